"""From images to ranked answers."""

from __future__ import annotations

import io
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitruvian.config import CascadeConfig, Preprocess, ResNetConfig, ViTConfig
from vitruvian.data.decode import Unreadable, decode
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.errors import CheckpointError, ConfigError, DataError, ImageError
from vitruvian.inference import Classifier, ImageResult, check_readable, features, load_batches, load_packed, unpack
from vitruvian.model.build import build
from vitruvian.model.vit import ViT
from vitruvian.weights.save import save

TINY = ViTConfig(image_size=(16, 16), patch_size=8, depth=1, width=16, mlp_dim=32, num_heads=2, num_classes=5)


def tiny_model(**changes: object) -> ViT:
    model = build(TINY.replace(**changes), seed=0)
    assert isinstance(model, ViT)
    if model.head is not None:
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model


def make_images(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (20 + i, 30, 3), np.uint8)) for i in range(count)]


def test_answers_are_the_largest_probabilities_of_the_model():
    model, (image,) = tiny_model(), make_images(1)
    (answers,) = Classifier(model).predict([image], top=3)
    with torch.no_grad():
        probabilities = model(apply_preprocess(decode(image), model.meta.preprocess)[None]).softmax(dim=-1)[0]
    assert [answer.index for answer in answers] == probabilities.argsort(descending=True)[:3].tolist()
    expected = sorted(probabilities.tolist(), reverse=True)[:3]
    assert [answer.probability for answer in answers] == pytest.approx(expected, abs=1e-6)  # order of sums
    assert all(answer.label == str(answer.index) for answer in answers)


def test_labels_are_the_models_own_or_numbers():
    model = tiny_model()
    assert Classifier(model).labels == ("0", "1", "2", "3", "4")
    model.meta = model.meta.replace(labels=("a", "b", "c", "d", "e"))
    assert Classifier(model).labels == model.meta.labels
    assert Classifier(tiny_model(num_classes=1000)).labels[999] == "999"  # nobody said that these are ImageNet's


def test_more_answers_than_classes_are_all_of_them():
    (answers,) = Classifier(tiny_model()).predict(make_images(1), top=99)
    assert sorted(answer.index for answer in answers) == [0, 1, 2, 3, 4]
    assert sum(answer.probability for answer in answers) == pytest.approx(1.0)


def test_equal_answers_stand_in_the_order_of_classes():
    logits = torch.zeros(1, 1000)
    logits[0, [700, 30]] = 1.0
    (ranked,) = Classifier(tiny_model(num_classes=1000)).rank(logits, 1000)
    others = [index for index in range(1000) if index not in (30, 700)]
    assert [answer.index for answer in ranked] == [30, 700, *others]


def test_answers_do_not_depend_on_the_batch():
    classifier, images = Classifier(tiny_model()), make_images(7)
    alone, together = classifier.predict(images, batch_size=1), classifier.predict(images, batch_size=4)
    for one, other in zip(alone, together, strict=True):
        assert [answer.index for answer in one] == [answer.index for answer in other]
        assert [a.probability for a in one] == pytest.approx([a.probability for a in other], abs=1e-6)  # order of sums


def test_a_stream_keeps_the_order_and_reports_bad_images_in_their_place(tmp_path):
    good = tmp_path / "good.png"
    make_images(1)[0].save(good)
    bad = tmp_path / "bad.jpg"
    bad.write_text("not an image")
    sources = [good, bad, str(good), good.read_bytes(), b"", io.BytesIO(good.read_bytes()), tmp_path / "none.jpg"]
    seen = list(Classifier(tiny_model()).stream(sources, batch_size=3))
    assert [prediction.path for prediction in seen[:3]] == [str(good), str(bad), str(good)]
    assert [bool(prediction.predictions) for prediction in seen] == [True, False, True, True, False, True, False]
    assert seen[1].error.startswith(f"{bad}: not an image")
    assert seen[4] == ImageResult("image of 0 bytes", error="image of 0 bytes: the file is empty")
    best = [prediction.predictions[0].index for prediction in seen if prediction.predictions]
    assert best == best[:1] * 4


def test_predict_raises_on_a_bad_image():
    with pytest.raises(ImageError, match="image of 4 bytes: not an image"):
        Classifier(tiny_model()).predict([*make_images(2), b"junk"])


def test_nothing_in_gives_nothing_out():
    assert Classifier(tiny_model()).predict([]) == []


