"""The table of tasks: complete, unambiguous, and consistent with the recipes."""

from importlib.resources import files

import pytest

from vitruvian.errors import UnknownNameError
from vitruvian.tasks import (
    all_tasks,
    data_root,
    extra_file,
    find_task,
    get_task,
    preprocess_for,
    tasks_by_name,
    vtab_tasks,
)
from vitruvian.text import fold

WANTED = [
    "CIFAR-10", "CIFAR-100", "ImageNet", "ImageNet-ReaL", "ImageNet-21k", "Oxford Flowers-102", "Oxford-IIIT Pets",
    "ObjectNet", "ImageNet-W", "VizWiz-Classification", "omnibenchmark-bird", "MAFW",
]  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_every_task_of_the_paper_and_the_later_ones_is_there(name):
    assert get_task(name).title


def test_vtab_has_its_19_tasks_in_three_groups_of_800_and_200():
    groups = [task.group for task in vtab_tasks()]
    assert {group: groups.count(group) for group in groups} == {"Natural": 7, "Specialized": 4, "Structured": 8}
    assert all((task.splits["train"], task.splits["val"]) == (800, 200) for task in vtab_tasks())
    assert all(task.preprocess == {"fit": "squash"} for task in vtab_tasks())


@pytest.mark.parametrize(
    ("name", "classes", "test"),
    [("cifar100", 100, 10_000), ("flowers102", 102, 6149), ("pets", 37, 3669), ("vtab-sun397", 397, 21_750)],
)
def test_classes_and_test_images_are_the_published_ones(name, classes, test):
    assert (all_tasks()[name].classes, all_tasks()[name].splits["test"]) == (classes, test)


def test_no_name_or_alias_means_two_tasks():
    spelled = [fold(name) for task in all_tasks().values() for name in {fold(n): n for n in (task.name, *task.aliases)}]
    assert len(spelled) == len(set(spelled)) == len(tasks_by_name())


def test_every_task_names_a_recipe_of_the_package():
    recipes = {entry.name for entry in (files("vitruvian") / "recipes").iterdir()}
    assert {f"{task.recipe}.toml" for task in all_tasks().values()} <= recipes


def test_names_are_known_in_any_spelling_but_paths_are_not():
    assert find_task("cifar-10") is find_task("CIFAR10") is all_tasks()["cifar10"]
    assert find_task("./cifar10") is find_task("cifar10/") is find_task("photos") is None
    with pytest.raises(UnknownNameError, match=r"unknown task 'flowrs'; did you mean flowers"):
        get_task("flowrs")


def test_a_task_brings_the_files_that_its_evaluation_needs(monkeypatch, tmp_path):
    monkeypatch.setenv("VITRUVIAN_DATA", str(tmp_path))
    assert extra_file("imagenet-real", "real") is None
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet" / "real.json").touch()
    (tmp_path / "objectnet" / "objectnet-1.0" / "mappings").mkdir(parents=True)
    assert extra_file("ReaL", "real") == tmp_path / "imagenet" / "real.json"
    assert extra_file("objectnet", "mappings") == tmp_path / "objectnet" / "objectnet-1.0" / "mappings"
    assert extra_file("imagenet", "real") is extra_file("photos", "real") is None


def test_the_root_is_the_one_given_or_of_the_environment_or_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("VITRUVIAN_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root("/elsewhere").as_posix() == "/elsewhere"
    monkeypatch.delenv("VITRUVIAN_DATA")
    assert data_root().name == "vitruvian-data"


def test_a_task_brings_its_view(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert preprocess_for("vtab-caltech101") == {"fit": "squash"}
    assert preprocess_for("cifar10") == preprocess_for("photos/") == {}
    (tmp_path / "vtab-caltech101").mkdir()
    assert preprocess_for("vtab-caltech101") == {}  # the folder, not the task
