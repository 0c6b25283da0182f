"""torchvision's Vision Transformers (`.pth`)."""

from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, NUMERICS, Preprocess, ViTConfig
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Family, scaled_size
from vitruvian.weights.families.tables import TABLES


class Torchvision(Family[ViTConfig]):
    """erf GELU, eps 1e-6, positions resampled bicubically with aligned corners."""

    name = "torchvision"
    suffixes = (".pth", ".pt", ".safetensors")
    numerics = NUMERICS["torchvision"]
    table = TABLES["torchvision"]

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess:
        """Shorter side 256, center crop 224, bilinear; L/16 resizes to 242, SWAG's models do not crop."""
        size = config.image_size
        is_swag = min(size) >= 384 or "swag" in checkpoint.path.name
        shorter_side = 242 if (config.width, config.patch_size) == (1024, 16) else 256
        return Preprocess(
            image_size=size,
            fit="crop",
            scaled_size=size if is_swag else scaled_size(size, shorter_side),
            interpolation="bicubic" if is_swag else "bilinear",
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )
