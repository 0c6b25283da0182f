"""Batches: their order, their pixels, what happens to unreadable images, and several processes."""

from collections import Counter

import numpy as np
import pytest
import torch
from making import Numbers, failing_transform, noisy_transform

from vitruvian.data.loader import Loader
from vitruvian.data.order import Blocks
from vitruvian.errors import ConfigError, DataError, VitruvianError


def loader(source=None, **settings):
    defaults = {"transform": noisy_transform, "batch_size": 8, "seed": 3, "training": True}
    return Loader(source or Numbers(30), **{**defaults, **settings})


def indices(batches):
    return [int(index) for batch in batches for index in batch.indices]


def same(first, second):
    fields = ("pixels", "labels", "indices", "weights")
    return len(first) == len(second) and all(
        torch.equal(getattr(a, name), getattr(b, name)) for a, b in zip(first, second) for name in fields
    )


def test_a_batch_has_pixels_labels_indices_and_weights():
    batch = next(loader().batches(0))
    assert batch.pixels.shape == (8, 1, 2, 2)
    assert batch.pixels.dtype == torch.float32
    assert torch.equal(batch.pixels[:, 0, 0, 0].floor().long(), batch.indices)
    assert torch.equal(batch.labels, batch.indices % 4)
    assert torch.allclose(batch.weights, 1 + batch.indices / 100)
    assert (batch.labels.dtype, batch.weights.dtype, batch.unreadable) == (torch.int64, torch.float32, [])
    assert len(batch) == 8


def test_whole_numbers_stay_whole():
    def raw(image, rng):
        return torch.from_numpy(image)

    assert next(loader(transform=raw).batches(0)).pixels.dtype == torch.uint8


def test_an_epoch_meets_each_sample_at_most_once_and_drops_the_short_end():
    training = loader()
    seen = indices(training.batches(0))
    assert training.steps_per_epoch == 3
    assert len(seen) == len(set(seen)) == 24
    assert seen != sorted(seen)
    whole = loader(drop_last=False)
    assert whole.steps_per_epoch == 4
    assert sorted(indices(whole.batches(0))) == list(range(30))


def test_epochs_and_seeds_differ_and_repeat_exactly():
    first = list(loader().batches(0))
    assert same(first, list(loader().batches(0)))
    assert indices(first) != indices(loader().batches(1))
    assert indices(first) != indices(loader(seed=4).batches(0))


@pytest.mark.parametrize("settings", [{}, {"sampling": "balanced"}, {"repeats": 2}, {"training": False}])
def test_an_epoch_can_be_entered_anywhere(settings):
    unbroken = list(loader(Numbers(50, broken=[7]), **settings).batches(2))
    for start in range(len(unbroken) + 1):
        assert same(list(loader(Numbers(50, broken=[7]), **settings).batches(2, start=start)), unbroken[start:])


def test_what_is_skipped_is_not_read(monkeypatch):
    read = []
    monkeypatch.setattr(Numbers, "read", lambda self, index: (read.append(index), np.zeros((2, 2), np.uint8))[1])
    list(loader().batches(0, start=2))
    assert len(read) == 8


