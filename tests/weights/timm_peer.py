"""Compares the interface of our models with timm's on the same random weights; prints one line per difference.

A process of its own: timm imports torchvision, in whose place an empty module is put.
"""

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import vitruvian as vt
from peers import make_torchvision_importable

make_torchvision_importable()
import timm  # noqa: E402

COMPARED = 0


def compare(what, ours, theirs, tolerance=2e-5):  # float32 sums in another order
    global COMPARED
    COMPARED += 1
    if isinstance(ours, torch.Tensor):
        if ours.shape != theirs.shape or (ours - theirs).abs().max() > tolerance * theirs.abs().max():
            print(f"{what}: {tuple(ours.shape)} and {tuple(theirs.shape)} differ")
    elif isinstance(ours, list | tuple):
        compare(f"{what}: count", len(ours), len(theirs))
        for index, pair in enumerate(zip(ours, theirs)):
            compare(f"{what}[{index}]", *pair, tolerance)
    elif ours != theirs:
        print(f"{what}: {ours!r}, in timm {theirs!r}")


def pair(name, **arguments):
    """Our model, made by `create_model` with these arguments, and timm's with the same weights."""
    ours = vt.create_model(name, num_classes=5, **arguments).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape))
    theirs = timm.create_model(name, num_classes=5, **arguments).eval()
    with tempfile.TemporaryDirectory() as folder:
        vt.save(ours, Path(folder) / "timm.safetensors", family="timm")
        timm.models.load_checkpoint(theirs, str(Path(folder) / "timm.safetensors"))
    return ours, theirs


SMALL = {"depth": 3, "img_size": 32}
CASES = [
    ("vit_tiny_patch16_224", SMALL | {"in_chans": 1, "drop_path_rate": 0.1, "attn_drop_rate": 0.1, "drop_rate": 0.0}),
    ("vit_tiny_patch16_224", SMALL | {"global_pool": "avg"}),
    ("vit_small_patch16_dinov3", SMALL),
    ("deit_tiny_distilled_patch16_224", SMALL),
    ("vit_tiny_patch16_224", SMALL | {"global_pool": "map", "num_heads": 3}),
]

for name, arguments in CASES:
    torch.manual_seed(0)
    ours, theirs = pair(name, **arguments)
    pixels = torch.randn(2, arguments.get("in_chans", 3), 32, 32)
    text = f"{name} {arguments}"
    for attribute in ("num_classes", "num_features", "embed_dim"):
        compare(f"{text} {attribute}", getattr(ours, attribute), getattr(theirs, attribute))
    with torch.no_grad():
        compare(f"{text} logits", ours(pixels), theirs(pixels))
        tokens, their_tokens = ours.forward_features(pixels), theirs.forward_features(pixels)
        compare(f"{text} forward_features", tokens, their_tokens)
        compare(f"{text} forward_head", ours.forward_head(tokens), theirs.forward_head(their_tokens))
        if "distilled" not in name:
            features = theirs.forward_head(their_tokens, pre_logits=True)
            compare(f"{text} pre_logits", ours.forward_head(tokens, pre_logits=True), features)
        for options in (
            {},
            {"indices": 2, "norm": True},
            {"indices": [-1, 0], "output_fmt": "NLC"},
            {"indices": [2, 0, 0], "intermediates_only": True, "return_prefix_tokens": True},
            {"indices": [1], "intermediates_only": True, "stop_early": True, "norm": True},
        ):
            results = [model.forward_intermediates(pixels, **options) for model in (ours, theirs)]
            compare(f"{text} forward_intermediates {options}", *results)
    for classes, pool in [(7, None)] + ([(4, "avg")] if "global_pool" not in arguments and "deit" not in name else []):
        for model in (ours, theirs):
            model.reset_classifier(classes, pool)
            for head in (
                model.get_classifier() if isinstance(model.get_classifier(), tuple) else [model.get_classifier()]
            ):
                with torch.no_grad():
                    head.weight.copy_(torch.linspace(-1, 1, head.weight.numel()).view(head.weight.shape))
                    head.bias.zero_()
        compare(f"{text} num_classes after reset", ours.num_classes, theirs.num_classes)
        with torch.no_grad():
            compare(f"{text} logits after reset_classifier({classes}, {pool})", ours(pixels), theirs(pixels), 5e-5)
    ours.reset_classifier(0), theirs.reset_classifier(0)
    with torch.no_grad():
        if "distilled" not in name:
            compare(f"{text} features without a head", ours(pixels), theirs(pixels))
    kind = type(theirs.get_classifier())
    compare(f"{text} no classifier", type(ours.get_classifier()), kind)

for indices in (3, [0, 2], (-2,)):
    ours = vt.create_model("vit_tiny_patch16_224", features_only=True, out_indices=indices, **SMALL).eval()
    theirs = timm.create_model("vit_tiny_patch16_224", features_only=True, out_indices=indices, **SMALL).eval()
    full_ours, full_theirs = pair("vit_tiny_patch16_224", **SMALL)
    ours.model.load_state_dict(full_ours.state_dict(), strict=False)
    theirs.model.load_state_dict(full_theirs.state_dict(), strict=False)
    for part in ("channels", "reduction", "module_name"):
        compare(f"{indices} {part}", *(getattr(model.feature_info, part)() for model in (ours, theirs)))
    compare(f"{indices} parameters", *(sum(p.numel() for p in model.parameters()) for model in (ours, theirs)))
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        compare(f"features_only {indices}", ours(pixels), theirs(pixels))

RESETS = [  # architectures, another pooling, and another size, with which timm saves a folder
    ("vit_tiny_patch16_224", "avg", (64, 96)),
    ("vit_base_patch16_clip_224", "avg", (64, 96)),
    ("vit_so400m_patch14_siglip_gap_224", "avg", (56, 84)),
    ("deit_tiny_distilled_patch16_224", None, (64, 96)),
    ("deit3_small_patch16_224", "avg", (112, 448)),  # as many patches as before
    ("eva02_tiny_patch14_224", "token", (56, 84)),
    ("vit_pe_core_tiny_patch16_384", "avg", (64, 96)),
    ("vit_small_patch16_dinov3", "token", (64, 96)),
    ("beit_base_patch16_224", "token", None),
    ("naflexvit_base_patch16_par_gap", "avg", None),
]
for name, pool, size in RESETS:
    torch.manual_seed(0)
    theirs = timm.create_model(name, depth=2, num_classes=5).eval()
    theirs.reset_classifier(7, pool)
    if size is not None:
        theirs.set_input_size(img_size=size)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
        timm.models.save_for_hf(theirs, folder, safe_serialization=True)
        pixels = torch.randn(1, 3, *(size or theirs.pretrained_cfg["input_size"][1:]))
        compare(f"{name} with pooling {pool} at {size}", vt.load(folder)(pixels), theirs(pixels))

names = set(vt.list_models("vit_*patch16*"))
compare("list_models", sorted(names & set(timm.list_models("vit_*patch16*"))), sorted(names))
for channels in (1, 2, 4, 7):
    kernel = torch.randn(4, 3, 2, 2)
    theirs = timm.models._manipulate.adapt_input_conv(channels, kernel)
    compare(f"{channels} channels", vt.weights.create.adapt_channels(kernel, channels), theirs, 1e-6)
print(f"{COMPARED} compared")
