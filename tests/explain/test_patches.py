"""Patch tokens without sinks and prefix tokens, and principal components as colors that mean the same everywhere."""

import numpy as np
import pytest
import torch
from PIL import Image
from reference import SHAPES, random_model, random_pixels

from vitruvian.errors import ConfigError, DataError, NotFiniteError
from vitruvian.explain import Explainer, MapSettings, fit_components, paint, patch_tokens
from vitruvian.explain.patches import otsu_threshold, without_sinks

PCA = MapSettings(methods=("pca",))


def photo(seed=0, size=(60, 40)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def scenes(parts, noise=0.05, width=12):
    """Grids (R, C, D) of tokens: each part of a layout (R, C) has its direction, opposite to the background's 0."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(4, width, generator=generator) + 2 * torch.randn(width, generator=generator)
    directions[0] = -directions[1:].mean(dim=0)
    return [directions[part] + noise * torch.randn(*part.shape, width, generator=generator) for part in parts]


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_are_those_of_the_patches_alone(name):
    model = random_model(**SHAPES[name])
    tokens, sinks = patch_tokens(model, random_pixels(model), [0, -1])
    assert tokens.shape == (2, 2, 3, 32)
    assert sinks.shape == (2, 2, 3)
    last = model.forward_intermediates(random_pixels(model), ["block_2"])["block_2"][:, model.config.prefix_tokens :]
    wanted = torch.nn.functional.layer_norm(last, (16,)).view(2, 2, 3, 16)
    torch.testing.assert_close(tokens[..., 16:][~sinks], wanted[~sinks])


@pytest.mark.parametrize("num_classes", [0, 3])
def test_tokens_that_are_not_finite_are_reported(num_classes):
    model = random_model(num_classes=num_classes)
    with torch.no_grad():
        model.blocks[0].mlp.fc2.weight.fill_(3e38)
    explainer = Explainer(model, PCA)
    if num_classes:
        assert "NaN or infinite" in explainer.explain(photo()).error
    else:
        with pytest.raises(NotFiniteError, match="NaN or infinite"):
            explainer.explain(photo())


def test_a_sink_is_replaced_by_the_patches_around_it():
    grid = torch.randn(1, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    grid = grid / grid.norm(dim=1, keepdim=True)
    wanted, none = without_sinks(grid)
    assert not none.any()
    grid[:, :, 1, 2] *= 50
    tokens, sinks = without_sinks(grid)
    assert sinks.nonzero().tolist() == [[0, 1, 2]]
    around = wanted[0, 0:3, 1:4].reshape(9, 8)[[0, 1, 2, 3, 5, 6, 7, 8]].mean(dim=0)
    torch.testing.assert_close(tokens[0, 1, 2], around)
    tokens[0, 1, 2] = wanted[0, 1, 2]
    torch.testing.assert_close(tokens, wanted)


def test_a_part_has_one_color_in_all_images_wherever_it_is():
    layouts = [torch.zeros(8, 8, dtype=torch.long) for _ in range(4)]
    for index, layout in enumerate(layouts):  # two parts that move, on a background that reaches the border
        layout[1 + index : 3 + index, 2:6] = 1
        layout[3 + index : 4 + index, 1 + index : 4 + index] = 2
    grids = scenes(layouts)
    components = fit_components(grids, len(grids))
    colors = np.stack([components.colors(grid) for grid in grids])
    parts = torch.stack(layouts).numpy()
    np.testing.assert_array_equal(np.isnan(colors[..., 0]), parts == 0)
    one, two = (colors[parts == part][:, 0] for part in (1, 2))  # the noise fills the other components
    assert max(np.ptp(one), np.ptp(two)) < 0.1
    assert abs(one.mean() - two.mean()) > 0.9


def test_signs_and_order_do_not_depend_on_the_order_of_the_images():
    layouts = [torch.randint(0, 4, (6, 6), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    grids = scenes(layouts)
    one, two = fit_components(grids, 3), fit_components(grids[::-1], 3)
    np.testing.assert_allclose(one.colors(grids[0]), two.colors(grids[0]), atol=1e-5)


def test_the_threshold_leaves_the_least_variance_within_the_sides():
    values = torch.randn(60, generator=torch.Generator().manual_seed(0)).double() ** 3

    def within(cut):
        sides = values[values <= cut], values[values > cut]
        return sum(float((side - side.mean()).square().sum()) for side in sides if len(side))

    assert within(otsu_threshold(values)) == pytest.approx(min(within(cut) for cut in values))


@pytest.mark.parametrize("size", [(8, 8), (8, 16)])
def test_images_of_few_patches_have_colors_too(size):
    explained = Explainer(random_model(image_size=size), PCA).explain(Image.new("RGB", (40, 40), "gray"))
    assert explained.maps[0].values.shape == (1, size[1] // 8, 3)


def test_components_are_fitted_over_all_images_of_a_stream():
    images = [photo(seed) for seed in range(3)]
    explainer = Explainer(random_model(), PCA)
    together = [explained.maps[0].values for explained in explainer.stream(images)]
    alone = explainer.explain(images[0]).maps[0].values
    assert not np.array_equal(together[0], alone, equal_nan=True)
    explainer.fit_components(images)  # and kept for what follows
    np.testing.assert_array_equal(explainer.explain(images[0]).maps[0].values, together[0])


def test_an_unreadable_image_is_left_out_of_the_fit(tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    explainer = Explainer(random_model(), PCA)
    first, broken = explainer.stream([photo(), tmp_path / "broken.jpg"])
    assert first.maps[0].values.shape == (2, 3, 3)
    assert "broken.jpg" in broken.error
    with pytest.raises(DataError, match="no image can be read, so no components can be fitted"):
        explainer.fit_components([tmp_path / "broken.jpg"])


def test_deletion_curves_need_a_map_that_ranks_patches():
    with pytest.raises(ConfigError, match="deletion curves need an attention map: pca does not rank patches"):
        MapSettings(methods=("pca",), deletion=True)
    settings = MapSettings(methods=("rollout", "pca"), deletion=True)
    assert list(Explainer(random_model(), settings).explain(photo()).curves) == ["rollout", "random"]


def test_patches_without_a_color_are_dark_and_gray():
    model = random_model(image_size=16)
    colors = np.full((2, 2, 3), np.nan, np.float32)
    colors[:, 1] = (1, 0, 0)
    painted = np.asarray(paint(Image.new("RGB", (160, 160), "white"), colors, model.meta.preprocess)).astype(int)
    side = len(painted)
    left, right = painted[side // 2, side // 8], painted[side // 2, side * 7 // 8]
    assert np.ptp(left) == 0
    assert left[0] < 150
    assert right[0] > 240
    assert right[1] < 100
