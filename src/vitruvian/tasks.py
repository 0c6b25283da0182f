"""The datasets that papers report, by name: where their images belong, their splits, and the metric."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitruvian.errors import UnknownNameError

DATA_VARIABLE = "VITRUVIAN_DATA"
DEFAULT_ROOT = "~/vitruvian-data"
SEEDS = 3  # default number of seeds to average over

Layout = Literal[
    "cifar", "flowers", "folders", "imagenet", "lists", "mafw", "numbered", "objectnet", "omni", "pets", "vizwiz",
    "watermark", "wordnet",
]  # fmt: skip
"""How the files of a task are arranged; `data.releases` has an opener for each layout."""

Metric = Literal["top1", "mean_per_class", "real"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One dataset with its metric; its images are in `folder` below the root directory of all tasks."""

    name: str
    title: str
    folder: str
    layout: Layout
    classes: int  # 0 if only the lists in the release state it
    splits: Mapping[str, int]  # number of images per split in the release; 0 if unknown
    files: tuple[str, ...]  # patterns of files in the folder, each of which must match; `|` separates alternatives
    download: str  # instructions: files to download, from where, and how to arrange them in the folder
    aliases: tuple[str, ...] = ()
    metric: Metric = "top1"  # the main metric in papers; `real`: the prediction is among the labels of ImageNet-ReaL
    group: str = ""  # group of a VTAB task: Natural, Specialized or Structured
    recipe: str = "finetune-paper"  # recipe for fine-tuning as in the paper
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    """Preprocessing settings that belong to the task (see `config.Preprocess`)."""
    extra_files: Mapping[str, str] = field(default_factory=dict)
    """Patterns of other files that an evaluation needs, by kind (`real`, `mappings`)."""
    note: str = ""  # remarks for users

    def path(self, root: Path) -> Path:
        return root / self.folder

    def missing(self, root: Path) -> list[str]:
        """The patterns of `files` that match nothing."""
        path = self.path(root)
        if not path.is_dir():
            return list(self.files)
        return [pattern for pattern in self.files if not any(any(path.glob(glob)) for glob in pattern.split("|"))]

    def present(self, root: Path) -> bool:
        return not self.missing(root)

    def to_json(self, root: Path) -> dict[str, Any]:
        """The row as `vit datasets --json` prints it."""
        return {
            "name": self.name, "title": self.title, "aliases": list(self.aliases), "group": self.group,
            "classes": self.classes, "metric": self.metric, "splits": dict(self.splits), "layout": self.layout,
            "files": list(self.files), "folder": str(self.path(root)), "present": self.present(root),
            "missing": self.missing(root), "download": self.download, "recipe": self.recipe,
            "preprocess": dict(self.preprocess), "note": self.note,
        }  # fmt: skip


def describe_pattern(pattern: str) -> str:
    """A pattern of `Task.files` as text."""
    return pattern.replace("|", " or ")


def data_root(chosen: str | Path | None = None) -> Path:
    """The directory of all tasks: `chosen`, else $VITRUVIAN_DATA, else `~/vitruvian-data`."""
    return Path(chosen or os.environ.get(DATA_VARIABLE) or DEFAULT_ROOT).expanduser()


IMAGENET_GET = (
    "ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz from https://image-net.org "
    "(an account is needed); unpack the training archives to train/WORDNET-ID/, the validation archive to val/ (flat, "
    "or sorted into val/WORDNET-ID/), and the development kit beside them if val/ is flat"
)
IMAGENET_VAL = "val/n*|val/ILSVRC2012_val_*"

