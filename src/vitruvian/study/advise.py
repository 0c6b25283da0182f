"""Advice on a dataset: what each option is expected to reach, what it costs on this machine, and which one to take."""

import math
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from vitruvian.catalog import RECOMMENDED, find_published
from vitruvian.cost import multiply_adds, parameters
from vitruvian.data.augment import Augment, train_transform
from vitruvian.data.decode import RawImage
from vitruvian.data.doctor import diagnose
from vitruvian.data.doctor.doctor_report import image_context, suspicious_labels, thumbnail_of
from vitruvian.data.doctor.findings import MARKS, Diagnosis
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Dataset, Source, class_sizes, hold_out
from vitruvian.errors import ConfigError, DataError, MissingExtraError, VitruvianError
from vitruvian.evaluation.evaluate import evaluate_classes
from vitruvian.evaluation.features import FeatureStore, feature_rows, open_store
from vitruvian.evaluation.metrics import Interval, wilson
from vitruvian.evaluation.probe import ProbeReport, probe, probe_sources
from vitruvian.evaluation.probe_classifiers import HOLD_OUT
from vitruvian.files import write_text
from vitruvian.inference import Encoder
from vitruvian.progress import track, waiting
from vitruvian.report.html import render, short_name
from vitruvian.settings import Record, check_range
from vitruvian.text import format_bytes, plural
from vitruvian.training.initial_model import augment_for
from vitruvian.training.loop import Diverged
from vitruvian.training.planning import MIN_EPOCHS, RESERVE, VALUE_BYTES, choose_recipe, plan
from vitruvian.training.splits import subsample
from vitruvian.training.train import train
from vitruvian.weights import hub
from vitruvian.weights.load import run_facts

RECIPE = "photos"  # the default of `vit train DATA --from WEIGHTS`
MOST_MODELS, SPEED_IMAGES = 3, 16  # cached weights to compare; images that their speed is measured on
FEATURE_SHARE, TRIAL_SHARE = 0.3, 0.5  # of the time for the features of all models; of the rest for the trial
LEAST_IMAGES, LEAST_STEPS = 64, 8  # fewer say nothing
TOLERANCE = 0.5  # points of accuracy that a quicker option may lose
EXPONENT = 0.25  # of the power law by which the errors fall with the number of steps after the trial
UNSURE, VERY_UNSURE = 1.35, 2.0  # factors by which predicted errors may be too many or too few; without a trial
SHOWN, VIEWS = 24, 2  # sample images on the page, and augmented views of each
HEADINGS: tuple[str, ...] = ("option", "weights", ">expected %", "95% interval", ">minutes", ">size", ">images/s")
HEADINGS += ("license", "basis", "command")


@dataclass(frozen=True, slots=True)
class Option:
    """One way to get a model for the data, with its expected accuracy and cost."""

    name: str
    model: str
    top1: float  # expected, in percent
    interval: Interval
    is_measured: bool
    basis: str  # what it was measured on, or predicted from
    minutes: float  # on this machine, until the model is ready
    bytes: int  # of the model's weights
    images_per_second: float  # on this machine, from the file to the prediction
    license: str  # of the weights
    command: str

    @property
    def cells(self) -> tuple[str, ...]:  # under HEADINGS
        accuracy = f"{self.top1:.1f}", "{:.1f} to {:.1f}".format(*self.interval)
        basis = f"measured on {self.basis}" if self.is_measured else f"predicted from {self.basis}"
        cost = f"{self.minutes:.1f}", format_bytes(self.bytes), f"{self.images_per_second:.0f}", self.license
        return self.name, short_name(self.model), *accuracy, *cost, basis, self.command


@dataclass(frozen=True)
class Advice(Record):
    """The result of `advise`."""

    data: str
    summary: str  # size, splits and classes of the images that there was time for
    test_is: str  # description of the held-out images
    findings: tuple[str, ...]  # of the doctor
    options: tuple[Option, ...]
    more_images: str  # what twice as many training images are expected to give
    recommended: Option | None  # None if no option fits the time limit
    reason: str
    notes: list[str]
    seconds: float  # that the advice took


