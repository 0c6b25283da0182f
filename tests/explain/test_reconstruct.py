"""MAE's decoder: the patches that transformers' model tells for the same noise, and pictures of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from vitruvian.cli.app import app
from vitruvian.errors import CheckpointError
from vitruvian.explain.reconstruct import reconstruct
from vitruvian.weights.load import load_autoencoder

transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
    "intermediate_size": 64, "decoder_hidden_size": 24, "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 3, "decoder_intermediate_size": 40,
}  # fmt: skip


def made(folder, **changes):
    torch.manual_seed(0)
    peer = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**SHAPE | changes)).eval()
    with torch.no_grad():
        for tensor in peer.state_dict().values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    peer.save_pretrained(folder)
    view = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(view))
    return peer


@pytest.mark.parametrize("changes", [{}, {"mask_ratio": 0.5, "norm_pix_loss": True, "qkv_bias": False}])
def test_hidden_patches_are_filled_in_as_transformers_does(changes, tmp_path):
    peer = made(tmp_path, **changes)
    ours = load_autoencoder(tmp_path)
    pixels, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)
    with torch.no_grad():
        wanted = peer(pixels, noise=noise)
        told, hidden = ours(pixels, noise, peer.config.mask_ratio)
    assert torch.equal(hidden, wanted.mask.bool())
    torch.testing.assert_close(told, wanted.logits, rtol=0, atol=2e-5 * float(wanted.logits.abs().max()))
    filled, _ = ours.fill_in(pixels, noise, peer.config.mask_ratio)
    places = hidden.view(2, 1, 4, 1, 4, 1).expand(2, 3, 4, 8, 4, 8).reshape(2, 3, 32, 32)
    assert torch.equal(filled[~places], pixels[~places])
    if not changes:
        whole = peer.unpatchify(wanted.logits)
        torch.testing.assert_close(filled[places], whole[places], rtol=0, atol=1e-4)


def test_a_picture_shows_the_image_without_filled_in_and_whole(tmp_path):
    made(tmp_path / "mae")
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    seen, filled, whole = reconstruct(load_autoencoder(tmp_path / "mae"), tmp_path / "a.png", share=0.75)
    with Image.open(tmp_path / "a.png") as image:
        assert whole.tobytes() == image.tobytes()
    gray = (np.asarray(seen) == 128).all(axis=2)
    assert gray.mean() == pytest.approx(0.75, abs=0.01)
    assert np.array_equal(np.asarray(filled)[~gray], np.asarray(whole)[~gray])
    arguments = ["explain", str(tmp_path / "a.png"), "--model", str(tmp_path / "mae"), "--reconstruct", "0.5"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    with Image.open(json.loads(done.stdout)["file"]) as image:
        assert image.size == (3 * 32 + 16, 32)


def test_weights_without_a_decoder_are_told_apart(tmp_path):
    shape = {name: value for name, value in SHAPE.items() if "decoder" not in name}
    transformers.ViTModel(transformers.ViTConfig(**shape)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no MAE decoder"):
        load_autoencoder(tmp_path)
