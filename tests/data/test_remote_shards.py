"""Remote shards through fsspec's local and memory file systems."""

import json
import pickle
import shutil
import sys

import numpy as np
import pytest
from making import decoded_transform, level_of, make_shard, make_shards

from vitruvian.data import remote
from vitruvian.data.formats import open_dataset
from vitruvian.data.loader import BatchMaker, BatchPlan, Loader
from vitruvian.data.remote import RemoteSource
from vitruvian.data.sources import hold_out
from vitruvian.errors import DataError, MissingExtraError

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def bucket(tmp_path):
    """Puts a local folder into the memory file system; gives the URL."""
    memory = fsspec.filesystem("memory")

    def put(folder, name="bucket"):
        memory.put(str(folder), f"/{name}", recursive=True)
        return f"memory://{name}"

    yield put
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "file"])
def shards(request, tmp_path, bucket):
    """The URL of seven shards with their sizes and classes, and the number of samples."""
    total = make_shards(tmp_path / "shards", shards=7)
    return (bucket(tmp_path / "shards") if request.param == "memory" else f"file://{tmp_path}/shards"), total


@pytest.mark.parametrize("data", ["", "/train-{000..006}.tar", "/*.tar", "/train-00[0-6].tar"])
def test_a_url_of_a_folder_or_a_pattern_means_its_shards(shards, data):
    url, total = shards
    train = open_dataset(url + data).train
    assert isinstance(train, RemoteSource)
    assert (len(train), train.classes, train.blocks.lanes) == (total, ("even", "odd"), 4)
    assert [level_of(train.read(i)) for i in (0, 4, total - 1)] == [0, 50, 303]
    assert train.key(4) == "train-001.tar:0000.png"
    assert train.label(5) == 1


def test_an_epoch_of_batches_meets_each_sample_once(shards):
    url, total = shards
    loader = Loader(open_dataset(url).train, transform=decoded_transform, batch_size=4, training=True, drop_last=False)
    batches = list(loader.batches(0))
    assert sorted(np.concatenate([batch.indices for batch in batches])) == list(range(total))
    resumed = list(loader.batches(0, start=3))
    assert all((a.pixels == b.pixels).all() for a, b in zip(resumed, batches[3:], strict=True))
    other = np.concatenate([batch.indices for batch in loader.batches(1)])
    assert other.tolist() != np.concatenate([batch.indices for batch in batches]).tolist()


