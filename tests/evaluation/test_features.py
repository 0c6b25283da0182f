"""Features are computed once for each content, survive an interruption, and are those of the model."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch
from colors import make_colors, tiny_model

from vitruvian.data.decode import decode
from vitruvian.data.formats import open_dataset
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.errors import ConfigError, DataError, VitruvianError
from vitruvian.evaluation import features as store_module
from vitruvian.evaluation.features import FeatureStore, compute_features, image_key, model_key, open_store
from vitruvian.inference import Encoder


@pytest.fixture
def photos(tmp_path):
    return make_colors(tmp_path / "photos", {"train": 7})


def found(encoder, folder, **options):
    return compute_features(encoder, open_dataset(folder).train, open_store(encoder), **options)


def test_features_are_the_models_in_the_order_of_the_source(photos):
    model = tiny_model()
    seen, source = found(Encoder(model), photos, batch_size=4), open_dataset(photos).train
    with torch.inference_mode():
        expected = [
            model.features(apply_preprocess(decode(source.read(i)), model.meta.preprocess)[None])[0] for i in range(21)
        ]
    np.testing.assert_allclose(seen.values, torch.stack(expected).numpy(), atol=1e-6)  # order of sums
    assert seen.labels.tolist() == source.labels().tolist()
    assert seen.computed == 21


def test_a_model_without_head_has_features(photos):
    assert found(Encoder(tiny_model(num_classes=0)), photos).values.shape == (21, 16)


def test_a_second_time_nothing_is_computed_and_the_numbers_are_the_same(photos):
    encoder = Encoder(tiny_model())
    first = found(encoder, photos)
    again = found(Encoder(tiny_model()), photos)  # another object with the same weights
    assert again.computed == 0
    assert np.array_equal(again.values, first.values)


def test_images_are_known_by_their_content_wherever_they_lie(photos, tmp_path):
    encoder = Encoder(tiny_model())
    found(encoder, photos)
    (photos / "train" / "red" / "000.png").rename(photos / "train" / "blue" / "renamed.png")
    moved = tmp_path / "moved"
    photos.rename(moved)
    assert found(encoder, moved).computed == 0
    (moved / "train" / "red" / "001.png").write_bytes((moved / "train" / "red" / "002.png").read_bytes())
    make_colors(tmp_path / "more", {"train": 1}, noise=5.0)
    (tmp_path / "more" / "train" / "red" / "000.png").replace(moved / "train" / "red" / "new.png")
    assert found(encoder, moved).computed == 1


def test_another_weight_view_or_size_is_another_model():
    encoder = Encoder(tiny_model())
    keys = {model_key(encoder)}
    with torch.no_grad():
        encoder.model.norm.bias[3] += 1e-6
    keys.add(model_key(encoder))
    encoder.model.meta = encoder.model.meta.replace(
        preprocess=encoder.model.meta.preprocess.replace(interpolation="bicubic")
    )
    keys.add(model_key(encoder))
    keys.add(model_key(Encoder(tiny_model(image_size=(32, 32)))))
    assert len(keys) == 4


def test_another_head_or_regularizer_is_not_another_model():
    plain, other = tiny_model(), tiny_model(num_classes=7, dropout=0.1, drop_path=0.1)
    below = {name: tensor for name, tensor in plain.state_dict().items() if not name.startswith("head.")}
    other.load_state_dict(below, strict=False)
    assert model_key(Encoder(other)) == model_key(Encoder(plain))


def test_a_new_setting_with_its_default_is_not_another_model():
    encoder = Encoder(tiny_model())
    before, config = model_key(encoder), encoder.model.config
    newer = dataclasses.make_dataclass(
        type(config).__name__, [("novel", int, 0)], bases=(type(config),), frozen=True, kw_only=True
    )
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    encoder.model.config = newer(**values)
    assert model_key(encoder) == before
    encoder.model.config = newer(**values, novel=1)
    assert model_key(encoder) != before


def test_pixels_and_shapes_are_content_too():
    pixels = np.arange(12, dtype=np.uint8)
    keys = {image_key(pixels.reshape(3, 4)), image_key(pixels.reshape(4, 3)), image_key(pixels.tobytes())}
    assert len(keys) == 3


def test_an_interrupted_computation_goes_on_where_it_was_with_the_same_numbers(photos, monkeypatch, cache):
    monkeypatch.setattr(store_module, "ROWS_PER_FILE", 8)
    encoder = Encoder(tiny_model())
    whole = compute_features(encoder, open_dataset(photos).train, FeatureStore(None, 16), batch_size=4)
    calls, store = 0, open_store(encoder)

    def killed(pixels):
        nonlocal calls
        calls += 1
        if calls == 4:
            store.folder = None  # as by SIGKILL: nothing is written on the way out
            raise KeyboardInterrupt
        return Encoder.features(encoder, pixels)

    monkeypatch.setattr(encoder, "features", killed)
    with pytest.raises(KeyboardInterrupt):
        compute_features(encoder, open_dataset(photos).train, store, batch_size=4)
    monkeypatch.undo()
    monkeypatch.setenv("VITRUVIAN_CACHE", str(cache))
    resumed = found(encoder, photos, batch_size=4)
    assert resumed.computed == 21 - 8  # one whole file of eight was written
    assert np.array_equal(resumed.values, whole.values)


def test_a_broken_file_of_the_cache_is_removed_and_computed_anew(photos):
    encoder = Encoder(tiny_model())
    first = found(encoder, photos)
    (path,) = open_store(encoder).folder.glob("*.npy")
    path.write_bytes(path.read_bytes()[:100])
    again = found(encoder, photos)
    assert again.computed == 21
    assert np.array_equal(again.values, first.values)


def test_one_flipped_bit_in_the_cache_is_noticed_and_computed_anew(photos):
    encoder = Encoder(tiny_model())
    first = found(encoder, photos)
    (path,) = open_store(encoder).folder.glob("*.npy")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # in the features of the last image
    path.write_bytes(content)
    store = open_store(encoder)
    again = compute_features(encoder, open_dataset(photos).splits["train"], store)
    assert (again.computed, store.damaged) == (1, 1)
    np.testing.assert_allclose(again.values, first.values, atol=1e-5)  # in a batch of its own, rounded otherwise
    assert not path.exists()
    later = open_store(encoder)
    compute_features(encoder, open_dataset(photos).splits["train"], later)
    assert later.damaged == 0


def test_unreadable_images_are_left_out_and_named(photos):
    (photos / "train" / "green" / "003.png").write_bytes(b"not an image")
    (photos / "train" / "red" / "000.png").write_bytes(b"")
    seen = found(Encoder(tiny_model()), photos)
    assert len(seen) == len(seen.values) == 19
    assert [image.key for image in seen.unreadable] == ["train/green/003.png", "train/red/000.png"]
    assert seen.unreadable[1].reason == "the file is empty"
    assert np.bincount(seen.labels).tolist() == [7, 6, 6]
    assert found(Encoder(tiny_model()), photos).unreadable == seen.unreadable


def test_nothing_readable_and_broken_weights_are_errors(photos):
    model = tiny_model()
    torch.nn.init.constant_(model.norm.bias, float("nan"))
    with pytest.raises(VitruvianError, match=r"blue/000.png: the model produced NaN or infinite outputs"):
        found(Encoder(model), photos)
    for path in photos.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"no image can be read, such as train/blue/000.png: the file is empty"):
        found(Encoder(tiny_model()), photos)


def test_the_cache_is_bounded_and_the_oldest_models_go_first(photos, monkeypatch, cache):
    models = [Encoder(tiny_model(num_classes=classes)) for classes in (2, 3, 4)]
    for age, encoder in enumerate(models[:2]):
        found(encoder, photos)
        os.utime(cache / "features" / model_key(encoder), (1000 + age, 1000 + age))
    size = sum(path.stat().st_size for path in (cache / "features" / model_key(models[0])).iterdir())
    monkeypatch.setenv("VITRUVIAN_FEATURES_GB", str(1.5 * size / 2**30))
    found(models[2], photos)
    kept = {path.name for path in (cache / "features").iterdir()}
    assert kept == {model_key(models[1]), model_key(models[2])}
    monkeypatch.setenv("VITRUVIAN_FEATURES_GB", "much")
    with pytest.raises(ConfigError, match="VITRUVIAN_FEATURES_GB='much' is not a number of gigabytes"):
        open_store(models[0])


def test_a_cache_that_cannot_be_made_costs_time_and_nothing_else(photos, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "file"))
    encoder = Encoder(tiny_model())
    assert found(encoder, photos).computed == found(encoder, photos).computed == 21
