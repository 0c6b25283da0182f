"""MLP-Mixer: Google's and timm's files give the numbers of their own formulas, and are written again unchanged."""

import json

import numpy as np
import pytest
import torch
from checkpoints import PEERS, TOLERANCE
from safetensors.torch import load_file, save_file

import vitruvian as vt
from vitruvian.catalog import PUBLISHED, title_of
from vitruvian.errors import CheckpointError, ConversionError

PATCH, SIDE, D, CLASSES = 8, 32, 12, 5
N = (SIDE // PATCH) ** 2


def google_arrays(blocks=2, tokens=10, channels=20):
    """Random arrays under the names of the release."""
    rng = np.random.default_rng(0)

    def dense(name, *shape):
        fan_in = np.prod(shape[:-1])
        return {f"{name}/kernel": rng.normal(0, fan_in**-0.5, shape), f"{name}/bias": rng.normal(0, 0.3, shape[-1])}

    def norm(name):
        return {f"{name}/scale": rng.normal(1, 0.3, D), f"{name}/bias": rng.normal(0, 0.3, D)}

    arrays = dense("stem", PATCH, PATCH, 3, D) | norm("pre_head_layer_norm") | dense("head", D, CLASSES)
    for block in (f"MixerBlock_{i}" for i in range(blocks)):
        arrays |= norm(f"{block}/LayerNorm_0") | norm(f"{block}/LayerNorm_1")
        arrays |= dense(f"{block}/token_mixing/Dense_0", N, tokens) | dense(f"{block}/token_mixing/Dense_1", tokens, N)
        arrays |= dense(f"{block}/channel_mixing/Dense_0", D, channels)
        arrays |= dense(f"{block}/channel_mixing/Dense_1", channels, D)
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def reference(arrays, images):  # (B, H, W, 3) -> (B, CLASSES), in float64
    """The paper's equations, written for these names."""
    a = {name: array.astype(np.float64) for name, array in arrays.items()}

    def norm(x, name):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-6) * a[f"{name}/scale"] + a[f"{name}/bias"]

    def mlp(x, name):
        hidden = x @ a[f"{name}/Dense_0/kernel"] + a[f"{name}/Dense_0/bias"]
        hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        return hidden @ a[f"{name}/Dense_1/kernel"] + a[f"{name}/Dense_1/bias"]

    side = SIDE // PATCH
    patches = (
        images.reshape(len(images), side, PATCH, side, PATCH, 3)
        .transpose(0, 1, 3, 2, 4, 5)
        .reshape(-1, N, PATCH**2 * 3)
    )
    x = patches @ a["stem/kernel"].reshape(-1, D) + a["stem/bias"]
    for i in range(2):
        block = f"MixerBlock_{i}"
        x = x + np.swapaxes(mlp(np.swapaxes(norm(x, f"{block}/LayerNorm_0"), 1, 2), f"{block}/token_mixing"), 1, 2)
        x = x + mlp(norm(x, f"{block}/LayerNorm_1"), f"{block}/channel_mixing")
    return norm(x, "pre_head_layer_norm").mean(1) @ a["head/kernel"] + a["head/bias"]


@pytest.fixture
def google_file(tmp_path):
    np.savez(tmp_path / "Mixer.npz", **google_arrays())
    return tmp_path / "Mixer.npz"


@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_googles_file_gives_the_logits_of_the_papers_equations(prefix, tmp_path):
    arrays = google_arrays()
    np.savez(tmp_path / "Mixer.npz", **{prefix + name: array for name, array in arrays.items()})
    model = vt.load(tmp_path / "Mixer.npz")
    images = np.random.default_rng(1).normal(size=(2, SIDE, SIDE, 3))
    with torch.no_grad():
        logits = model(torch.from_numpy(images).float().permute(0, 3, 1, 2))
    np.testing.assert_allclose(logits.numpy(), reference(arrays, images), atol=TOLERANCE)
    assert model.config.image_size == (SIDE, SIDE)
    assert model.meta.preprocess.fit == "squash"


