"""Published names to local files: single files through a mirror, repositories through a small stand-in for the Hub."""

from __future__ import annotations

import functools
import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from forked import Forked, Ran
from vitruvian.cli.app import main
from vitruvian.config import ViTConfig
from vitruvian.errors import CheckpointError, ConfigError, HubError, MissingExtraError, UnknownNameError
from vitruvian.model.build import build
from vitruvian.weights import hub
from vitruvian.weights.hub import resolve_source
from vitruvian.weights.load import load
from vitruvian.weights.save import save

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "google/vit-base-patch16-224"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class HubHandler(BaseHTTPRequestHandler):
    """The addresses of huggingface.co that a download needs: a model's files, and each file."""

    server: HubServer

    def do_GET(self) -> None:
        match = re.fullmatch(
            r"/(?:api/models/)?([\w-]+/[\w.-]+)(?:/(revision|tree|resolve)/(\w+))?(?:/(.+?))?(\?.*)?", self.path
        )
        assert match, self.path
        repository, verb, _, file, _ = match.groups()
        files = self.server.repositories.get(repository)
        if files is None:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif verb == "resolve" and file not in files:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        elif verb == "resolve":
            self.server.served += [file] if self.command == "GET" else []
            self.answer(200, files[file], {"ETag": f'"{file}"', "X-Repo-Commit": COMMIT})
        elif verb == "tree":
            tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in files.items()]
            self.answer(200, json.dumps(tree).encode(), {})
        else:
            model = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.answer(200, json.dumps(model).encode(), {})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class HubServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.served: list[str] = []


def run(server: ThreadingHTTPServer) -> Iterator[ThreadingHTTPServer]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


@pytest.fixture
def hugging_face() -> Iterator[ThreadingHTTPServer]:
    yield from run(HubServer())


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is served as the mirror while the test runs."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    handler = functools.partial(QuietHandler, directory=str(folder))
    monkeypatch.setattr(hub, "RETRY_SECONDS", ())
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for server in run(ThreadingHTTPServer(("127.0.0.1", 0), handler)):
        monkeypatch.setenv("VITRUVIAN_MIRROR", f"http://127.0.0.1:{server.server_port}")
        yield folder


def process(*words: object, home: Path, server: HubServer | None = None, work=main, **environment: str) -> Ran:
    """`vit` with these words, or other work, in another process: huggingface_hub reads its settings when imported."""

    def forget() -> None:
        for module in [module for module in sys.modules if module.partition(".")[0] == "huggingface_hub"]:
            del sys.modules[module]

    port = server.server_port if server else 9
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{port}", "no_proxy": "127.0.0.1"}
    done = Forked(*words, env={**settings, **environment}, first=forget, work=work).wait()
    assert done.code == 0, done.err
    assert "Retrying" not in done.err
    return done


def elsewhere(name: str, *, home: Path, server: HubServer | None = None, **environment: str) -> list[str]:
    """What another process prints that resolves `name`."""

    def resolve() -> None:
        try:
            print(resolve_source(name))
        except HubError as error:
            print(f"HubError: {error}")

    return process(home=home, server=server, work=resolve, **environment).out.splitlines()


def test_preprocessing_that_could_not_be_downloaded_is_said(tmp_path, monkeypatch, capsys):
    folder = snapshot(tmp_path, config__json="{}", model__safetensors="weights")
    monkeypatch.setattr(hub.Repository, "_files", lambda self: 1 / 0)
    assert resolve_source(NAME, cache=tmp_path, offline=False) == folder
    assert f"note: {NAME}: preprocessor_config.json could not be downloaded (ZeroDiv" in capsys.readouterr().err


def test_a_processor_of_images_and_text_is_preprocessing_too(tmp_path, monkeypatch, capsys):
    folder = snapshot(tmp_path, config__json="{}", model__safetensors="weights", processor_config__json="{}")
    monkeypatch.setattr(hub.Repository, "_files", lambda self: 1 / 0)
    assert resolve_source(NAME, cache=tmp_path, offline=False) == folder
    assert capsys.readouterr().err == ""


