"""The training loop: steps, metrics, evaluations and checkpoints, until the last step or a request to stop.

`Trainer` holds what a step changes (model, optimizer, gradient scaler, averaged weights) and takes the steps. `Loop`
takes a trainer from a position to the end of its run and writes the run's folder.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from vitruvian.config import Preprocess
from vitruvian.data.augment import mix, normalize_batch
from vitruvian.data.loader import Batch, Loader
from vitruvian.data.order import generator_for, hash_words
from vitruvian.data.sources import Source, take
from vitruvian.data.transform import Transform
from vitruvian.errors import Interrupted, NotFiniteError, TrainingError
from vitruvian.evaluation.metrics import score_batches
from vitruvian.evaluation.probe_classifiers import SEEDS, fit_fewshot, shuffle_classes
from vitruvian.evaluation.target_metrics import TargetMeasures
from vitruvian.files import write_json
from vitruvian.machine import choose_precision, tune_allocator
from vitruvian.model.build import Model, empty
from vitruvian.model.lora import merge_state
from vitruvian.progress import print_status
from vitruvian.targets import LOWER_IS_BETTER
from vitruvian.text import brief, describe_error
from vitruvian.training import objective
from vitruvian.training import optimizer as optim
from vitruvian.training.checkpoint import Checkpoints, Position, live_tensors, read_tensors, write_digests
from vitruvian.training.distributed import Processes, average_buffers, full_tensor, fully_shard, no_sync, reshard
from vitruvian.training.initial_model import augment_for
from vitruvian.training.integrations import Listener, notify
from vitruvian.training.masked import Colors, MaskedViT
from vitruvian.training.recipe import Recipe
from vitruvian.training.run_folder import METRICS_FILE, Journal, Line, Run, write_run
from vitruvian.training.run_report import write_report
from vitruvian.training.splits import NO_TRANSFORMS, CustomTransforms, Splits, TrainingBatches, validation_loader
from vitruvian.weights.adapter import save_adapter
from vitruvian.weights.load import assemble
from vitruvian.weights.save import save

SYNC_STEPS = 10
"""With several processes: steps between messages that decide whether to stop or to write a checkpoint."""
CLOSING_SECONDS = 60  # how long a failing run waits for a checkpoint that is being written
DIVERGED_FACTOR = 10  # a loss this many times that of the first steps, or of random predictions, will not recover


class Diverged(TrainingError):
    """The loss exploded, or the loss or the weights became NaN or infinite."""


class Trainer:
    """A model with its optimizer, batches and objective; takes training steps.

    The random numbers of a step depend only on the seed, the step and the process.
    """

    def __init__(
        self,
        recipe: Recipe,
        splits: Splits,
        processes: Processes,
        model: Model,
        transforms: CustomTransforms = NO_TRANSFORMS,
    ) -> None:
        self.recipe, self.splits, self.processes, self.transforms = recipe, splits, processes, transforms
        self.grad_accum_steps = recipe.grad_accum_steps  # more after running out of memory
        self.model = model.to(processes.device)
        self.augment = augment_for(recipe, model)
        self.batches = TrainingBatches(splits.train, recipe, self.augment, processes, transforms.train_transform)
        fully_shard(model, processes, recipe)
        if recipe.compile:
            model.compile()
        self.optimizer = optim.build_optimizer(model, recipe)
        self.module: nn.Module = model
        if processes.is_distributed and recipe.parallel == "ddp":  # gives all processes the same weights
            ids = [processes.device.index] if processes.device.type == "cuda" else None
            self.module = nn.parallel.DistributedDataParallel(model, device_ids=ids)
        self.objective: objective.Objective
        if isinstance(model, MaskedViT):
            self.objective = Colors(recipe, model, processes)
        elif splits.train.targets is not None:
            self.objective = objective.TargetRows(recipe, model, splits.train, processes)
        elif recipe.teacher:
            self.objective = objective.Distilled(recipe, model, processes)
        else:
            self.objective = objective.Labels(recipe, model, processes)
        self.schedule = optim.Schedule(recipe, self.batches.total)
        self.average: optim.Average | None = None
        if recipe.average != "none":
            start = round(recipe.polyak_start * self.batches.total)
            self.average = optim.Average(model, recipe.average, decay=recipe.ema_decay, start=start)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=self.objective.dtype is torch.float16)
        balanced = recipe.class_weights == "balanced" and splits.train.targets is None
        self.class_weights = objective.balanced_weights(splits.train).to(processes.device) if balanced else None

    # B images, K classes
    def step(self, batch: Batch, step: int) -> Tensor:
        """Train on one batch; returns the sums of losses, of the metric and of images, (3,) on the device.

        Nothing is read back from the device. The caller's random state is restored afterwards.
        """
        recipe, device = self.recipe, self.processes.device
        gpus = [device] if device.type in ("cuda", "xpu") else []  # the others have no state per device
        with torch.random.fork_rng(gpus, device_type=device.type if gpus else "cuda"):
            seed = int(hash_words(recipe.seed, step, self.processes.rank, size=1, purpose=b"step")[0])
            torch.manual_seed(seed)

            pixels = batch.pixels.to(device, non_blocking=True)
            if not pixels.is_floating_point():  # a caller's own transform returns normalized floats
                pixels = normalize_batch(pixels, self.augment)
            targets = self.objective.targets(batch, step).to(device, non_blocking=True)
            weights = batch.weights.to(device, non_blocking=True)
            if self.augment.mixes:
                pixels, targets = mix(
                    pixels,
                    targets,
                    classes=len(self.splits.classes),
                    settings=self.augment,
                    rng=generator_for(recipe.seed, step, 0, 0, 0),  # the same in all processes
                    smoothing=recipe.label_smoothing,
                    repeats=recipe.aug_repeats,
                )
            weights = objective.image_weights(targets, weights, self.class_weights)
            teacher = self.objective.teacher_logits(pixels)

            B = len(pixels)
            sums = torch.zeros(3, device=device)
            sums[2] = B
            parts = (pixels, targets, teacher, weights)
            if recipe.sam_rho:
                torch.manual_seed(seed)
            self.backward(parts, sums, seed)
            if recipe.sam_rho:
                torch.manual_seed(seed)  # the same dropout in both passes
                again = partial(self.backward, parts, torch.zeros_like(sums), seed)
                optim.sharpness_aware(self.model, again, rho=recipe.sam_rho, alpha=recipe.gsam_alpha)

            optim.set_lr(self.optimizer, self.schedule.lr_at(step))
            if recipe.grad_clip:
                self.scaler.unscale_(self.optimizer)
                parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(parameters, recipe.grad_clip, foreach=True)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            average_buffers(self.module, self.processes)
            if self.average is not None:
                self.average.update(step)
        return sums

    def backward(self, parts: tuple[Tensor, ...], sums: Tensor, seed: int) -> None:
        """Compute the gradients of a batch, and set its losses and correct ones in `sums`.

        The batch is split into `grad_accum_steps` parts, and into twice as many whenever a part needs too much memory.
        """
        B = len(parts[0])
        while True:
            try:
                return self.accumulate(parts, sums)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.processes.is_distributed or self.grad_accum_steps >= B:
                    hint = "set a larger grad_accum_steps, a smaller image_size, or grad_checkpointing=true"
                    count = f"{-(-B // self.grad_accum_steps)} of {B} images at a time"
                    raise TrainingError(f"out of memory with {count}", hint=hint) from error
            self.grad_accum_steps *= 2
            self.model.zero_grad(set_to_none=True)
            sums[:2] = 0
            torch.manual_seed(seed)
            if self.processes.device.type == "cuda":
                torch.cuda.empty_cache()

    def accumulate(self, parts: tuple[Tensor, ...], sums: Tensor) -> None:
        B = len(parts[0])
        count = min(self.grad_accum_steps, B)
        for index, (x, y, teacher, weights) in enumerate(zip(*(tensor.tensor_split(count) for tensor in parts)), 1):
            with nullcontext() if index == count else no_sync(self.module):
                losses, correct = self.objective.losses(self.module, x, y, teacher)
                loss = (losses * weights).sum() / B
                self.scaler.scale(loss).backward()
            sums[0] += loss.detach() * B
            sums[1] += correct

    def use_average(self) -> AbstractContextManager[None]:
        """A context in which the model has the averaged weights, if the recipe averages."""
        return nullcontext() if self.average is None else self.average.in_place()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name, without copying."""
        tensors = {f"model.{name}": tensor for name, tensor in live_tensors(self.model).items()}
        tensors |= optim.moments(self.optimizer, self.model, self.recipe.optimizer)
        if self.average is not None:
            tensors |= {f"average.{name}": mean for name, mean in self.average.means.items()}
        return tensors

    def restore(self, checkpoint: Path, position: Position) -> None:
        """Load the state that a checkpoint stored."""
        read_tensors(checkpoint, self.tensors(), self.processes)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(position.updates)
        if position.scaler:
            self.scaler.load_state_dict(position.scaler)

    def is_finite(self) -> bool:
        norms = torch._foreach_norm([optim.local(parameter) for parameter in self.model.parameters()])
        return bool(torch.stack(norms).isfinite().all())


