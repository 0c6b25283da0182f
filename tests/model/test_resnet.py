"""Laws of the standardized-convolution ResNets."""

import pytest
import torch
import torch.nn.functional as F

from vitruvian.config import ResNetConfig, StemConfig
from vitruvian.model.build import build
from vitruvian.model.resnet import StdConv, Stem, pad_same


@pytest.mark.parametrize("style", ["hybrid", "timm", "bit", "timm_bit"])
def test_standardized_kernels_have_mean_zero_and_deviation_one(style):
    conv = StdConv(4, 6, 3, style=style)
    kernel = conv.standardized().flatten(1)
    torch.testing.assert_close(kernel.mean(1), torch.zeros(6), atol=1e-6, rtol=0)
    torch.testing.assert_close(kernel.std(1, unbiased=False), torch.ones(6), atol=1e-3, rtol=0)


def test_same_padding_puts_the_odd_pixel_at_the_bottom_right():
    ones = torch.ones(1, 1, 4, 4)
    padded = pad_same(ones, kernel=3, stride=2)
    assert padded.shape[-2:] == (5, 5)
    assert padded[0, 0, 0, 0] == 1
    assert padded[0, 0, -1, -1] == 0
    assert pad_same(torch.ones(1, 1, 7, 7), kernel=3, stride=2).shape[-2:] == (9, 9)


def test_a_stem_steps_as_its_settings_say():
    for stages in [(), (1,), (1, 2), (1, 1, 1)]:
        config = StemConfig(stages=stages, width=32)
        features = Stem(config, 3)(torch.randn(1, 3, 64, 64))
        assert features.shape == (1, config.out_channels, 64 // config.stride, 64 // config.stride)


def test_a_new_resnet_answers_zero_and_learns():
    model = build(ResNetConfig(stages=(1, 1), width=32, num_classes=3, image_size=32))
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert (model(images) == 0).all()
    labels = torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = F.cross_entropy(model(images), labels)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert F.cross_entropy(model(images), labels) < first / 2
