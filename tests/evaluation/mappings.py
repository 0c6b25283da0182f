"""ObjectNet's mapping files, in the layout that it ships."""

from __future__ import annotations

import json
from pathlib import Path

FILES = {
    "folder_to_objectnet_label.json": json.dumps({"alarm_clock": "Alarm clock", "chair": "Chair", "comb": "Comb"}),
    "objectnet_to_imagenet_1k.json": '{"Alarm clock": "analog clock; digital clock", "Chair": "folding chair"}',
    "imagenet_to_label_2012_v2": "digital clock\nfolding chair\nanalog clock\n",
    "pytorch_to_imagenet_2012_id.json": json.dumps({"409": 2, "530": 0, "559": 1}),
}


def make_mappings(root: Path) -> Path:
    folder = root / "mappings"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_text(content)
    return folder
