"""Adapters in peft's format: exchanged with peft both ways, and what cannot be one is refused in one line."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitruvian as vt
from vitruvian.config import LoraConfig, Preprocess, ViTConfig
from vitruvian.errors import VitruvianError
from vitruvian.model.build import build
from vitruvian.model.lora import add_lora, lora_layers
from vitruvian.weights.adapter import ADAPTER_FILE, ADAPTER_WEIGHTS, save_adapter
from vitruvian.weights.load import load, with_adapter
from vitruvian.weights.save import save

KINDS = [{}, {"targets": ("all",)}, {"dora": True}, {"targets": ("all",), "dora": True}]
TINY = ViTConfig(image_size=(16, 16), patch_size=8, depth=2, width=16, mlp_dim=32, num_heads=2, num_classes=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of transformers that both libraries can read."""
    model = build(TINY, seed=3)
    for parameter in (model.head.weight, model.embed.cls_token, model.embed.pos_embed):  # not zero, as if trained
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("base") / "vit"
    save(model, folder, family="huggingface")
    return folder


def pixels():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def disturb(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def trained(base, **kind):
    """The base as after training with LoRA."""
    model = load(base)
    add_lora(model, LoraConfig(rank=4, **kind))
    disturb(model)
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_the_same_logits_with_our_adapter(base, tmp_path, kind):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = trained(base, **kind)
    save_adapter(model, tmp_path / "adapter", base=str(base))
    theirs = transformers.ViTForImageClassification.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        logits = theirs(pixels()).logits
        exact = theirs.double()(pixels().double()).logits
    assert (logits - model(pixels())).abs().max() < 1e-5  # float32 in another order
    assert (logits - load(base)(pixels())).abs().max() > 0.1
    assert (exact - model.double()(pixels().double())).abs().max() < 1e-12  # float64: the same formula


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
        {"target_modules": r".*(_proj|mlp\.fc\d)", "use_rslora": True, "alpha_pattern": {"mlp.fc1": 3}},
        {"target_modules": ["k_proj", "mlp.fc2"], "rank_pattern": {"mlp.fc2": 2}, "use_dora": True},
    ],
)
def test_we_compute_the_same_logits_with_an_adapter_of_peft(base, tmp_path, settings):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    theirs = transformers.ViTForImageClassification.from_pretrained(base)
    config = peft.LoraConfig(r=4, lora_alpha=8, modules_to_save=["classifier"], **settings)
    theirs = peft.get_peft_model(theirs, config)
    disturb(theirs)
    theirs.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        logits = theirs(pixels()).logits
    for merge in (True, False):
        model = with_adapter(load(base), tmp_path / "adapter", merge=merge)
        assert (logits - model(pixels())).abs().max() < 1e-5
        assert bool(list(lora_layers(model))) != merge


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_transformers_does_not_have_is_exchanged_with_peft_under_our_names(tmp_path, kind):
    peft = pytest.importorskip("peft")
    config = TINY.replace(pos_embed="none", pool="mean", cls_token=False, layer_scale=True)
    save(build(config, seed=3), tmp_path / "base")
    model = trained(tmp_path / "base", **kind)
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    assert "blocks.0.attn.qkv" in json.loads((tmp_path / "adapter" / ADAPTER_FILE).read_text())["target_modules"]
    assert (load(tmp_path / "adapter")(pixels()) - model(pixels())).abs().max() < 1e-5
    theirs = peft.PeftModel.from_pretrained(load(tmp_path / "base"), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        assert (theirs(pixels()) - model(pixels())).abs().max() < 1e-5


def test_an_adapter_brings_its_head_labels_and_image_size(base, tmp_path):
    model = load(base, num_classes=5, image_size=32)
    preprocess = Preprocess(image_size=(32, 32))
    model.meta = model.meta.replace(labels=tuple("abcde"), preprocess=preprocess)
    add_lora(model, LoraConfig(rank=2))
    disturb(model)
    save_adapter(model, tmp_path / "adapter", base=str(base))
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for loaded in (load(tmp_path / "adapter"), load(base, adapter=tmp_path / "adapter")):
        assert loaded.meta.labels == tuple("abcde")
        assert loaded.meta.preprocess == preprocess
        assert torch.allclose(loaded(x), model.eval()(x), atol=1e-5)
    assert vt.Classifier(base, adapter=tmp_path / "adapter").labels == tuple("abcde")
    assert load(base, adapter=tmp_path / "adapter", image_size=24).config.image_size == (24, 24)


def test_several_adapters_share_the_weights_of_one_model(base, tmp_path):
    model = load(base)
    save_adapter(trained(base), tmp_path / "one", base=str(base))
    save_adapter(trained(base, dora=True), tmp_path / "two", base=str(base))
    before = model(pixels())
    one, two = (with_adapter(model, tmp_path / name, merge=False) for name in ("one", "two"))
    for name, parameter in model.named_parameters():
        if not name.startswith("head."):
            assert {parameter.data_ptr()} == {x.get_parameter(name).data_ptr() for x in (one, two)}
    assert not torch.allclose(one(pixels()), two(pixels()))
    assert torch.equal(model(pixels()), before)


def test_a_model_with_lora_layers_is_saved_and_copied_merged(base, tmp_path):
    model = trained(base)
    save(model, tmp_path / "merged")
    assert torch.allclose(load(tmp_path / "merged")(pixels()), model(pixels()), atol=1e-5)
    assert torch.allclose(vt.with_merging(model, 0)(pixels()), model(pixels()), atol=1e-5)


def write(folder, config=None, **tensors):
    folder.mkdir()
    (folder / ADAPTER_FILE).write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8, **(config or {})}))
    save_file(
        {f"base_model.model.{name.replace('__', '.')}": x for name, x in tensors.items()}, folder / ADAPTER_WEIGHTS
    )
    return folder


