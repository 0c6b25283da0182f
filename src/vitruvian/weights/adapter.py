"""LoRA adapters in peft's format: `adapter_config.json` and `adapter_model.safetensors`, read and written.

Names of all libraries are read. A model that transformers has as `vit` is written with the names of transformers 5;
others with our names, which are also timm's: its fused layer of queries, keys and values then has one update. Our
files also contain the description of the model, and a few of the weights that the adapter was trained on.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvian.config import ViTConfig
from vitruvian.errors import CheckpointError, ConversionError
from vitruvian.files import atomic_path, json_bytes, read_object
from vitruvian.model.build import Model
from vitruvian.model.lora import Update, lora_layers, rows_of
from vitruvian.text import package_table
from vitruvian.weights.checkpoint_files import Description, check_values, read_file, write_tensors
from vitruvian.weights.families.huggingface import HuggingFaceViT
from vitruvian.weights.families.registry import huggingface_kind

ADAPTER_FILE, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
SAMPLES = 8  # weights per layer that an adapter stores of its base
SAMPLE_TOLERANCE = 0.01  # of their root mean square; a base stored in 16 bits differs less

NAMES = package_table("weights/families/peft.toml")
LAYER_NAMES, HEAD_NAMES, TRANSFORMERS_NAMES = NAMES["layers"], NAMES["heads"], NAMES["transformers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The content of an adapter's folder."""

    path: Path
    base: str  # name of the weights it was trained on; may be empty
    updates: dict[tuple[int, str], Update]  # by block and part
    head: dict[str, Tensor]  # under our names; empty if the adapter keeps the base's head
    description: Description | None  # of the adapted model, if we wrote the adapter
    samples: dict[str, list[float]]  # some weights of the base, by layer

    def check_base(self, model: Model) -> None:
        """Raise CheckpointError if the adapter was trained on other weights than these."""
        for name, expected in self.samples.items():
            try:
                values = sample(model.get_submodule(name).weight)  # type: ignore[arg-type]
            except AttributeError:
                values = []
            scale = math.sqrt(sum(value**2 for value in expected) / SAMPLES)
            if len(values) != SAMPLES or max(map(abs, map(float.__sub__, values, expected))) > SAMPLE_TOLERANCE * scale:
                reason = f"the adapter was trained on other weights: {name!r} differs"
                raise CheckpointError(reason, where=self.path, hint=f"load it on {self.base or 'its base'}")


