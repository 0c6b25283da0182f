"""Images that keep their shape (NaFlex): the numbers of SigLIP 2's own processor and model, by every way to use it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitruvian as vt
from vitruvian.cli.app import app
from vitruvian.compress.fewer_tokens import fit_cascade
from vitruvian.config import Preprocess
from vitruvian.data.preprocess import naflex_size, preprocess_image
from vitruvian.errors import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers")

SHAPES = [(40, 60), (64, 64), (33, 90), (40, 60), (120, 17), (64, 64)]
TOLERANCE = 2e-5
"""Of float32 through two layers, relative to the largest value."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number, (rows, columns) in enumerate(SHAPES):
        Image.fromarray(rng.integers(0, 256, (rows, columns, 3), np.uint8)).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A SigLIP 2 as transformers saves it, and its processor."""
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    folder = tmp_path_factory.mktemp("siglip2")
    settings = transformers.Siglip2VisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, patch_size=8, num_patches=16
    )
    torch.manual_seed(0)
    peer = transformers.Siglip2VisionModel(settings).eval()
    for parameter in peer.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape)
    processor = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=20)
    peer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder, peer, processor


@pytest.fixture(scope="module")
def wanted(theirs, photos):
    """What transformers gives for all photos in one padded batch."""
    _, peer, processor = theirs
    inputs = processor([Image.open(photo).convert("RGB") for photo in photos], return_tensors="pt")
    with torch.no_grad():
        return inputs, peer(**inputs).pooler_output


def near(found, target):
    found = found if isinstance(found, torch.Tensor) else torch.tensor(found)
    return float((found - target).abs().max()) < TOLERANCE * float(target.abs().max())


@pytest.mark.parametrize("most", [1, 2, 16, 250, 1024])
def test_every_shape_ends_at_the_size_of_the_processor(most):
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    view = Preprocess(fit="naflex", patch_size=14, max_num_patches=most)
    for size in np.random.default_rng(most).integers(1, 3000, (50, 2)).tolist():
        assert naflex_size(tuple(size), view) == get_image_size_for_max_num_patches(*size, 14, most)


def test_images_and_features_are_those_of_transformers(theirs, wanted, photos):
    model = vt.load(theirs[0])
    assert model.meta.preprocess == Preprocess(image_size=32, fit="naflex", patch_size=8, max_num_patches=20)
    inputs, features = wanted
    for photo, patches, grid in zip(photos, inputs["pixel_values"], inputs["spatial_shapes"].tolist()):
        pixels = preprocess_image(photo, model.meta.preprocess)
        assert list(pixels.shape) == [3, grid[0] * 8, grid[1] * 8]
        cut = pixels.view(3, grid[0], 8, grid[1], 8).permute(1, 3, 2, 4, 0).reshape(grid[0] * grid[1], -1)
        assert torch.equal(cut, patches[: len(cut)])
    with torch.no_grad():
        alone = torch.cat([model(preprocess_image(photo, model.meta.preprocess)[None]) for photo in photos])
    assert near(alone, features)
    assert near(vt.embed_images(model, photos, batch_size=4), torch.nn.functional.normalize(features, dim=-1))


def test_answers_in_batches_are_those_of_each_image_alone(theirs, photos):
    model = vt.load(theirs[0], num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    classifier = vt.Classifier(model)
    together = classifier.predict([*photos], top=3, batch_size=5)
    for photo, answers in zip(photos, together):
        alone = classifier.predict([photo], top=3)[0]
        assert [answer.index for answer in answers] == [answer.index for answer in alone]
        assert near([answer.probability for answer in answers], torch.tensor([a.probability for a in alone]))


def test_vectors_of_many_images_are_those_of_transformers(theirs, wanted, photos, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    vt.embed(photos[0].parent, theirs[0], tmp_path / "out", batch_size=4, dtype="float32")
    table = parquet.read_table(next((tmp_path / "out").glob("*.parquet"))).to_pydict()
    assert near(table["vector"], wanted[1])


def test_layers_of_images_of_several_sizes_are_asked_for_one_at_a_time(theirs, photos):
    model = vt.load(theirs[0])
    assert vt.features(model, [photos[0], photos[3]])[0].shape == (2, 32, 4, 5)
    with pytest.raises(ConfigError, match="these images differ in size"):
        vt.features(model, photos)


def test_a_size_for_all_images_is_a_squash_to_it(theirs):
    model = vt.load(theirs[0], image_size=(32, 48))
    assert model.meta.preprocess == Preprocess(image_size=(32, 48))
    assert vt.load(theirs[0], patch_size=16).meta.preprocess.fit == "squash"


def test_what_needs_one_size_says_so(theirs, photos, tmp_path):
    text = "needs images of one size, and this model keeps each image's shape"
    model = vt.load(theirs[0], num_classes=3)
    with pytest.raises(ConfigError, match=f"engine='onnxruntime' {text}"):
        vt.Classifier(model, engine="onnxruntime")
    with pytest.raises(ConfigError, match=f"a graph without dynamic_size=True {text}"):
        vt.export(model, tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match=f"a cascade {text}"):
        fit_cascade(model, photos[0].parent, tome_r=2)


@pytest.mark.slow
def test_a_graph_of_any_size_keeps_the_shape_of_images(theirs, wanted, photos, tmp_path):
    pytest.importorskip("onnxruntime")
    model = vt.load(theirs[0], num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    vt.export(model, tmp_path / "model.onnx", dynamic_size=True)
    found = vt.Classifier(tmp_path / "model.onnx").predict([*photos])
    for ours, theirs_ in zip(found, vt.Classifier(model).predict([*photos])):
        assert near([a.probability for a in ours], torch.tensor([a.probability for a in theirs_]))


def test_it_is_written_for_transformers_with_its_processor(theirs, tmp_path):
    model = vt.load(theirs[0])
    vt.save(model, tmp_path / "ours", "huggingface")
    written = json.loads((tmp_path / "ours" / "preprocessor_config.json").read_text())
    assert (written["image_processor_type"], written["patch_size"], written["max_num_patches"]) == (
        "Siglip2ImageProcessor", 8, 20,
    )  # fmt: skip
    assert vt.load(tmp_path / "ours", family="huggingface").meta.preprocess == model.meta.preprocess
    vt.save(model, tmp_path / "native")
    assert vt.load(tmp_path / "native").meta.preprocess == model.meta.preprocess


def test_a_processor_with_other_patches_than_the_model_is_refused(theirs, tmp_path):
    for file in theirs[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": 16}))
    with pytest.raises(CheckpointError, match="says patch_size=16, the arrays have 8"):
        vt.load(tmp_path)


def test_the_processor_of_images_and_text_is_read(theirs, tmp_path):
    for file in theirs[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    own = json.loads((tmp_path / "preprocessor_config.json").read_text()) | {"max_num_patches": 12}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": own, "processor_class": "X"}))
    assert vt.load(tmp_path).meta.preprocess.max_num_patches == 12


@pytest.mark.parametrize("command", ["predict", "explain", "figures", "probe", "train", "evaluate"])
@pytest.mark.slow
def test_commands_follow_it_or_say_what_they_do(command, theirs, photos, tmp_path):
    data = tmp_path / "data"
    for split in ("train", "test"):
        for number, photo in enumerate(photos):
            folder = data / split / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / photo.name).write_bytes(photo.read_bytes())
    model = vt.load(theirs[0], num_classes=2, labels=["a", "b"])
    vt.save(model, tmp_path / "model")
    words = {
        "predict": ["predict", str(photos[0]), str(photos[2])],
        "explain": ["explain", str(photos[0]), str(photos[2]), "--out", str(tmp_path / "out")],
        "figures": ["explain", *map(str, photos), "--figures", "--out", str(tmp_path / "out")],
        "probe": ["probe", str(data), "--only", "neighbors"],
        "train": f"train {data} --recipe finetune-small --epochs 1 --batch-size 4 --out {tmp_path}/run".split(),
        "evaluate": ["evaluate", str(data)],
    }[command]
    source = ["--from" if command == "train" else "--model", str(tmp_path / "model")]
    result = CliRunner().invoke(app, [*words, *source])
    assert result.exit_code == 0, result.output
    if command == "train":
        assert "keeps the aspect ratio (NaFlex); here all images are squashed to" in result.stderr
        assert vt.load(tmp_path / "run").meta.preprocess.fit == "squash"
