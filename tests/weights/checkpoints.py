"""The small checkpoints that tests read, and the answers their own implementations gave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden"
FIXTURES, PEERS = GOLDEN / "fixtures", GOLDEN / "peers"

TOLERANCE = 1e-5
"""Float32 sums in another order; the fixtures' own bound (PARITY.md)."""

FIXTURE_NAMES = sorted(path.name.split(".expected")[0] for path in FIXTURES.glob("*.expected.*"))
PEER_NAMES = sorted(path.name.split(".expected")[0] for path in PEERS.glob("*.expected.*"))

DESTINATIONS = {
    "native": "native",
    "google": "google.npz",
    "timm": "timm.safetensors",
    "torchvision": "torchvision.pth",
    "huggingface": "huggingface",
}


def path_of(name: str) -> Path:
    """The file or folder of a fixture or of a peer's checkpoint."""
    folder = FIXTURES if name in FIXTURE_NAMES else PEERS
    return next(
        path for path in sorted(folder.glob(f"{name}*")) if path.name.split(".")[0] == name and is_weights(path)
    )


def is_weights(path: Path) -> bool:
    return ".expected" not in path.name


def expected(name: str) -> list[tuple[Tensor, Tensor]]:
    """Pairs of normalized pixels (B, 3, H, W) and the answers of the family's own implementation."""
    folder = FIXTURES if name in FIXTURE_NAMES else PEERS
    file = next(folder.glob(f"{name}.expected.*"))
    if file.suffix == ".npz":  # Google's and big_vision's inputs are NHWC
        arrays = {key: torch.from_numpy(value) for key, value in np.load(file).items()}
        arrays = {key: value.permute(0, 3, 1, 2) if value.dim() == 4 else value for key, value in arrays.items()}
    else:
        arrays = load_file(file)
    answers = {key.split("_", 1)[1]: value for key, value in arrays.items() if not key.startswith("input_")}
    return [(arrays[f"input_{size}"].contiguous(), answer) for size, answer in sorted(answers.items())]


def arrays_of(name: str) -> dict[str, np.ndarray]:
    """The arrays of an npz fixture, to be changed and written again."""
    with np.load(path_of(name)) as archive:
        return dict(archive)


def largest_difference(model: torch.nn.Module, name: str) -> float:
    """Between a model's answers and the expected ones of a checkpoint, over all of its sizes."""
    with torch.no_grad():
        return max(float((model(pixels) - answer).abs().max()) for pixels, answer in expected(name))
