"""Images that occur more than once."""

import io
import json

import numpy as np
import pytest
from photos import encoded, make_photos, photo
from PIL import Image, ImageEnhance
from typer.testing import CliRunner

from vitruvian.cli.app import app
from vitruvian.config import ViTConfig
from vitruvian.data.decode import Problem, decode
from vitruvian.data.doctor import diagnose
from vitruvian.data.doctor.checks import candidate_pairs, same_groups
from vitruvian.data.doctor.doctor_report import suspicious_labels
from vitruvian.data.doctor.scan import examine, is_same_image, perceptual_hashes, sketch
from vitruvian.data.formats import open_dataset
from vitruvian.errors import ImageError
from vitruvian.model.build import build
from vitruvian.weights.save import save


@pytest.fixture
def data(tmp_path):
    return make_photos(tmp_path / "photos", each=20, splits=("train", "test"))


def found(data):
    return {f.check: (f.level, f.count, f.text) for f in diagnose(data).findings if f.level not in ("ok", "unchecked")}


def test_a_copy_in_two_splits_is_a_leak(data):
    (data / "test" / "cat" / "x.jpg").write_bytes((data / "train" / "cat" / "003.jpg").read_bytes())
    text = "1 of 41 test images is also in train (1 exact, 0 near)"
    assert found(data) == {"leak": ("problem", 1, text)}
    (example,) = diagnose(data).at("problem")[0].examples
    assert [(p.split, p.key) for p in example.images] == [("train", "train/cat/003.jpg"), ("test", "test/cat/x.jpg")]


def test_equal_pixels_in_another_file_are_an_exact_copy(data):
    image = Image.open(data / "train" / "cat" / "003.jpg")
    image.save(data / "test" / "cat" / "x.png")
    assert "(1 exact," in found(data)["leak"][2]


def test_an_exact_copy_is_named_rather_than_a_near_one(data):
    content = (data / "train" / "cat" / "003.jpg").read_bytes()
    (data / "train" / "cat" / "zzz.jpg").write_bytes(encoded(Image.open(io.BytesIO(content)).resize((60, 45))))
    (data / "test" / "cat" / "x.jpg").write_bytes(content)
    (example,) = diagnose(data).at("problem")[0].examples
    assert (example.note, example.images[0].key) == ("exact copy", "train/cat/003.jpg")


CHANGES = {
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC),
    "twice the size": lambda image: image.resize((image.width * 2, image.height * 2), Image.Resampling.BICUBIC),
    "squashed": lambda image: image.resize((64, 64)),
    "encoded again": lambda image: Image.open(io.BytesIO(encoded(image, quality=40))),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.88),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.08),
    "more contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_nearly_the_same(data, change):
    image = Image.open(data / "train" / "cat" / "003.jpg")
    (data / "test" / "cat" / "x.png").write_bytes(encoded(CHANGES[change](image), "PNG"))
    assert found(data)["leak"][2].endswith("(0 exact, 1 near)")


@pytest.mark.parametrize("seed", range(5))
def test_another_object_in_the_same_scene_is_not_the_is_same_image(seed):
    scene = photo(seed)
    other = scene.copy()
    other.paste("black" if np.asarray(scene.crop((40, 30, 56, 46))).mean() > 100 else "white", (40, 30, 56, 46))
    assert not is_same_image(sketch(scene)[None], sketch(other)[None])[0]


def test_a_faint_object_in_a_scene_of_strong_contrast_is_not_the_is_same_image():
    scene = Image.new("RGB", (96, 72), "black")
    scene.paste("white", (48, 0, 96, 72))
    other = scene.copy()
    other.paste((60, 60, 60), (12, 27, 24, 39))
    assert not is_same_image(sketch(scene)[None], sketch(other)[None])[0]


