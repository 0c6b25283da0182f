"""The processes of a run: one alone, or those that torchrun started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitruvian.errors import ConfigError, TrainingError, VitruvianError, argument
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.settings import environment_number
from vitruvian.text import brief, describe_error

if TYPE_CHECKING:
    from vitruvian.training.recipe import Recipe

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
    background: dist.ProcessGroup | None = None
    """The same processes, connected once more: for threads, as messages of two threads must not mix."""

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

    def all_gather(self, value: Result) -> list[Result]:
        """What each process says, in each of them."""
        if not self.is_distributed:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

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

    def check_same(self, facts: dict[str, Any]) -> None:
        """Refuse to go on, in all processes, where one of them has other facts than the first."""
        told = self.all_gather((socket.gethostname(), facts))
        first_host, first = told[0]
        for rank, (host, found) in enumerate(told):
            for name in (name for name in first if found[name] != first[name]):
                mine, others = (brief(v) if isinstance(v, list) else repr(v) for v in (first[name], found[name]))
                raise TrainingError(
                    f"process {rank} on {host} has {name}={others}, process 0 on {first_host} has {mine}; start every "
                    "machine with the same command, data and version"
                )

    def check_sees(self, path: Path) -> None:
        """Refuse to go on, in all processes, where one of them does not see what the main process has written."""
        for rank, (host, there) in enumerate(self.all_gather((socket.gethostname(), path.exists()))):
            if not there:
                raise TrainingError(
                    f"{path.parent.absolute()}: process {rank} on {host} does not see what process 0 has written "
                    "there; the folder of a run must be on a file system that all machines share"
                )


_left: list[object] = []
"""Groups that were left. Kept, because taking gloo's connections apart while the other end does may wait for ever."""
_background: dist.ProcessGroup | None = None


@contextmanager
def process_group(device: str) -> Iterator[Processes]:
    """This process, connected to the others while the context lasts.

    Inside another such context the connection is that one's. An error of the connection, which is how the death of
    another process shows, becomes a TrainingError.
    """
    global _background
    world, rank = environment_number("WORLD_SIZE", 1), environment_number("RANK", 0)
    chosen = chosen_device(device)
    if world == 1 or dist.is_initialized():
        yield Processes(rank=rank if world > 1 else 0, world_size=world, device=chosen, background=_background)
        return
    try:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        place = ":".join(os.environ.get(name, f"${name}") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise TrainingError(
            f"process {rank} of {world} cannot reach the others through {place}: {describe_error(error)}",
            hint="all of them must be started, and that address must be reachable from every machine",
        ) from error
    try:
        _background = dist.new_group(backend="gloo", timeout=TIMEOUT)
        yield Processes(rank=rank, world_size=world, device=chosen, background=_background)
    except (RuntimeError, dist.DistError) as error:
        words = ("gloo", "nccl", "connection", "timed out", "peer")
        if isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words):
            raise TrainingError(
                f"process {rank} lost the others, one of the {world} has died; its own messages tell why; "
                "continue with `vit train --resume RUN`"
            ) from error
        raise
    finally:
        _left.extend((dist.group.WORLD, _background))
        _background = None
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
        raise ConfigError(f"{argument('device', name)} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def fully_shard(model: Model, processes: Processes, recipe: Recipe) -> None:
    """Spread the parameters over the processes (`fsdp`, `hsdp`), block by block; before the optimizer is made."""
    if not processes.is_distributed or recipe.parallel == "ddp":
        return
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    groups = shard_groups(recipe, processes.world_size)
    names = ("replicate", "shard")[-len(groups) :]
    mesh = init_device_mesh(processes.device.type, groups, mesh_dim_names=names)
    for part in model.blocks if isinstance(model, ViT) else model.stages:
        fsdp.fully_shard(part, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)


def shard_groups(recipe: Recipe, world: int) -> tuple[int, ...]:
    """The shape of the mesh: all processes (`fsdp`), or groups, each with a whole model, and their size (`hsdp`)."""
    if recipe.parallel != "hsdp":
        return (world,)
    size = recipe.shard_size or environment_number("LOCAL_WORLD_SIZE", world)
    if world % size:
        raise ConfigError(
            f"parallel='hsdp' needs groups of one size: {world} processes are not divisible by shard_size={size}"
        )
    return world // size, size


def wrap_ddp(model: Model, processes: Processes, recipe: Recipe) -> nn.Module:
    """What to call in training: with `ddp` a wrapper that averages gradients, else the model itself."""
    if not processes.is_distributed or recipe.parallel != "ddp":
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