class Loop:
    """Takes a trainer from a position to the end of its run, and writes the run's folder."""

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        position: Position,
        listeners: Sequence[Listener],
        deadline: float = math.inf,
    ) -> None:
        """`deadline` is a time of `time.monotonic()`, to end at; the run then has as many steps as fit."""
        self.trainer, self.run_folder, self.position, self.deadline = trainer, Run(folder), position, deadline
        self.recipe, self.processes, self.batches = trainer.recipe, trainer.processes, trainer.batches
        self.steps = self.planned = self.batches.total
        self.listeners = tuple(listeners) if self.processes.is_main else ()
        self.checkpoints = Checkpoints(self.run_folder.checkpoints, self.processes, keep=self.recipe.keep_checkpoints)
        transform = trainer.transforms.transform or trainer.model.meta.preprocess
        self.validation = validation_loader(trainer.splits.validation, self.recipe, transform, self.processes)
        self.fewshot = FewShot(self.recipe, trainer.splits.fewshot, transform, self.processes)
        self.journal: Journal | None = None
        now = time.monotonic()
        self.start_time = now - position.seconds  # as if all sessions had followed each other
        self.line_time = now  # of the last line of training metrics, later by the evaluations since then
        self.checkpoint_time = now
        self.check_time = now + (deadline - now) / 5  # when to see whether the run will end at its deadline
        self.sums: list[Tensor] = []  # results of the steps since the last read from the device
        self.metrics: objective.ValidationMetrics | None = None  # the last evaluation in this session
        self.scalars: dict[str, float] = {}  # its numbers, with the few-shot accuracy

    def run(self) -> Run:
        """Train to the last step, then write the model and the report.

        Raises:
            Interrupted: a signal asked to stop; the checkpoint of the last step is written.
            Diverged: the loss exploded, or the loss or the weights became NaN or infinite. The model then has the best
                weights before that, if there was an evaluation.
        """
        with tune_allocator(keep_freed=not self.recipe.grad_checkpointing), ExitStack() as stack:
            stop = self.start(stack)
            try:
                self.train(stop)
            except Diverged as error:
                if not self.can_rescue():
                    raise error.replace(hint="no weights were saved") from None
                self.finish(diverged=error.reason)
                saved = f"saved the weights of step {self.position.best_step}, the best so far"
                raise error.replace(hint=f"{saved}, in {self.run_folder.folder}") from None
            self.write_checkpoint(wait=True)
            self.finish()
        return self.run_folder

    def train(self, stop: StopRequest) -> None:
        """Train to the last step or until early stopping."""
        position = self.position
        if position.step and self.is_evaluation_due() and position.evaluated != position.step:
            self.evaluate(stop)  # the run was stopped during this evaluation
        for batch in self.batches.from_step(position.step):
            if self.is_early_stop() or position.step >= self.steps:
                break
            before = self.trainer.grad_accum_steps
            self.sums.append(self.trainer.step(batch, position.step))
            if self.trainer.grad_accum_steps != before:
                count = f"splitting each batch into {self.trainer.grad_accum_steps} parts (grad_accum_steps)"
                notify(self.listeners, f"out of memory in step {position.step + 1}: {count}")
            position.step += 1
            position.unreadable.update(batch.unreadable)
            # A resumed run repeats this order.
            for listener in self.listeners:
                listener.stepped(position.step)
            if position.step % self.recipe.log_every == 0 or position.step == self.steps:
                self.record_training()
                self.keep_deadline()
            if self.is_evaluation_due():
                self.evaluate(stop)
            signal_number, is_due = self.agree_on_checkpoint(stop)
            if signal_number or is_due:
                self.write_checkpoint(wait=bool(signal_number))
            if signal_number and position.step < self.steps:
                self.interrupt(signal_number)

    def keep_deadline(self) -> None:
        """Fit the number of steps, at most the planned one, to the time that is left; the lr then decays within it."""
        if math.isinf(self.deadline) or self.position.step == self.steps:
            return
        before, run, steps = self.steps, self.run_folder, self.processes.broadcast(self.steps_in_time())
        if abs(steps - before) <= before / 20:
            return
        self.steps, self.trainer.schedule = steps, optim.Schedule(self.recipe, steps)
        self.batches.total = steps
        if self.processes.is_main:
            write_run(run.folder, run.recipe.replace(steps=steps), run.facts | {"steps": steps})
        notify(self.listeners, f"to meet the time limit: {steps:,} steps instead of {before:,}")

    def steps_in_time(self) -> int:
        """The number of steps that ends at the deadline, from the time of the steps so far."""
        now, done = time.monotonic(), self.position.step
        if now < self.check_time:
            return self.steps
        self.check_time = now + (self.deadline - now) / 5
        left = (self.deadline - now) * done / max(now - self.start_time, 1e-9)
        left -= self.validation.steps_per_epoch / 2  # the last evaluation, which has no backward passes
        return min(self.planned, done + max(1, int(left)))

    def can_rescue(self) -> bool:
        """Whether the best weights before a divergence can be saved; with FSDP, only some processes may notice it."""
        is_same = not self.processes.is_distributed or self.recipe.parallel == "ddp"
        best = self.run_folder.best(self.position.best_step)
        return is_same and self.recipe.objective == "labels" and self.position.best_step > 0 and best.is_dir()

    def start(self, stack: ExitStack) -> StopRequest:
        """Open the journal, notify the listeners and handle signals until the stack is closed."""
        position = self.position
        self.checkpoints.clean()
        stack.callback(self.checkpoints.close, CLOSING_SECONDS)
        for loader in (self.batches.loader, self.validation, *self.fewshot.loaders):
            stack.enter_context(loader)
        if self.processes.is_main:
            path = self.run_folder.folder / METRICS_FILE
            self.journal = Journal(path, position.journal_bytes, position.journal_digest)
            stack.callback(self.journal.close)
        for listener in self.listeners:
            stack.callback(listener.finished)
            listener.started(folder=self.run_folder.folder, steps=self.steps, done=position.step)
            for note in self.trainer.splits.notes:
                listener.said(note)
        return stack.enter_context(StopRequest())

    def is_early_stop(self) -> bool:
        return bool(self.recipe.patience) and self.position.worse >= self.recipe.patience

    def is_evaluation_due(self) -> bool:
        return self.position.step % self.batches.per_evaluation == 0 or self.position.step == self.steps

    def agree_on_checkpoint(self, stop: StopRequest) -> tuple[int, bool]:
        """The signal that asks to stop (0: none) and whether a checkpoint is due, the same in all processes."""
        every = self.recipe.checkpoint_steps
        is_due = bool(every) and self.position.step % every == 0
        is_late = time.monotonic() - self.checkpoint_time > self.recipe.checkpoint_seconds
        if not self.processes.is_distributed:
            return stop.number, is_due or is_late
        if self.position.step % SYNC_STEPS and self.position.step < self.steps:
            return 0, is_due
        vote = max(self.processes.all_gather(2 * stop.number + (is_late and self.processes.is_main)))
        return vote // 2, is_due or bool(vote % 2)

    def interrupt(self, signal_number: int) -> None:
        again = f"continue with `vit train --resume {self.run_folder.folder}`"
        raise Interrupted(f"stopped after step {self.position.step} of {self.steps}; {again}", signal_number)

    def settle(self) -> None:
        """All-reduce the results of the steps since the last call; raises Diverged on a non-finite loss."""
        if not self.sums:
            return
        rows = self.processes.all_reduce_sum(torch.stack(self.sums)).tolist()
        first = self.position.step - len(rows)
        self.sums.clear()
        for step, (loss, _, _) in enumerate(rows, first):
            if not math.isfinite(loss):
                self.diverge(step, f"the loss of step {step + 1} is NaN or infinite")
        self.position.pending += rows
        if self.position.first_loss is None:
            self.position.first_loss = rows[0][0] / rows[0][2]

    def diverge(self, step: int, reason: str) -> None:
        checkpoints = self.checkpoints.all()
        last = f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"
        problem = f"{reason}; the batch was {brief(self.batches.keys(step), 8)}; {last}"
        raise Diverged(problem, hint="try a lower lr, grad_clip=1, or precision=float32 or bfloat16")

    def record_training(self) -> None:
        self.settle()
        loss, total, images = (sum(column) for column in zip(*self.position.pending))
        self.position.pending.clear()
        now = time.monotonic()
        seconds, self.line_time = now - self.line_time, now
        kind = self.trainer.objective
        self.record(
            "train",
            loss=loss / images,
            **{kind.metric: kind.unit * total / images},
            lr=self.trainer.schedule.lr_at(self.position.step - 1),
            images_per_second=round(images / max(seconds, 1e-9), 1),
        )
        self.check_loss(loss / images)

    def check_loss(self, loss: float) -> None:
        """Raise Diverged if a loss is far above that of the first step and of random predictions."""
        first = self.position.first_loss or 0.0
        if loss > DIVERGED_FACTOR * max(first, 1 + math.log(len(self.trainer.splits.classes))):
            reason = f"training diverged: the loss was {first:.4g} at first and is {loss:.4g}"
            raise Diverged(f"{reason} after step {self.position.step}", hint="try a lower lr, or grad_clip=1")

    def record(self, split: str, **values: float) -> None:
        line = self.line(split, self.position.step) | values
        if self.journal is not None:
            self.journal.record(line)
        for listener in self.listeners:
            listener.recorded(line)

    def line(self, split: str, step: int) -> Line:
        seconds = round(time.monotonic() - self.start_time, 2)
        return {"step": step, "epoch": step / self.batches.per_epoch, "split": split, "seconds": seconds}

    def evaluate(self, stop: StopRequest) -> None:
        """Evaluate the (averaged) weights, and save them if they are the best so far and the recipe needs the best."""
        self.settle()
        position, began = self.position, time.monotonic()
        try:
            with self.trainer.use_average():
                self.metrics = self.measure(stop)
                self.record("val", **self.scalars)
                self.check_loss(self.metrics.loss)
                value = self.scalars.get(self.recipe.monitor, -math.inf)
                value = -value if self.recipe.monitor in LOWER_IS_BETTER else value
                if position.best is not None and value <= position.best:
                    position.worse += 1
                else:
                    position.best, position.best_step, position.worse = value, position.step, 0
                    # The last steps may diverge, so the best weights are kept in any case.
                    is_rescue = position.step < self.steps and self.recipe.objective == "labels"
                    if self.recipe.final == "best" or is_rescue:
                        self.save_best(self.run_folder.best(position.step))
        except EvaluationStopped:
            self.write_checkpoint(wait=True)
            self.interrupt(stop.number)
        except NotFiniteError:  # after the last step, no later loss would show it
            if self.processes.is_distributed and self.trainer.is_finite():
                raise  # perhaps in this process alone: it ends, and the others with it
            self.diverge(position.step - 1, f"the weights after step {position.step} give NaN or infinite outputs")
        position.evaluated = position.step
        self.line_time += time.monotonic() - began

    def measure(self, stop: StopRequest | None = None) -> objective.ValidationMetrics:
        """Evaluate the weights on the validation images; a single process stops between batches when asked to."""

        def batches(loader: Loader) -> Iterator[Batch]:
            for batch in loader.batches(0):
                if stop is not None and stop.number and not self.processes.is_distributed:
                    raise EvaluationStopped
                self.position.unreadable.update(batch.unreadable)
                yield batch

        try:
            images, all_ranks = len(self.validation.source), self.processes.is_distributed
            metrics = self.trainer.objective.evaluate(batches(self.validation), images, all_ranks=all_ranks)
            self.scalars = metrics.scalars() | self.fewshot.scalars(self.trainer.model, batches)
            return metrics
        finally:
            reshard(self.trainer.model)

    def save_model(self) -> None:
        """Gather the current weights from all processes and save them as a native model directory.

        LoRA's updates are merged, and also saved alone as an adapter.
        """
        model = self.trainer.model
        left_out = MaskedViT.own_names if isinstance(model, MaskedViT) else ()
        tensors = gather({name: tensor for name, tensor in model.state_dict().items() if name not in left_out})
        meta = model.meta
        if isinstance(self.metrics, TargetMeasures):
            meta = meta.replace(target=self.metrics.fit())
        if self.processes.is_main:
            save(assemble(empty(model.config), merge_state(model, tensors), meta), self.run_folder.folder / "model")
            if self.recipe.lora.rank:
                save_adapter(model, self.run_folder.folder / "adapter", base=self.recipe.weights, tensors=tensors)
        self.processes.barrier()

    def save_best(self, folder: Path) -> None:
        """Save what training changes under its own names, from which `finish` can restore it."""
        tensors = gather(self.trained())
        if self.processes.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "trained.safetensors")
            write_digests(folder)
        self.processes.barrier()

    def trained(self) -> dict[str, Tensor]:
        """The tensors that training changes: with LoRA, not the frozen weights."""
        tensors = live_tensors(self.trainer.model)
        names = {name for name, _ in optim.trainable(self.trainer.model)} if self.recipe.lora.rank else tensors
        return {name: tensor for name, tensor in tensors.items() if name in names}

    def write_checkpoint(self, *, wait: bool) -> None:
        """Save everything needed to continue from here; `wait` until it is on disk."""
        self.settle()
        position = self.position
        if not self.trainer.is_finite():
            self.diverge(position.step - 1, f"the weights after step {position.step} are NaN or infinite")
        # With float16 there are fewer updates than steps, because overflowing ones are skipped.
        states = self.trainer.optimizer.state.values()
        position.updates = max((int(state["step"].item()) for state in states if "step" in state), default=0)
        position.scaler = self.trainer.scaler.state_dict()
        position.unreadable = self.all_unreadable()
        position.seconds = time.monotonic() - self.start_time
        if self.journal is not None:
            position.journal_bytes, position.journal_digest = self.journal.sync(), self.journal.digest()
        self.checkpoints.settle()  # the previous one, whose best weights must not be removed before
        if self.processes.is_main:
            self.checkpoints.remove_worse(self.run_folder.best(0).parent, position.best_step)
        wait = wait or not self.recipe.async_checkpoint
        self.checkpoints.write(position.step, self.trainer.tensors(), asdict(position), wait=wait)
        self.checkpoint_time = time.monotonic()

    def all_unreadable(self) -> dict[str, str]:
        """The images that any process could not read, with the reasons."""
        parts = self.processes.all_gather(self.position.unreadable)
        return {key: reason for part in parts for key, reason in part.items()}

    def finish(self, diverged: str = "") -> None:
        """Write the skipped images, the model and the report, and last `result.json`, which marks the run as done.

        A run that diverged gets the best weights.
        """
        run, splits, position = self.run_folder, self.trainer.splits, self.position
        unreadable = self.all_unreadable()
        if self.processes.is_main and unreadable:
            write_json(run.folder / "unreadable.json", unreadable)
        step = position.step
        with self.trainer.use_average():
            if (self.recipe.final == "best" or diverged) and position.best_step != step:
                read_tensors(run.best(position.best_step), self.trained(), self.processes)
                self.metrics, step = None, position.best_step
            metrics = self.metrics = self.metrics or self.measure()
            self.save_model()
        if self.processes.is_main:
            early = diverged or (f"no better evaluation in {position.worse}" if self.is_early_stop() else "")
            try:
                write_report(run, splits.train, held_out=splits.validation, measures=metrics, stopped=early)
            except Exception as error:  # the model is still good
                again = f"`vit train --resume {run.folder}` tries again"
                notify(self.listeners, f"the report could not be written: {describe_error(error)}; {again}")
            ends = metrics.headline_interval() if isinstance(metrics, TargetMeasures) else {}
            run.seal(self.line("val", step) | self.scalars | ends, diverged)
            is_elsewhere = position.best_step != position.step or bool(self.recipe.lora.rank)
            run.remove_old(self.recipe, keep_best=self.recipe.final == "best" and is_elsewhere)
        self.processes.barrier()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU, or the allocator of the CPU, ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)


