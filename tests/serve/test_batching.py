"""The batching core without HTTP: what shares a batch, what is refused, what survives a bad image and a stop."""

from __future__ import annotations

import threading
import time

import pytest

from forked import patience
from vitruvian.serve.batching import Batcher, BatchFunction, Refused


class Model:
    """Doubles numbers while its gate is open; remembers its batches."""

    def __init__(self, max_batch: int = 4, max_parallel: int = 1) -> None:
        self.gate = threading.Event()
        self.started = threading.Event()
        self.batches: list[list[int]] = []
        self.function = BatchFunction(self.run, max_batch, max_parallel)

    def run(self, values: list[int]) -> list[int]:
        self.batches.append(list(values))
        self.started.set()
        assert self.gate.wait(10)
        if any(value < 0 for value in values):
            raise ValueError("negative")
        return [2 * value for value in values]


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def batcher(model):
    batcher = Batcher(queue=8)
    yield batcher
    model.gate.set()
    assert batcher.stop(10)


def occupied(batcher: Batcher, model: Model, value: int = 0):
    """The model computing one image, so that others wait."""
    (future,) = batcher.reserve(1).put(model.function, [value])
    assert model.started.wait(10)
    return future


def test_what_waits_when_the_model_becomes_free_is_one_batch(batcher, model):
    first = occupied(batcher, model)
    futures = [f for value in (1, 2, 3) for f in batcher.reserve(1).put(model.function, [value])]
    model.gate.set()
    assert [f.result(10) for f in futures] == [2, 4, 6]
    assert first.result(10) == 0
    assert model.batches == [[0], [1, 2, 3]]


def test_a_single_image_does_not_wait_for_others(batcher, model):
    model.gate.set()
    (future,) = batcher.reserve(1).put(model.function, [5])
    assert future.result(10) == 10
    assert model.batches == [[5]]


def test_batches_count_images_and_split_requests(batcher, model):
    occupied(batcher, model)
    several = batcher.reserve(3).put(model.function, [1, 2, 3])
    more = batcher.reserve(3).put(model.function, [4, 5, 6])
    model.gate.set()
    assert [f.result(10) for f in several + more] == [2, 4, 6, 8, 10, 12]
    assert model.batches == [[0], [1, 2, 3, 4], [5, 6]]


def test_the_queue_is_bounded_in_images_and_says_when_to_come_back(batcher, model):
    occupied(batcher, model)
    place = batcher.reserve(7)
    with pytest.raises(Refused, match=r"the queue is full; try again in \d+ s") as refused:
        batcher.reserve(1)
    assert refused.value.status == 429
    assert int(refused.value.headers["retry-after"]) >= 1
    with place:  # leaving it gives the unused room back
        pass
    assert batcher.accepted == 1
    with batcher.reserve(7):
        pass


def test_a_request_is_accepted_whole_or_not_at_all(batcher):
    with batcher.reserve(5), pytest.raises(Refused):
        batcher.reserve(4)
    assert batcher.accepted == 0


def test_room_comes_back_when_images_are_done(batcher, model):
    model.gate.set()
    for _ in range(5):
        with batcher.reserve(8) as place:
            assert [f.result(10) for f in place.put(model.function, list(range(8)))] == [2 * i for i in range(8)]
    assert batcher.accepted == 0


def test_one_bad_image_does_not_spoil_its_neighbors(batcher, model):
    occupied(batcher, model)
    good, bad, last = (batcher.reserve(1).put(model.function, [value])[0] for value in (1, -1, 3))
    model.gate.set()
    assert good.result(10) == 2
    assert last.result(10) == 6
    with pytest.raises(ValueError, match="negative"):
        bad.result(10)
    assert model.batches == [[0], [1, -1, 3], [1], [-1], [3]]


def test_different_work_never_shares_a_batch_and_nothing_starves(batcher, model):
    order = []
    other = BatchFunction(lambda values: [order.append(v) or v for v in values], 1)
    occupied(batcher, model)
    batcher.reserve(1).put(model.function, [1])
    futures = batcher.reserve(2).put(other, [10, 11])
    futures += batcher.reserve(1).put(model.function, [2])
    model.gate.set()
    for future in futures:
        future.result(10)
    assert model.batches == [[0], [1, 2]]
    assert order == [10, 11]