PAPER_TASKS = (
    *(
        Task(
            name=f"cifar{n}", aliases=(f"CIFAR-{n}",), title=f"CIFAR-{n}", folder=f"cifar{n}", layout="cifar",
            classes=n, splits={"train": 50_000, "test": 10_000}, recipe="finetune-paper-cifar",
            files=(f"{folder}/{first}*|{first}*|cifar-{n}-*.tar.gz",),
            download=f"cifar-{n}-python.tar.gz or cifar-{n}-binary.tar.gz from "
            "https://www.cs.toronto.edu/~kriz/cifar.html; keep the archive, or unpack it",
        )
        for n, folder, first in ((10, "cifar-10-batches-*", "data_batch_1"), (100, "cifar-100-*", "train"))
    ),
    Task(
        name="imagenet", aliases=("ImageNet-1k", "ILSVRC2012", "in1k"), title="ImageNet (ILSVRC 2012)",
        folder="imagenet", layout="imagenet", classes=1000, splits={"train": 1_281_167, "val": 50_000},
        recipe="finetune-paper-imagenet", files=(IMAGENET_VAL,), download=IMAGENET_GET,
        note="papers report the validation images; classes are the WordNet ids in the order of every published head",
    ),
    Task(
        name="imagenet-real", aliases=("ReaL", "ImageNet-ReaL"), title="ImageNet-ReaL", folder="imagenet",
        layout="imagenet", classes=1000, splits={"val": 50_000}, metric="real", recipe="finetune-paper-imagenet",
        files=(IMAGENET_VAL, "real.json"), extra_files={"real": "real.json"},
        download=IMAGENET_GET + "; and real.json from https://github.com/google-research/reassessed-imagenet",
        note="the validation images of ImageNet with better labels, several or none per image; those without do not "
        "count",
    ),
    Task(
        name="imagenet21k", aliases=("ImageNet-21k", "ImageNet-22k", "in21k"), title="ImageNet-21k",
        folder="imagenet21k", layout="folders", classes=21_843, splits={"train": 14_197_122},
        recipe="paper-imagenet21k", files=("n*|train/n*|*.tar",),
        download="the fall 2011 archives from https://image-net.org (an account is needed), a folder for each WordNet "
        "id; or tar shards in the WebDataset layout",
        note="for pre-training; there is no test split",
    ),
    Task(
        name="jft-300m", aliases=("JFT", "jft300m"), title="JFT-300M", folder="jft-300m", layout="folders",
        classes=18_291, splits={"train": 303_000_000}, recipe="paper-jft-b", files=("train/*|*.tar",),
        download="nothing: JFT-300M belongs to Google and is not public. Use imagenet21k instead, the largest dataset "
        "of the paper that others can get (`--recipe paper-imagenet21k`)",
        note="for pre-training; those who have it put tar shards or a folder for each class into train/",
    ),
    Task(
        name="flowers102", aliases=("flowers", "Oxford Flowers-102", "oxford_flowers102"), title="Oxford Flowers-102",
        folder="flowers102", layout="flowers", classes=102, splits={"train": 2040, "test": 6149},
        files=("jpg/image_*.jpg", "imagelabels.mat", "setid.mat"),
        download="102flowers.tgz, imagelabels.mat and setid.mat from "
        "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/; unpack the first",
        note="train is the release's training and validation sets together; some papers report mean_per_class",
    ),
    Task(
        name="pets", aliases=("Oxford-IIIT Pets", "oxford_iiit_pet", "oxford pets"), title="Oxford-IIIT Pets",
        note="some papers report mean_per_class", folder="pets", layout="pets", classes=37,
        splits={"train": 3680, "test": 3669},
        files=("images/*.jpg", "annotations/trainval.txt", "annotations/test.txt"),
        download="images.tar.gz and annotations.tar.gz from https://www.robots.ox.ac.uk/~vgg/data/pets/; unpack both",
    ),
    Task(
        name="objectnet", title="ObjectNet", folder="objectnet", layout="objectnet", classes=313,
        splits={"test": 50_273}, files=("images|objectnet-1.0/images",),
        extra_files={"mappings": "mappings|objectnet-1.0/mappings"},
        download="objectnet-1.0.zip from https://objectnet.dev; unpack it",
        note="for testing only: its terms forbid training on it; the red border of one pixel is cut off",
    ),
    Task(
        name="imagenet-a", title="ImageNet-A", folder="imagenet-a", layout="wordnet", classes=200,
        splits={"test": 7500}, files=("n*|imagenet-a/n*",),
        download="imagenet-a.tar from https://github.com/hendrycks/natural-adv-examples; unpack it",
        note="200 of the classes of ImageNet",
    ),
    Task(
        name="imagenet-r", title="ImageNet-R", folder="imagenet-r", layout="wordnet", classes=200,
        splits={"test": 30_000}, files=("n*|imagenet-r/n*",),
        download="imagenet-r.tar from https://github.com/hendrycks/imagenet-r; unpack it",
        note="200 of the classes of ImageNet",
    ),
    Task(
        name="imagenet-v2", title="ImageNet-V2, matched frequency", folder="imagenet-v2", layout="numbered",
        classes=1000, splits={"test": 10_000}, files=("0|imagenetv2-matched-frequency-format-val/0",),
        download="imagenetv2-matched-frequency.tar.gz from https://imagenetv2.org; unpack it",
        note="folders are the numbers of the classes of ImageNet",
    ),
    Task(
        name="imagenet-w", title="ImageNet-W", folder="imagenet-w", layout="watermark", classes=1000,
        splits={"test": 50_000}, preprocess={"fit": "squash"}, recipe="finetune-paper-imagenet",
        files=("fonts/SourceHanSerifSC-ExtraLight.otf",),
        download="the font imagenet_w/fonts/SourceHanSerifSC-ExtraLight.otf of "
        "https://github.com/facebookresearch/Whac-A-Mole into fonts/; the images are those of the task imagenet",
        note="the validation images of ImageNet, shorter side 256, center 224, with a watermark drawn over them as "
        "the release does",
    ),
    Task(
        name="vizwiz", aliases=("VizWiz-Classification",), title="VizWiz-Classification", folder="vizwiz",
        layout="vizwiz", classes=200, splits={"test": 8900}, files=("annotations.json", "images/*.jpg"),
        download="the images of all splits into images/ and annotations.json, from "
        "https://vizwiz.org/tasks-and-datasets/image-classification",
        note="200 of the classes of ImageNet; the public annotations.json has no labels (the evaluation server has "
        "them), and without labels there is nothing to measure here",
    ),
)  # fmt: skip

