"""The report of a fine-tuning: one HTML file with every trial, the choice of the learning rate, and the result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vitruvian.evaluation.measuring.metrics import MEASURE_NAMES
from vitruvian.files import write_text
from vitruvian.report.html import PAGE, Html, facts, heading, notice, page, section, table, text, tiles
from vitruvian.text import duration
from vitruvian.training.sweep import Sweep, Trial, mean_and_std

METRICS = {key: MEASURE_NAMES[key] for key in ("top1", "mean_per_class")}


def write_sweep_report(sweep: Sweep) -> Path:
    """Write `report.html` into the sweep's folder and give its path; an older one stays until the new is complete."""
    title = f"{Path(sweep.protocol.recipe.weights).name} fine-tuned on {Path(sweep.protocol.data).name}"
    return write_text(sweep.folder / PAGE, page(title, sections(title, sweep)))


def sections(title: str, sweep: Sweep) -> Iterator[Html]:
    yield heading(title, progress(sweep))
    if sweep.values():
        yield tiles({METRICS[key]: stated(sweep, key) for key in METRICS} | lr_tile(sweep))
    failed = [trial.name for trial in sweep.trials if trial.state == "failed"]
    if failed:
        yield notice(f"Training diverged in {', '.join(failed)}; these trials do not count.")
    if sweep.dev:
        note = "Measured on images that are neither trained on nor in the result; the best learning rate is taken."
        yield section("Choosing the learning rate", trial_table(sweep, sweep.dev), note=note)
    if sweep.test:
        note = (
            f"Trained on everything else, and measured once, at the end, on {sweep.measured_on or 'held-out images'}."
        )
        yield section("Result", trial_table(sweep, sweep.test), note=note)
    yield section("Settings", facts(sweep.protocol.recipe.shown()))


def progress(sweep: Sweep) -> str:
    states = [trial.state for trial in sweep.trials]
    planned = len(sweep.dev) + sweep.protocol.seeds
    return f"{states.count('done')} of {planned} trials done" + ("" if sweep.finished else ", not finished yet")


def lr_tile(sweep: Sweep) -> dict[str, str]:
    return {"learning rate": f"{sweep.chosen_lr:g}"} if sweep.chosen_lr is not None else {}


def stated(sweep: Sweep, measure: str) -> str:
    """`91.03 ± 0.12 %` over several seeds, `91.03 %` of one."""
    found = mean_and_std(sweep.values(measure))
    if found["mean"] is None:
        return "–"
    around = "" if found["deviation"] is None else f" ± {found['deviation']:.2f}"
    return f"{found['mean']:.2f}{around} %"


def trial_table(sweep: Sweep, trials: tuple[Trial, ...]) -> Html:
    columns = ["trial", "lr", "seed", *METRICS.values(), "cross-entropy", "time", "state"]
    return table(columns, [row(sweep, trial) for trial in trials])


def row(sweep: Sweep, trial: Trial) -> list[object]:
    measures, state = trial.measures, trial.state
    link = f'<a href="{text(trial.name)}/{PAGE}">{text(trial.name)}</a>'
    numbers = [Html(f"{measures[key]:.2f}&nbsp;%") if measures else Html("–") for key in METRICS]
    loss = Html(f"{measures['loss']:.4f}") if measures else Html("–")
    seconds = duration(measures["seconds"]) if measures else "–"
    word = "chosen" if trial.kind == "dev" and trial.lr == sweep.chosen_lr else state
    name: object = Html(f"<span>{link}</span>") if state == "done" else trial.name
    return [name, Html(f"{trial.lr:g}"), trial.seed, *numbers, loss, seconds, word]
