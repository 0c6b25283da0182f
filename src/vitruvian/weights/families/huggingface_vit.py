"""ViT, DeiT, BEiT, data2vec, DINOv2 and DINOv3 in transformers, and the model types with the same names."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, Numerics, Preprocess, RopeConfig, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Facts, check_settings, find_obstacles, imagenet_preprocess
from vitruvian.weights.families.huggingface import NAMES, HuggingFace, read_bool, read_int
from vitruvian.weights.families.tables import TABLES, Tensors, rename

QKV = ("query", "key", "value")


def add_missing_biases(tensors: Tensors, layers: Iterable[str]) -> None:
    """If one of these dense layers has a bias, add zeros for those that have none."""
    weights = {f"{layer}.bias": tensors.get(f"{layer}.weight") for layer in layers}
    if any(name in tensors for name in weights):
        missing = {name: weight for name, weight in weights.items() if name not in tensors and weight is not None}
        tensors.update({name: weight.new_zeros(len(weight)) for name, weight in missing.items() if weight.dim()})


class HuggingFaceViT(HuggingFace):
    """model_type `vit` and `deit`, and the encoders of `vit_mae`, `vit_msn` and `ijepa`."""

    model_types: ClassVar = {"vit": "ViT", "deit": "DeiT", "vit_mae": "ViTMAE", "vit_msn": "ViTMSN", "ijepa": "IJepa"}
    norm_eps = 1e-12
    table = TABLES["huggingface_vit"]
    limits = "huggingface_vit"

    def claims(self, checkpoint: Checkpoint) -> bool:
        return super().claims(checkpoint) and not any(".layer_scale" in name for name in checkpoint.tensors)

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        """None for `vit`: some need mean and std 0.5 (Google's), some those of ImageNet (DINO's)."""
        return None if self.kind_of(checkpoint) == "vit" else imagenet_preprocess(config.image_size)

    def model_type(self, config: ViTConfig) -> str:
        if not config.cls_token:
            return "ijepa"
        if config.distillation or config.reg_tokens:
            return "deit"
        same_shape = ("vit_msn",) if config.num_classes else ("vit_msn", "vit_mae")
        return self.kind if self.kind in same_shape else "vit"

    def prefix_rows(self, config: ViTConfig) -> int:
        return super().prefix_rows(config) + config.reg_tokens

    def rename_parameters(self, native: Tensors, config: ViTConfig) -> Tensors:
        return rename(native, [(r"^embed\.reg_tokens$", "embed.dist_token")])

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        renamed = super().from_table_names(tensors, config)
        return rename(renamed, [(r"^classifier\.", "cls_classifier.")]) if config.distillation else renamed

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        settings = super().config_json(config, labels)
        return settings | ({"mask_ratio": 0.0} if self.model_type(config) == "vit_mae" else {})


BIAS = "relative_position_bias.relative_position_bias_table"
SHARED_BIAS = f"encoder.{BIAS}"
SHARED_BIAS_IN_MEMORY = "shared_position_bias.relative_position_bias_table"


class HuggingFaceBeit(HuggingFace):
    """model_type `beit` and `data2vec-vision`: relative biases, and a norm after the mean of the patches."""

    model_types: ClassVar = {"beit": "Beit", "data2vec-vision": "Data2VecVision"}
    norm_eps = 1e-12
    preprocess: ClassVar = {"interpolation": "bicubic"}
    table = TABLES["huggingface_beit"]
    limits = "huggingface_beit"

    def claims(self, checkpoint: Checkpoint) -> bool:
        stated = self.config_of(checkpoint).get("model_type") in tuple(self.model_types)
        return super().claims(checkpoint) and (stated or any(BIAS in name for name in checkpoint.tensors))

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Add zero biases for keys, and a bias table shared by all layers to each; drop the indices of older files."""
        for prefix, what in NAMES["other_heads"].items():
            if any(name.startswith(prefix) for name in tensors):
                raise CheckpointError(
                    f"the weights have {what} ({prefix}*)",
                    hint="use a checkpoint fine-tuned for classification, or save the encoder only (BeitModel, "
                    "Data2VecVisionModel)",
                )
        state = {name: tensor for name, tensor in tensors.items() if not name.endswith("relative_position_index")}
        shared = state.pop(SHARED_BIAS, None)
        for layer in sorted({name.split(".")[2] for name in state if name.startswith("encoder.layer.")}):
            attention = f"encoder.layer.{layer}.attention.attention"
            add_missing_biases(state, (f"{attention}.{part}" for part in QKV))
            if shared is not None:
                bias = state.get(f"{attention}.{BIAS}")
                if bias is not None and bias.shape != shared.shape:
                    raise CheckpointError(f"{SHARED_BIAS!r} and that of layer {layer} have different shapes")
                state[f"{attention}.{BIAS}"] = shared.clone() if bias is None else shared + bias
        return state

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        facts, settings, names = super().facts(checkpoint, tensors), self.config_of(checkpoint), checkpoint.tensors
        is_mean = read_bool(settings, "use_mean_pooling") is not False
        has_norm = "layernorm.weight" in tensors
        has_pool_norm = any(name.endswith("pooler.layernorm.weight") for name in names)
        has_biases = any(BIAS in name for name in tensors)
        has_positions = "embeddings.position_embeddings" in tensors
        own_biases, shared_bias = f".attention.{BIAS}", (SHARED_BIAS, SHARED_BIAS_IN_MEMORY)
        present = {
            "use_relative_position_bias": any(own_biases in name for name in names),
            "use_shared_relative_position_bias": any(name.endswith(shared_bias) for name in names),
            "use_absolute_position_embeddings": has_positions,
        }
        check_settings({key: read_bool(settings, key) for key in present}, present)
        if has_biases and facts.image_size and facts.image_size[0] != facts.image_size[1]:
            reason = "relative biases of an image that is not square, whose table transformers reads as columns by rows"
            raise CheckpointError(reason)
        if has_biases and has_positions:
            raise CheckpointError("relative biases together with absolute positions are not supported")
        return replace(
            facts,
            norm_after_pool=has_pool_norm or not has_norm,
            stated=facts.stated | {"norm_after_pool": is_mean},
            settings={
                "pool": "mean" if is_mean else "token",
                "pos_embed": "relative_bias" if has_biases else "learned" if has_positions else "none",
                "final_norm": has_norm,
            },
        )

    def shape_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """LayerScale is stated by its initial value; 0 means none."""
        scale = settings.get("layer_scale_init_value")
        return super().shape_settings(settings) | {"layer_scale": scale > 0 if isinstance(scale, int | float) else None}

    def model_type(self, config: ViTConfig) -> str:
        """data2vec's model without a head does not normalize the mean."""
        is_data2vec = self.kind == "data2vec-vision" and config.num_classes
        return "data2vec-vision" if is_data2vec or not config.final_norm else "beit"

    def has_position_array(self, config: ViTConfig) -> bool:
        return config.pos_embed not in ("relative_bias", "none")

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        """Drop the bias of keys: it is the same for every key, so it does not change the softmax."""
        state = {name: tensor for name, tensor in tensors.items() if not name.endswith(".attention.key.bias")}
        if config.pool == "mean":
            state = rename(state, [(r"^layernorm\.", "pooler.layernorm.")])
        return super().from_table_names(state, config)

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        return super().config_json(config, labels) | {
            "use_mask_token": False,
            "use_absolute_position_embeddings": self.has_position_array(config),
            "use_relative_position_bias": config.pos_embed == "relative_bias",
            "use_shared_relative_position_bias": False,
            "layer_scale_init_value": 0.1 if config.layer_scale else 0.0,
            "drop_path_rate": config.drop_path,
            "use_mean_pooling": config.pool == "mean",
        }


