"""A page's commands and Python here: other places, smaller sizes, and what is not run, with the reason."""

from __future__ import annotations

import re
from importlib import resources

NOT_RUN = {
    "pip": "installs packages",
    "make": "sets up environments; the targets call what the tests call",
    "docker": "needs a docker daemon",
    "hf": "downloads",
    "tensorboard": "serves until it is stopped",
    "python": "a measurement of its own in benchmarks/",
}
"""Programs that are named and not run."""

ELSEWHERE = {
    "docs/pytorch.md": "tests/test_pytorch_page.py also looks at its results",
    "docs/trainers.md": "tests/test_trainers_page.py runs each section, and looks at its model",
}
"""Pages that a test of their own runs."""

TESTED_ELSEWHERE = {
    "--on ray": "tests/bulk/test_ray.py starts a cluster of processes",
    "similar --text": "needs vectors of a CLIP: tests/words/test_text_search.py",
    "--to web": "needs onnxruntime-web: tests/engines/test_web.py",
    "vit push": "needs an account: tests/training/test_push.py uploads to a server of its own",
    "--calibrated": "needs more images, and a model that a temperature helps: tests/evaluation/test_evaluate.py",
}
"""Commands with these words are left to other tests."""

RUN_ON = {"study": "study.md", "advise": "advise.md"}
"""Commands that take long, and the page that runs them; other pages only repeat what that page states."""

UNAVAILABLE = {
    "torchvision": "its builds tie the environment to one build of torch",
    "ray": "tests/bulk/test_ray.py starts a cluster of processes",
}
"""Blocks of Python that name these are compiled, not run."""

STAND_INS = (
    ("s3://bucket/", "bucket/"),
    ("src/vitruvian/bundled", str(resources.files("vitruvian") / "bundled")),
    (" /data/", " data/"),
    (" /shared/", " "),
    ("seq 64", "seq 2"),
    ("/64", "/2"),
    ("1000,4000,16000,all", "4,all"),
    ("fewshot --shots 5", "fewshot --shots 1"),
    ("epochs=90", "epochs=1"),
    ("explain photos/", "explain photos/test/cat/"),
    ("explain IMAGES", "explain photos/test/cat/"),
)
"""Places of other machines, and how many of them."""

SMALLER_CODE = (
    ("src/vitruvian/bundled", str(resources.files("vitruvian") / "bundled")),
    ("workers=4", "workers=0"),
    ("batch_size=256", "batch_size=4"),
    ("seeds=3", "seeds=1"),
    ("tome_schedule(8, 12, -1)", "tome_schedule(8, 2, -1)"),
    ('"epochs=10"', '"epochs=1", "workers=0"'),
    ('"epochs=20"', '"epochs=1", "workers=0"'),
)
"""The same in Python."""

SMALL_MODEL = "--set architecture.depth=1 --set architecture.width=48 --set architecture.mlp_dim=48 " + (
    "--set architecture.num_heads=3 --set architecture.patch_size=16 --set image_size=32"
)
SMALLER = (
    (r"(train(?!.*(--resume|--recipes|--cluster|--plan|epochs=)).*)", "--epochs 1"),
    (r"(train(?!.*(--resume|--recipes|--cluster|--plan|workers=)).*)", "--workers 0"),
    (r"(train(?!.*(--resume|--recipes|--cluster)).*--recipe paper.*)", "--set warmup=0"),
    (r"(train(?!.*(--from|--resume|--recipes|--cluster|digits)).*(--arch|paper).*)", SMALL_MODEL),
    (r"(finetune (?!.*--folds).*)", "--steps 2 --seeds 2 --workers 0 --image-size 32"),
    (r"(finetune .*--folds.*)", "--quick --steps 1 --workers 0 --image-size 32"),
    (r"((train|finetune) .*--folds.*)", "--folds 2"),
    (r"(study (?!speed).*)", "--set workers=0"),
    (r"(study (?!speed|table|vtab).*)", "--set steps=1 --seeds 1"),
    (r"(study data-size (?!.*--columns).*)", "--columns 4"),
    (r"(study self-supervision .*)", "--columns 10"),
    (r"(study few-shot .*)", "--columns 75"),
    (r"(study (shape|head|compute|axial) .*)", "--columns 1"),
    (r"(study positions .*)", "--columns input"),
    (r"(study positions .*--recipe paper.*)", "--set eval_fewshot=digits --set warmup=0 " + SMALL_MODEL),
    (r"study speed", "--models ViT-Ti/16 --sizes 32 --batches 1 --rounds 1"),
    (r"(study (table2|table5|vtab) .*)", "--set steps=1 --set image_size=32"),
    (r"(explain .*--figures.*)", "--count 2"),
    (r"(demo)", "--set epochs=2"),
    (r"(advise .*)", "--minutes 0.1"),
    (r"(bench .*)", "--rounds 1 --batches 1"),
    (r"(optimize (?!.*--only merge).*)", "--max-loss 100"),
    (r"((doctor|pack) .*)", "--workers 0"),
    (r"(serve.*)", "--port 0"),
)
"""Words that are added to a command so that it takes as little time as it can; the last of two settings holds."""


def smaller(words: list[str]) -> list[str]:
    """A command with what is added to it; an option that is added replaces the one that the command has."""
    line = " ".join(words)
    added = [word for pattern, more in SMALLER if re.fullmatch(pattern, line) for word in more.split()]
    kept = list(words)
    for word in added:
        if word.startswith("--") and word != "--set" and word in kept:
            start = kept.index(word)
            has_value = start + 1 < len(kept) and not kept[start + 1].startswith("--")
            del kept[start : start + 1 + has_value]
        kept.append(word)
    return kept
