"""A run put together, and taken from a position to its end: the loop, then the model, then the report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vitruvian.files import write_json
from vitruvian.model.build import Model
from vitruvian.text import describe_error
from vitruvian.training.checkpoint import Checkpoints, Position, State
from vitruvian.training.distributed import Processes, fully_shard, wrap_ddp
from vitruvian.training.given import NO_VIEWS, Views
from vitruvian.training.images import Images, TrainingBatches, validation_loader
from vitruvian.training.journal import METRICS_FILE, Journal, Listener, tell_all
from vitruvian.training.loop import Loop, StopRequest, stop_requests
from vitruvian.training.model import augment_of, model_for, objective_for
from vitruvian.training.objective import balanced_weights
from vitruvian.training.optimizer import average_for, optimizer_for
from vitruvian.training.recipe import Recipe
from vitruvian.training.report import Outcome, write_report
from vitruvian.training.run import Run
from vitruvian.training.step import Stepper

CLOSING_SECONDS = 60
"""How long a run that fails waits for a checkpoint that is being written."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """All parts of a run."""

    recipe: Recipe
    images: Images
    model: Model
    state: State
    stepper: Stepper
    batches: TrainingBatches
    views: Views

    @classmethod
    def build(
        cls, recipe: Recipe, images: Images, processes: Processes, model: Model | None = None, views: Views = NO_VIEWS
    ) -> Trainer:
        """The optimizer and the batches of a run around its model, by default that of the recipe."""
        model = (model or model_for(recipe, images.classes)).to(processes.device)
        batches = TrainingBatches(images.train, recipe, augment_of(recipe, model), processes, view=views.train_view)
        fully_shard(model, processes, recipe)
        if recipe.compile:
            model.compile()
        optimizer = optimizer_for(model, recipe)
        module = wrap_ddp(model, processes, recipe)  # which gives all processes the same weights
        stepper = Stepper(
            module,
            optimizer,
            batches=batches,
            objective=objective_for(recipe, model, images.train, processes),
            average=average_for(model, recipe, batches.total),
            class_weights=balanced_weights(images.train) if recipe.class_weights == "balanced" else None,
        )
        state = State(model, optimizer, stepper.scaler, stepper.average, recipe)
        return cls(
            recipe=recipe, images=images, model=model, state=state, stepper=stepper, batches=batches, views=views
        )

    def fit(self, folder: Path, *, position: Position, listeners: Sequence[Listener]) -> Run:
        """Run the loop from a position to the end, and save the model."""
        processes = self.batches.processes
        checkpoints = Checkpoints(Run(folder).checkpoints, processes, keep=self.recipe.keep_checkpoints)
        checkpoints.clean()
        heard = listeners if processes.is_main else ()
        with ExitStack() as stack:
            stack.callback(self.batches.close)
            stack.callback(checkpoints.close, CLOSING_SECONDS)
            view = self.views.view or self.model.meta.preprocess
            validation = stack.enter_context(validation_loader(self.images.validation, self.recipe, view, processes))
            journal = None
            if processes.is_main:
                journal = Journal(
                    folder / METRICS_FILE, heard, keep_bytes=position.journal_bytes, keep_digest=position.journal_digest
                )
                stack.callback(journal.close)
            for listener in heard:
                stack.callback(listener.finished)
                listener.started(folder=folder, steps=self.batches.total, done=position.step)
                for note in self.images.notes:
                    listener.said(note)
            parts = folder, self.stepper, self.state, position
            loop = Loop(*parts, validation=validation, checkpoints=checkpoints, journal=journal)
            loop.run(stack.enter_context(stop_requests()))
            finish(loop, self.images)
        return Run(folder)


def finish(loop: Loop, images: Images) -> None:
    """Write what is left when a run is over: the skipped images, the model, the report, and last its numbers."""
    unreadable = loop.all_unreadable()
    if loop.processes.is_main and unreadable:
        write_json(loop.folder / "unreadable.json", unreadable)
    step = loop.position.step
    with loop.averaged():
        if loop.recipe.final == "best" and loop.position.best_step != step:
            loop.take_best()
            loop.measures, step = None, loop.position.best_step
        measures = loop.measures or loop.measured(StopRequest())
        loop.save_model(loop.folder / "model")
    if loop.processes.is_main:
        early = f"no better evaluation in {loop.position.worse}" if loop.finished() else ""
        outcome = Outcome(train=images.train, measures=measures, held_out=images.validation, stopped=early)
        try:
            write_report(Run(loop.folder), outcome)
        except Exception as error:  # which costs nothing but the report
            again = f"`vit train --resume {loop.folder}` tries again"
            tell_all(loop.listeners, f"the report could not be written: {describe_error(error)}; {again}")
        Run(loop.folder).seal(loop.line("val", step) | measures.scalars())
    loop.processes.barrier()