def test_timms_file_gives_timms_logits():
    expected = load_file(PEERS / "timm_mixer.logits.safetensors")
    model = vt.load(PEERS / "timm_mixer.safetensors")
    with torch.no_grad():
        assert float((model(expected["input"]) - expected["logits"]).abs().max()) < TOLERANCE
    assert (model.config.mixer_dim, model.config.mlp_dim, model.config.numerics.gelu) == (12, 96, "erf")


def test_files_are_written_as_they_were_read(google_file, tmp_path):
    vt.save(vt.load(google_file), tmp_path / "again.npz", family="google")
    with np.load(tmp_path / "again.npz") as written:
        arrays = google_arrays()
        assert set(arrays) <= set(written.files)
        assert all(np.array_equal(written[name], array) for name, array in arrays.items())
    vt.save(vt.load(PEERS / "timm_mixer.safetensors"), tmp_path / "again.safetensors", family="timm")
    written, original = load_file(tmp_path / "again.safetensors"), load_file(PEERS / "timm_mixer.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)


def test_a_model_goes_from_google_to_timm_and_to_no_other_family(google_file, tmp_path):
    model = vt.load(google_file)
    vt.save(model, tmp_path / "mixer.safetensors", family="timm")
    again = vt.load(tmp_path / "mixer.safetensors")
    assert again.config == model.config
    assert vt.load(tmp_path / "mixer.safetensors", family="timm").config.numerics.gelu == "erf"
    with pytest.raises(ConversionError, match=r"no mixer_\* of this shape"):
        vt.save(model, tmp_path / "folder", family="timm")
    for family, path in (("torchvision", "w.pth"), ("huggingface", "folder")):
        with pytest.raises(ConversionError, match=r"cannot express this model: .*[mM]ixer"):
            vt.save(model, tmp_path / path, family=family)


def test_a_folder_names_timms_model_and_is_read_by_that_name(tmp_path):
    model = vt.create_model("Mixer-S/32", num_classes=3)
    vt.save(model, tmp_path / "mixer", family="timm")
    config = json.loads((tmp_path / "mixer" / "config.json").read_text())
    assert config["architecture"] == "mixer_s32_224"
    again = vt.load(tmp_path / "mixer", family="timm")
    assert (title_of(again.config), again.config.image_size) == ("Mixer-S/32", (224, 224))
    config["model_args"] = {"act_layer": "silu"}
    (tmp_path / "mixer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="act_layer='silu' is not supported for an MLP-Mixer"):
        vt.load(tmp_path / "mixer", family="timm")


@pytest.mark.parametrize("size", [{"image_size": 64}, {"patch_size": 4}])
def test_another_image_size_is_refused_in_one_line(size, google_file):
    with pytest.raises(CheckpointError) as raised:
        vt.load(google_file, **size)
    assert "an MLP-Mixer works only at its own image size, with 4x4 patches" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_smaller_patch_on_a_smaller_image_keeps_the_grid(google_file):
    assert vt.load(google_file, image_size=16, patch_size=4).config.grid == (4, 4)


def test_a_gated_mixer_is_refused(tmp_path):
    tensors = load_file(PEERS / "timm_mixer.safetensors")
    gated = {name: t.repeat(2, *[1] * (t.dim() - 1)) if "fc1" in name else t for name, t in tensors.items()}
    save_file(gated, tmp_path / "gmixer.safetensors")
    with pytest.raises(CheckpointError, match="has shape"):
        vt.load(tmp_path / "gmixer.safetensors")


def test_the_releases_mixers_have_names():
    rows = {row.name: row.variant for row in PUBLISHED.values() if "mixer_models" in row.location}
    assert rows == {
        "imagenet21k/Mixer-B_16": "Mixer-B/16",
        "imagenet21k/Mixer-L_16": "Mixer-L/16",
        "imagenet1k/Mixer-B_16": "Mixer-B/16",
        "imagenet1k/Mixer-L_16": "Mixer-L/16",
        "sam/Mixer-B_16": "Mixer-B/16",
        "sam/Mixer-B_32": "Mixer-B/32",
    }