@dataclass(frozen=True)
class ProbedWeights:
    """Weights whose frozen features were probed."""

    encoder: Encoder
    speed: float  # images per second
    report: ProbeReport  # few-shot and linear, as far as there are enough images
    half: float  # accuracy of the linear probe on half of the training images; that on all if there are few
    share: float  # fraction of all images that is used

    @property
    def top1(self) -> float:
        return self.report.results[-1].top1

    def fewer_errors(self, before: float, after: float) -> float:
        """The logarithm of the ratio of errors at two accuracies; half an error more keeps it finite."""
        wrong = (self.report.test_images * (1 - top1 / 100) + 0.5 for top1 in (before, after))
        return math.log(next(wrong) / next(wrong))

    def with_images(self, top1: float, ratio: float) -> float:
        """The accuracy with `ratio` times the images, by a power law through the accuracies with half and with all."""
        exponent = self.fewer_errors(self.half, self.top1) / math.log(2)
        return 100 - (100 - top1) * ratio ** -min(0.5, max(0.0, exponent))

    def interval(self, top1: float, unsure: float) -> Interval:
        """Wilson's interval, widened for errors that may be up to `unsure` times more or fewer than expected."""
        count = self.report.test_images
        wrong = count * (1 - top1 / 100)
        low = count - min(count, wrong * unsure + unsure - 1)
        return wilson(low, count)[0], wilson(count - wrong / unsure, count)[1]

    def option(
        self, name: str, words: list[str], top1: float, minutes: float, basis: str, unsure: float = 1, slower: float = 1
    ) -> Option:
        """An option that was measured (`unsure` is 1), or predicted with up to `unsure` times the errors."""
        if self.share < 1 and minutes:  # training on all images
            top1, unsure = self.with_images(top1, 1 / self.share), max(unsure, UNSURE)
            basis += f", {self.share:.0%} of the images and the learning curve"
        model, published = self.encoder.name, find_published(self.encoder.name)
        license = (published and published.license) or ("Apache-2.0" if model == str(hub.BUNDLED) else "unknown")
        cost = minutes, VALUE_BYTES * parameters(self.encoder.torch_model.config), self.speed / slower
        command = shlex.join(["vit", words[0], self.report.data, *words[1:]])
        return Option(name, model, top1, self.interval(top1, unsure), unsure == 1, basis, *cost, license, command)


def advise(
    data: object, models: Sequence[str | Path] = (), *, minutes: float = 30.0, html: str | Path | None = None
) -> Advice:
    """Run cheap options on a dataset, predict expensive ones (long fine-tuning from a short one), and recommend one.

    Args:
        data: Anything `vit evaluate` accepts, with one class per image.
        models: Files, directories or published names of weights; by default those in the cache, else the bundled model.
        minutes: Time for the advice, and for each option that it may recommend.
        html: A file for the advice as a page, with sample images and doubtful labels.

    Raises:
        DataError: The data cannot be read, has several labels or numbers per image, or no class has two images.
    """
    check_range("minutes", minutes, 0.01)
    began, opened = time.monotonic(), open_dataset(data)
    sources, test_is = probe_sources(opened)
    cached = [] if models else sorted(hub.cached_names(), key=lambda name: name != RECOMMENDED)[:MOST_MODELS]
    names = [str(model) for model in models] or cached or [str(hub.BUNDLED)]
    notes = [*opened.notes, *([] if models else [f"no model given, using {', '.join(names)}"])]
    notes += [f"{name} was trained on this data: accuracy too high" for name in names if run_facts(name, opened.name)]
    encoders = [Encoder(name, engine="auto").with_task_preprocess(data, None) for name in names]
    speeds = [measure_speed(encoder, sources[0]) for encoder in encoders]
    total = sum(map(len, sources))
    share = FEATURE_SHARE * 60 * minutes / sum(total / speed for speed in speeds)
    parts = sources if share >= 1 else [subsample(part, max(LEAST_IMAGES, int(share * len(part)))) for part in sources]
    used = sum(map(len, parts))
    notes += [f"examined {used:,} of {total:,} images to stay within {minutes:g} minutes"] if used < total else []
    dataset = Dataset(name=opened.name, splits=dict(zip(("train", "test", "val"), parts)), notes=opened.notes)
    candidates = [probe_weights(dataset, *pair, share=used / total) for pair in zip(encoders, speeds)]
    options = [option for candidate in candidates for option in cheap_options(candidate, parts[1], total)]
    best = max(candidates, key=lambda candidate: candidate.top1)
    vectors = [feature_rows(best.encoder, part, open_store(best.encoder))[0] for part in parts]
    diagnosis = diagnose(dataset, vectors=np.concatenate(vectors), track=partial(track, label="examining"))
    try:
        options += finetunings(best, sources, parts, minutes, began + 60 * minutes)
    except (ConfigError, DataError, MissingExtraError, Diverged) as error:
        notes.append(f"fine-tuning could not be tried: {error}")
    findings = tuple(f"{MARKS[row.level]} {row.text}" for row in diagnosis.findings if row.level != "unchecked")
    doubled = best.with_images(best.top1, 2)
    curve = f"linear probe: {best.half:.1f}% with half of the training images, {best.top1:.1f}% with all; about "
    curve += "{:.1f}% ({:.1f} to {:.1f}) expected with twice as many".format(doubled, *best.interval(doubled, UNSURE))
    facts = opened.name, diagnosis.heading(), f"{plural(best.report.test_images, 'image')}: {test_is}", findings
    advice = Advice(*facts, tuple(options), curve, *recommend(options, minutes), notes, time.monotonic() - began)
    if html is not None:
        augment = augment_for(choose_recipe(dataset, RECIPE, weights=best.encoder.name), best.encoder.torch_model)
        write_text(Path(html), advice_page(advice, diagnosis, dataset, augment))
    return advice