def test_a_long_stream_is_read_only_a_little_ahead_and_can_be_left():
    taken = 0

    def many():
        nonlocal taken
        (image,) = make_images(1)
        for _ in range(1000):
            taken += 1
            yield image

    stream = Classifier(tiny_model()).stream(many(), batch_size=4)
    assert len(list(islice(stream, 10))) == 10
    assert taken <= 3 * 4 + 3 * 4 + 2 * 4  # three batches answered, three with the model, two decoded ahead
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]


def load_number(position, item):
    """Load a number as an image of that side, an odd one as an error."""
    return (position, item), ImageError(f"{item} is odd") if item % 2 else torch.full((3, item, item), float(item))


@pytest.mark.parametrize("ahead", [1, 4, 100])
def test_loaded_batches_keep_their_items_and_order_and_empty_ones_are_left_out(ahead):
    batches = [[2, 3, 4], [], [5], [6, 8]]
    loaded = list(load_batches(load_number, batches, ahead=ahead, threads=3))
    assert [[details for details, _ in batch] for batch in loaded] == [
        [(0, 2), (1, 3), (2, 4)],
        [(3, 5)],
        [(4, 6), (5, 8)],
    ]
    assert [str(image) for batch in loaded for _, image in batch if isinstance(image, ImageError)] == [
        "3 is odd",
        "5 is odd",
    ]


def test_images_of_several_shapes_are_the_same_after_the_way_from_a_worker():
    items = list(enumerate([2, 3, 2, 4, 4, 5, 2]))
    images, stacks = load_packed(load_number, items)
    assert [stack.shape[0] for stack in stacks] == [2, 2, 1]  # one tensor per run of equal shapes
    for (details, image), (position, item) in zip(unpack(images, stacks), items, strict=True):
        wanted_details, wanted = load_number(position, item)
        assert details == wanted_details
        assert str(image) == str(wanted) if isinstance(wanted, ImageError) else torch.equal(image, wanted)


def test_too_many_unreadable_images_are_an_error_that_names_the_first():
    some = [Unreadable("a.jpg", "the file is empty"), Unreadable("b.jpg", "not an image")]
    check_readable("photos", some, 8)
    with pytest.raises(
        DataError, match=r"^photos: 2 of 7 images cannot be read, more than 25%, such as a.jpg: the file is"
    ):
        check_readable("photos", some, 7)
    with pytest.raises(DataError, match=r"more than 0.5%"):
        check_readable("photos", some, 100, max_unreadable=0.005)
    with pytest.raises(DataError, match=r"^photos: no image can be read, such as a.jpg"):
        check_readable("photos", some, 2)


def test_cores_that_take_whole_images_get_the_next_batch_meanwhile(two_threads):
    begun = {number: threading.Event() for number in range(5)}

    def compute(number):
        begun[number].set()
        if 0 < number < 4:  # a first batch is alone; the others wait until the next one is under way
            assert begun[number + 1].wait(60)
        return 10 * number

    assert list(Classifier(tiny_model().eval())._overlap(compute, range(5))) == [0, 10, 20, 30, 40]


@pytest.mark.parametrize("changed", [{"engine": "onnxruntime"}, {"cascade": CascadeConfig(threshold=0.5, tome_r=(1,))}])
def test_batches_do_not_overlap_where_all_cores_share_one(two_threads, changed):
    model = tiny_model().eval()
    model.meta = model.meta.replace(cascade=changed.get("cascade"))
    classifier, threads = Classifier(model), set()
    classifier.engine = changed.get("engine", "torch")
    assert list(classifier._overlap(lambda _: threads.add(threading.get_ident()), range(4))) == [None] * 4
    assert threads == {threading.get_ident()}


def test_dropout_is_off_and_a_model_in_training_stays_in_training():
    model = tiny_model(dropout=0.5).train()
    classifier = Classifier(model)
    (one,), (other,) = classifier.predict(make_images(1)), classifier.predict(make_images(1))
    assert [a.probability for a in one] == pytest.approx([a.probability for a in other], abs=1e-6)  # order of sums
    assert model.training


def test_logits_have_no_gradient():
    logits = Classifier(tiny_model()).logits(torch.zeros(2, 3, 16, 16))
    assert logits.shape == (2, 5)
    assert not logits.requires_grad


def test_a_model_with_broken_weights_gives_an_error_and_not_nan():
    model = tiny_model()
    nn.init.constant_(model.head.bias, float("nan"))
    (prediction,) = Classifier(model).stream(make_images(1))
    assert prediction == ImageResult("image", error="image: the model produced NaN or infinite outputs")


