"""One step of training: a batch in, changed weights and a loss out, with nothing read back from the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from vitruvian.data.augment import mix, normalize
from vitruvian.data.loader import Batch
from vitruvian.data.order import generator_for, hash_words
from vitruvian.evaluation.measuring.metrics import autocast as computing_in
from vitruvian.training.distributed import average_buffers, no_sync
from vitruvian.training.images import TrainingBatches
from vitruvian.training.objective import Objective, image_weights
from vitruvian.training.optimizer import Average, set_lr
from vitruvian.training.schedule import schedule_of

# B images, K classes

DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Stepper:
    """Takes steps; the randomness of each depends on the seed, the step and the process alone."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batches: TrainingBatches,
        objective: Objective,
        average: Average | None,
        class_weights: Tensor | None = None,
    ) -> None:
        self.module, self.optimizer, self.batches, self.objective = module, optimizer, batches, objective
        self.recipe, self.augment, self.processes = batches.recipe, batches.augment, batches.processes
        self.schedule = schedule_of(self.recipe, batches.total)
        self.average = average
        self.class_weights = None if class_weights is None else class_weights.to(self.processes.device)
        self.dtype = DTYPES[self.recipe.precision]
        self.scaler = torch.amp.GradScaler(self.processes.device.type, enabled=self.recipe.precision == "float16")
        self.learning = [p for group in optimizer.param_groups for p in group["params"]]

    def take(self, batch: Batch, step: int) -> Tensor:
        """Learn from a batch; the sums of losses, of right answers and of images, (3,) on the device."""
        seed, rank = self.recipe.seed, self.processes.rank
        torch.manual_seed(int(hash_words(seed, step, rank, size=1, purpose=b"step")[0]))
        inputs = self.prepared(batch, step)
        pixels = inputs[0]
        sums = torch.zeros(3, device=pixels.device)
        sums[2] = len(pixels)
        parts = min(self.recipe.grad_accum_steps, len(pixels))
        for number, some in enumerate(zip(*(each.tensor_split(parts) for each in inputs)), 1):
            with nullcontext() if number == parts else no_sync(self.module):
                loss, correct = self.learn(*some, count=len(pixels))
            sums[0] += loss * len(pixels)
            sums[1] += correct
        self.update(step)
        return sums

    def prepared(self, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalized and perhaps mixed pixels, targets, how much each image counts and a teacher's answers."""
        device = self.processes.device
        pixels = batch.pixels.to(device, non_blocking=True)
        if not pixels.is_floating_point():  # as a view of the caller is
            pixels = normalize(pixels, self.augment)
        targets = self.objective.targets(batch, step).to(device, non_blocking=True)
        own = batch.weights.to(device, non_blocking=True)
        if self.augment.mixes:
            pixels, targets = mix(
                pixels,
                targets,
                classes=len(self.batches.source.classes),
                settings=self.augment,
                rng=generator_for(self.recipe.seed, step, 0, 0, 0),  # the same in all processes
                smoothing=self.recipe.label_smoothing,
                repeats=self.recipe.aug_repeats,
            )
        weights = image_weights(targets, own, self.class_weights)
        return pixels, targets, weights, self.objective.answers(batch, pixels)

    def learn(
        self, pixels: Tensor, targets: Tensor, weights: Tensor, answers: Tensor, *, count: int
    ) -> tuple[Tensor, Tensor]:
        """Add the gradients of a part of a batch of `count`; its share of the mean loss, and its right answers."""
        losses, correct = self.objective.judged(self.module, pixels, targets, answers, self.autocast)
        loss = (losses * weights).sum() / count
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), correct

    def update(self, step: int) -> None:
        """Change the weights by the gradients, clipped, at the learning rate of the step."""
        set_lr(self.optimizer, self.schedule.lr_at(step))
        if self.recipe.grad_clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.learning, self.recipe.grad_clip, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        average_buffers(self.module, self.processes)
        if self.average is not None:
            self.average.update(step)

    def autocast(self) -> AbstractContextManager[object]:
        return computing_in(self.processes.device, self.dtype)