def test_another_color_is_not_the_is_same_image():
    red, blue = (Image.new("RGB", (64, 64), "white") for _ in range(2))
    red.paste((200, 40, 40), (20, 20, 44, 44))
    blue.paste((40, 40, 200), (20, 20, 44, 44))
    assert not is_same_image(sketch(red)[None], sketch(blue)[None])[0]


def test_the_same_image_under_two_labels_hurts(data):
    (data / "train" / "dog" / "x.jpg").write_bytes((data / "train" / "cat" / "003.jpg").read_bytes())
    assert found(data) == {"conflict": ("problem", 1, "1 image occurs twice with different labels")}


def test_nearly_the_same_image_under_two_labels_is_worth_a_look(data):
    image = Image.open(data / "train" / "cat" / "003.jpg").resize((60, 45))
    (data / "train" / "dog" / "x.jpg").write_bytes(encoded(image))
    text = "1 image is a near duplicate of one with another label"
    assert found(data) == {"near-conflict": ("warning", 1, text)}


def test_repeats_of_a_class_are_counted_without_the_first(data):
    for name in "xyz":
        (data / "train" / "cat" / f"{name}.jpg").write_bytes((data / "train" / "cat" / "003.jpg").read_bytes())
    text = "3 images repeat another of the same split and class: 3 exactly, 0 nearly"
    assert found(data) == {"duplicate": ("warning", 3, text)}


def test_blank_images_of_two_levels_are_not_the_same():
    dark, light = (sketch(Image.new("RGB", (80, 60), (level, level, level)))[None] for level in (100, 140))
    assert not is_same_image(dark, light)[0]


def test_groups_are_those_that_comparing_all_pairs_gives():
    images = [photo(seed) for seed in range(40)]
    images += [image.resize((50, 40)) for image in images[:12]] + [image.resize((300, 200)) for image in images[6:9]]
    sketches = np.stack([sketch(image) for image in images])
    one, two = np.triu_indices(len(images), 1)
    same = is_same_image(sketches[one], sketches[two])
    assert same.sum() == 12 + 3 * 2
    groups = same_groups(np.arange(len(images), dtype=np.uint64), sketches, np.arange(len(images)))
    assert [group.tolist() for group in groups] == [
        [k, 40 + k] + ([52 + k - 6] if 6 <= k < 9 else []) for k in range(12)
    ]


@pytest.mark.slow
def test_few_pairs_of_strangers_are_compared():
    sketches = np.stack([sketch(photo(seed, (40, 40))) for seed in range(1500)])
    pairs = sum(len(pairs) for pairs in candidate_pairs(perceptual_hashes(sketches)))
    assert pairs < 10  # of 1.1 million; with an equal band but without the limit on other bits: 250


class OneFile:
    def __init__(self, content):
        self.content = content

    def read(self, index):
        return self.content


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF"])
def test_the_doctor_and_decode_agree_on_what_can_be_read(format):
    whole = encoded(photo(1, (600, 560)), format)
    rng = np.random.default_rng(0)
    for _ in range(20):
        content = bytearray(whole[: rng.integers(1, len(whole))] if rng.random() < 0.5 else whole)
        content[rng.integers(len(content))] ^= 0xFF
        try:
            decode(bytes(content))
            readable = True
        except ImageError:
            readable = False
        assert (examine([OneFile(bytes(content))], (0, 0))[0]["problem"] == Problem.NONE) == readable


@pytest.fixture
def twins(tmp_path):
    """Dark cats and bright dogs; two cats are also dogs, one cat occurs twice, and one file is cut."""
    for name, level in (("cat", 20), ("dog", 180)):
        for number in range(14):
            path = tmp_path / "photos" / name / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng([level, number]).integers(0, 60, (40, 40, 3))
            Image.fromarray((level + noise).astype(np.uint8)).save(path)
    cats, dogs = tmp_path / "photos" / "cat", tmp_path / "photos" / "dog"
    for source, target in (("003", dogs / "a.png"), ("005", dogs / "b.png"), ("007", cats / "again.png")):
        target.write_bytes((cats / f"{source}.png").read_bytes())
    (dogs / "cut.png").write_bytes((dogs / "000.png").read_bytes()[:900])
    return tmp_path / "photos"


