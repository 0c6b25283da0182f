"""Evaluations: every image counted, numbers that repeat, and what is printed and written."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import typer
from colors import make_colors, tiny_model
from mappings import make_mappings
from PIL import Image
from typer.testing import CliRunner

import vitruvian
from vitruvian.cli.evaluate import evaluate as command
from vitruvian.config import Preprocess
from vitruvian.data.formats import open_dataset
from vitruvian.data.preprocess import preprocess_image
from vitruvian.data.sources import Subset
from vitruvian.errors import ConfigError, DataError, VitruvianError
from vitruvian.evaluation.calibration import Calibration
from vitruvian.evaluation.evaluate import evaluate, save_calibrated
from vitruvian.evaluation.features import FeatureStore, compute_features
from vitruvian.evaluation.probe_classifiers import fit_linear
from vitruvian.evaluation.report import write_evaluation
from vitruvian.inference import Classifier, Encoder
from vitruvian.training import train
from vitruvian.weights.load import load
from vitruvian.weights.save import save

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(command)


def vit_evaluate(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def color_model(**changes):
    model = tiny_model(**changes)
    model.meta = model.meta.replace(labels=("red", "green", "blue"))
    return model


@pytest.fixture
def weights(tmp_path):
    save(color_model(), tmp_path / "weights")
    return tmp_path / "weights"


@pytest.fixture
def photos(tmp_path):
    return make_colors(tmp_path / "photos", {"train": 2, "test": 17}, noise=60.0)


def test_every_image_is_counted_once_and_as_predictions_have_it(photos):
    classifier, source = Classifier(color_model()), open_dataset(photos).splits["test"]
    found = evaluate(photos, classifier, batch_size=16)  # 51 images: the last batch is short
    answers = classifier.predict([source.read(i) for i in range(51)], top=3)
    truth = [source.classes[source.label(i)] for i in range(51)]
    right = [ranked[0].label == label for ranked, label in zip(answers, truth)]
    assert found.measures.count == 51
    assert [found.measures.top1, found.accuracies["top1_among_all_outputs"]] == pytest.approx(
        [100 * np.mean(right)] * 2
    )
    own = [next(a.probability for a in ranked if a.label == label) for ranked, label in zip(answers, truth)]
    assert found.measures.loss == pytest.approx(-np.mean(np.log(own)), rel=1e-5)  # probabilities in float32
    assert found.space.classes == ("blue", "green", "red")
    assert found.measures.class_counts.tolist() == [17, 17, 17]


def test_mirror_images_are_averaged_whether_a_model_or_a_classifier_is_given(photos):
    plain, mirrored, given = (
        evaluate(photos, model, flip=flip)
        for model, flip in ((color_model(), False), (color_model(), True), (Classifier(color_model()), True))
    )
    assert plain.measures.loss != mirrored.measures.loss
    assert given.measures.loss == mirrored.measures.loss


def test_two_evaluations_agree_to_the_last_digit_and_another_seed_changes_only_intervals(photos):
    one, same, other = (evaluate(photos, color_model(), seed=seed).to_json() for seed in (0, 0, 1))
    assert json.dumps(one) == json.dumps(same)
    assert one["intervals"] != other["intervals"]
    assert one["loss"] == other["loss"]


def test_numbers_lie_inside_their_intervals(photos):
    found = evaluate(photos, color_model()).to_json()
    for name in ("top1", "top5", "mean_per_class", "top1_among_all_outputs"):
        low, high = found["intervals"][name]
        assert low <= found[name] <= high


def test_the_split_is_test_then_val_then_what_there_is_or_the_one_named(tmp_path):
    classifier = color_model()
    for splits, wanted in ((("train", "val", "test"), "test"), (("train", "val"), "val"), (("train",), "train")):
        folder = make_colors(tmp_path / wanted, dict.fromkeys(splits, 1))
        assert evaluate(folder, classifier).split == wanted
    assert evaluate(tmp_path / "test", classifier, split="dev").split == "val"
    with pytest.raises(DataError, match="no split 'holdout', only train, val, test"):
        evaluate(tmp_path / "test", classifier, split="holdout")


@pytest.mark.slow
def test_images_that_the_model_was_trained_on_are_said(tmp_path, monkeypatch):
    photos = make_colors(tmp_path / "photos", {"train": 4}) / "train"
    settings = ["epochs=1", "image_size=16", "workers=0"]
    run = train(photos, model="ViT-Ti/16", out=tmp_path / "run", settings=settings, progress=False)
    monkeypatch.chdir(tmp_path)
    for data, model in ((photos, run.folder), ("photos/train/", "run/model")):
        (note,) = evaluate(data, model).notes
        assert note.startswith("the model was trained on 9 of these images; ")
        assert note.endswith("run/report.html")
    assert not evaluate(shutil.copytree(photos, tmp_path / "others"), run.folder).notes


def test_a_temperature_is_fitted_on_the_split_val_where_test_is_evaluated(tmp_path):
    folder = make_colors(tmp_path / "photos", {"val": 10, "test": 12}, noise=60.0)
    found = evaluate(folder, color_model()).calibration
    assert found.fitted_on == "30 images of the split 'val'"
    assert found.before.count == found.now.count == 36


def test_unreadable_images_are_listed_and_not_counted(photos):
    (photos / "test" / "red" / "000.png").write_bytes(b"junk")
    found = evaluate(photos, color_model())
    assert found.measures.count == 50
    assert [image.key for image in found.unreadable] == ["test/red/000.png"]
    for path in list((photos / "test").rglob("*.png"))[:20]:
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"2[01] of 51 images cannot be read, more than 25%, such as test/"):
        evaluate(photos, color_model())
    for path in (photos / "test").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"no image can be read, such as test/blue/000.png: the file is empty"):
        evaluate(photos, color_model())


def test_broken_weights_name_the_image(photos):
    model = color_model()
    torch.nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(VitruvianError, match=r"test/blue/000.png: the model produced NaN or infinite outputs"):
        evaluate(photos, Classifier(model))


def test_real_labels_go_by_the_images_names_and_all_1000_classes(tmp_path):
    model = tiny_model(num_classes=1000)
    for number, name in enumerate(("7", "3", "3")):
        (tmp_path / "val" / name).mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", (16, 16), (50 * number, 100, 200 - 50 * number))
        image.save(tmp_path / "val" / name / f"ILSVRC2012_val_0000000{number + 1}.png")
    classifier = Classifier(model)
    paths = sorted((tmp_path / "val").rglob("*.png"), key=lambda path: path.name)
    best = [ranked[0].index for ranked in classifier.predict(paths, top=1)]
    real = [[best[0], 999], [(best[1] + 1) % 1000], []]
    (tmp_path / "real.json").write_text(json.dumps(real))
    found = evaluate(tmp_path, classifier, real=tmp_path / "real.json")
    assert (found.real, len(found.right["real"]), found.restricted) == (50.0, 2, True)
    with pytest.raises(DataError, match="ReaL labels need a model with all classes of ImageNet-1k"):
        evaluate(make_colors(tmp_path / "p", {"": 1}), color_model(), real=tmp_path / "real.json")


def test_the_table_has_numbers_with_intervals(weights, photos):
    ran = vit_evaluate(photos, "--model", weights)
    assert ran.exit_code == 0, ran.output
    first, _, top1, per_class, error, *_ = ran.stdout.splitlines()
    assert first.startswith("51 images of the split 'test', 3 classes matched with the model's outputs by the model's")
    found = evaluate(photos, Classifier(weights))
    assert top1.split()[:3] == ["top-1", "accuracy", f"{found.measures.top1:.2f}"]
    low, high = found.intervals["top1"]
    assert top1.split()[3:] == [f"{low:.2f}", "to", f"{high:.2f}"]
    assert per_class.startswith("mean per class")
    assert error.startswith("calibration error")


def test_json_and_report_hold_every_number_and_escape_names(weights, photos, tmp_path):
    (photos / "test" / "red" / "<b>.png").write_bytes(b"junk")
    ran = vit_evaluate(photos, "--model", weights, "--json", "--out", tmp_path / "out")
    assert ran.exit_code == 0, ran.output
    assert "not counted: 1 unreadable image" in ran.stderr
    printed = json.loads(ran.stdout)
    assert printed == json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert sum(count for *_, count in printed["confusion"]) == printed["count"] == 51
    page = (tmp_path / "out" / "report.html").read_text()
    for part in ("Accuracy", "Calibration", "Confusion matrix", "Most confident mistakes", "test/red/&lt;b&gt;.png"):
        assert part in page
    assert "<b>.png" not in page


def overconfident(folder, photos):
    """A head that knows the colors and is ten times too sure of it."""
    model = color_model()
    source = open_dataset(photos).splits["test"]
    model.meta = model.meta.replace(labels=source.classes)
    seen = compute_features(Encoder(model), source, FeatureStore(None, 16))
    fitted = fit_linear(*seen.examples, classes=3, l2=0.01)
    weights = 10 * fitted.weights[:-1] / fitted.std[:, None]
    with torch.no_grad():
        model.head.weight.copy_(weights.T)
        model.head.bias.copy_(10 * fitted.weights[-1] - fitted.mean @ weights)
    save(model, folder)
    return folder


@pytest.mark.slow
def test_a_fitted_temperature_is_saved_with_the_model_and_used_by_predictions(tmp_path):
    photos = make_colors(tmp_path / "photos", {"test": 40}, noise=300.0)
    ran = vit_evaluate(
        photos, "--model", overconfident(tmp_path / "sure", photos), "--calibrated", tmp_path / "calibrated"
    )
    assert ran.exit_code == 0, ran.output
    before, after = (load(tmp_path / name) for name in ("sure", "calibrated"))
    assert after.meta.temperature > 1.5
    found = evaluate(photos, Classifier(after))
    assert found.calibration.now.temperature == after.meta.temperature
    assert found.calibration.now.loss < evaluate(photos, Classifier(before)).calibration.now.loss
    images = sorted(photos.rglob("*.png"))
    sure, mild = ([best for (best,) in Classifier(model).predict(images, top=1)] for model in (before, after))
    assert [answer.index for answer in sure] == [answer.index for answer in mild]
    assert np.mean([answer.probability for answer in sure]) > 0.02 + np.mean([answer.probability for answer in mild])


def test_a_temperature_that_could_not_be_fitted_is_not_saved(tmp_path):
    save(color_model(), tmp_path / "few")
    few = make_colors(tmp_path / "little", {"test": 2})
    ran = vit_evaluate(few, "--model", tmp_path / "few", "--calibrated", tmp_path / "out")
    assert "not written, no temperature fitted: 3 images are too few" in str(ran.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [(), ("--split", "train", "--seed", 3, "--batch-size", 4)])
def test_python_gives_the_numbers_of_the_command(weights, photos, options):
    ran = vit_evaluate(photos, "--model", weights, "--json", *options)
    named = {"split": "train", "seed": 3, "batch_size": 4} if options else {}
    assert json.loads(ran.stdout) == json.loads(
        json.dumps(vitruvian.evaluate(str(photos), str(weights), **named).to_json())
    )


def test_a_torch_dataset_and_a_view_of_ones_own_are_measured_alike(photos):
    source = open_dataset(photos).splits["test"]

    class Photos(torch.utils.data.Dataset):
        classes = source.classes

        def __len__(self):
            return len(source)

        def __getitem__(self, index):
            return Image.open(io.BytesIO(source.read(index))), source.label(index)

    model = color_model()
    usual, own = (
        evaluate(photos, model),
        evaluate(Photos(), model, preprocess=lambda image: preprocess_image(image, model.meta.preprocess)),
    )
    assert own.measures.scalars() == usual.measures.scalars()
    assert own.to_json()["preprocess"].endswith("<lambda>")
    upside_down = evaluate(photos, model, preprocess=lambda image: -preprocess_image(image, model.meta.preprocess))
    assert upside_down.measures.loss != usual.measures.loss


def test_a_view_that_gives_no_tensor_is_named(photos):
    with pytest.raises(
        ConfigError, match=r"the transform returned PngImageFile, expected a float tensor \(channels, rows, columns\)"
    ):
        evaluate(photos, color_model(), preprocess=lambda image: image)


@pytest.mark.slow
def test_a_dataset_of_hugging_face_is_measured(photos):
    datasets = pytest.importorskip("datasets")
    source = open_dataset(photos).splits["test"]
    columns = {"image": [{"bytes": source.read(i), "path": None} for i in range(51)], "label": source.labels().tolist()}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(source.classes))})
    found = evaluate(datasets.Dataset.from_dict(columns, features=features), color_model())
    assert found.measures.scalars() == evaluate(photos, color_model()).measures.scalars()


def vtab_kitti(root, model):
    """A task whose own view squashes images, with four classes; two of three labels are the model's answers."""
    classifier = Classifier(model).with_preprocess(model.meta.preprocess.with_changes({"fit": "squash"}))
    folder = root / "vtab-1k" / "kitti"
    rng = np.random.default_rng(0)
    for name, each in (("train800", 1), ("val200", 12), ("test", 6)):
        lines = []
        (folder / name).mkdir(parents=True)
        for number in range(4 * each):
            pixels = rng.integers(0, 256, (12, 20, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
            ((best,),) = classifier.predict([pixels], top=1)
            lines.append(f"{name}/{number}.png {best.index if number % 3 else number % 4}")
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return root


def test_a_tasks_view_is_used_and_not_saved_with_the_calibrated_model(tmp_path, monkeypatch):
    model = tiny_model(num_classes=4)
    model.meta = model.meta.replace(preprocess=Preprocess(image_size=16, fit="crop", scaled_size=18))
    with torch.no_grad():
        model.head.weight.mul_(20)  # so sure of itself that any temperature above 1 helps
    save(model, tmp_path / "weights")
    monkeypatch.setenv("VITRUVIAN_DATA", str(vtab_kitti(tmp_path / "data", model)))
    ran = vit_evaluate("vtab-kitti", "--model", tmp_path / "weights", "--json", "--calibrated", tmp_path / "out")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["preprocess"]["fit"] == "squash"
    saved = load(tmp_path / "out")
    assert saved.meta.preprocess == model.meta.preprocess
    assert saved.meta.temperature > 1
    other = evaluate("vtab-kitti", model, preprocess=model.meta.preprocess)
    assert other.measures.loss != json.loads(ran.stdout)["loss"]


def test_a_report_is_titled_by_the_file_or_by_what_the_model_is(photos, weights, tmp_path):
    for model, title in (
        (weights, "weights on photos"),
        (color_model(), "ViT of depth 1, width 16, patch 8 on photos"),
    ):
        page = write_evaluation(evaluate(photos, model), tmp_path / "out").read_text()
        assert f"<h1>{title}</h1>" in page


def test_a_head_for_other_classes_says_what_to_do(weights):
    ran = vit_evaluate("digits", "--model", weights)
    assert "10 of 10 classes of the data are not among the model's 3, such as '0', '1', '2', ..." in str(ran.exception)
    assert "list the names in a file classes.txt beside the data" in str(ran.exception)
    assert "vit probe" in str(ran.exception)


def test_a_temperature_that_makes_other_images_worse_is_not_saved(tmp_path, photos):
    found = evaluate(photos, color_model())
    before, after = (replace(found.calibration.now, loss=loss) for loss in (1.0, 1.25))
    worse = replace(found, calibration=Calibration(now=before, temperature=2.0, before=before, after=after))
    with pytest.raises(DataError, match=r"temperature 2.000 does not help: cross-entropy 1.0000 becomes 1.2500"):
        save_calibrated(worse, tmp_path / "out")
    better = replace(found, calibration=Calibration(now=before, temperature=2.0, before=after, after=before))
    four = replace(better, space=replace(found.space, total=4))
    with pytest.raises(DataError, match="fitted with 3 of the model's 4 outputs; evaluate on all its classes"):
        save_calibrated(four, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    save_calibrated(better, tmp_path / "out")
    assert load(tmp_path / "out").meta.temperature == 2.0


def test_objectnet_is_evaluated_with_the_mappings_beside_its_images(tmp_path):
    make_mappings(tmp_path)
    for number, name in enumerate(("alarm_clock", "chair", "comb")):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16), (80 * number, 100, 90)).save(tmp_path / "images" / name / "a.png")
    model = tiny_model(num_classes=1000)
    with torch.no_grad():
        model.head.bias[530] += 1000.0  # a digital clock, always
    save(model, tmp_path / "weights")
    ran = vit_evaluate(tmp_path / "images", "--model", tmp_path / "weights", "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert (found["count"], found["left_out"], found["top1"], found["top1_among_all_outputs"]) == (2, 1, 50.0, 50.0)
    assert found["headline"] == {"top1": 50.0, "top5": 50.0}  # a chair is not among the best 5 of 1000
    assert (found["top5"], found["top5_among_all_outputs"]) == (100.0, 50.0)
    shown = vit_evaluate(tmp_path / "images", "--model", tmp_path / "weights").stdout.splitlines()
    assert [line.split("  ")[0] for line in shown[2:5]] == [
        "top-1 among all outputs",
        "top-5 among all outputs",
        "top-1 accuracy",
    ]
    assert "the paper on ObjectNet, among all outputs: H/14, JFT-300M, top-1 61.7, top-5 82.1" in shown
    assert found["label_space"] == {
        "matched_by": "a mapping to ImageNet-1k, 2 of 3 classes",
        "outputs": 1000,
        "competing": 3,
    }


@pytest.mark.slow
def test_vit_ti_has_its_published_accuracy_and_real_accuracy_on_imagenet(shared, tmp_path):
    """On every fifth of 1,000 images; all have 75.3, 92.9 and 80.3, with 80.3 published for ReaL."""
    classifier = Classifier(shared / "weights" / "vit_ti16_imagenet1k.safetensors")
    whole = open_dataset(shared / "data" / "imagenet-val-1000")
    ((name, images),) = whole.splits.items()
    np.arange(0, 1000, 5).astype("i8").tofile(tmp_path / "fifth")
    fifth = replace(whole, splits={name: Subset(images, tmp_path / "fifth", name="a fifth")})
    found = evaluate(fifth, classifier, real=shared / "data" / "real.json")
    assert found.measures.count == 200
    assert (found.measures.top1, found.measures.top5) == pytest.approx((80.0, 94.0), abs=0.51)
    assert (found.real, len(found.right["real"])) == (pytest.approx(100 * 164 / 196, abs=0.52), 196)  # one near tie
    assert not found.restricted