def test_a_gray_model_sees_gray_images():
    model = tiny_model(in_channels=1)
    model.meta = model.meta.replace(preprocess=Preprocess(image_size=(16, 16)))
    with pytest.raises(ConfigError, match="the model takes 1 channels, its preprocessing gives 3"):
        Classifier(model)
    model.meta = model.meta.replace(preprocess=Preprocess(image_size=(16, 16), mean=(0.5,), std=(0.5,)))
    assert len(Classifier(model).predict(make_images(3))) == 3


def test_a_model_without_head_is_refused():
    with pytest.raises(ConfigError, match=r"no classification head, only features; load it with num_classes=N"):
        Classifier(tiny_model(num_classes=0))


def test_labels_that_do_not_fit_are_refused():
    model = tiny_model()
    model.meta = model.meta.replace(labels=("cat", "dog"))
    with pytest.raises(ConfigError, match="the model has 5 classes but 2 labels"):
        Classifier(model)


def test_weights_are_loaded_from_their_path(tmp_path):
    model = tiny_model()
    save(model, tmp_path / "native")
    (expected,), (found,) = (Classifier(source).predict(make_images(1)) for source in (model, tmp_path / "native"))
    assert [answer.index for answer in found] == [answer.index for answer in expected]
    assert Classifier(str(tmp_path / "native"), image_size=(16, 24)).model.config.grid == (2, 3)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        Classifier(Path("nowhere"))


def test_wrong_arguments_are_refused():
    classifier = Classifier(tiny_model())
    with pytest.raises(ConfigError, match="expected a list of images, not one"):
        classifier.predict("a.jpg")
    with pytest.raises(ConfigError, match="top=0 is not at least 1"):
        classifier.stream([], top=0)
    with pytest.raises(ConfigError, match="num_heads, image_size and adapter apply when weights are loaded"):
        Classifier(tiny_model(), image_size=32)
    with pytest.raises(ConfigError, match="device='abacus' cannot be used; devices are auto, cpu, "):
        Classifier(tiny_model(), device="abacus")


def test_a_device_without_values_is_refused():
    with pytest.raises(ConfigError, match="device='meta' cannot be used: it cannot run a model"):
        Classifier(tiny_model(), device="meta")


@torch.no_grad()
def test_features_of_layers_are_maps_of_patches_or_all_tokens():
    model = tiny_model(depth=3, reg_tokens=2, image_size=(16, 24)).eval()
    pixels = torch.randn(2, 3, 16, 24)
    first, last = features(model, pixels, layers=[0, -1])
    assert first.shape == last.shape == (2, 16, 2, 3)
    wanted = model.forward_intermediates(pixels, ["block_2"])["block_2"]
    assert torch.equal(last[1, :, 1, 2], wanted[1, 3 + 5])  # after class token and registers, the sixth patch
    (tokens,) = features(model, pixels, grid=False)
    assert torch.equal(tokens, wanted)
    (seen,) = features(model, make_images(2))
    assert seen.shape == (2, 16, 2, 3)
    with pytest.raises(ConfigError, match="layer 3 does not exist"):
        features(model, pixels, layers=[3])


def test_features_of_a_resnet_are_the_maps_of_its_stages():
    model = build(ResNetConfig(stages=(1, 1), width=32, image_size=32))
    early, late = features(model, torch.randn(1, 3, 32, 32), layers=[0, 1])
    assert early.shape == (1, 128, 8, 8)
    assert late.shape == (1, 256, 4, 4)
    with pytest.raises(ConfigError, match="stage 2 does not exist: the model has stages 0 to 1"):
        features(model, torch.randn(1, 3, 32, 32), layers=[2])
    with pytest.raises(ConfigError, match="a ResNet has no tokens: grid=False"):
        features(model, torch.randn(1, 3, 32, 32), grid=False)


def test_a_classifier_is_called_with_one_image_or_many_and_has_a_readable_repr(tmp_path):
    classifier = Classifier(tiny_model())
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))
    image.save(tmp_path / "image.png")
    (expected,) = classifier.predict([image], top=2)
    for one in (image, str(tmp_path / "image.png"), (tmp_path / "image.png").read_bytes(), np.asarray(image)):
        assert classifier(one, top=2) == expected
    assert classifier([image, image], top=2) == classifier.predict([image, image], top=2)
    size = "x".join(map(str, classifier.model.config.image_size))
    classes = classifier.model.config.num_classes
    assert repr(classifier) == f"Classifier({classifier.name}, {classes} classes, {size} pixels, torch on cpu)"