REGISTERS = "embeddings.register_tokens"


def mlp_kind(settings: dict[str, Any], key: str) -> str | None:
    is_gated = read_bool(settings, key)
    return None if is_gated is None else "swiglu" if is_gated else "gelu"


class HuggingFaceDinoV2(HuggingFace):
    """model_type `dinov2` and `dinov2_with_registers`; the classifier reads class token and mean concatenated."""

    model_types: ClassVar = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
    norm_eps = 1e-6
    empty_tokens: ClassVar = REGISTERS  # an array that models without registers store
    table = TABLES["huggingface_dinov2"]
    limits = "huggingface_dinov2"

    def kind_of(self, checkpoint: Checkpoint) -> Any:
        registers = (tensor for name, tensor in checkpoint.tensors.items() if name.endswith(REGISTERS))
        usual = "dinov2_with_registers" if any(tensor.numel() for tensor in registers) else "dinov2"
        return self.config_of(checkpoint).get("model_type", usual)

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Drop the empty array that models without registers store."""
        return {name: tensor for name, tensor in tensors.items() if name != self.empty_tokens or tensor.numel()}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        facts = super().facts(checkpoint, tensors)
        rows, columns = facts.image_size or (1, 1)
        if rows != columns:
            raise CheckpointError(
                f"config.json: image_size={rows}x{columns} is not square, but DINOv2 in transformers reads positions "
                "as those of a square"
            )
        return facts

    def shape_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The MLP's width is stated as a ratio of the model's."""
        stated, ratio = super().shape_settings(settings), settings.get("mlp_ratio")
        mlp = mlp_kind(settings, "use_swiglu_ffn")
        is_stated = isinstance(ratio, int | float) and stated["width"] is not None and mlp is not None
        has_registers = settings.get("model_type") in ("dinov2_with_registers", *HuggingFaceTips.model_types)
        return stated | {
            "mlp": mlp,
            "mlp_dim": hidden_width(int(stated["width"] * ratio), gated=mlp == "swiglu") if is_stated else None,
            "reg_tokens": read_int(settings, "num_register_tokens", minimum=0) if has_registers else None,
        }

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        return imagenet_preprocess((224, 224))

    def model_type(self, config: ViTConfig) -> str:
        return "dinov2_with_registers" if config.reg_tokens else "dinov2"

    def obstacles(self, config: ViTConfig) -> list[str]:
        no_ratio = f"huggingface's DINOv2 has no MLP of {config.mlp_dim} at a width of {config.width}"
        return super().obstacles(config) + ([no_ratio] if mlp_ratio(config) is None else [])

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        mask = tensors["embeddings.cls_token"].new_zeros(1, config.width)
        renamed = super().from_table_names(tensors | {"embeddings.mask_token": mask}, config)
        gated = [(r"\.fc1\.", ".weights_in."), (r"\.fc2\.", ".weights_out.")]
        return rename(renamed, gated) if config.mlp == "swiglu" else renamed

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        settings = super().config_json(config, labels)
        del settings["intermediate_size"]
        settings |= {"use_swiglu_ffn": config.mlp == "swiglu", "mlp_ratio": mlp_ratio(config)}
        has_registers = config.reg_tokens or self.model_type(config) not in HuggingFaceDinoV2.model_types
        return settings | ({"num_register_tokens": config.reg_tokens} if has_registers else {})