def gather(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with the shards of all processes, on the CPU."""
    return {name: full_tensor(tensor.detach()).cpu() for name, tensor in tensors.items()}


class EvaluationStopped(Exception):
    """A signal stopped an evaluation."""


class StopRequest:
    """A context in which SIGTERM and SIGINT become a request to stop; only the main thread can receive them.

    Under torchrun the end of its agent asks, too: it sends no signal.
    """

    def __init__(self) -> None:
        self.received = 0
        self.agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def __enter__(self) -> StopRequest:
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        self.handlers = {number: signal.signal(number, self.receive) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    @property
    def number(self) -> int:
        """The signal, or 0."""
        if self.agent is not None and not self.received and os.getppid() != self.agent:
            print_status("torchrun's agent has ended: stopping")
            self.received = signal.SIGTERM
        return self.received

    def receive(self, number: int, _: FrameType | None) -> None:
        if self.received:  # asked twice: stop at once
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number


class FewShot:
    """Few-shot accuracy at every evaluation (`eval_fewshot`): least squares on a few images per class."""

    def __init__(
        self, recipe: Recipe, sources: Sequence[Source], transform: Preprocess | Transform, processes: Processes
    ) -> None:
        """`sources` are the images to choose the shots from and to test on, or none."""
        self.processes = processes
        self.dtype = objective.DTYPES.get(choose_precision(recipe.precision, str(processes.device)))
        self.loaders: list[Loader] = []
        self.draws: list[NDArray[np.int64]] = []  # the images of each seed, as positions in the first loader's source
        if not sources:
            return
        train, test = sources
        self.num_classes = len(train.classes)
        labels = np.asarray(train.labels(), np.int64)
        shots, count = recipe.fewshot_shots, self.num_classes
        draws = [np.concatenate([o[:shots] for o in shuffle_classes(labels, classes=count, seed=s)]) for s in SEEDS]
        used = np.unique(np.concatenate(draws))  # only these need features
        self.draws = [np.searchsorted(used, draw) for draw in draws]
        parts = (take(train, used, train.name), test)
        self.loaders = [validation_loader(part, recipe, transform, processes) for part in parts]

    def scalars(self, model: Model, batches: Callable[[Loader], Iterator[Batch]]) -> dict[str, float]:
        """The accuracy in percent, averaged over the seeds, as `fewshot`; empty without images to measure it on."""
        if not self.loaders:
            return {}
        (x, y), (test, truth) = (self.features(model, loader, batches(loader)) for loader in self.loaders)
        is_read = truth >= 0
        accuracies = []
        for draw in (draw[y[draw] >= 0] for draw in self.draws):
            classifier = fit_fewshot(x[draw], y[draw], classes=self.num_classes)
            accuracies.append(100.0 * float((classifier.predictions(test[is_read]) == truth[is_read]).mean()))
        return {"fewshot": float(np.mean(accuracies))}

    def features(
        self, model: Model, loader: Loader, batches: Iterator[Batch]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Features (n, F) and labels (n,) of all images, from all processes; an unreadable image has the label -1."""

        def columns(features: Tensor, batch: Batch) -> tuple[Tensor, ...]:
            return batch.indices, batch.labels, features.float().cpu()

        device, all_ranks = self.processes.device, self.processes.is_distributed
        options: Any = {"device": device, "dtype": self.dtype, "all_ranks": all_ranks, "forward": model.features}
        indices, truth, values = score_batches(model, batches, columns, **options)
        labels = np.full(len(loader.source), -1, np.int64)
        features = np.zeros((len(labels), model.config.feature_width), np.float32)
        labels[indices], features[indices] = truth, values
        return features, labels
