"""torchvision's builders: a table of calls and errors, and the idioms of programs written for torchvision."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from checkpoints import TOLERANCE, expected, path_of
from PIL import Image
from torch import nn

import vitruvian as vt
from vitruvian import progress
from vitruvian.catalog import PUBLISHED, resolve
from vitruvian.cost import multiply_adds, parameters
from vitruvian.errors import ConversionError
from vitruvian.weights import builders

ENUMS = (vt.ViT_B_16_Weights, vt.ViT_B_32_Weights, vt.ViT_L_16_Weights, vt.ViT_L_32_Weights, vt.ViT_H_14_Weights)
TINY = {"image_size": 32, "patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}


@pytest.fixture
def published(monkeypatch, tmp_path):
    """Tiny stand-ins for the files of torchvision, with 1000 classes at the size of the weights."""
    config = resolve("ViT-B/16").replace(depth=1, width=16, mlp_dim=16, num_heads=2, patch_size=32)
    monkeypatch.setattr(builders, "resolve", lambda name: config)

    def file_of(name):
        size = PUBLISHED[name].image_size // 32 * 32
        path = tmp_path / f"{name}.pth"
        vt.save(
            vt.build(config.replace(image_size=size, numerics=builders.NUMERICS["torchvision"])), path, "torchvision"
        )
        return path

    monkeypatch.setattr(builders, "resolve_source", file_of)
    monkeypatch.setattr(builders, "load", lambda name: vt.load(file_of(name), num_heads=2))


def outcome(call):
    """What a call gives: the kind of its error, or (training mode, image size, classes, has gradients)."""
    try:
        model = call()
    except Exception as error:
        return type(error)
    return model.training, model.image_size, model.num_classes, all(p.requires_grad for p in model.parameters())


CALLS = [
    # arguments of vit_b_16, and what torchvision's gives
    ({}, (True, 224, 1000, True)),
    ({"weights": None}, (True, 224, 1000, True)),
    ({"weights": vt.ViT_B_16_Weights.DEFAULT}, (True, 224, 1000, True)),
    ({"weights": vt.ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1}, (True, 384, 1000, True)),
    ({"weights": "DEFAULT"}, (True, 224, 1000, True)),
    ({"weights": "IMAGENET1K_V1", "progress": False}, (True, 224, 1000, True)),
    ({"weights": "ViT_B_16_Weights.IMAGENET1K_SWAG_LINEAR_V1"}, (True, 224, 1000, True)),
    ({"weights": "DEFAULT", "num_classes": 1000, "image_size": 224}, (True, 224, 1000, True)),
    ({"weights": "DEFAULT", "dropout": 0.1, "attention_dropout": 0.1}, (True, 224, 1000, True)),
    ({"num_classes": 10, "image_size": 64, "dropout": 0.1}, (True, 64, 10, True)),
    ({"representation_size": 8, "norm_layer": partial(nn.LayerNorm, eps=1e-5)}, (True, 224, 1000, True)),
    ({"weights": "IMAGENET1K_V7"}, KeyError),
    ({"weights": "ViT_B_32_Weights.DEFAULT"}, KeyError),
    ({"weights": vt.ViT_B_32_Weights.DEFAULT}, TypeError),
    ({"num_classes": 0}, AssertionError),
    ({"weights": "DEFAULT", "num_classes": 10}, ValueError),
    ({"weights": "DEFAULT", "image_size": 384}, ValueError),
    ({"image_size": 100}, AssertionError),
    ({"hidden_dim": 17}, AssertionError),
    ({"classes": 10}, TypeError),
]


@pytest.mark.parametrize(("arguments", "result"), CALLS, ids=lambda value: str(value)[:60])
def test_calls_give_what_torchvisions_give(published, arguments, result):
    found = outcome(lambda: vt.vit_b_16(**arguments))
    assert found == result or (isinstance(found, type) and issubclass(found, result))


LEGACY = [
    # arguments by position and by keyword, and what torchvision's gives with a warning
    ((vt.ViT_B_16_Weights.DEFAULT,), {}, (True, 224, 1000, True)),
    ((None, False), {"num_classes": 3}, (True, 224, 3, True)),
    ((True,), {"progress": False}, (True, 224, 1000, True)),
    ((), {"pretrained": True}, (True, 224, 1000, True)),
    ((), {"pretrained": False, "num_classes": 7}, (True, 224, 7, True)),
    ((), {"weights": True}, (True, 224, 1000, True)),
    ((), {"weights": False, "num_classes": 7}, (True, 224, 7, True)),
    ((), {"pretrained": True, "num_classes": 10}, ValueError),
    ((vt.ViT_B_32_Weights.DEFAULT,), {}, TypeError),
]


@pytest.mark.parametrize(("args", "kwargs", "result"), LEGACY, ids=str)
def test_calls_that_torchvision_accepts_with_a_warning(published, args, kwargs, result):
    with pytest.warns(UserWarning, match="by keyword|pretrained is deprecated; pass weights="):
        assert outcome(lambda: vt.vit_b_16(*args, **kwargs)) in (result, builders.ConfigError)


def test_calls_that_torchvision_refuses_are_refused(published):
    with pytest.raises(TypeError, match="takes 0 positional arguments but 3"):
        vt.vit_b_16(None, True, 10)
    with pytest.raises(ValueError, match="vit_h_14 has no weights for pretrained=True; pass weights"):
        vt.vit_h_14(pretrained=True)


def test_errors_say_what_to_change(published):
    with pytest.raises(ValueError, match="the weights need num_classes=1000; without weights it can be chosen"):
        vt.vit_b_16(weights="DEFAULT", num_classes=10)
    with pytest.raises(TypeError, match="weights must be a ViT_L_32_Weights, not a ViT_B_32_Weights"):
        vt.vit_l_32(weights=vt.ViT_B_32_Weights.DEFAULT)
    with pytest.raises(TypeError, match=r"vit_b_16\(\) got an unexpected keyword argument 'classes'"):
        vt.vit_b_16(classes=10)
    with pytest.raises(AssertionError, match="the images have 64x64 pixels, the model takes 32x32"):
        vt.vit_b_16(**TINY)(torch.zeros(1, 3, 64, 64))
    with pytest.raises(ValueError, match="conv_stem_configs is not supported"):
        vt.vit_b_16(conv_stem_configs=[])


def test_counts_are_those_that_torchvision_publishes():
    counts = [(w.meta["num_params"], w.meta["_ops"]) for enum in ENUMS for w in enum]
    assert counts == [
        (86_567_656, 17.564), (86_859_496, 55.484), (86_567_656, 17.564), (88_224_232, 4.409), (304_326_632, 61.555),
        (305_174_504, 361.986), (304_326_632, 61.555), (306_535_400, 15.378), (633_470_440, 1016.717),
        (632_045_800, 167.295),
    ]  # fmt: skip


@pytest.mark.parametrize("enum", ENUMS)
def test_the_facts_about_weights_are_torchvisions(enum):
    variant = enum.__name__.removesuffix("_Weights").replace("_", "-", 1).replace("_", "/")
    for weights in enum:
        row, config = PUBLISHED[weights.published_name], resolve(variant).replace(image_size=weights.meta["min_size"])
        assert (weights.url, str(weights), repr(weights)) == (
            row.location,
            weights.published_name,
            weights.published_name,
        )
        assert weights.meta["num_params"] == parameters(config)
        assert weights.meta["_ops"] == round(multiply_adds(config) / 1e9, 3)
        assert (weights.meta["categories"][0], weights.meta["categories"][134]) == ("tench", "crane bird")
        assert len(weights.meta["categories"]) == 1000
        assert pickle.loads(pickle.dumps(weights)) is copy.deepcopy(weights) is weights
        transform = weights.transforms()
        size = weights.meta["min_size"][0]
        assert transform.crop_size == [size]
        swag = "SWAG" in weights.name
        assert transform.interpolation == ("bicubic" if swag else "bilinear")
        assert transform.resize_size == [size if swag else 242 if enum is vt.ViT_L_16_Weights else 256]
    names = {"H": ["IMAGENET1K_SWAG_E2E_V1", "IMAGENET1K_SWAG_LINEAR_V1"]}.get(variant[4], ["IMAGENET1K_V1"])
    assert enum.DEFAULT is enum[names[0]]


@pytest.mark.parametrize("member", ["IMAGENET1K_SWAG_LINEAR_V1", "IMAGENET1K_V1"])
def test_a_transform_is_that_of_the_loaded_weights_for_images_and_tensors(published, member):
    weights = vt.ViT_B_16_Weights[member]
    waves = np.sin(np.arange(400) / 9) + np.cos(np.arange(300) / 7)[:, None] + np.arange(3)[:, None, None]
    levels = np.ascontiguousarray((60 + 25 * waves).transpose(1, 2, 0).astype(np.uint8))
    transform, image = weights.transforms(), Image.fromarray(levels)
    pixels = transform(image)
    torch.testing.assert_close(pixels, vt.transform(vt.vit_b_16(weights=weights))(image), rtol=0, atol=0)
    tensor = torch.from_numpy(levels).permute(2, 0, 1)
    batch = transform(torch.stack([tensor, tensor]))
    assert batch.shape == (2, 3, 224, 224)
    step = 1 / 255 / 0.224  # rounding of intermediate values to 8 bits, in Pillow and in PyTorch
    torch.testing.assert_close(batch[0], pixels, rtol=0, atol=2.5 * step)
    torch.testing.assert_close(transform(tensor.float() / 255), batch[1], rtol=0, atol=2.5 * step)


@pytest.mark.parametrize("name", ["torchvision_vit", "torchvision_vit_hidden"])
def test_a_state_dict_of_torchvision_gives_its_outputs(name):
    tensors = torch.load(path_of(name), weights_only=True)
    pixels, answer = next((p, a) for p, a in expected(name) if p.shape[-2] == p.shape[-1])
    shape = {
        "hidden_dim": tensors["class_token"].shape[-1],
        "mlp_dim": len(tensors["encoder.layers.encoder_layer_0.mlp.0.bias"]),
    }
    hidden = tensors["heads.pre_logits.bias"].shape[0] if "heads.pre_logits.bias" in tensors else None
    model = vt.vit_b_16(
        patch_size=tensors["conv_proj.weight"].shape[-1], num_layers=2, num_heads=4, representation_size=hidden,
        num_classes=len(tensors["heads.head.bias"]), image_size=pixels.shape[-1], **shape,
    )  # fmt: skip
    model.load_state_dict(tensors)
    model.eval()
    with torch.no_grad():
        assert float((model(pixels) - answer).abs().max()) < TOLERANCE
        tokens = torch.cat([model.class_token.expand(len(pixels), -1, -1), model._process_input(pixels)], dim=1)
        torch.testing.assert_close(model.heads(model.encoder(tokens)[:, 0]), model(pixels))
    torch.testing.assert_close(model.encoder.pos_embedding, tensors["encoder.pos_embedding"])
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "encoder.other"'):
        model.load_state_dict(tensors | {"encoder.other": torch.zeros(1)})


def test_programs_replace_the_head_freeze_the_rest_and_reload():
    model = vt.vit_b_16(**TINY, num_classes=5)
    assert [name for name, _ in model.named_parameters() if "heads" in name] == ["heads.head.weight", "heads.head.bias"]
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("heads")
    model.heads.head = nn.Linear(model.heads.head.in_features, 3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = model(torch.randn(4, 3, 32, 32)).logsumexp(dim=1).mean()
    loss.backward()
    optimizer.step()
    assert model.conv_proj.weight.grad is None
    again = vt.vit_b_16(**TINY, num_classes=3)
    again.load_state_dict(model.state_dict())
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(again.eval()(pixels), model.eval()(pixels))
    torch.testing.assert_close(copy.deepcopy(model)(pixels), model(pixels))
    model.heads = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    assert model(pixels).shape == (2, 2)
    model.heads = nn.Identity()
    assert model(pixels).shape == (2, 16)
    assert (model.hidden_dim, model.patch_size, model.seq_length, model.representation_size) == (16, 16, 5, None)


def test_programs_replace_other_parts_and_reach_layers_by_name():
    model, gray = vt.vit_b_16(**TINY, num_classes=5), torch.randn(2, 1, 32, 32)
    nn.init.normal_(model.heads.head.weight)
    model.conv_proj = nn.Conv2d(1, 16, kernel_size=16, stride=16)
    before = model.eval()(gray)
    nn.init.zeros_(model.conv_proj.weight)
    assert not torch.allclose(model(gray), before)
    model.class_token = nn.Parameter(torch.full((1, 1, 16), 9.0))
    assert torch.equal(model.embed.cls_token, torch.full((1, 1, 16), 9.0))
    with pytest.raises(ValueError, match=r"conv_proj must be a Conv2d with kernel and stride \(16, 16\)"):
        model.conv_proj = nn.Conv2d(1, 16, kernel_size=8, stride=8)
    with pytest.raises(ValueError, match="encoder cannot be replaced"):
        model.encoder = nn.Identity()
    with pytest.raises(ValueError, match=r"hook model\.encoder\.ln, its last layer"):
        model.encoder.register_forward_hook(print)
    for parameter in model.encoder.parameters():
        parameter.requires_grad = False
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["embed.cls_token", "embed.patch.weight", "embed.patch.bias", *trained[-2:]]
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        seen = []
        twin.encoder.layers[-1].ln_1.register_forward_hook(lambda *_, seen=seen: seen.append("ln_1"))
        twin.encoder.layers.encoder_layer_1.register_forward_hook(lambda *_, seen=seen: seen.append("layer"))
        twin.heads.register_forward_hook(lambda *_, seen=seen: seen.append("heads"))
        torch.testing.assert_close(twin(gray), model(gray))
        assert seen[:3] == ["ln_1", "layer", "heads"]


def test_a_head_that_does_not_fit_the_config_is_not_written(tmp_path):
    for model in (vt.vit_b_16(**TINY), vt.create_model("ViT-B/16", depth=1, width=16, mlp_dim=8, num_heads=2)):
        model.head = nn.Linear(16, 3)
        with pytest.raises(ConversionError, match=r"the head has 3 outputs, model\.config has num_classes=1000"):
            vt.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_transform_is_a_module_with_a_readable_repr():
    transform = vt.ViT_L_16_Weights.DEFAULT.transforms()
    pixels = nn.Sequential(transform)(torch.zeros(3, 300, 260, dtype=torch.uint8))
    assert pixels.shape == (3, 224, 224)
    assert repr(transform).splitlines()[:2] == ["ImageClassification(", "    crop_size=[224]"]


def test_random_weights_follow_the_seed_of_torch_and_numerics_are_torchvisions():
    torch.manual_seed(0)
    first = vt.vit_b_16(**TINY)
    second = vt.vit_b_16(**TINY)
    torch.manual_seed(0)
    third = vt.vit_b_16(**TINY)
    assert torch.equal(first.conv_proj.weight, third.conv_proj.weight)
    assert not torch.equal(first.conv_proj.weight, second.conv_proj.weight)
    assert (first.config.numerics.gelu, first.config.numerics.norm_eps) == ("erf", 1e-6)
    assert first.encoder.layers[0].norm1.eps == 1e-6


def test_a_model_of_a_builder_works_with_everything_else(tmp_path, published):
    model = vt.vit_b_16(weights="DEFAULT")
    assert vt.vit_b_16(weights="DEFAULT").meta.preprocess == vt.ViT_B_16_Weights.DEFAULT.transforms().preprocess
    vt.save(model, tmp_path / "saved")
    pixels = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(vt.load(tmp_path / "saved")(pixels), model.eval()(pixels))
    assert set(vt.ViT_B_16_Weights.DEFAULT.get_state_dict(progress=True)) > {"conv_proj.weight", "heads.head.weight"}


def test_files_of_swag_with_a_linear_classifier_have_their_own_transform(tmp_path):
    """Resized to 224 without a crop, bicubic, unlike other files of torchvision at 224 pixels."""
    path = tmp_path / "vit_b_16_lc_swag-4e70ced5.pth"
    vt.save(vt.create_model("ViT-B/16", depth=1, width=192, mlp_dim=64, num_heads=3), path, "torchvision")
    assert (
        vt.load(path, family="torchvision").meta.preprocess
        == builders.ImageClassification(crop_size=224, resize_size=224, interpolation="bicubic").preprocess
    )


def test_progress_is_shown_unless_turned_off(published, monkeypatch):
    hidden, load = [], builders.load
    monkeypatch.setattr(builders, "load", lambda name: hidden.append(progress._hidden) or load(name))
    vt.vit_b_16(weights="DEFAULT")
    vt.vit_b_16(weights="DEFAULT", progress=False)
    assert hidden == [False, True]
    assert not progress._hidden