def measure_speed(encoder: Encoder, source: Source) -> float:
    nothing, few = FeatureStore(None, encoder.torch_model.config.feature_width), subsample(source, SPEED_IMAGES)
    feature_rows(encoder, subsample(source, 2), nothing)  # the first images are slow
    began = time.perf_counter()
    feature_rows(encoder, few, nothing)
    return len(few) / (time.perf_counter() - began)


def probe_weights(data: Dataset, encoder: Encoder, speed: float, *, share: float) -> ProbedWeights:
    """Probe the features: few-shot and linear on all training images, and linear on half of them."""
    most = class_sizes(data.train.labels(), len(data.classes)).max()
    follow = partial(track, label=f"features of {short_name(encoder.name)}")
    report = probe(data, encoder, only=("fewshot", "linear")[: 1 + (most > 1)], track=follow)
    half = report
    if most > 3:  # of two images, one chooses the regularization
        halved = replace(data, splits={**data.splits, "train": hold_out(data.train, 0.5, 0)[0]})
        half = probe(halved, encoder, only=["linear"])
    return ProbedWeights(encoder, speed, report, half.results[-1].top1, share)


def cheap_options(probed: ProbedWeights, test: Source, total: int) -> Iterator[Option]:
    """The unchanged model, or zero-shot with words, if it knows all classes; then few-shot and linear probes."""
    model, config, basis = probed.encoder.name, probed.encoder.torch_model.config, f"{len(test):,} held-out images"
    with suppress(VitruvianError):  # it has no head, or other classes
        evaluation = evaluate_classes(Dataset(name=test.name, splits={"test": test}), probed.encoder)
        name, words = "unchanged" if config.num_classes else "zero-shot", ["evaluate", "--model", model]
        if not evaluation.left_out:
            yield probed.option(name, words, evaluation.measures.top1, 0.0, basis)
    for result in probed.report.results[-2:]:
        shots = result.setting.removesuffix("-shot")
        few = f"few-shot, {shots} per class", ["fewshot", "--shots", shots]
        name, only = few if result.probe == "few-shot" else ("linear probe", ["linear"])
        minutes = (total / probed.speed + result.seconds / probed.share) / 60  # with the features of all images
        words = ["probe", "--model", model, "--only", *only, "--save", "model"]
        yield probed.option(name, words, result.top1, minutes, basis)