def brightness(data):
    """A feature that tells the two classes of `twins` apart."""
    rows = []
    for source in open_dataset(data).splits.values():
        for index in range(len(source)):
            cut = source.key(index).endswith("cut.png")
            mean = np.nan if cut else np.asarray(decode(source.read(index))).mean()
            rows.append((mean - 128, np.random.default_rng(index).normal()))
    return np.array(rows, np.float32)


def test_the_neighbors_decide_between_two_labels_of_one_image(twins):
    diagnosis = diagnose(twins, vectors=brightness(twins))
    (finding,) = (finding for finding in diagnosis.findings if finding.check == "conflict")
    assert [example.right for example in finding.examples] == ["cat", "cat"]
    assert {image.key for image, _, _ in suspicious_labels(diagnosis)} == {"dog/a.png", "dog/b.png"}
    assert {key for _, key in droppable(diagnosis, twins)} == {"dog/cut.png", "cat/again.png", "dog/a.png", "dog/b.png"}


def test_without_a_decision_both_labels_of_one_image_are_doubted_and_dropped(data):
    (data / "train" / "dog" / "x.jpg").write_bytes((data / "train" / "cat" / "003.jpg").read_bytes())
    (data / "train" / "dog" / "y.jpg").write_bytes((data / "test" / "dog" / "004.jpg").read_bytes())
    diagnosis = diagnose(data)
    assert {image.key for image, _, _ in suspicious_labels(diagnosis)} == {"train/cat/003.jpg", "train/dog/x.jpg"}
    # the test split keeps its image
    assert droppable(diagnosis, data) == {
        ("train", f"train/{key}") for key in ("cat/003.jpg", "dog/x.jpg", "dog/y.jpg")
    }


def droppable(diagnosis, data):
    splits = open_dataset(data).splits
    return {(split, splits[split].key(index)) for images in diagnosis.droppable.values() for split, index in images}


def test_broken_files_and_duplicates_are_left_out_of_a_manifest(twins, tmp_path):
    clean = tmp_path / "clean.csv"
    run = CliRunner().invoke(app, ["doctor", str(twins), "--drop", "broken", "--out", str(clean), "--workers", "0"])
    assert run.exit_code == 0, run.output
    assert f"wrote {clean} with 31 images; left out: 1 broken; {twins} is unchanged" in run.stderr
    assert not [finding for finding in diagnose(clean).findings if finding.check == "truncated"]


def test_the_doctor_embeds_by_itself(twins, tmp_path):
    config = ViTConfig(image_size=(16, 16), patch_size=8, depth=1, width=16, mlp_dim=32, num_heads=2, num_classes=3)
    save(build(config, seed=0), tmp_path / "tiny")
    run = CliRunner().invoke(app, ["doctor", str(twins), "--model", str(tmp_path / "tiny"), "--json", "--workers", "0"])
    findings = {finding["check"]: finding for finding in json.loads(run.stdout)["findings"]}
    assert "(the features separate all 2 classes)" in findings["label"]["text"]
    assert [example["right"] for example in findings["conflict"]["examples"]] == ["cat", "cat"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--drop", "broken"], "--drop needs --out clean.csv"),
        (["--drop", "blurry", "--out", "x.csv"], "'blurry' is not broken or duplicates"),
        (["--out", "x.csv"], "a .csv needs --drop, --apply or --against"),
        (["--model", "a", "--vectors", "b"], "give one of the two"),
    ],
)
def test_wrong_options_are_refused_before_images_are_read(twins, options, text):
    run = CliRunner().invoke(app, ["doctor", str(twins), *options])
    assert run.exit_code == 2
    assert text in " ".join(run.stderr.split())
