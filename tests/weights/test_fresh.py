"""Part of the release checklist (`make fresh`): names of installed libraries that are newer than the last check.

`fresh.json` holds the versions and names of the last check. A new name is to be read, or refused with the reason; then
`VITRUVIAN_FRESH=write` records it. Ordinary test runs skip this file.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from vitruvian.weights.families.timm_config import rows

MODE = os.environ.get("VITRUVIAN_FRESH", "")
REVIEWED = Path(__file__).with_name("fresh.json")
TIMM_MODULES = ("vision_transformer", "deit", "vision_transformer_hybrid", "eva", "beit", "naflexvit")
MAPPINGS = ("IMAGE_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "BACKBONE", "IMAGE_FEATURE_EXTRACTION")


def folder_of(package):
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent


def timm_names():
    texts = ((folder_of("timm") / "models" / f"{name}.py").read_text() for name in TIMM_MODULES)
    return {name for text in texts for name in re.findall(r"@register_model\ndef (\w+)\(", text)}


def transformers_names():
    """Model types of image classifiers, image-text models and backbones, and everything called a vision model."""
    folder_of("transformers")
    from transformers.models.auto import configuration_auto, modeling_auto

    kinds = {name for name in configuration_auto.CONFIG_MAPPING_NAMES if re.search("_vision(_model)?$", name)}
    for mapping in MAPPINGS:
        name = f"MODEL_FOR_{mapping}_MAPPING_NAMES"
        kinds |= set(getattr(modeling_auto, name, None) or getattr(modeling_auto, name.replace("_FOR", ""), {}))
    return kinds


def open_clip_names():
    return {path.stem for path in (folder_of("open_clip") / "model_configs").glob("*.json")}


NAMES = {"timm": timm_names, "transformers": transformers_names, "open_clip_torch": open_clip_names}


@pytest.mark.skipif(not MODE, reason="part of the release checklist: `make fresh`")
@pytest.mark.parametrize("package", NAMES)
def test_no_name_of_the_installed_library_is_newer_than_the_last_check(package):
    names, reviewed = NAMES[package](), json.loads(REVIEWED.read_text())
    version = importlib.metadata.version(package)
    if MODE == "write":
        row = {"version": version, "date": datetime.date.today().isoformat(), "names": sorted(names)}
        REVIEWED.write_text(json.dumps(reviewed | {package: row}, indent=1) + "\n")
    new = sorted(names - set(reviewed.get(package, {}).get("names", ())))
    assert MODE == "write" or not new, f"{package} {version} has {len(new)} new names: {', '.join(new)}"


def test_the_names_of_timm_at_the_last_check_are_in_the_table():
    assert set(json.loads(REVIEWED.read_text())["timm"]["names"]) == set(rows())


def test_the_page_states_the_versions_and_dates_of_the_last_check():
    text = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    for package, row in json.loads(REVIEWED.read_text()).items():
        assert f"{package} {row['version']} ({row['date']})" in text
