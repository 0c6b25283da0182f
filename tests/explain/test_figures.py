"""The figures of filters and positions: laws of principal components and of similarity, and where they mean nothing."""

import numpy as np
import pytest
import torch
from reference import random_model

from vitruvian.config import StemConfig, ViTConfig
from vitruvian.errors import ConfigError
from vitruvian.explain import draw_figures, filter_components, position_similarity
from vitruvian.explain.figures import filters_figure, positions_figure, tint
from vitruvian.model.build import build
from vitruvian.weights.load import load


def test_components_are_orthonormal_and_their_variance_falls():
    components, shares = filter_components(random_model(width=32))
    flat = components.flatten(1).double()
    torch.testing.assert_close(flat @ flat.T, torch.eye(28, dtype=torch.float64), atol=1e-5, rtol=0)
    assert (shares.diff() <= 1e-7).all()
    assert 0 < shares.sum() <= 1 + 1e-6
    assert (flat.gather(1, flat.abs().argmax(1, keepdim=True)) > 0).all()


def test_filters_made_of_two_patterns_around_a_mean_have_these_two_components():
    model = random_model()
    generator = torch.Generator().manual_seed(3)
    patterns, _ = torch.linalg.qr(torch.randn(192, 2, generator=generator))
    mixing = torch.randn(16, 2, generator=generator) * torch.tensor([5.0, 1.0])
    mean = torch.randn(192, generator=generator)
    kernels = (mean + mixing @ patterns.T).view(16, 8, 8, 3).permute(0, 3, 1, 2)
    with torch.no_grad():
        model.embed.patch.weight.copy_(kernels)
    components, shares = filter_components(model)
    assert float(shares[:2].sum()) == pytest.approx(1, abs=1e-5)
    projected = components[:2].flatten(1) @ patterns
    torch.testing.assert_close(projected.square().sum(dim=1), torch.ones(2), atol=1e-4, rtol=0)


def test_a_narrow_model_has_as_many_components_as_filters():
    assert filter_components(random_model())[0].shape == (16, 8, 8, 3)


def test_zero_is_gray_and_the_strongest_value_full():
    tile = np.zeros((1, 2, 2, 3), np.float32)
    tile[0, 0, 0] = [0.5, -0.5, 0.0]
    assert tint(tile)[0, 0, 0].tolist() == [255, 0, 128]
    assert tint(tile)[0, 1, 1].tolist() == [128, 128, 128]
    assert tint(np.ones((1, 2, 2, 1), np.float32)).shape == (1, 2, 2, 3)


def test_a_hybrid_shows_its_stems_filters_and_says_so():
    config = ViTConfig(
        image_size=64, patch_size=1, depth=1, width=16, mlp_dim=16, num_heads=2, stem=StemConfig(stages=(1,), width=32)
    )
    figure = filters_figure(build(config))
    assert figure.arrays["components"].shape == (28, 7, 7, 3)
    assert figure.title == "Filters of the stem"
    assert "The patch embedding of a hybrid reads features without colors" in figure.note


def test_filters_of_many_channels_have_no_image():
    figure = filters_figure(random_model(in_channels=5))
    assert (figure.image, figure.arrays) == (None, {})
    assert figure.note == "The filters read 5 channels, which cannot be shown as colors."
    assert filters_figure(random_model(in_channels=1)).image is not None


@pytest.mark.parametrize("positions", ["learned", "learned_2d", "sincos"])
def test_similarity_is_one_with_itself_and_symmetric(positions):
    similarity = position_similarity(random_model(pos_embed=positions))
    assert similarity.shape == (2, 3, 2, 3)
    square = similarity.view(6, 6)
    torch.testing.assert_close(square.diagonal(), torch.ones(6))
    torch.testing.assert_close(square, square.T)


def test_fixed_positions_are_as_similar_as_cosines_of_their_distance():
    model = random_model(pos_embed="sincos")
    similarity = position_similarity(model, grid=(4, 5))
    omega = 10_000.0 ** -(torch.arange(4) / 3)
    wanted = ((3 * omega).cos().sum() + (2 * omega).cos().sum()) / 8  # from (0, 1) to (3, 3)
    assert float(similarity[0, 1, 3, 3]) == pytest.approx(float(wanted), abs=1e-6)
    assert "fixed sines and cosines, not learned" in positions_figure(model).note


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ("none", "the model has no position embeddings"),
        ("relative", "the model's positions are relative offsets inside attention"),
    ],
)
def test_models_without_positions_of_patches_are_told_so(positions, words):
    model = random_model(pos_embed=positions)
    with pytest.raises(ConfigError, match=words):
        position_similarity(model)
    figure = positions_figure(model)
    assert figure.image is None
    assert figure.note.startswith(words[0].upper() + words[1:])


def test_figures_are_drawn_over_the_built_in_digits_and_written_with_their_numbers(tmp_path):
    done = list(draw_figures(random_model(), [], tmp_path, count=5))
    assert [figure.name for figure, _ in done] == ["filters", "positions", "attention-distance"]
    for figure, paths in done:
        assert [path.name for path in paths] == [f"{figure.name}.png", f"{figure.name}.npz"]
        with np.load(paths[1], allow_pickle=False) as arrays:
            assert {name: arrays[name].shape for name in arrays} == {n: a.shape for n, a in figure.arrays.items()}
    assert "averaged over 5 built-in digits." in done[2][0].note
    page = (tmp_path / "figures.html").read_text(encoding="utf-8")
    assert page.count("data:image/png") == 3
    assert all(figure.title in page for figure, _ in done)


def low_frequencies(tiles):
    """The share of a tile's energy below half of the highest frequency in both directions."""
    energy = np.abs(np.fft.fft2(tiles, axes=(1, 2))) ** 2
    low = np.abs(np.fft.fftfreq(tiles.shape[1])) < 0.25
    return energy[:, low[:, None] & low[None]].sum() / energy.sum()


@pytest.mark.slow
def test_a_trained_model_shows_what_the_paper_describes(shared, tmp_path):
    model = load(shared / "weights" / "vit_ti16_imagenet1k.safetensors")
    images = [next(folder.iterdir()) for folder in sorted((shared / "data" / "imagenet-val-1000").iterdir())[::63]]
    filters, positions, distance = (figure.arrays for figure, _ in draw_figures(model, images, tmp_path))
    noise = np.random.default_rng(0).normal(size=(28, 16, 16, 3))
    assert low_frequencies(filters["components"]) > 0.45  # 0.49; of noise a fifth
    assert low_frequencies(noise) < 0.25
    similarity = positions["similarity"]
    row, column = np.arange(14)[:, None], np.arange(14)[None]
    same, other = [], []
    for r, c in np.ndindex(14, 14):
        alike = ((row == r) ^ (column == c)) > 0
        same.append(similarity[r, c][alike].mean())
        other.append(similarity[r, c][(row != r) & (column != c)].mean())
    assert np.mean(same) - np.mean(other) > 0.5  # 0.47 and -0.06
    layers = distance["distance_pixels"].mean(axis=1)
    assert layers[-3:].min() > 2 * layers[:3].max()  # about 140 pixels after 50
