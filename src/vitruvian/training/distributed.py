"""The processes of a run: one alone, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitruvian.errors import ConfigError, TrainingError, VitruvianError
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.settings import environment_number

if TYPE_CHECKING:
    from vitruvian.training.recipe import Parallel

TIMEOUT = timedelta(minutes=10)
"""How long a process waits for the others before the job ends."""

CPU = torch.device("cpu")

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """This process among those of the run."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        if self.is_distributed:
            dist.all_reduce(values)
        return values

    def broadcast(self, value: Any) -> Any:
        """What the main process says, in each of them."""
        if not self.is_distributed:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def all_reduce_max(self, value: int) -> int:
        if not self.is_distributed:
            return value
        box = torch.tensor(value, device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return int(box.item())

    def all_gather(self, entries: dict[str, str]) -> dict[str, str]:
        if not self.is_distributed:
            return entries
        found: list[dict[str, str]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(found, entries)
        return {key: value for part in found for key, value in part.items()}

    def on_main(self, work: Callable[[], Result]) -> Result:
        """What the main process gets from this work, in each of them; where it fails, all fail."""
        result, problem = None, None
        if self.is_main:
            try:
                result = work()
            except VitruvianError as error:
                if not self.is_distributed:
                    raise
                problem = str(error)
        result, problem = self.broadcast((result, problem))
        if problem is not None:
            raise TrainingError(problem)
        return result

    def barrier(self) -> None:
        if self.is_distributed:
            dist.barrier()


_left: list[object] = []
"""Groups that were left. Kept, because taking gloo's connections apart while the other end does may wait for ever."""


@contextmanager
def process_group(device: str) -> Iterator[Processes]:
    """This process, connected to the others while the context lasts.

    Inside another such context the connection is that one's. An error of the connection, which is how the death of
    another process shows, becomes a TrainingError.
    """
    world, rank = environment_number("WORLD_SIZE", 1), environment_number("RANK", 0)
    chosen = chosen_device(device)
    if world == 1 or dist.is_initialized():
        yield Processes(rank=rank if world > 1 else 0, world_size=world, device=chosen)
        return
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield Processes(rank=rank, world_size=world, device=chosen)
    except (RuntimeError, dist.DistError) as error:
        words = ("gloo", "nccl", "connection", "timed out", "peer")
        if isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words):
            raise TrainingError(
                f"process {rank} lost the others, one of the {world} has died; its own messages tell why; "
                "continue with `vit train --resume RUN`"
            ) from error
        raise
    finally:
        _left.append(dist.group.WORLD)
        dist.destroy_process_group()


def chosen_device(name: str) -> torch.device:
    """The device of this name; `auto` is this process's GPU, or else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={name!r} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def fully_shard(model: Model, processes: Processes, parallel: Parallel) -> None:
    """Spread the parameters over the processes (`fsdp`), block by block; before the optimizer is made."""
    if not processes.is_distributed or parallel != "fsdp":
        return
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(processes.device.type, (processes.world_size,))
    for part in model.blocks if isinstance(model, ViT) else model.stages:
        fsdp.fully_shard(part, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)


def wrap_ddp(model: Model, processes: Processes, parallel: Parallel) -> nn.Module:
    """What to call in training: with `ddp` a wrapper that averages gradients, else the model itself."""
    if not processes.is_distributed or parallel == "fsdp":
        return model
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


def average_buffers(model: nn.Module, processes: Processes) -> None:
    """Give all processes the mean of their buffers: each has BatchNorm's statistics of its own part of a batch."""
    buffers = list(model.buffers()) if processes.is_distributed else []
    if buffers:
        means = torch.cat([buffer.flatten() for buffer in buffers]) / processes.world_size
        parts = torch.split(processes.all_reduce_sum(means), [buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, parts):
            buffer.copy_(mean.view_as(buffer))


@contextmanager
def no_sync(module: Any) -> Iterator[None]:
    """A context in which a backward pass keeps its gradients to this process: for all parts of a batch but the last."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        with module.no_sync():
            yield
    elif hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
    else:
        yield


def reshard(model: nn.Module) -> None:
    """Drop the whole parameters that a sharded model (`fsdp`) keeps after a forward pass without a backward one.

    Else the next step would compute with them, although the weights have changed since: an evaluation has the average
    of the weights in their place.
    """
    if hasattr(model, "reshard"):
        model.reshard()  # type: ignore[operator]


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor put together from its parts in all processes, which must all ask."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
