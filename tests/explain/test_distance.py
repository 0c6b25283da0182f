"""Mean attention distance: closed forms, and what is left out."""

import math

import pytest
import torch
from reference import forward, random_model, random_pixels

from vitruvian.errors import DataError
from vitruvian.explain import attention_distance
from vitruvian.explain.figures import distances, patch_distances


def test_attention_to_oneself_has_no_distance():
    assert distances(torch.eye(12).expand(1, 2, 12, 12), (3, 4), 16).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("n", [1, 2, 7, 14])
def test_uniform_attention_along_a_line_has_the_closed_form(n):
    uniform = torch.full((1, 1, n, n), 1 / n)
    wanted = 16 * (n * n - 1) / (3 * n)  # the mean of |i - j| over all pairs of n places, 16 pixels apart
    for grid in ((1, n), (n, 1)):
        assert distances(uniform, grid, 16).item() == pytest.approx(wanted, rel=1e-6)


def test_uniform_attention_over_a_grid_is_the_mean_distance_of_all_pairs():
    places = [(row, column) for row in range(3) for column in range(5)]
    pairs = [math.hypot(a - c, b - d) for a, b in places for c, d in places]
    found = distances(torch.full((2, 3, 15, 15), 1 / 15), (3, 5), 8)
    torch.testing.assert_close(found, torch.full((2, 3), 8 * sum(pairs) / len(pairs)))


def test_attention_to_the_opposite_corner_is_the_diagonal():
    weights = torch.eye(4).flip(0).expand(1, 1, 4, 4)
    assert distances(weights, (2, 2), 10).item() == pytest.approx(10 * math.sqrt(2))


def test_tokens_before_the_patches_do_not_count():
    inner = torch.rand(1, 2, 6, 6, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    whole = torch.zeros(1, 2, 8, 8)
    whole[:, :, 2:, 2:] = 0.3 * inner
    whole[:, :, :, 0] += 0.7
    torch.testing.assert_close(distances(whole, (2, 3), 4), distances(inner, (2, 3), 4))


def test_a_models_distances_are_means_over_all_images_however_they_are_batched():
    model = random_model(distillation=True)
    pixels = random_pixels(model, batch_size=3)
    found = attention_distance(model, [pixels[:2], pixels[2:]])
    apart = 8 * patch_distances((2, 3)).double()
    sums = torch.zeros(3, 2, dtype=torch.float64)
    for image in pixels:
        for layer, attention in enumerate(forward(model, image)[0]):
            among = attention[:, 2:, 2:].detach()
            sums[layer] += ((among * apart).sum(-1) / among.sum(-1)).mean(-1)
    torch.testing.assert_close(found, sums / 3, atol=1e-4, rtol=0)  # pixels, of float32 attention


def test_no_images_are_an_error():
    with pytest.raises(DataError, match="no images to measure the attention distance on"):
        attention_distance(random_model(), [])
