"""What programs written for timm and transformers expect of a model: its sizes, a new head, a loss from labels."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import TIMM_POOLS, ModelConfig, ModelMeta, Preprocess, ViTConfig
from vitruvian.errors import ConfigError
from vitruvian.settings import check_choice


class ImageNetwork(nn.Module):
    """The part that all models share: config, metadata and head."""

    config: Any
    head: nn.Linear | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        half = (0.5,) * config.in_channels
        self.meta = ModelMeta(preprocess=Preprocess(image_size=config.image_size, mean=half, std=half))

    def check(self, pixels: Tensor) -> None:
        """Raise ConfigError unless `pixels` is a batch of images with the model's number of channels."""
        check_floats(pixels)
        if pixels.dim() != 4 or pixels.shape[1] != self.config.in_channels:
            reason = f"pixels have shape {tuple(pixels.shape)}, expected (B, {self.config.in_channels}, height, width)"
            raise ConfigError(reason)

    def with_loss(self, logits: Tensor, labels: Tensor | None) -> Any:
        """The logits, or with labels {"loss", "logits"}, as transformers' Trainer expects.

        The loss is the cross-entropy with class indices (B,) or soft targets (B, K), or for a model with sigmoids the
        binary cross-entropy with targets (B, K).
        """
        if labels is None:
            return logits
        if self.meta.score_function == "sigmoid":
            return {"loss": F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype)), "logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 without a head."""
        return int(self.config.num_classes)

    @property
    def num_features(self) -> int:
        """Width of the features that the head reads."""
        return int(self.config.feature_width)

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of the heads: one, or two with a distillation token."""
        return ("head", "head_dist") if getattr(self.config, "distillation", False) else ("head",)

    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...]:
        """The head, or both with a distillation token; an identity if there is none."""
        heads = tuple(getattr(self, name) or nn.Identity() for name in self.head_names)
        return heads if len(heads) > 1 else heads[0]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a zero-initialized linear layer, without a pre-logits layer before it.

        Labels, thresholds and all other metadata that belong to the old head are removed.

        Args:
            num_classes: Number of classes; 0 for no head.
            global_pool: Another pooling of a Vision Transformer, "token" or "avg". The final norm stays where it is.
        """
        config = self.config.replace(num_classes=num_classes)
        if global_pool is not None and not isinstance(config, ViTConfig):
            raise ConfigError("global_pool is for Vision Transformers; a ResNet always averages")
        if global_pool is not None:
            check_choice("global_pool", global_pool, TIMM_POOLS)
            pool = TIMM_POOLS[global_pool]
            if pool == "map" != config.pool:
                raise ConfigError("reset_classifier cannot add attention pooling", hint="create_model(..., pool='map')")
            config = config.replace(pool=pool, pool_tokens=0)
        if isinstance(config, ViTConfig) and num_classes:
            config = config.replace(representation_size=0, projection=False, projection_bias=False, unit_features=False)
            setattr(self, "pre_logits", nn.Identity())  # noqa: B010
        if isinstance(config, ViTConfig) and config.pool != "map":
            config = config.replace(pool_num_heads=0, pool_mlp_dim=0, pool_prefix=False)
            setattr(self, "attn_pool", None)  # noqa: B010
        like = next(self.parameters())
        self.config, self.meta = config, self.meta.for_new_head()
        for name in self.head_names:
            setattr(self, name, None)
            if num_classes:
                head = nn.Linear(config.feature_width, num_classes, device=like.device, dtype=like.dtype)
                for parameter in head.parameters():
                    nn.init.zeros_(parameter)
                setattr(self, name, head.train(self.training))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """In training, store only the input of each block and recompute the rest in the backward pass."""
        if not hasattr(self, "grad_checkpointing"):
            raise ConfigError("gradient checkpointing is for Vision Transformers, not for a ResNet")
        self.grad_checkpointing = enable

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
        *,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """`set_grad_checkpointing` as transformers' Trainer calls it; recomputation is never reentrant."""
        if every_n_layers != 1 or offload:
            raise ConfigError(f"{every_n_layers=} and {offload=} are not supported: every block is recomputed")
        self.set_grad_checkpointing()

    gradient_checkpointing_enable = activation_checkpointing_enable  # its name before transformers 5.23


def check_floats(pixels: Tensor) -> None:
    """Raise ConfigError if the pixels are integers, such as the bytes of a decoded image."""
    if not pixels.is_floating_point():
        kind = str(pixels.dtype).removeprefix("torch.")
        reason = f"the pixels are {kind}, expected floats, normalized as model.meta.preprocess describes"
        hint = (
            "vitruvian.transform(model)(image) returns them, and vitruvian.Classifier(model) takes images of any kind"
        )
        raise ConfigError(reason, hint=hint)