def sample(weight: Tensor) -> list[float]:
    """A few evenly spaced values."""
    flat = weight.detach().flatten()
    return [float(flat[index * (len(flat) - 1) // (SAMPLES - 1)]) for index in range(SAMPLES)]


def is_adapter(path: Path) -> bool:
    return (path / ADAPTER_FILE).is_file()


def read_adapter(path: Path) -> Adapter:
    """Read an adapter's folder.

    Raises:
        CheckpointError: It is not a LoRA or DoRA adapter of the dense layers of a Vision Transformer.
    """
    if not is_adapter(path):
        what = f"not an adapter: it has no {ADAPTER_FILE}" if path.is_dir() else "no such folder"
        raise CheckpointError(what, where=path)
    config = read_object(path / ADAPTER_FILE, raises=CheckpointError)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"peft_type is {config.get('peft_type')!r}, only LORA can be read", where=path)
    names = (ADAPTER_WEIGHTS, "adapter_model.bin")
    file = next((path / name for name in names if (path / name).is_file()), path / ADAPTER_WEIGHTS)
    checkpoint = read_file(file)
    check_values(checkpoint.tensors, file)
    layers, head = dict[str, dict[str, Tensor]](), dict[str, Tensor]()
    for key, tensor in checkpoint.tensors.items():
        name = key.removeprefix(PREFIX)
        if match := re.fullmatch(r"(.+)\.(lora_A|lora_B|lora_magnitude_vector)(\.weight)?", name):
            layers.setdefault(match[1], {})[match[2]] = tensor.float()
        elif match := re.fullmatch(rf"({'|'.join(HEAD_NAMES)}|head|head_dist)\.(weight|bias)", name):
            head[f"{HEAD_NAMES.get(match[1], match[1])}.{match[2]}"] = tensor.float()
        else:
            raise CheckpointError(f"{key!r} is neither LoRA's nor the head's", where=file)
    updates = {block_and_part(name, file): make_update(name, t, config, file) for name, t in layers.items()}
    if not updates:
        raise CheckpointError("contains no updates", where=file)
    embedded = checkpoint.embedded if isinstance(checkpoint.embedded, dict) else {}
    return Adapter(
        path=path,
        base=str(config.get("base_model_name_or_path") or ""),
        updates=updates,
        head=head,
        description=Description.from_json(embedded, str(file)) if embedded else None,
        samples=embedded.get("samples", {}),
    )


def block_and_part(name: str, where: Path) -> tuple[int, str]:
    """Block number and layer of a module, from the name that another library gives it."""
    match = re.fullmatch(r"(.*\.)?(?:blocks|layers?)\.(\d{1,4})\.(.+)", name)
    part = next((part for part, names in LAYER_NAMES.items() if match and re.fullmatch(names, match[3])), None)
    if match is None or part is None or "text" in (match[1] or ""):
        raise CheckpointError(f"{name!r} is not a dense layer of a Vision Transformer's block", where=where)
    return int(match[2]), part


def make_update(name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: Path) -> Update:
    """The update of a layer; `alpha_pattern` in the config may replace `lora_alpha` for it."""
    a, b = tensors.get("lora_A"), tensors.get("lora_B")
    if a is None or b is None or a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1] or not len(a):
        raise CheckpointError(f"the matrices of {name!r} are missing or do not fit together", where=where)
    patterns, alpha = config.get("alpha_pattern") or {}, config.get("lora_alpha")
    alpha = next((value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", name)), alpha)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"lora_alpha is {alpha!r}, not a number", where=where.parent / ADAPTER_FILE)
    divisor = math.sqrt(len(a)) if config.get("use_rslora") else len(a)
    return Update(a=a, b=b, scale=alpha / divisor, magnitude=tensors.get("lora_magnitude_vector"))


def save_adapter(
    model: Model, path: str | Path, *, base: str = "", tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write the updates and the head of a model with LoRA layers as an adapter that peft can read.

    Args:
        model: A model with LoRA layers.
        path: The folder to write; an existing one is replaced.
        base: Name of the weights that were adapted.
        tensors: The full state dict, if the model is sharded and holds only a part of it.

    Raises:
        ConversionError: The model has no LoRA layers.
    """
    layers = dict(lora_layers(model))
    if not layers:
        raise ConversionError("this model has no LoRA layers", where=path)
    has_names = is_transformers_vit(model)
    state_dict = {name: tensor.detach().float().cpu() for name, tensor in (tensors or model.state_dict()).items()}
    written, scales = dict[str, Tensor](), dict[str, tuple[int, float]]()
    for name, layer in layers.items():
        state = part_of(state_dict, name)
        block = name.split(".")[1]
        parts = {
            f"vit.layers.{block}.{TRANSFORMERS_NAMES[part]}": update_of(state, part, scale)
            for part, scale in layer.scales.items()
            if has_names and part in TRANSFORMERS_NAMES
        }
        for module, update in (parts or {name: join_parts(state, layer.scales)}).items():
            written[f"{PREFIX}{module}.lora_A.weight"], written[f"{PREFIX}{module}.lora_B.weight"] = update.a, update.b
            if update.magnitude is not None:
                written[f"{PREFIX}{module}.lora_magnitude_vector"] = update.magnitude
            scales[module] = len(update.a), update.scale * len(update.a)
    heads = [head for head in ("head", "head_dist") if getattr(model, head, None) is not None]
    named = {head: "classifier" if has_names else head for head in heads}
    for head, name in named.items():
        written |= {f"{PREFIX}{name}.{key}": tensor for key, tensor in part_of(state_dict, head).items()}
    rank, alpha = Counter(scales.values()).most_common(1)[0][0]
    config = {  # what differs from peft's defaults
        "peft_type": "LORA",
        "base_model_name_or_path": base or model.meta.source or None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: r for name, (r, _) in scales.items() if r != rank},
        "alpha_pattern": {name: value for name, (_, value) in scales.items() if value != alpha},
        "target_modules": sorted(scales),
        "modules_to_save": sorted(named.values()) or None,
        "use_dora": any(layer.lora_magnitude for layer in layers.values()),
        "inference_mode": True,
    }
    samples = {name: sample(state_dict[f"{name}.weight"]) for name in layers}
    with atomic_path(Path(path).expanduser()) as new:
        new.mkdir()
        (new / ADAPTER_FILE).write_bytes(json_bytes(config))
        write_tensors(new / ADAPTER_WEIGHTS, written, Description.of(model).to_json() | {"samples": samples})


def is_transformers_vit(model: Model) -> bool:
    """Whether transformers has this model as `vit`, and all updates are of layers that it has."""
    config = model.config
    if not isinstance(config, ViTConfig) or huggingface_kind(config) is not HuggingFaceViT:
        return False
    kind, parts = HuggingFaceViT("vit"), {part for _, layer in lora_layers(model) for part in layer.scales}
    return not kind.obstacles(config) and kind.model_type(config) == "vit" and parts <= set(TRANSFORMERS_NAMES)


def part_of(state: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{module}."): value for key, value in state.items() if key.startswith(f"{module}.")}


def update_of(state: Mapping[str, Tensor], part: str, scale: float) -> Update:
    a, b = state[f"lora_A.{part}"], state[f"lora_B.{part}"]
    return Update(a=a, b=b, scale=scale, magnitude=state.get(f"lora_magnitude.{part}"))


def join_parts(state: Mapping[str, Tensor], scales: Mapping[str, float]) -> Update:
    """The updates of the parts of a layer as one of higher rank: B is zero where a part has no update."""
    updates = {part: update_of(state, part, scale) for part, scale in scales.items()}
    scale, weight = next(iter(scales.values())), state["weight"]
    b, column = torch.zeros(len(weight), sum(len(update.a) for update in updates.values())), 0
    magnitude = weight.norm(dim=1)
    for part, update in updates.items():
        rows = rows_of(part, len(weight))
        b[rows, column : column + len(update.a)] = update.b * (update.scale / scale)
        column += len(update.a)
        if update.magnitude is not None:
            magnitude[rows] = update.magnitude
    has_magnitude = any(update.magnitude is not None for update in updates.values())
    a = torch.cat([update.a for update in updates.values()])
    return Update(a=a, b=b, scale=scale, magnitude=magnitude if has_magnitude else None)
