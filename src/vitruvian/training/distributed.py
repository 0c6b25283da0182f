"""The processes of a run: a single one, or those that torchrun started."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitruvian.errors import ConfigError, TrainingError, VitruvianError
from vitruvian.machine import choose_device
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.settings import environment_number
from vitruvian.text import brief, describe_error
from vitruvian.training.recipe import Recipe

TIMEOUT = timedelta(minutes=10)  # how long a process waits for the others before it fails

CPU = torch.device("cpu")

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """This process and its communication with the other processes of the run."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    background: dist.ProcessGroup | None = None
    """A second group of all processes, for the thread that writes checkpoints: messages of two threads must not mix."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        if self.is_distributed:
            dist.all_reduce(values)
        return values

    def broadcast(self, value: Any) -> Any:
        """The value of the main process, in all processes."""
        if not self.is_distributed:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def all_gather(self, value: Result) -> list[Result]:
        """The values of all processes, in all processes."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Call `work` in the main process; returns its result in all processes, or raises in all of them."""
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
        """Raise TrainingError in all processes if one of them has other facts than the main one."""
        gathered = self.all_gather((socket.gethostname(), facts))
        main_host, main = gathered[0]
        for rank, (host, values) in enumerate(gathered):
            for name in (name for name in main if values[name] != main[name]):
                shown, expected = (brief(v) if isinstance(v, list) else repr(v) for v in (values[name], main[name]))
                reason = f"process {rank} on {host} has {name}={shown}, process 0 on {main_host} has {expected}"
                raise TrainingError(reason, hint="start every machine with the same command, data and version")

    def check_sees(self, path: Path) -> None:
        """Raise TrainingError in all processes if one of them does not see a file of the main one."""
        for rank, (host, exists) in enumerate(self.all_gather((socket.gethostname(), path.exists()))):
            if not exists:
                reason = f"process {rank} on {host} does not see the files that process 0 has written"
                hint = "the folder of a run must be on a file system that all machines share"
                raise TrainingError(reason, where=path.parent.absolute(), hint=hint)


_closed_groups: list[object] = []
"""Process groups we have left. Kept alive: destroying gloo connections on both ends at once can deadlock."""
_background: dist.ProcessGroup | None = None


@contextmanager
def process_group(device: str) -> Iterator[Processes]:
    """A context in which this process is connected to the others of the run.

    A nested context uses the connection of the outer one. A communication error, which usually means that another
    process has died, becomes a TrainingError.
    """
    global _background
    world, rank = environment_number("WORLD_SIZE", 1), environment_number("RANK", 0)
    chosen = torch.device(choose_device(device))
    if chosen.type in ("cuda", "xpu"):
        torch.get_device_module(chosen).set_device(chosen)
    if world == 1 or dist.is_initialized():
        yield Processes(rank=rank if world > 1 else 0, world_size=world, device=chosen, background=_background)
        return
    try:
        dist.init_process_group(dist.get_default_backend_for_device(chosen), timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        address = ":".join(os.environ.get(name, f"${name}") for name in ("MASTER_ADDR", "MASTER_PORT"))
        reason = f"process {rank} of {world} cannot reach the others through {address}: {describe_error(error)}"
        hint = "start all of them, and make sure that every machine can reach this address"
        raise TrainingError(reason, hint=hint) from error
    try:
        _background = dist.new_group(backend="gloo", timeout=TIMEOUT)
        yield Processes(rank=rank, world_size=world, device=chosen, background=_background)
    except (RuntimeError, dist.DistError) as error:
        words = ("gloo", "nccl", "connection", "timed out", "peer")
        if isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words):
            reason = f"process {rank} lost the connection: one of the {world} processes has died, see its messages"
            raise TrainingError(reason, hint="continue with `vit train --resume RUN`") from error
        raise
    finally:
        _closed_groups.extend((dist.group.WORLD, _background))
        _background = None
        dist.destroy_process_group()


def fully_shard(model: Model, processes: Processes, recipe: Recipe) -> None:
    """Shard the parameters over the processes (`fsdp`, `hsdp`), block by block; before the optimizer is built."""
    if not processes.is_distributed or recipe.parallel == "ddp":
        return
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    shape = {"shard": processes.world_size}
    if recipe.parallel == "hsdp":  # groups of processes, each with one copy of the model
        size = recipe.shard_size or environment_number("LOCAL_WORLD_SIZE", processes.world_size)
        if processes.world_size % size:
            count = f"{processes.world_size} processes are not divisible by shard_size={size}"
            raise ConfigError(f"parallel='hsdp' needs groups of one size: {count}")
        shape = {"replicate": processes.world_size // size, "shard": size}
    mesh = init_device_mesh(processes.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    for part in model.blocks if isinstance(model, ViT) else model.stages:
        fsdp.fully_shard(part, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    fsdp.register_fsdp_forward_method(model, "features")


def average_buffers(model: nn.Module, processes: Processes) -> None:
    """Average the buffers over all processes: each has BatchNorm statistics of its part of the batch."""
    buffers = list(model.buffers()) if processes.is_distributed else []
    if buffers:
        means = torch.cat([buffer.flatten() for buffer in buffers]) / processes.world_size
        parts = torch.split(processes.all_reduce_sum(means), [buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, parts):
            buffer.copy_(mean.view_as(buffer))


@contextmanager
def no_sync(module: Any) -> Iterator[None]:
    """A context without gradient synchronization, for all but the last part of an accumulated batch."""
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
    """Free the full parameters that a sharded model (`fsdp`) keeps after a forward pass without a backward pass.

    Otherwise the next step would use them, although they may be the averaged weights of an evaluation.
    """
    if hasattr(model, "reshard"):
        model.reshard()  # type: ignore[operator]


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from all processes, which must all call this."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
