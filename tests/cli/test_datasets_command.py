"""`vit datasets`: what there is, what is missing, and what to do about it."""

import json

import pytest

from vitruvian.tasks import all_tasks


def test_all_tasks_are_listed_with_what_is_missing(vit, tmp_path):
    (tmp_path / "imagenet" / "val" / "n01440764").mkdir(parents=True)
    code, out, err = vit("datasets", "--data-root", tmp_path, "--json")
    found = {row["name"]: row for row in map(json.loads, out.splitlines())}
    assert (code, err) == (0, "")
    assert found.keys() == all_tasks().keys()
    assert [name for name, row in found.items() if row["present"]] == ["imagenet"]
    assert found["imagenet-real"]["missing"] == ["real.json"]
    assert found["pets"]["folder"] == str(tmp_path / "pets")


def test_the_root_may_come_from_the_environment(vit, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_DATA", str(tmp_path))
    out = vit("datasets").out
    assert f"Images belong in {tmp_path}." in out
    assert len(out.splitlines()) == len(all_tasks()) + 3


@pytest.mark.parametrize("name", ["flowers102", "Oxford Flowers-102"])
def test_one_task_tells_what_to_download_and_where(vit, tmp_path, name):
    out = vit("datasets", name, "--data-root", tmp_path).out
    assert f"folder      {tmp_path / 'flowers102'}" in out
    assert "images      missing: jpg/image_*.jpg, imagelabels.mat, setid.mat" in out
    assert "download    102flowers.tgz" in out


def test_part_of_a_name_lists_all_that_have_it(vit, tmp_path):
    out = vit("datasets", "vtab", "--data-root", tmp_path).out
    assert out.count("vtab-") == 19


def test_an_unknown_task_is_answered_with_the_nearest(vit):
    code, out, err = vit("datasets", "objectnett")
    assert (code, out) == (1, "")
    assert err == "error: unknown task 'objectnett'; did you mean objectnet? (see `vit datasets`)\n"


def test_jft_says_that_it_is_not_public_and_what_to_use_instead(vit, tmp_path):
    out = vit("datasets", "JFT", "--data-root", tmp_path).out
    assert "JFT-300M belongs to Google and is not public. Use imagenet21k instead" in out
    code, out, err = vit("train", "jft-300m", "--recipe", "paper-jft-b", "--plan")
    assert (code, out) == (1, "")
    assert "the task jft-300m has no train/* or *.tar in " in err
    assert "JFT-300M belongs to Google and is not public. Use imagenet21k instead" in err