def snapshot(cache: Path, **files: str) -> Path:
    """A folder of NAME in the layout of huggingface_hub's cache."""
    model = cache / "huggingface" / "models--google--vit-base-patch16-224"
    folder = model / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_published_file_comes_from_the_mirror_and_then_from_the_cache(mirror, tmp_path):
    place = mirror / "storage.googleapis.com" / "vit_models" / "imagenet21k+imagenet2012" / "ViT-B_16-224.npz"
    place.parent.mkdir(parents=True)
    np.savez(place, weights=np.arange(3))
    path = resolve_source("ViT-B_16-224", cache=tmp_path / "cache")
    assert path.read_bytes() == place.read_bytes()
    place.unlink()
    assert resolve_source("gs://vit_models/imagenet21k+imagenet2012/ViT-B_16-224.npz", cache=tmp_path / "cache") == path


def test_one_machines_cache_is_another_ones_mirror(mirror, tmp_path):
    path = mirror / "storage.googleapis.com" / "bit_models" / "BiT-M-R50x1.npz"
    path.parent.mkdir(parents=True)
    np.savez(path, weights=np.arange(3))
    resolve_source("BiT-M-R50x1", cache=mirror, offline=True)
    assert resolve_source("BiT-M-R50x1", cache=tmp_path / "cache").read_bytes() == path.read_bytes()


def test_the_checksum_in_torchvisions_file_name_is_kept(mirror, tmp_path):
    place = mirror / "download.pytorch.org" / "models" / "vit_b_16-c867db91.pth"
    place.parent.mkdir(parents=True)
    buffer = io.BytesIO()
    np.savez(buffer, weights=np.arange(3))
    place.write_bytes(buffer.getvalue())
    with pytest.raises(HubError, match=r"has sha256 \w{8}\.\.\., expected c867db91"):
        resolve_source("vit_b_16", cache=tmp_path / "cache")


def test_offline_a_file_that_is_not_there_names_its_address_and_its_place(tmp_path):
    address = "https://dl.fbaipublicfiles.com/dinov2/dinov2_vitb14/dinov2_vitb14_pretrain.pth"
    place = tmp_path / address.removeprefix("https://")
    with pytest.raises(HubError, match=re.escape(address) + r": .*put the file at " + re.escape(str(place))):
        resolve_source("dinov2_vitb14", cache=tmp_path, offline=True)


def test_any_file_of_googles_storage_has_its_address_for_a_name(tmp_path):
    address = "https://storage.googleapis.com/vit_models/augreg/another.npz"
    with pytest.raises(HubError, match=f"^{re.escape(address)}: not in the cache"):
        resolve_source("gs://vit_models/augreg/another.npz", cache=tmp_path, offline=True)


def test_offline_is_what_the_environment_says(mirror, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match="working offline"):
        resolve_source("ViT-B_16", cache=tmp_path)
    with pytest.raises(HubError, match="responded 404"):
        resolve_source("ViT-B_16", cache=tmp_path, offline=False)


@pytest.mark.parametrize("name", ["ViT-B/16", "B/16", "vit_base_patch16_512"])
def test_a_shape_is_answered_with_its_weights(name):
    with pytest.raises(
        ConfigError, match=rf"^{name} is an architecture, not weights; .* imagenet21k/ViT-B_16, .* more \(see"
    ):
        resolve_source(name)


def test_a_shape_without_weights_says_so():
    with pytest.raises(ConfigError, match="ViT-Ti/8 is an architecture, not weights; it has no published weights"):
        resolve_source("ViT-Ti/8")