def test_a_transformed_sample_depends_on_seed_epoch_and_sample_alone():
    def views(batches):
        return {int(i): float(p[0, 0, 0]) for batch in batches for i, p in zip(batch.indices, batch.pixels)}

    small, large = (views(loader(batch_size=size, drop_last=False).batches(1)) for size in (3, 10))
    assert small == large
    assert small != views(loader(drop_last=False).batches(2))


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(loader().batches(0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("settings", [{}, {"sampling": "balanced"}, {"repeats": 2}])
def test_processes_share_each_batch_of_one(world, settings):
    alone = list(loader(**settings).batches(0))
    ranks = [list(loader(rank=rank, world=world, **settings).batches(0)) for rank in range(world)]
    for number, batch in enumerate(alone):
        parts = [part[number] for part in ranks]
        assert torch.equal(torch.cat([part.indices for part in parts]), batch.indices)
        assert torch.equal(torch.cat([part.pixels for part in parts]), batch.pixels)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_an_evaluation_counts_each_sample_once_over_all_processes(world):
    loaders = [loader(training=False, rank=rank, world=world) for rank in range(world)]
    assert {one.steps_per_epoch for one in loaders} == {4}
    ranks = [list(one.batches(0)) for one in loaders]
    assert {len(batches) for batches in ranks} == {4}  # so that the processes stay in step
    assert sorted(index for batches in ranks for index in indices(batches)) == list(range(30))


def test_an_evaluation_goes_in_order():
    assert indices(loader(training=False).batches(0)) == list(range(30))


def test_repeats_of_a_sample_stand_together_and_differ():
    batch = next(loader(repeats=4).batches(0))
    groups = batch.indices.view(2, 4)
    assert torch.equal(groups, groups[:, :1].expand(2, 4))
    assert len({float(pixels[0, 0, 0]) for pixels in batch.pixels}) == 8
    seen = Counter(indices(loader(repeats=4, drop_last=False).batches(0)))
    assert set(seen.values()) == {4}
    assert len(seen) == 7


def test_balanced_sampling_meets_all_classes_equally_often():
    labels = np.repeat([0, 1, 2], [80, 18, 2])  # and no sample of class 3
    balanced = loader(Numbers(100, labels=labels), sampling="balanced", batch_size=10)
    drawn = [indices(balanced.batches(epoch)) for epoch in range(3)]
    for epoch in drawn:
        counts = np.bincount(labels[epoch], minlength=4)
        assert counts.sum() == 100
        assert counts[:3].max() - counts[:3].min() <= 1
    rare = Counter(index for index in drawn[0] if labels[index] == 2)
    assert abs(rare[98] - rare[99]) <= 2
    common = Counter(index for epoch in drawn for index in epoch if labels[index] == 0)
    assert len(common) == 80  # in three epochs of 33 all 80 come up
    assert max(common.values()) <= 2


@pytest.mark.slow
def test_balanced_sampling_keeps_to_a_few_blocks_at_a_time():
    rng = np.random.default_rng(0)
    source = Numbers(1000, labels=rng.choice(3, 1000, p=[0.9, 0.08, 0.02]))
    source.blocks = Blocks(np.full(20, 50), lanes=2)
    balanced = loader(source, sampling="balanced", batch_size=20)
    epochs = [list(balanced.batches(epoch)) for epoch in range(4)]
    for batches in epochs:
        assert max(len({int(index) // 50 for index in batch.indices}) for batch in batches) <= 6
        counts = np.bincount(source.labels()[indices(batches)])
        assert (counts.sum(), counts.max() - counts.min() <= 1) == (1000, True)
    rare = Counter(index for batches in epochs for index in indices(batches) if source.label(index) == 2)
    assert max(rare.values()) - min(rare.values()) <= 2  # all of a class before one comes up again
    assert same(list(balanced.batches(1, start=30)), epochs[1][30:])
    halves = [loader(source, sampling="balanced", batch_size=20, rank=rank, world=2) for rank in (0, 1)]
    parts = [torch.cat([batch.indices for batch in half.batches(2)]).view(-1, 10) for half in halves]
    assert torch.equal(torch.cat(parts, 1).flatten(), torch.cat([batch.indices for batch in epochs[2]]))


def test_an_unreadable_image_is_replaced_by_its_neighbor_while_training():
    clean = list(loader(drop_last=False).batches(0))
    broken = loader(Numbers(30, broken=[5, 6]), drop_last=False)
    batches = list(broken.batches(0))
    assert indices(batches) == [7 if index in (5, 6) else index for index in indices(clean)]
    reports = sorted(report for batch in batches for report in batch.unreadable)
    assert reports == [("number 5", "broken on purpose")] + [("number 6", "broken on purpose")] * 2
    assert broken.unreadable == {"number 5": "broken on purpose", "number 6": "broken on purpose"}
    views = [float(p[0, 0, 0]) for batch in batches for i, p in zip(batch.indices, batch.pixels) if i == 7]
    assert len(set(views)) == 3  # a replacement is augmented differently than the sample itself


def test_an_unreadable_image_is_left_out_of_an_evaluation():
    broken = loader(Numbers(30, broken=[0, 29]), training=False)
    batches = list(broken.batches(0))
    assert indices(batches) == list(range(1, 29))
    assert [len(batch) for batch in batches] == [7, 8, 8, 5]
    assert len(broken.unreadable) == 2


def test_a_missing_file_is_an_unreadable_image(monkeypatch):
    def gone(self, index):
        raise FileNotFoundError(2, "No such file or directory", "x.png")

    monkeypatch.setattr(Numbers, "read", gone)
    with pytest.raises(DataError, match=r"30 consecutive images cannot be read, such as number \d+: no such file"):
        list(loader().batches(0))


def test_too_many_unreadable_images_stop_the_run():
    source = Numbers(1000, broken=range(0, 1000, 20))
    tolerant = loader(source, max_unreadable=0.06, batch_size=10)
    assert len(list(tolerant.batches(0))) == 100
    strict = loader(source, max_unreadable=0.01, batch_size=10)
    with pytest.raises(DataError, match=r"numbers: 11 of \d+ images could not be read, such as number \d+ \(broken on"):
        list(strict.batches(0))


def test_a_few_unreadable_images_pass_unless_none_may():
    source = Numbers(40, broken=range(0, 40, 4))
    assert len(list(loader(source, training=False).batches(0))) == 5
    with pytest.raises(DataError, match=r"1 of 8 .*; this exceeds max_unreadable=0 of an epoch's 30"):
        list(loader(Numbers(30, broken=[0]), training=False, max_unreadable=0.0).batches(0))


@pytest.mark.parametrize(("images", "most"), [(3, 0), (12, 3), (40, 10), (400, 10), (2000, 20)])
def test_no_set_is_so_small_that_most_of_it_may_be_lost(images, most):
    assert len(indices(loader(Numbers(images, broken=range(most)), training=False).batches(0))) == images - most
    with pytest.raises(DataError, match=f"{most + 1} of .* images could not be read.* of an epoch's {images:,}"):
        list(loader(Numbers(images, broken=range(most + 1)), training=False).batches(0))


def test_one_unreadable_image_does_not_add_up_over_the_epochs():
    broken = loader(Numbers(30, broken=[5]))
    assert all(len(list(broken.batches(epoch))) == 3 for epoch in range(20))


def test_broken_images_that_all_come_first_are_judged_by_the_whole():
    few = loader(Numbers(2000, broken=range(20)), training=False)
    assert len(indices(few.batches(0))) == 1980
    many = loader(Numbers(2000, broken=range(21)), training=False)
    with pytest.raises(DataError, match=r"21 of 24 images .*; this exceeds max_unreadable=0.01 of an epoch's 2,000"):
        list(many.batches(0))


def test_an_evaluation_of_nothing_readable_is_an_error():
    with pytest.raises(DataError, match="numbers: no image could be read, such as number 0"):
        list(loader(Numbers(5, broken=range(5)), training=False, max_unreadable=1.0).batches(0))


def test_a_mistake_in_the_transform_names_the_image():
    with pytest.raises(DataError, match=r"^number 0: the transform failed: ValueError: a mistake in the transform$"):
        list(loader(transform=failing_transform, training=False).batches(0))


def test_images_of_several_shapes_are_an_error():
    def ragged(image, rng):
        return torch.zeros(1, 2, 2 + int(image[0, 0] == 3))

    with pytest.raises(DataError, match=r"number 3: transformed to shape \(1, 2, 3\), the batch has \(1, 2, 2\)"):
        list(loader(transform=ragged, training=False).batches(0))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"batch_size": 31}, "batch_size=31 exceeds the 30 samples of numbers; use 30 or less"),
        ({"batch_size": 0}, "batch_size=0 is not at least 1"),
        ({"batch_size": 8, "world": 3}, "batch_size=8 is not divisible by the 3 processes"),
        ({"batch_size": 8, "repeats": 3}, "batch_size=8 is not divisible by repeats=3"),
        ({"rank": 2, "world": 2}, "rank=2 is not between 0 and 1"),
        ({"sampling": "odd"}, "sampling='odd' is not one of uniform, balanced"),
        ({"training": False, "drop_last": True}, "evaluation uses each sample once"),
        ({"training": False, "sampling": "balanced"}, "evaluation uses each sample once"),
        ({"workers": -1}, "workers=-1 is not between 0 and 1024"),
        ({"max_unreadable": 2.0}, r"max_unreadable=2.0 is not between 0.0 and 1.0"),
    ],
)
def test_settings_that_cannot_be_say_so(settings, text):
    with pytest.raises(ConfigError, match=text):
        loader(**settings)


def test_a_batch_outside_the_epoch_is_an_error():
    with pytest.raises(VitruvianError, match="start=4 is beyond the 3 batches of an epoch"):
        next(loader().batches(0, start=4))


def test_alternating_flips_mirror_each_image_in_every_other_epoch():
    def transform(image, rng):
        return torch.arange(3.0).expand(1, 2, 3)

    with loader(transform=transform, training=True, alternate_flip=True) as batches:
        epochs = [
            {int(i): p for b in batches.batches(e) for i, p in zip(b.indices, b.pixels[:, 0, 0, 0])} for e in (0, 1, 2)
        ]
    for number in epochs[0].keys() & epochs[1].keys():
        assert {float(epochs[0][number]), float(epochs[1][number])} == {0.0, 2.0}
    assert all(epochs[2][number] == epochs[0][number] for number in epochs[0].keys() & epochs[2].keys())
    assert len(set(map(float, epochs[0].values()))) == 2
