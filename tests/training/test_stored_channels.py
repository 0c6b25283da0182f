"""Images of any number of channels, from training to explanations."""

import numpy as np
import pytest
from PIL import Image
from runs import TINY, StopAt, identical, weights

import vitruvian as vt
from vitruvian.config import Preprocess
from vitruvian.errors import ConfigError
from vitruvian.training import Interrupted, resume, train

SETTINGS = (*TINY, "batch_size=8", "image_size=16", "steps=6", "architecture.in_channels=4")


@pytest.fixture(scope="module")
def bands(tmp_path_factory):
    """Two classes of 4-channel images of 16 bits that differ in one channel, as arrays in both orders."""
    folder, rng = tmp_path_factory.mktemp("bands"), np.random.default_rng(0)
    for label in (0, 1):
        (folder / str(label)).mkdir()
        for index in range(20):
            image = rng.normal(30_000, 2_000, (20, 24, 4))
            image[..., 3] += 15_000 * label
            stored = image.astype(np.uint16)
            np.save(folder / str(label) / f"{index}.npy", stored if index % 2 else np.moveaxis(stored, 2, 0))
    return folder


def test_a_model_of_four_channels_trains_resumes_to_the_bit_predicts_and_explains(bands, tmp_path, capsys):
    settings = [*SETTINGS, "steps=30"]
    whole = train(bands, recipe="digits", out=tmp_path / "whole", settings=settings, progress=False)
    preprocess = whole.model().meta.preprocess
    assert preprocess.is_stored
    assert preprocess.mean == pytest.approx([30_000 / 65535] * 3 + [37_500 / 65535], abs=0.01)
    assert whole.evaluation["top1"] == 100

    with pytest.raises(Interrupted):
        train(bands, recipe="digits", out=tmp_path / "parts", settings=settings, progress=False, listeners=[StopAt(7)])
    resume(tmp_path / "parts", progress=False)
    assert identical(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    names = ("whole", "parts")
    configs = [(tmp_path / name / "model" / "config.json").read_bytes() for name in names]
    assert configs[0] == configs[1]

    path = bands / "1" / "3.npy"
    ((best, _),) = vt.Classifier(whole.folder).predict([path])
    assert best.label == "1"
    explained = vt.Explainer(whole.folder).explain(path)
    assert not explained.error
    assert explained.image.size == (24, 20)
    assert vt.evaluate(bands, whole.folder).measures.top1 > 90


def test_weights_of_three_channels_start_a_model_of_four(bands, tmp_path, capsys):
    weights = vt.create_model("ViT-Ti/16", depth=1, width=16, mlp_dim=16, num_heads=2, patch_size=4, image_size=16)
    weights.meta = weights.meta.replace(preprocess=Preprocess(image_size=16))
    vt.save(weights, tmp_path / "rgb")
    run = train(
        bands,
        recipe="finetune-small",
        weights=str(tmp_path / "rgb"),
        out=tmp_path / "run",
        settings=["architecture.in_channels=4", "steps=1", "lr=0.0001", "batch_size=8", "workers=0"],
        progress=False,
    )
    assert (
        "note: the weights of the 3 input channels are repeated for 4 channels, of the same sum"
        in capsys.readouterr().err
    )
    assert run.model().config.in_channels == 4
    assert run.model().meta.preprocess.mean[0] == pytest.approx(30_000 / 65535, abs=0.01)


def test_color_operations_are_refused_in_one_line(bands, tmp_path):
    settings = [*SETTINGS, "augment.rand_augment=2"]
    with pytest.raises(ConfigError, match=r"augment.rand_augment needs 8-bit images.*set augment.rand_augment=0"):
        train(bands, recipe="digits", out=tmp_path / "run", settings=settings, progress=False)


def test_training_on_8_bits_of_images_with_16_is_noted(tmp_path, capsys):
    for label in (0, 1):
        (tmp_path / "data" / str(label)).mkdir(parents=True)
        for index in range(8):
            image = np.random.default_rng(index).integers(0, 65535, (12, 12), dtype=np.uint16)
            Image.fromarray(image).save(tmp_path / "data" / str(label) / f"{index}.png")
    settings = [*TINY, "batch_size=8", "steps=1"]
    run = train(tmp_path / "data", recipe="digits", out=tmp_path / "run", settings=settings, progress=True)
    assert "although the first has 16 bits per channel; preprocess.pixels=stored" in capsys.readouterr().err
    assert run.model().meta.preprocess.pixels == "rgb"