class HuggingFaceTips(HuggingFaceDinoV2):
    """The image tower of `tipsv2`: DINOv2 with a register, in files with the names of its release."""

    model_types: ClassVar = {"tipsv2_vision_model": "Tipsv2Vision"}
    preprocess: ClassVar = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    empty_tokens = "reg_token"
    table = TABLES["tipsv2"]

    def claims(self, checkpoint: Checkpoint) -> bool:
        return super().claims(checkpoint) and self.kind_of(checkpoint) in tuple(self.model_types)

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        return HuggingFace.default_preprocess(self, checkpoint, config)

    def model_type(self, config: ViTConfig) -> str:
        return next(iter(self.model_types))

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        layers = ("w12", "w3") if config.mlp == "swiglu" else ("c_fc", "c_proj")
        rules = [(rf"\.mlp\.fc{i}\.", f".mlp.{layer}.") for i, layer in enumerate(layers, start=1)]
        token = tensors["cls_token"]
        state = {"reg_token": token.new_zeros(1, 0, config.width), "mask_token": token.new_zeros(1, config.width)}
        return rename(state | tensors, [*rules, ("^reg_token$", "register_tokens")])


def mlp_ratio(config: ViTConfig) -> int | None:
    """The integer from which transformers computes the width of DINOv2's MLP, or None."""
    widths = {ratio: hidden_width(config.width * ratio, gated=config.mlp == "swiglu") for ratio in range(1, 65)}
    return next((ratio for ratio, width in widths.items() if width == config.mlp_dim), None)


def hidden_width(hidden: int, *, gated: bool) -> int:
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