A, B = torch.ones(2, 16), torch.ones(16, 2)
Q = "vit__layers__0__attention__q_proj__lora_"


@pytest.mark.parametrize(
    ("config", "tensors", "text"),
    [
        ({"peft_type": "IA3"}, {Q + "A__weight": A}, "peft_type is 'IA3', only LORA can be read"),
        (
            {},
            {Q + "A__weight": A},
            "the matrices of 'vit.layers.0.attention.q_proj' are missing or do not fit together",
        ),
        ({"lora_alpha": "x"}, {Q + "A__weight": A, Q + "B__weight": B}, "lora_alpha is 'x', not a number"),
        ({}, {"classifier__weight": A}, "contains no updates"),
        ({}, {"vit__layernorm__bias": A}, "'base_model.model.vit.layernorm.bias' is neither LoRA's nor the head's"),
        ({}, {"conv__lora_A": A, "conv__lora_B": B}, "'conv' is not a dense layer of a Vision Transformer's block"),
        ({}, {Q + "A__weight": A[:, :8].contiguous(), Q + "B__weight": B}, "'q' in block 0 does not fit the model"),
        (
            {},
            {Q + "A": A, Q + "B": B, "classifier__weight": A[:, :7].contiguous()},
            "head or architecture does not fit",
        ),
    ],
)
def test_what_is_not_an_adapter_of_the_model_is_refused_in_one_line(base, tmp_path, config, tensors, text):
    with pytest.raises(VitruvianError, match=re.escape(text)) as error:
        load(base, adapter=write(tmp_path / "adapter", config, **tensors))
    assert "\n" not in str(error.value)


def test_a_missing_folder_a_wrong_base_and_a_nameless_base_are_refused(base, tmp_path):
    with pytest.raises(VitruvianError, match="nowhere: no such folder"):
        load(base, adapter=tmp_path / "nowhere")
    with pytest.raises(VitruvianError, match=r"not an adapter: it has no adapter_config.json"):
        load(base, adapter=base)
    with pytest.raises(VitruvianError, match="does not name its base"):
        load(write(tmp_path / "nameless", **{Q + "A": A, Q + "B": B}))
    save_adapter(trained(base), tmp_path / "adapter", base="the right one")
    save(build(TINY, seed=4), tmp_path / "other")
    text = r"trained on other weights: 'blocks.0.attn.qkv' differs; load it on the right one"
    with pytest.raises(VitruvianError, match=text):
        load(tmp_path / "other", adapter=tmp_path / "adapter")
    save(load(base), tmp_path / "half", half=True)
    load(tmp_path / "half", adapter=tmp_path / "adapter")  # the same weights in 16 bits
    with pytest.raises(VitruvianError, match="num_classes, patch_size, head and labels cannot be combined"):
        load(base, adapter=tmp_path / "adapter", num_classes=7)
    with pytest.raises(VitruvianError, match="this model has no LoRA layers"):
        save_adapter(load(base), tmp_path / "none")


def test_an_adapter_is_small(base, tmp_path):
    save_adapter(trained(base), tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    assert sum(tensor.numel() for tensor in tensors.values()) == 2 * 2 * (4 * 16 * 2) + 3 * 17
