"""A model that carries the temperature an evaluation has fitted."""

from __future__ import annotations

from pathlib import Path

from vitruvian.errors import DataError
from vitruvian.evaluation.outcome import Evaluation
from vitruvian.model.build import Model
from vitruvian.weights.save import save


def save_calibrated(evaluation: Evaluation, model: Model, folder: Path) -> None:
    """Write the model natively with the fitted temperature, which every later prediction uses."""
    fitted = evaluation.calibration
    if fitted.temperature is None:
        raise DataError(f"{folder}: not written, as no temperature was fitted: {fitted.obstacle}")
    assert fitted.before is not None
    assert fitted.after is not None
    if fitted.after.loss >= fitted.before.loss:
        raise DataError(
            f"{folder}: not written, as temperature {fitted.temperature:.3f} does not help: cross-entropy "
            f"{fitted.before.loss:.4f} becomes {fitted.after.loss:.4f} on the images that it was not fitted on"
        )
    if evaluation.restricted:
        raise DataError(
            f"{folder}: not written, as the temperature was fitted with {evaluation.space.competing} of the model's "
            f"{evaluation.space.total} outputs; evaluate on all its classes"
        )
    model.temperature = fitted.temperature
    save(model, folder)
