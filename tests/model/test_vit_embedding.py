"""Positions and patch kernels follow another grid as each family of weights does it."""

import numpy as np
import pytest
import scipy.ndimage
import torch
import torch.nn.functional as F

from vitruvian.config import RopeConfig, ViTConfig
from vitruvian.model.positions import Rotary, interpolate_positions, sincos_positions
from vitruvian.model.vit import resize_patch_kernel


def random_positions(rows, columns, width=6):
    return torch.randn(rows, columns, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("grid", [(7, 7), (3, 9), (14, 5), (2, 2)])
def test_google_resize_is_scipys_zoom(grid):
    old = random_positions(4, 4)
    zoom = (grid[0] / 4, grid[1] / 4, 1)
    expected = scipy.ndimage.zoom(old.numpy().astype(np.float64), zoom, order=1)
    torch.testing.assert_close(
        interpolate_positions(old, grid, "zoom").double().numpy(), expected, atol=1e-6, rtol=1e-5
    )


INTERPOLATE = {
    "zoom": {"mode": "bilinear", "align_corners": True},
    "bicubic": {"mode": "bicubic"},
    "bicubic_antialias": {"mode": "bicubic", "antialias": True},
    "bilinear_antialias": {"mode": "bilinear", "antialias": True},
    "bicubic_aligned": {"mode": "bicubic", "align_corners": True},
    "dino": {"mode": "bicubic"},
}


@pytest.mark.parametrize("method", INTERPOLATE)
@pytest.mark.parametrize("grid", [(7, 7), (3, 9), (4, 5), (1, 2)])
def test_every_way_gives_what_torch_interpolates(method, grid):
    old = random_positions(4, 5)
    image = old.permute(2, 0, 1)[None].double()
    to = {"scale_factor": ((grid[0] + 0.1) / 4, (grid[1] + 0.1) / 5)} if method == "dino" else {"size": grid}
    expected = F.interpolate(image, **to, **INTERPOLATE[method])[0].permute(1, 2, 0)
    expected = old.double() if grid == (4, 5) else expected
    torch.testing.assert_close(interpolate_positions(old, grid, method).double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [3, 6, 7])
def test_a_grid_of_one_column_has_the_antialiased_positions_of_the_formula(rows):
    """torch's own on a CPU are others, but not for the grid turned by 90 degrees."""
    old = random_positions(4, 5).double()
    found = interpolate_positions(old.float(), (rows, 1), "bilinear_antialias").double()

    def triangle(length, new):  # weights of all old places in each new one, wider where there are fewer
        scale = length / new
        centers = (torch.arange(new, dtype=torch.float64) + 0.5) * scale
        places = centers[:, None] - torch.arange(length) - 0.5
        weights = (1 - places.abs() / max(scale, 1.0)).clamp(min=0)
        return weights / weights.sum(dim=1, keepdim=True)

    formula = torch.einsum("rR,cC,RCd->rcd", triangle(4, rows), triangle(5, 1), old)
    turned = F.interpolate(old.permute(2, 1, 0)[None], (1, rows), mode="bilinear", antialias=True)[0].permute(2, 1, 0)
    torch.testing.assert_close(found, formula, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(turned, formula, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("method", ["zoom", "bicubic", "bicubic_antialias", "bicubic_aligned", "dino"])
@pytest.mark.parametrize("grid", [(7, 7), (3, 9), (14, 5)])
def test_constant_positions_stay_constant(method, grid):
    resized = interpolate_positions(torch.full((4, 4, 2), 0.5), grid, method)
    torch.testing.assert_close(resized, torch.full((*grid, 2), 0.5))


@pytest.mark.parametrize("method", ["zoom", "bicubic", "bicubic_antialias", "bicubic_aligned", "dino"])
def test_the_same_grid_is_left_alone(method):
    old = random_positions(3, 5)
    assert interpolate_positions(old, (3, 5), method) is old


def test_families_resize_differently():
    old = random_positions(4, 4)
    methods = ["zoom", "bicubic", "bicubic_antialias", "bicubic_aligned", "dino"]
    resized = [interpolate_positions(old, (3, 3), method) for method in methods]
    for i, one in enumerate(resized):
        for other in resized[i + 1 :]:
            assert (one - other).abs().max() > 1e-3


def test_sincos_positions_are_the_formula():
    positions = sincos_positions((3, 5), 16)
    omega = [10000 ** (-k / 3) for k in range(4)]
    for y in range(3):
        for x in range(5):
            parts = [np.sin(x * np.array(omega)), np.cos(x * np.array(omega))]
            parts += [np.sin(y * np.array(omega)), np.cos(y * np.array(omega))]
            np.testing.assert_allclose(positions[y, x].numpy(), np.concatenate(parts), atol=1e-6)


@pytest.mark.parametrize("method", ["zoom", "bicubic_antialias", "bicubic_aligned"])
def test_an_enlarged_patch_kernel_answers_an_enlarged_patch_alike(method):
    generator = torch.Generator().manual_seed(0)
    kernel = torch.randn(5, 3, 8, 8, generator=generator)
    image = torch.randn(1, 3, 8, 8, generator=generator)
    mode, aligned = ("bilinear", True) if method == "zoom" else ("bicubic", method == "bicubic_aligned")
    smooth = method == "bicubic_antialias"
    enlarged = F.interpolate(image, (16, 16), mode=mode, align_corners=aligned, antialias=smooth)
    old = F.conv2d(image, kernel)
    new = F.conv2d(enlarged, resize_patch_kernel(kernel, 16, method))
    torch.testing.assert_close(new, old, atol=1e-4, rtol=1e-4)  # pseudo-inverse of a 64 x 256 matrix


@pytest.mark.parametrize("kind", ["axial", "normalized", "mixed"])
def test_rotations_are_computed_in_float32_in_lower_precision(kind):
    config = ViTConfig(image_size=(320, 480), width=32, num_heads=2, rope=RopeConfig(kind=kind, half=kind != "axial"))
    rotary = Rotary(config)
    for frequencies in rotary.parameters():
        torch.nn.init.uniform_(frequencies, -3, 3, generator=torch.Generator().manual_seed(0))
    rotary.bfloat16()
    q = torch.randn(2, 2, 1 + 20 * 30, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        rotated, _ = rotary.rotate(q, q, (20, 30))
    exact, _ = rotary.float().rotate(q.float(), q.float(), (20, 30))
    assert torch.equal(rotated, exact.bfloat16())