def test_overlapping_batches_share_what_was_accepted(batcher):
    model = Model(max_parallel=2)
    places = [batcher.reserve(2), *(batcher.reserve(1) for _ in range(6))]  # of clients whose images are decoded
    futures = places[0].put(model.function, [0, 0])
    assert model.started.wait(10)
    for value in (1, 2, 3):
        futures += places[value].put(model.function, [value])
    time.sleep(0.05)
    assert model.batches == [[0, 0]]  # the cores are busy, and less than half of eight waits
    futures += places[4].put(model.function, [4])
    assert any(len(model.batches) == 2 for _ in patience(10))
    futures += places[5].put(model.function, [5]) + places[6].put(model.function, [6])
    time.sleep(0.05)
    assert model.batches == [[0, 0], [1, 2, 3, 4]]
    model.gate.set()
    assert [f.result(10) for f in futures] == [0, 0, 2, 4, 6, 8, 10, 12]


def test_a_single_image_has_all_cores(batcher):
    model = Model(max_parallel=2)
    futures = batcher.reserve(1).put(model.function, [0])
    assert model.started.wait(10)
    futures += batcher.reserve(4).put(model.function, [1, 2, 3, 4])
    time.sleep(0.05)
    assert model.batches == [[0]]
    model.gate.set()
    assert [future.result(10) for future in futures] == [0, 2, 4, 6, 8]


def test_work_that_does_not_overlap_waits_until_the_model_is_free(batcher):
    model, alone = Model(max_parallel=2), []
    apart = BatchFunction(lambda values: [alone.append(len(model.batches)) or value for value in values], 4)
    futures = batcher.reserve(1).put(model.function, [1])
    assert model.started.wait(10)
    futures += batcher.reserve(1).put(apart, [2])
    futures += batcher.reserve(1).put(model.function, [3])  # came later, so it does not overtake
    time.sleep(0.05)
    assert model.batches == [[1]]
    assert alone == []
    model.gate.set()
    assert [f.result(10) for f in futures] == [2, 2, 6]
    assert alone == [1]


def test_a_cancelled_image_is_not_computed_and_frees_its_room(batcher, model):
    occupied(batcher, model)
    (gone,) = batcher.reserve(1).put(model.function, [1])
    (kept,) = batcher.reserve(1).put(model.function, [2])
    assert gone.cancel()
    assert batcher.accepted == 2
    model.gate.set()
    assert kept.result(10) == 4
    assert model.batches == [[0], [2]]


def test_a_stop_finishes_what_was_accepted_and_refuses_the_rest(model):
    batcher = Batcher(queue=8)
    occupied(batcher, model)
    futures = batcher.reserve(2).put(model.function, [1, 2])
    decoding = batcher.reserve(1)  # accepted, its image not yet decoded
    stopped = threading.Thread(target=batcher.stop)
    stopped.start()
    assert any(not batcher._open for _ in patience(10))
    with pytest.raises(Refused, match="shutting down"):
        batcher.reserve(1)
    model.gate.set()
    assert [f.result(10) for f in futures] == [2, 4]
    assert stopped.is_alive()
    assert decoding.put(model.function, [3])[0].result(10) == 6
    stopped.join(10)
    assert not stopped.is_alive()


def test_many_threads_each_get_their_own_results():
    batcher = Batcher(queue=1000)
    function = BatchFunction(lambda values: [value * value for value in values], 16)
    wrong = []

    def client(number: int) -> None:
        for step in range(50):
            values = [number * 1000 + step, number]
            with batcher.reserve(2) as place:
                if [f.result(10) for f in place.put(function, values)] != [v * v for v in values]:
                    wrong.append(values)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(30)
    assert wrong == []
    assert batcher.accepted == 0
    assert batcher.stop(10)


def test_every_batch_is_told_with_its_size_and_seconds(model):
    told = []
    batcher = Batcher(queue=4, on_batch=lambda images, seconds: told.append((images, seconds >= 0)))
    model.gate.set()
    batcher.reserve(1).put(model.function, [1])[0].result(10)
    assert batcher.stop(10)
    assert told == [(1, True)]


def test_all_batches_that_do_not_overlap_are_computed_in_one_thread(batcher):
    model, threads = Model(max_parallel=2), []
    function = BatchFunction(lambda values: threads.append(threading.get_ident()) or model.run(values), 2, 2)
    model.gate.set()
    for value in range(20):
        assert batcher.reserve(1).put(function, [value])[0].result(10) == 2 * value
    assert len(set(threads)) == 1
    model.gate.clear()
    futures = batcher.reserve(4).put(function, [1, 2, 3, 4])
    assert any(len(threads) == 22 for _ in patience(10))  # the second in a thread of its own
    model.gate.set()
    assert [future.result(10) for future in futures] == [2, 4, 6, 8]
    for value in range(20):
        assert batcher.reserve(1).put(function, [value])[0].result(10) == 2 * value
    assert len(set(threads[22:] + threads[:20])) == 1