@pytest.mark.parametrize(
    ("name", "near"),
    [("ViT-B_61", "ViT-B_16"), ("vit_base_patch16_224.augreg_in2k", "vit_base_patch16_224.augreg_in21k")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, near):
    with pytest.raises(UnknownNameError, match=rf"unknown weights '{name}'; did you mean .*{near}"):
        resolve_source(name)


@pytest.mark.parametrize(
    "name", ["runs/best.safetensors", "runs/best.onnx", "graph/model.xml", "./best", "/tmp/none", "~/none", "C:\\none"]
)
def test_what_looks_like_a_path_is_never_looked_up(name):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        resolve_source(name)


@pytest.mark.parametrize("name", ["a/../b", "org/name/more", "org/nam\u00e9", "org\n/name", ""])
def test_what_is_no_name_at_all_is_unknown(name):
    with pytest.raises(UnknownNameError, match="unknown weights"):
        resolve_source(name)


@pytest.mark.parametrize("name", ["a/..", "hf://../x", "org/na..me", "-a/b", "org/na--me", f"org/{'x' * 100}"])
def test_no_name_leaves_the_cache(name, tmp_path):
    with pytest.raises(HubError, match="no such file or folder, and not a valid Hugging Face id"):
        resolve_source(name, cache=tmp_path, offline=True)


@pytest.mark.parametrize("revision", ["../../x", "/x", "a..b", "a b"])
def test_no_revision_leaves_the_cache(revision, tmp_path):
    with pytest.raises(HubError, match="is not a branch, tag or commit"):
        resolve_source(f"{NAME}@{revision}", cache=tmp_path, offline=True)


def test_a_single_file_has_no_revisions():
    with pytest.raises(HubError, match=r"only Hugging Face repositories have revisions; leave out @main"):
        resolve_source("vit_b_16@main")


@pytest.mark.slow
def test_a_repository_gives_its_descriptions_and_its_safetensors_and_works_offline_after(hugging_face, tmp_path):
    wanted = {"config.json": b"{}", "preprocessor_config.json": b"{}", "model.safetensors": b"weights"}
    others = {"pytorch_model.bin": b"pickle", "tf_model.h5": b"big", "README.md": b"words", "onnx/model.onnx": b"big"}
    hugging_face.repositories[NAME] = wanted | others
    (folder,) = elsewhere(NAME, home=tmp_path, server=hugging_face)
    assert {file.name: file.read_bytes() for file in Path(folder).iterdir()} == wanted
    assert sorted(hugging_face.served) == sorted(wanted)
    assert elsewhere(NAME, home=tmp_path) == [folder]
    assert elsewhere(f"{NAME}@{COMMIT}", home=tmp_path, HF_HUB_OFFLINE="1") == [folder]


@pytest.mark.slow
def test_the_default_is_downloaded_once_and_then_predicts_offline(hugging_face, tmp_path):
    model = build(ViTConfig(image_size=16, patch_size=8, num_classes=2, depth=1, width=16, mlp_dim=16, num_heads=2))
    model.meta = model.meta.replace(labels=("red", "blue"))
    save(model, tmp_path / "published")
    files = {file.name: file.read_bytes() for file in (tmp_path / "published").iterdir()}
    hugging_face.repositories[f"timm/{hub.DEFAULT}"] = files
    Image.new("RGB", (8, 8), "red").save(tmp_path / "photo.png")
    first = process("predict", tmp_path / "photo.png", home=tmp_path, server=hugging_face)
    assert f"no model given, using {hub.DEFAULT}" in first.err
    assert sorted(hugging_face.served) == sorted(files)
    for offline in ({}, {"HF_HUB_OFFLINE": "1"}):  # the network is gone; and nobody asks for it
        again = process("predict", tmp_path / "photo.png", home=tmp_path, **offline)
        assert (again.out, again.err) == (first.out, f"no model given, using {hub.DEFAULT}\n")
    elsewhere = process("predict", tmp_path / "photo.png", home=tmp_path / "other").err
    assert "no model given, and the default could not be downloaded: using the bundled model, which knows" in elsewhere


@pytest.mark.slow
def test_a_timm_name_is_its_repository_and_a_pickle_is_taken_only_if_there_is_nothing_else(hugging_face, tmp_path):
    repository = "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k"
    hugging_face.repositories[repository] = {"config.json": b'{"pretrained_cfg": {}}', "pytorch_model.bin": b"pickle"}
    (folder,) = elsewhere("vit_base_patch16_224", home=tmp_path, server=hugging_face)
    assert sorted(file.name for file in Path(folder).iterdir()) == ["config.json", "pytorch_model.bin"]
    assert elsewhere("vit_base_patch16_224", home=tmp_path) == [folder]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_weights_that_another_program_cached_alone_get_their_preprocessing(file, hugging_face, tmp_path):
    folder = snapshot(tmp_path / "cache", config__json="{}", model__safetensors="weights")
    (tmp_path / "cache" / "huggingface").rename(tmp_path / "hub")
    folder = tmp_path / "hub" / folder.relative_to(tmp_path / "cache" / "huggingface")
    assert elsewhere(NAME, home=tmp_path) == [str(folder)]
    hugging_face.repositories[NAME] = {file: b'{"size": 224}'}
    assert elsewhere(NAME, home=tmp_path, server=hugging_face) == [str(folder)]
    assert (folder / file).read_text() == '{"size": 224}'


@pytest.mark.slow
def test_the_hub_says_what_is_missing_in_one_line(hugging_face, tmp_path):
    hugging_face.repositories["org/empty"] = {"README.md": b"words"}
    *_, line = elsewhere("google/vit-base-patch16-22", home=tmp_path, server=hugging_face)
    assert re.search(r"HubError: .*no such model on Hugging Face; did you mean google/vit-base-patch16-224", line)
    *_, line = elsewhere("org/empty", home=tmp_path, server=hugging_face)
    assert "HubError: org/empty: contains none of model.safetensors, " in line
    *_, line = elsewhere("org/name", home=tmp_path)
    assert re.search(r"HubError: org/name: .*refused\); on a machine with a network, run `hf download org/name`", line)


def test_a_cached_repository_is_used_as_it_is(tmp_path):
    folder = snapshot(tmp_path, config__json="{}", model__safetensors="weights")
    assert resolve_source(NAME, cache=tmp_path, offline=True) == folder


def test_a_damaged_copy_in_the_cache_says_what_to_remove(tmp_path, monkeypatch):
    folder = snapshot(tmp_path, config__json="{}", model__safetensors="weights")
    monkeypatch.setattr(hub, "resolve_source", lambda name: folder)
    place = tmp_path / "huggingface" / "models--google--vit-base-patch16-224"
    with pytest.raises(CheckpointError, match=rf"; remove {re.escape(str(place))} to download it again"):
        load(NAME)
    with pytest.raises(CheckpointError, match=r"not an npz, safetensors or PyTorch file$"):
        load(folder)


def test_an_incomplete_cached_repository_says_what_to_copy_where(tmp_path):
    index = json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    )
    folder = snapshot(tmp_path, config__json="{}")
    place = tmp_path / "huggingface" / "models--google--vit-base-patch16-224"
    told = rf"run `hf download {NAME}` and copy the folder .* to {re.escape(str(place))}, or pass the path"
    with pytest.raises(HubError, match=told):
        resolve_source(NAME, cache=tmp_path, offline=True)
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "model-00001-of-00002.safetensors").write_text("half")
    with pytest.raises(HubError, match=told):
        resolve_source(NAME, cache=tmp_path, offline=True)
    (folder / "model-00002-of-00002.safetensors").write_text("half")
    assert resolve_source(NAME, cache=tmp_path, offline=True) == folder


def test_shards_are_chosen_with_their_index():
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    chosen = hub._needed_files(
        ["config.json", "model.safetensors.index.json", *shards, "pytorch_model.bin", "x.safetensors"]
    )
    assert sorted(chosen) == ["config.json", *shards, "model.safetensors.index.json"]


def test_without_the_extra_the_error_names_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install '.[hub]'")):
        resolve_source(NAME, cache=tmp_path, offline=True)


def test_a_model_that_is_refused_names_an_open_one_of_similar_size(tmp_path, monkeypatch):
    class RefusedError(Exception):
        response = SimpleNamespace(status_code=403)

    def refuse(self):
        raise RefusedError

    monkeypatch.setattr(hub.Repository, "_files", refuse)
    with pytest.raises(HubError) as caught:
        resolve_source("facebook/dinov3-vits16-pretrain-lvd1689m", cache=tmp_path, offline=False)
    assert "access to this model is restricted" in str(caught.value)
    instead = "or use vit_small_patch16_224.dino (Apache-2.0, DINO-S/16), which is open to everyone"
    assert instead in str(caught.value)
    assert hub.open_alternative("nobody/unknown") == ""