def test_processes_that_share_a_batch_fetch_different_shards(tmp_path, cache):
    for number in range(8):
        make_shard(tmp_path / f"s/train-{number}.tar", range(8))
    (tmp_path / "s/classes.txt").write_text("even\nodd\n")
    (tmp_path / "s/sizes.json").write_text(str({f"train-{n}.tar": 8 for n in range(8)}).replace("'", '"'))
    train = open_dataset(f"file://{tmp_path}/s").train
    used = []
    for rank in (0, 1):
        loader = Loader(train, transform=decoded_transform, batch_size=16, training=True, rank=rank, world=2)
        used.append({int(i) // 8 for batch in loader.batches(0) for i in batch.indices})
    assert used[0] | used[1] == set(range(8))
    assert not used[0] & used[1]


def test_a_shard_is_fetched_once_for_all_readers(shards, monkeypatch):
    url, _ = shards
    fetched = []
    original = remote.download
    monkeypatch.setattr("vitruvian.data.remote.download", lambda u, t: (fetched.append(u), original(u, t)))
    train = open_dataset(url).train
    copy = pickle.loads(pickle.dumps(train))
    assert train.read(0) == copy.read(0)
    assert len(fetched) == 1


def test_shards_are_announced_a_round_before_they_are_read_also_from_one_epoch_to_the_next(tmp_path, monkeypatch):
    for number in range(8):
        make_shard(tmp_path / f"train-{number}.tar", range(40))
    (tmp_path / "classes.txt").write_text("even\nodd\n")
    (tmp_path / "sizes.json").write_text(json.dumps({f"train-{number}.tar": 40 for number in range(8)}))
    monkeypatch.setattr(remote, "MAX_LANES", 4)
    train = open_dataset(f"file://{tmp_path}").train
    plan = BatchPlan(source=train, batch_size=4, seed=0, training=True, drop_last=True)
    maker, announced = BatchMaker(plan, decoded_transform), []
    assert (train.blocks.lanes, plan.steps, maker.look_ahead) == (4, 80, 40)
    monkeypatch.setattr(train, "announce", lambda indices: announced.append({int(i) // 40 for i in indices}))
    monkeypatch.setattr(BatchMaker, "_sample", lambda *_: (None, 0))
    first = {}
    for place in range(2 * plan.steps):
        maker(divmod(place, plan.steps))
        needed, later = announced[-2:]
        for shard in later:
            first.setdefault(((place + 40) // plan.steps, shard), place)
        for shard in needed:
            first.setdefault((0, shard), 0 if place == 0 else place)
            assert place - first[place // plan.steps, shard] >= min(place, 40)


def test_a_shard_that_changed_is_fetched_again(tmp_path):
    make_shards(tmp_path, shards=2)
    assert level_of(open_dataset(f"file://{tmp_path}").train.read(3)) == 3
    make_shard(tmp_path / "train-000.tar", range(60, 80))
    (tmp_path / "sizes.json").write_text('{"train-000.tar": 20, "train-001.tar": 5}')
    assert level_of(open_dataset(f"file://{tmp_path}").train.read(3)) == 63


def test_other_classes_give_other_labels(tmp_path):
    make_shards(tmp_path, shards=2)
    assert open_dataset(f"file://{tmp_path}").train.label(1) == 1
    (tmp_path / "classes.txt").write_text("none\n1\n0\n")
    assert open_dataset(f"file://{tmp_path}").train.label(0) == 2


def test_a_full_disk_is_not_taken_for_a_broken_image(tmp_path, cache):
    make_shards(tmp_path, shards=2)
    train = open_dataset(f"file://{tmp_path}").train
    (cache / "shards").write_text("a file in the way")
    with pytest.raises(DataError, match=r"train-000.tar: cannot be copied to .*: (Not a directory|File exists)"):
        train.read(0)


def test_only_so_many_bytes_stay_on_the_disk(shards, monkeypatch, cache):
    url, _ = shards
    monkeypatch.setattr(remote, "MAX_CACHE_BYTES", 25_000)  # a shard has 10240 bytes
    train = open_dataset(url).train
    assert train.blocks.lanes == 1
    assert [level_of(train.read(i)) for i in (0, 4, 19, 30, 0)] == [0, 50, 200, 300, 0]
    assert len(list(cache.glob("shards/*/*/*.tar"))) == 2
    with pytest.raises(DataError, match=r"all labels are needed.*; write .*train-000.jsonl and so on"):
        hold_out(train, 0.2, 0)


def test_labels_of_large_data_come_from_the_lists_beside_the_shards(shards, monkeypatch, cache):
    url, _ = shards
    system, folder = fsspec.core.url_to_fs(url)
    for path in system.glob(f"{folder}/*.tar"):
        count = len(open_dataset(f"{url}/{path.rpartition('/')[2]}").train)
        system.pipe(path.replace(".tar", ".jsonl"), b"".join(b'{"label": %d}\n' % (n % 2) for n in range(count)))
    small = open_dataset(url).train.labels().tolist()
    shutil.rmtree(cache / "shards")
    monkeypatch.setattr(remote, "MAX_CACHE_BYTES", 25_000)
    train = open_dataset(url).train
    assert train.labels().tolist() == small
    assert len(hold_out(train, 0.25, 0)[1]) > 0
    assert not list(cache.glob("shards/*/*/*.tar"))  # not one was fetched
    system.pipe(path.replace(".tar", ".jsonl"), b'{"label": 2}\n')
    with pytest.raises(DataError, match=r"train-006.jsonl: expected the class indices of 4 samples"):
        open_dataset(url).train.labels()


def test_small_data_can_be_held_out(shards):
    url, total = shards
    train, held = hold_out(open_dataset(url).train, 0.25, 0)
    assert len(train) + len(held) == total
    assert level_of(held.read(0)) % 2 == held.label(0)
    assert train.blocks.sizes.sum() == len(train)


def test_small_data_without_sizes_is_copied_here(tmp_path, bucket):
    total = make_shards(tmp_path / "a", shards=3, sizes=False)
    make_shard(tmp_path / "a/val-0.tar", [3, 4])
    data = open_dataset(bucket(tmp_path / "a"))
    assert {split: len(source) for split, source in data.splits.items()} == {"train": total, "val": 2}
    assert data.classes == ("even", "odd")
    assert level_of(data.train.read(total - 1)) == 105


def test_large_data_without_sizes_is_an_error(tmp_path, monkeypatch):
    make_shards(tmp_path, shards=3, sizes=False)
    monkeypatch.setattr(remote, "MAX_CACHE_BYTES", 20_000)
    with pytest.raises(DataError, match=r"3 shards, about 0 GB, without sizes.json beside them; write"):
        open_dataset(f"file://{tmp_path}")


def test_sizes_that_are_wrong_are_an_error(tmp_path):
    make_shards(tmp_path, shards=2)
    (tmp_path / "sizes.json").write_text('{"train-000.tar": 9, "train-001.tar": 5}')
    with pytest.raises(DataError, match=r"train-000.tar: 4 labeled images, but sizes.json states 9"):
        open_dataset(f"file://{tmp_path}").train.read(0)
    (tmp_path / "sizes.json").write_text("[1, 2]")
    with pytest.raises(DataError, match=r"sizes.json: not an object from file names to numbers"):
        open_dataset(f"file://{tmp_path}")


def test_a_shard_that_is_gone_is_named(tmp_path):
    make_shards(tmp_path, shards=3)
    train = open_dataset(f"file://{tmp_path}").train
    (tmp_path / "train-002.tar").unlink()
    with pytest.raises(DataError, match=r"train-002.tar: cannot be read: FileNotFoundError"):
        train.read(len(train) - 1)
    make_shards(tmp_path, shards=3)
    assert level_of(train.read(len(train) - 1)) == 105  # a later attempt may succeed


def test_a_passing_failure_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.0)
    failures = [ConnectionError("lost"), TimeoutError("slow")]

    def action():
        if failures:
            raise failures.pop()
        return 42

    assert remote.retry("x", action) == 42
    failures[:] = [ConnectionError(f"lost {n}") for n in range(9)]
    with pytest.raises(DataError, match=r"^x: cannot be read: ConnectionError: lost 5 \(4 attempts\)$"):
        remote.retry("x", action)


def test_a_broken_shard_is_named_by_its_own_name(tmp_path):
    make_shards(tmp_path, shards=2)
    (tmp_path / "train-000.tar").write_bytes(b"x" * 2000)
    with pytest.raises(DataError, match=r"train-000.tar: not a complete tar file"):
        open_dataset(f"file://{tmp_path}").train.read(0)


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("nonsense://a/b.tar", DataError, "Protocol not known: nonsense"),
        ("memory://nothing/here", DataError, "cannot be read|no .tar files"),
        ("s3://a/b.tar", MissingExtraError, "^s3://a/b.tar: this needs another package: pip install s3fs$"),
    ],
)
def test_a_url_that_leads_nowhere_says_so(url, error, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(error, match=text):
        open_dataset(url)
