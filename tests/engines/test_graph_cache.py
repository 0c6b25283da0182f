"""A damaged graph in the cache is exported again."""

import json
import shutil

import pytest
import torch

import vitruvian as vt
from vitruvian.engines import choose
from vitruvian.engines.choose import RunMode
from vitruvian.errors import FileError

pytestmark = pytest.mark.slow

TINY = vt.ViTConfig(image_size=16, patch_size=8, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=3)
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def random_model(seed):
    model = vt.build(TINY).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache with one model's graph."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRUVIAN_CACHE", str(folder))
        cached_logits(random_model(0))
    return folder


@pytest.fixture
def cache(filled, tmp_path, monkeypatch):
    """A private copy, with the mtimes of the files."""
    shutil.copytree(filled, tmp_path / "cache")
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cached_logits(model):
    return vt.Classifier(model, engine="onnxruntime").logits(PIXELS)


def check_logits(model):
    torch.testing.assert_close(cached_logits(model), model(PIXELS).detach(), rtol=0, atol=1e-5)


def graph_in(cache):
    (path,) = (cache / "engines").glob("*/model.onnx")
    return path


def test_an_intact_graph_is_used_also_in_a_copy_of_the_cache(cache, capsys):
    check_logits(random_model(0))
    copied = graph_in(cache)
    copied.write_bytes(copied.read_bytes())  # with another time
    check_logits(random_model(0))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damage", [lambda content: content[:1000], lambda content: b""])
def test_a_damaged_graph_is_exported_again(cache, capsys, damage):
    path = graph_in(cache)
    path.write_bytes(damage(path.read_bytes()))
    check_logits(random_model(0))
    printed = capsys.readouterr().err
    assert f"{path}: the cached graph is damaged and will be exported again" in printed
    assert "exporting the model for onnxruntime" in printed
    check_logits(random_model(0))
    assert capsys.readouterr().err == ""


def test_the_graph_of_another_model_in_its_place_is_noticed(cache, tmp_path, monkeypatch):
    path = graph_in(cache)
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "other"))
    check_logits(random_model(5))
    shutil.copy2(graph_in(tmp_path / "other"), path)
    monkeypatch.setenv("VITRUVIAN_CACHE", str(cache))
    check_logits(random_model(0))


@pytest.mark.parametrize("content", ["", "[1]", '{"stamps": 3, "sha256": {}, "largest_difference": "no"}'])
def test_damaged_records_beside_a_graph_are_written_again(cache, content):
    for path in graph_in(cache).parent.glob("*.json"):
        path.write_text(content)
    check_logits(random_model(0))
    folder = graph_in(cache).parent
    assert isinstance(json.loads((folder / "onnxruntime.checked.json").read_text())["largest_difference"], float)
    assert json.loads((folder / choose.RECORD).read_text())["sha256"]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"engine": "torch"}',
        '{"engine": ["torch"], "split": 1}',
        '{"engine": "torch", "split": "no", "fixed": null}',
    ],
)
def test_an_unreadable_choice_is_measured_again(cache, monkeypatch, content):
    monkeypatch.setattr(choose, "installed", lambda: ["torch"])
    model, chosen = random_model(0), RunMode("torch", split=True)
    monkeypatch.setattr(choose, "measure", lambda *_: {chosen: [1.0]})
    assert choose.fastest_mode(model, PIXELS) == chosen
    (file,) = (cache / "engines").glob("*.json")
    file.write_text(content)
    assert choose.fastest_mode(model, PIXELS) == chosen
    assert json.loads(file.read_text()) == chosen._asdict()


def test_a_read_only_cache_still_provides_its_graphs(cache, monkeypatch, capsys):
    def refuse(path, *given, **named):
        raise FileError(f"{path}: cannot be written: Read-only file system")

    monkeypatch.setattr(choose, "file_lock", refuse)
    monkeypatch.setattr(choose, "write_json", refuse)
    (graph_in(cache).parent / "onnxruntime.checked.json").unlink()
    check_logits(random_model(0))
    assert capsys.readouterr().err == ""


def test_a_folder_that_another_process_removes_meanwhile_is_ignored(tmp_path, monkeypatch):
    for number in range(choose.MAX_CACHED_GRAPHS + 1):
        (tmp_path / str(number)).mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    choose.remove_old_graphs(tmp_path)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == choose.MAX_CACHED_GRAPHS


def test_an_unwritable_cache_is_reported_with_what_to_change(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "file"))
    with pytest.raises(FileError, match=r"cannot be locked: Not a directory; set \$VITRUVIAN_CACHE to use another"):
        cached_logits(random_model(0))


def test_an_engine_that_a_full_disk_excludes_is_measured_the_next_time(tmp_path, monkeypatch, capsys):
    def full(model, path, **_):
        raise FileError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path))
    monkeypatch.setattr(choose, "installed", lambda: ["torch", "onnxruntime"])
    monkeypatch.setattr(choose, "export", full)
    assert choose.fastest_mode(random_model(0), PIXELS).engine == "torch"
    assert "the next start measures again" in capsys.readouterr().err
    assert not list((tmp_path / "engines").glob("*.json"))