REALMS = (
    "activity", "aircraft", "amphibian", "aquatic_vertebrate", "bird", "car", "consumer_goods", "creation",
    "decoration", "device", "food", "geological_formation", "instrumentality", "locomotive", "mammal", "material",
    "military_vehicle", "process", "region", "structure", "vascular_plant",
)  # fmt: skip

OMNI_TASKS = tuple(
    Task(
        name=f"omnibenchmark-{realm}", aliases=(f"omni-{realm}",), title=f"OmniBenchmark: {realm.replace('_', ' ')}",
        folder=f"omnibenchmark/{realm}", layout="omni", classes=0, splits={"train": 0, "val": 0, "test": 0},
        metric="mean_per_class",
        files=(f"train.txt|{realm}.train/record.txt", f"test.txt|{realm}.test/record.txt|val.txt"),
        download="the images with download_tool/download_image.py of "
        f"https://github.com/ZhangYuanhan-AI/OmniBenchmark, and meta_v2/{realm}/*.txt of it",
        note="classes are the train ids in the lists of this realm",
    )
    for realm in REALMS
)  # fmt: skip

MAFW_TASKS = tuple(
    Task(
        name=f"mafw-{fold}", aliases=("mafw",) if fold == 1 else (), title=f"MAFW, single expressions, fold {fold}",
        folder="mafw", layout="mafw", classes=11, splits={"train": train, "test": test}, metric="mean_per_class",
        files=(f"Train & Test Set/single/no_caption/set_{fold}/train.txt", "data/frames|frames"),
        download="clips and Train & Test Set from https://mafw-database.github.io/MAFW/ (on request); extract "
        "the frames of the clips to data/frames/CLIP/*.jpg",
        note="a clip is represented by its middle frame",
    )
    for fold, train, test in ((1, 7333, 1839), (2, 7335, 1837), (3, 7339, 1833), (4, 7340, 1832), (5, 7341, 1831))
)  # fmt: skip

