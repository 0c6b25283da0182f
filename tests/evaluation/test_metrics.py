"""Measures against cases worked out by hand and against plain loops."""

import math

import numpy as np
import pytest
import torch

from vitruvian.data.loader import Batch
from vitruvian.errors import DataError, VitruvianError
from vitruvian.evaluation.metrics import MAX_CONFUSION_CLASSES, measure_classes


class Parrot(torch.nn.Module):
    """Answers with the pixels it is given."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, pixels):
        assert not self.training
        self.calls += 1
        return pixels


def batch(logits, labels, first=0):
    count = len(labels)
    return Batch(
        pixels=torch.as_tensor(logits, dtype=torch.float32),
        labels=torch.tensor(labels, dtype=torch.int64),
        indices=torch.arange(first, first + count),
        weights=torch.ones(count),
        unreadable=[],
    )


def measured(logits, labels, *, classes, size=4, **options):
    """In batches of `size`, the last one short."""
    parts = [batch(logits[i : i + size], labels[i : i + size], i) for i in range(0, len(labels), size)]
    return measure_classes(Parrot(), parts, classes=classes, **options)


def random_case(count=203, classes=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=generator)
    return logits, torch.randint(classes, (count,), generator=generator).tolist()


def test_a_case_worked_out_by_hand():
    logits = [[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]
    found = measured(logits, [0, 1, 1], classes=2)
    losses = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1)), math.log(1 + math.exp(3))]
    assert found.loss == pytest.approx(sum(losses) / 3)
    assert found.top1 == pytest.approx(200 / 3)
    assert found.top5 == 100.0
    assert found.confusion.tolist() == [[1, 0], [1, 1]]
    assert found.class_accuracy.tolist() == [100.0, 50.0]
    assert found.mean_per_class == 75.0
    assert found.mistakes.tolist() == [2]
    assert found.probabilities[2] == pytest.approx(1 / (1 + math.exp(-3)))


def test_measures_agree_with_a_plain_loop_over_examples():
    logits, labels = random_case()
    found = measured(logits, labels, classes=7)
    confusion, top5 = np.zeros((7, 7), int), 0
    for row, label in zip(logits.tolist(), labels):
        order = sorted(range(7), key=lambda c: -row[c])
        confusion[label, order[0]] += 1
        top5 += label in order[:5]
    assert (found.confusion == confusion).all()
    assert found.count == 203
    assert found.top1 == pytest.approx(100 * np.trace(confusion) / 203)
    assert found.top5 == pytest.approx(100 * top5 / 203)
    expected = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(labels))
    assert found.loss == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("size", [1, 4, 203, 1000])
def test_how_examples_are_batched_changes_no_measure(size):
    logits, labels = random_case()
    one, other = (measured(logits, labels, classes=7, size=s) for s in (50, size))
    assert (one.confusion == other.confusion).all()
    assert one.mistakes.tolist() == other.mistakes.tolist()
    assert one.loss == pytest.approx(other.loss, rel=1e-12)  # sums in another order


def test_equal_logits_rank_in_the_order_of_classes_as_in_predictions():
    found = measured(torch.zeros(8, 8), list(range(8)), classes=8)
    assert found.confusion[:, 0].tolist() == [1] * 8
    assert found.top5 == 62.5


def test_the_most_confident_mistakes_come_first():
    logits, labels = random_case()
    found = measured(logits, labels, classes=7)
    probabilities = found.probabilities[found.mistakes].tolist()
    assert probabilities == sorted(probabilities, reverse=True)
    assert len(probabilities) == 203 - np.trace(found.confusion)


def test_a_class_without_examples_has_no_accuracy_and_does_not_enter_the_mean():
    found = measured([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], [0, 1], classes=3)
    assert found.mean_per_class == 50.0
    assert math.isnan(found.class_accuracy[2])


def test_many_classes_are_counted_without_a_confusion_matrix():
    classes = MAX_CONFUSION_CLASSES + 1
    found = measured(torch.eye(classes)[[5, 6]], [5, 7], classes=classes)
    assert found.confusion is None
    assert (found.top1, found.mean_per_class) == (50.0, 50.0)


def test_the_model_is_measured_without_dropout_and_stays_as_it_was():
    model = Parrot().train()
    measure_classes(model, [batch([[1.0, 0.0]], [0])], classes=2)
    assert model.training


def test_an_answer_that_is_no_number_names_the_example():
    with pytest.raises(VitruvianError, match="outputs for example 5 are NaN or infinite"):
        measured(torch.tensor([[0.0, 1.0]] * 5 + [[0.0, math.nan]]), [0] * 6, classes=2)


def test_an_answer_of_minus_infinity_rules_a_class_out():
    assert measured([[-math.inf, 0.0, 1.0]], [2], classes=3).top1 == 100.0


def test_a_head_of_another_size_and_foreign_labels_are_refused():
    with pytest.raises(VitruvianError, match=r"logits \(1, 2\) for 1 examples of 3 classes"):
        measured([[0.0, 1.0]], [0], classes=3)
    with pytest.raises(DataError, match="labels from 2 to 2, expected 0 to 1"):
        measured([[0.0, 1.0]], [2], classes=2)


def test_nothing_to_measure_is_an_error():
    with pytest.raises(DataError, match="there are no examples"):
        measure_classes(Parrot(), [], classes=2)


def test_a_process_without_a_part_in_a_batch_calls_the_model_only_if_all_take_part(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda gathered, rows: gathered[0].extend(rows))
    empty = batch(torch.empty(0), [])
    for all_ranks, calls in ((False, 1), (True, 2)):
        model = Parrot()
        found = measure_classes(model, [batch([[1.0, 0.0]], [0]), empty], classes=2, all_ranks=all_ranks)
        assert (model.calls, found.count) == (calls, 1)


def share(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    logits, labels = random_case(count=9)
    mine = slice(0, 4) if rank == 0 else slice(4, 9)
    part = batch(logits[mine], labels[mine], first=mine.start)
    found = measure_classes(Parrot(), [part], classes=7, all_ranks=True)
    torch.save((found.confusion, found.loss, found.mistakes.tolist()), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_measure_the_whole_without_counting_an_example_twice(tmp_path):
    torch.multiprocessing.spawn(share, (tmp_path,), nprocs=2)
    logits, labels = random_case(count=9)
    whole = measured(logits, labels, classes=7)
    for rank in range(2):
        confusion, loss, mistakes = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert (confusion == whole.confusion).all()
        assert loss == pytest.approx(whole.loss, rel=1e-12)
        assert mistakes == whole.mistakes.tolist()