class HuggingFaceDinoV3(HuggingFace):
    """model_type `dinov3_vit`: rotary positions normalized to the image, registers, LayerScale."""

    model_types: ClassVar = {"dinov3_vit": "DINOv3ViT"}
    norm_eps = 1e-5
    default_heads = 6
    preprocess: ClassVar = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    table = TABLES["huggingface_dinov3"]
    limits = "huggingface_dinov3"

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Add missing biases, join gate and value, and drop the empty array of models without registers."""
        state = {name: tensor for name, tensor in tensors.items() if name != REGISTERS or tensor.numel()}
        layers = {f"{part}_bias": f"attention.attention.{part}" for part in QKV}
        layers |= {"proj_bias": "attention.output.dense", "mlp_bias": "mlp.down_proj"}
        biases = {key: f"layer.0.{layer}.bias" in state for key, layer in layers.items()}
        check_settings({key: read_bool(self.config_of(checkpoint), key) for key in biases}, biases)
        for layer in sorted({name.split(".")[1] for name in state if name.startswith("layer.")}):
            attention, mlp = f"layer.{layer}.attention", f"layer.{layer}.mlp"
            add_missing_biases(state, (f"{attention}.attention.{part}" for part in QKV))
            dense = (f"{attention}.output.dense", *(f"{mlp}.{part}_proj" for part in ("gate", "up", "down")))
            add_missing_biases(state, dense)
            for kind in ("weight", "bias"):
                gate, value = state.pop(f"{mlp}.gate_proj.{kind}", None), state.get(f"{mlp}.up_proj.{kind}")
                if gate is not None and value is not None and gate.shape == value.shape:
                    state[f"{mlp}.up_proj.{kind}"] = torch.cat([gate, value])
        return state

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        settings = self.config_of(checkpoint)
        if not settings:
            raise CheckpointError("DINOv3 weights without config.json, which states heads and rotary positions")
        theta = settings.get("rope_theta", 100.0)
        if not isinstance(theta, int | float) or isinstance(theta, bool):
            raise CheckpointError(f"config.json: rope_theta={theta!r} is not a number")
        rope = RopeConfig(kind="normalized", temperature=float(theta), half=True)
        return replace(super().facts(checkpoint, tensors), settings={"rope": rope, "pos_embed": "none"})

    def shape_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        biases = [read_bool(settings, f"{part}_bias") for part in QKV]
        dense = [read_bool(settings, f"{part}_bias") for part in ("proj", "mlp")]
        return super().shape_settings(settings) | {
            "reg_tokens": read_int(settings, "num_register_tokens", minimum=0),
            "mlp": mlp_kind(settings, "use_gated_mlp"),
            "qkv_bias": None if None in biases else any(biases),
            "dense_bias": None if None in dense else any(dense),
            "layer_scale": True,
        }

    def numerics_of(self, settings: dict[str, Any]) -> Numerics:
        if not settings.get("use_gated_mlp"):
            return super().numerics_of(settings)
        if settings.get("hidden_act", "gelu") not in ("silu", "swish"):
            reason = f"config.json: a gated MLP with {settings.get('hidden_act')!r} is not supported, only silu is"
            raise CheckpointError(reason)
        return super().numerics_of(settings | {"hidden_act": "gelu"})

    def obstacles(self, config: ViTConfig) -> list[str]:
        temperature = config.rope.temperature if config.rope else 100.0
        rope = RopeConfig(kind="normalized", temperature=temperature, half=True)
        return find_obstacles(config, self.limits, rope=rope)

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        """Split gate and value; add the mask token and registers, which are always stored."""
        state = dict(tensors)
        if config.mlp == "swiglu":
            for name in [name for name in state if ".mlp.up_proj." in name]:
                state[name.replace("up_proj", "gate_proj")], state[name] = state[name].chunk(2)
        token = state["embeddings.cls_token"]
        state.setdefault(REGISTERS, token.new_zeros(1, 0, config.width))
        rules = [(rf"\.attention\.attention\.{part}\.", f".attention.{part[0]}_proj.") for part in QKV]
        rules.append((r"\.attention\.output\.dense\.", ".attention.o_proj."))
        return rename(state, rules) | {"embeddings.mask_token": torch.zeros_like(token)}

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        assert config.rope is not None
        settings = super().config_json(config, labels) | {f"{part}_bias": config.qkv_bias for part in QKV}
        settings |= {"num_register_tokens": config.reg_tokens, "rope_theta": config.rope.temperature}
        return settings | ({"use_gated_mlp": True, "hidden_act": "silu"} if config.mlp == "swiglu" else {})