VTAB_ROWS = (
    # name, folder in the redistribution, title, group, classes, test images
    ("caltech101", "caltech101", "Caltech101", "Natural", 102, 6084),
    ("cifar100", "cifar", "CIFAR-100", "Natural", 100, 10_000),
    ("dtd", "dtd", "Describable Textures", "Natural", 47, 1880),
    ("flowers102", "oxford_flowers102", "Oxford Flowers-102", "Natural", 102, 6149),
    ("pets", "oxford_iiit_pet", "Oxford-IIIT Pets", "Natural", 37, 3669),
    ("svhn", "svhn", "SVHN", "Natural", 10, 26_032),
    ("sun397", "sun397", "SUN397", "Natural", 397, 21_750),
    ("camelyon", "patch_camelyon", "Patch Camelyon", "Specialized", 2, 32_768),
    ("eurosat", "eurosat", "EuroSAT", "Specialized", 10, 5400),
    ("resisc45", "resisc45", "RESISC45", "Specialized", 45, 6300),
    ("retinopathy", "diabetic_retinopathy", "Diabetic Retinopathy", "Specialized", 5, 42_670),
    ("clevr-count", "clevr_count", "CLEVR, count", "Structured", 8, 15_000),
    ("clevr-distance", "clevr_dist", "CLEVR, distance", "Structured", 6, 15_000),
    ("dmlab", "dmlab", "DMLab", "Structured", 6, 22_735),
    ("kitti", "kitti", "KITTI, distance", "Structured", 4, 711),
    ("dsprites-location", "dsprites_loc", "dSprites, location", "Structured", 16, 73_728),
    ("dsprites-orientation", "dsprites_ori", "dSprites, orientation", "Structured", 16, 73_728),
    ("smallnorb-azimuth", "smallnorb_azi", "SmallNORB, azimuth", "Structured", 18, 12_150),
    ("smallnorb-elevation", "smallnorb_ele", "SmallNORB, elevation", "Structured", 9, 12_150),
)

VTAB_TASKS = tuple(
    Task(
        name=f"vtab-{name}", aliases=(f"vtab-{folder}",), title=f"VTAB-1k: {title}", group=group,
        folder=f"vtab-1k/{folder}", layout="lists", classes=classes, splits={"train": 800, "val": 200, "test": test},
        recipe="finetune-paper-vtab", preprocess={"fit": "squash"},
        files=("train800.txt", "val200.txt", "test.txt"),
        download="vtab-1k.zip, the redistribution as folders of images that "
        "https://github.com/ZhangYuanhan-AI/NOAH links to; unpack it to vtab-1k/ in the root",
        note="lists of `path label`; the image is squashed to a square, neither cropped nor mirrored, because many "
        "of these tasks ask for the position or orientation of an object",
    )
    for name, folder, title, group, classes, test in VTAB_ROWS
)  # fmt: skip

TASKS: dict[str, Task] = {task.name: task for task in (*PAPER_TASKS, *VTAB_TASKS, *OMNI_TASKS, *MAFW_TASKS)}


def fold_name(name: str) -> str:
    """A name without case and punctuation: `CIFAR-10` and `cifar10` become equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


NAMES: dict[str, str] = {fold_name(name): task.name for task in TASKS.values() for name in (task.name, *task.aliases)}
"""Folded name or alias -> the name of the task."""


def find_task(name: str) -> Task | None:
    """The task of this name or alias; None if there is none, or for a path."""
    return None if "/" in name or "\\" in name else TASKS.get(NAMES.get(fold_name(name), ""))


def task_of_data(data: str) -> Task | None:
    """The task that DATA names; None if it is an existing path or no task."""
    return None if Path(data).expanduser().exists() else find_task(data)


def preprocess_for(data: str) -> Mapping[str, Any]:
    """Preprocessing settings of the task that DATA names; empty if it names none."""
    task = task_of_data(data)
    return {} if task is None else task.preprocess


def extra_file(data: str, kind: str) -> Path | None:
    """The extra file of this kind (`real`, `mappings`) of the task that `data` names, if it has one."""
    task = task_of_data(data)
    if task is None or kind not in task.extra_files:
        return None
    folder = task.path(data_root())
    return next((path for glob in task.extra_files[kind].split("|") for path in folder.glob(glob)), None)


def get_task(name: str) -> Task:
    """The task of this name or alias; an UnknownNameError suggests similar names."""
    task = find_task(name)
    if task is None:
        aliases = (alias for known in TASKS.values() for alias in known.aliases)
        raise UnknownNameError("task", name, [*TASKS, *aliases], see="(see `vit datasets`)")
    return task


def download_hint(task: Task, root: Path) -> str:
    """The missing files of a task and how to get them, in one line."""
    missing = " and ".join(map(describe_pattern, task.missing(root)))
    return (
        f"the task {task.name} has no {missing} in {task.path(root)}; download {task.download} (set the directory of "
        f"all tasks with {DATA_VARIABLE})"
    )
