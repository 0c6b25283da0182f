"""The plain convolutional stem: BatchNorm as PyTorch has it, whitening, and a model that is saved and read again."""

import pytest
import torch
from torch import nn

import vitruvian as vt
from vitruvian.config import StemConfig, ViTConfig
from vitruvian.cost import parameters
from vitruvian.errors import ConfigError, ConversionError
from vitruvian.explain.figures import filter_components
from vitruvian.model.build import build
from vitruvian.model.resnet import BatchNorm, whitening_kernels
from vitruvian.weights.families.family import Facts
from vitruvian.weights.parse import infer_stem
from vitruvian.weights.save import convert

STEM = StemConfig(style="conv", stages=(2, 1, 1), width=8)
CONFIG = ViTConfig(image_size=32, patch_size=1, num_classes=3, depth=1, width=16, mlp_dim=16, num_heads=2, stem=STEM)


@pytest.fixture
def model():
    made = build(CONFIG)
    torch.manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    made.train()(torch.randn(8, 3, 32, 32))
    return made.eval()


def test_running_statistics_are_those_of_pytorch():
    torch.manual_seed(0)
    own, reference = BatchNorm(4), nn.BatchNorm2d(4)
    (
        nn.init.ones_(own.weight),
        nn.init.zeros_(own.bias),
        nn.init.zeros_(own.running_mean),
        nn.init.ones_(own.running_var),
    )
    for _ in range(3):
        x = 2 * torch.randn(5, 4, 6, 6) + 1
        assert torch.equal(own(x), reference(x))
    assert torch.equal(own.eval()(x), reference.eval()(x))
    assert torch.equal(own.running_var, reference.running_var)


def test_whitened_patches_are_uncorrelated_with_unit_variance():
    torch.manual_seed(0)
    patches = torch.randn(4000, 9, dtype=torch.float64) @ torch.randn(9, 9, dtype=torch.float64)
    kernels = whitening_kernels(patches.T @ patches / len(patches), 4, epsilon=0.0)
    assert torch.equal(kernels[:4], -kernels[4:])
    answers = patches @ kernels[:4].T
    torch.testing.assert_close(answers.T @ answers / len(patches), torch.eye(4, dtype=torch.float64))


def test_the_stem_gives_one_token_for_eight_pixels_and_its_filters_can_be_drawn(model):
    assert CONFIG.grid == (4, 4)
    assert model.embed.patches(torch.zeros(1, 3, 32, 64)).shape == (1, 32, 16)
    components, shares = filter_components(model, 5)
    assert components.shape == (5, 3, 3, 3)
    assert shares.sum() <= 1.0001


def test_running_statistics_are_saved_and_read_again(model, tmp_path):
    vt.save(model, tmp_path / "model")
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(vt.load(tmp_path / "model")(pixels), model(pixels))
    assert convert(tmp_path / "model", tmp_path / "again", to="native").largest_difference == 0.0


def test_half_precision_halves_the_file_and_keeps_the_answers(model, tmp_path):
    vt.save(model, tmp_path / "model")
    certificate = convert(tmp_path / "model", tmp_path / "half", to="native", half=True)
    assert 0 < certificate.largest_difference < 2e-2 * max(1.0, certificate.largest_output)
    assert certificate.notes == ("matrices were rounded to float16",)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("model", "half")]
    assert sizes[1] < 0.65 * sizes[0]  # headers and vectors stay
    again = vt.load(tmp_path / "half")
    assert {tensor.dtype for tensor in again.state_dict().values()} == {torch.float32}


def test_half_precision_refuses_what_float16_cannot_hold(model, tmp_path):
    with torch.no_grad():
        model.head.weight[0, 0] = 1e5
    with pytest.raises(ConversionError, match=r"'head.weight' has values beyond float16's 65,504"):
        vt.save(model, tmp_path / "model", half=True)


def test_flipped_answers_are_the_mean_of_an_image_and_its_mirror_image(model):
    pixels = torch.randn(2, 3, 32, 32)
    plain = vt.Classifier(model)
    wanted = (plain.logits(pixels) + plain.logits(pixels.flip(-1))) / 2
    torch.testing.assert_close(vt.Classifier(model, flip=True).logits(pixels), wanted)


def test_no_other_family_has_such_a_stem(model, tmp_path):
    with pytest.raises(ConversionError, match="timm has no stem with BatchNorm"):
        vt.save(model, tmp_path / "model.safetensors", family="timm")


def test_stages_of_any_widths_are_built_counted_and_inferred_from_their_tensors(tmp_path):
    stem = STEM.replace(widths=(8, 24, 16))
    made = build(CONFIG.replace(stem=stem))
    assert [stage[0].conv.out_channels for stage in made.embed.stem.stages] == [8, 24, 16]
    assert parameters(made.config) == sum(parameter.numel() for parameter in made.parameters())
    assert infer_stem(made.state_dict(), Facts(numerics=CONFIG.numerics)) == stem
    assert infer_stem(build(CONFIG).state_dict(), Facts(numerics=CONFIG.numerics)) == STEM


@pytest.mark.parametrize("wrong", [{"widths": (8, 16)}, {"style": "timm", "width": 32, "widths": (8, 8, 8)}])
def test_widths_are_one_for_each_stage_of_plain_convolutions(wrong):
    with pytest.raises(ConfigError, match=r"need style='conv' and one width for each of stages=\(2, 1, 1\)"):
        STEM.replace(**wrong)


def test_a_plain_stem_needs_a_stage():
    with pytest.raises(ConfigError, match="needs at least one stage"):
        StemConfig(style="conv", stages=())