def finetunings(
    probed: ProbedWeights, sources: Sequence[Source], parts: Sequence[Source], minutes: float, end: float
) -> Iterator[Option]:
    """Fine-tuning: a short run on `parts`, measured if there is time until `end`, and a longer one on `sources`."""
    name, roles = probed.report.data, ("train", "val")
    data, part = (Dataset(name=name, splits=dict(zip(roles, images))) for images in (sources, parts))
    model, config = probed.encoder.name, probed.encoder.torch_model.config
    recipe = choose_recipe(data, RECIPE, weights=model)
    with waiting("measuring a few training steps ..."):
        planned = plan(data, recipe, seconds=min(10.0, 3 * minutes))
    evaluation, step = planned.evaluation_seconds / planned.evaluations, planned.step_seconds
    head = evaluation * len(sources[0]) / len(sources[1])  # features to fit the head to
    seconds, epochs, per_epoch = planned.seconds + head, planned.epochs, planned.steps / planned.epochs
    same_images = ["--set", f"val_fraction={HOLD_OUT}"] * sources[1].name.endswith("(held out)")
    words, slower = ["train", "--from", model, *same_images], multiply_adds(planned.config) / multiply_adds(config)
    left = TRIAL_SHARE * (end - time.monotonic()) - probed.share * (head + evaluation)
    is_full, least = probed.share == 1 and seconds < left, min(LEAST_STEPS, planned.steps)
    steps = min(max(least, round(per_epoch * probed.share)), int(left / step))
    top1, done = probed.top1, 0.0  # a short fine-tuning is often worse than the probe that it starts from
    unsure, basis = VERY_UNSURE, "the linear probe, without a trial"
    if is_full or steps >= least:
        trial, began = recipe if is_full else recipe.replace(steps=steps, epochs=0, eval_every=0), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            top1 = float(train(part, recipe=trial, out=Path(folder) / "run").evaluation["top1"])
        done, took = epochs if is_full else steps / per_epoch / probed.share, (time.monotonic() - began) / 60
        name, length = f"fine-tuning, {done:.2g} epochs", [] if is_full else ["--epochs", f"{done:.2g}"]
        basis = f"{len(parts[1]):,} held-out images"
        yield probed.option(name, [*words, *length], top1, took / probed.share, basis, slower=slower)
        unsure, basis = UNSURE, f"{top1:.1f}% after {done:.2g} epochs"
    in_time = (60 * minutes * (1 - RESERVE) - head - evaluation) / (step * per_epoch)
    if seconds > 60 * minutes and in_time > max(MIN_EPOCHS, done):
        seconds, epochs, words = 60 * minutes, in_time, [*words, "--minutes", f"{minutes:g}"]
    if epochs > done:
        top1 = 100 - (100 - top1) * (done / epochs) ** EXPONENT if done else top1
        yield probed.option(f"fine-tuning, {epochs:.2g} epochs", words, top1, seconds / 60, basis, unsure, slower)


def recommend(options: Sequence[Option], minutes: float) -> tuple[Option | None, str]:
    """The best option within the time limit, or a quicker one expected to be nearly as good; and the reason."""
    in_time = [option for option in options if option.minutes <= minutes]
    if not in_time:
        return None, f"no option fits in {minutes:g} minutes: give more time, or fewer images"
    best, later = (max(some, key=lambda option: option.top1) for some in (in_time, options))
    nearly = [option for option in in_time if option.top1 >= best.top1 - TOLERANCE]
    chosen = min(nearly, key=lambda option: (round(option.minutes), -option.top1))
    rank = "the most accurate" if chosen is best else "nearly the most accurate"
    reason = f"{chosen.name} of {short_name(chosen.model)}: {rank} within {minutes:g} minutes"
    if chosen is not best:
        reason += f"; {best.name} takes {best.minutes:.1f} minutes for {best.top1 - chosen.top1:.1f} points more"
    if later.top1 > best.top1 + TOLERANCE:
        reason += f"; {later.name} is expected to reach {later.top1:.1f}% in {later.minutes:.0f} minutes"
    return chosen, reason


def advice_page(advice: Advice, diagnosis: Diagnosis, data: Dataset, augment: Augment) -> str:
    """The advice as HTML, with sample images, their augmented views, and images with doubtful labels."""
    source, samples = data.train, []
    for index in np.unique(np.linspace(0, len(source) - 1, SHOWN).astype(int)).tolist():
        augmented = (partial(augmented_view, augment=augment, seed=[seed, index]) for seed in range(VIEWS))
        views = [thumbnail_of(source, index), *(thumbnail_of(source, index, view) for view in augmented)]
        samples.append({"images": views, "label": source.label_text(index)})
    doubts = [image_context(image, data) | {"note": note} for image, _, note in suspicious_labels(diagnosis)][:SHOWN]
    return render("advise.html", title=advice.data, advice=advice, titles=HEADINGS, samples=samples, doubts=doubts)


def augmented_view(image: RawImage, augment: Augment, seed: list[int]) -> Image.Image:
    return Image.fromarray(train_transform(augment).levels(image, np.random.default_rng(seed)))
