"""Bulk jobs: the same bytes for one process or many, nothing missing, nothing doubled, nothing mixed."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vitruvian as vt
import vitruvian.bulk.job
import vitruvian.inference
from forked import patience
from vitruvian.bulk import embed, merge, predict
from vitruvian.bulk.result import open_result
from vitruvian.errors import ConfigError, DataError, FileError, NotFiniteError
from vitruvian.inference import Classifier, Encoder
from vitruvian.weights.save import save

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def whole(images, model, tmp_path_factory):
    """The result of one process."""
    folder = tmp_path_factory.mktemp("whole")
    embed(images, model, folder, piece=5, batch_size=2)
    return folder


@pytest.mark.slow
def test_a_vector_is_what_the_encoder_gives_for_the_image(images, model, whole, tmp_path):
    found = merge(whole, tmp_path / "all.parquet")
    table = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert (found.images, found.parts, len(table)) == (24, 5, 24)
    encoder = Encoder(model)
    for row in (table[0], table[17]):
        wanted = encoder.embed([images / row["key"]]).numpy()[0]
        np.testing.assert_allclose(row["vector"], wanted.astype("float16"), atol=2e-3)
    assert [row["label"] for row in table] == ["a"] * 12 + ["b"] * 12
    assert [row["index"] for row in table] == list(range(24))


@pytest.mark.slow
def test_an_unreadable_image_is_a_row_with_its_error(whole, tmp_path):
    found = merge(whole, tmp_path / "all.parquet")
    row = pq.read_table(tmp_path / "all.parquet").to_pylist()[5]
    assert row["key"].endswith("05.png")
    assert row["vector"] is None
    assert "not an image" in row["error"]
    assert found.errors == {row["error"]: 1}


@pytest.mark.parametrize("count", [2, 7])
def test_shards_together_give_the_bytes_of_one_process(images, model, whole, tmp_path, count):
    for number in reversed(range(count)):
        embed(images, model, tmp_path, shard=(number + 1, count), piece=5, batch_size=2)
    assert content(tmp_path) == content(whole)


def test_a_folder_of_other_files_is_refused(images, model, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(DataError, match=r"not empty, and not the result of a job: it has thesis.tex; choose another"):
        embed(images, model, tmp_path)
    assert content(tmp_path) == {"thesis.tex": b"mine"}


def test_a_job_keeps_the_engine_that_was_chosen_when_it_began(images, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vitruvian.inference, "fastest_engine", lambda *_: "onnxruntime")
    monkeypatch.setattr(Encoder, "_open_engine", lambda self: self.model)  # no graph in a quick test
    embed(images, Encoder(model, engine="auto"), tmp_path / "one", piece=5)
    assert json.loads((tmp_path / "one" / "job.json").read_text())["engine"] == "onnxruntime"
    assert capsys.readouterr().err == "engine: onnxruntime, for all parts\n"
    embed(images, Encoder(model, engine="auto"), tmp_path / "shards", shard=(1, 2), piece=5)
    assert json.loads((tmp_path / "shards" / "job.json").read_text())["engine"] == "torch"
    monkeypatch.setattr(vitruvian.inference, "fastest_engine", None)
    embed(images, Encoder(model, engine="auto"), tmp_path / "one", piece=5)
    with pytest.raises(DataError, match=r"this folder belongs to another job \(engine was onnxruntime\)"):
        embed(images, model, tmp_path / "one", piece=5)
    (tmp_path / "shards" / "job.json").write_text(
        (tmp_path / "shards" / "job.json").read_text().replace('"engine": "torch"', '"other": 1')
    )  # as jobs were described before there was a choice
    embed(images, Encoder(model, engine="auto"), tmp_path / "shards", piece=5)


@pytest.mark.slow
def test_a_resumed_job_of_another_engine_has_the_same_bytes_and_the_features_of_torch(images, model, tmp_path):
    headless = vt.build(model.config.replace(num_classes=0)).eval()
    for name, engine in (("torch", "torch"), ("whole", "onnxruntime"), ("resumed", "onnxruntime")):
        embed(images, Encoder(headless, engine=engine), tmp_path / name, piece=5, batch_size=4, dtype="float32")
    for part in ("part-000001-of-000005.parquet", "part-000004-of-000005.parquet"):
        (tmp_path / "resumed" / part).unlink()
    embed(images, Encoder(headless, engine="onnxruntime"), tmp_path / "resumed", piece=5, batch_size=4, dtype="float32")
    assert content(tmp_path / "resumed") == content(tmp_path / "whole")
    vectors = []
    for name in ("torch", "whole"):
        merge(tmp_path / name, tmp_path / f"{name}.parquet")
        rows = pq.read_table(tmp_path / f"{name}.parquet").to_pylist()
        vectors.append(np.array([row["vector"] for row in rows if row["vector"]]))
    np.testing.assert_allclose(*vectors, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_processes_that_read_give_the_bytes_of_threads(images, model, whole, tmp_path):
    embed(images, model, tmp_path, piece=5, batch_size=2, workers=2)
    assert content(tmp_path) == content(whole)


def test_batches_that_overlap_on_two_cores_give_the_bytes_of_one_after_the_other(
    images, model, tmp_path, monkeypatch, two_threads
):
    embed(images, model, tmp_path / "two", piece=11, batch_size=5)
    monkeypatch.setattr(vitruvian.inference, "in_threads", lambda function, items, **_: map(function, items))
    embed(images, model, tmp_path / "one", piece=11, batch_size=5)
    assert content(tmp_path / "two") == content(tmp_path / "one")


def test_each_process_of_torchrun_does_its_share(images, model, whole, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in "021":
        monkeypatch.setenv("RANK", rank)
        embed(images, model, tmp_path, piece=5, batch_size=2)
    assert content(tmp_path) == content(whole)


def test_a_part_that_is_there_is_not_made_again_and_a_damaged_one_is(images, model, whole, tmp_path, capsys):
    folder = shutil.copytree(whole, tmp_path / "copy")
    parts = sorted(folder.glob("part-*"))
    kept, damaged = parts[0], parts[3]
    before = kept.stat().st_mtime_ns
    damaged.write_bytes(damaged.read_bytes()[:-20])
    parts[1].unlink()
    embed(images, model, folder, piece=5, batch_size=2)
    assert kept.stat().st_mtime_ns == before
    assert content(folder) == content(whole)
    assert f"{damaged.name}: damaged, computing it again" in capsys.readouterr().err


def test_merging_says_which_parts_are_missing(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    sorted(folder.glob("part-*"))[2].unlink()
    with pytest.raises(DataError, match=r"1 of 5 parts are missing \(number 3\)"):
        merge(folder)


def test_merging_refuses_a_part_of_another_job_a_doubled_and_a_damaged_one(images, model, whole, tmp_path):
    embed(images, model, tmp_path / "other", piece=5, batch_size=2, dtype="float32")
    folder = shutil.copytree(whole, tmp_path / "copy")
    first, second, *_ = sorted(folder.glob("part-*"))
    good = first.read_bytes()
    first.write_bytes((tmp_path / "other" / first.name).read_bytes())
    with pytest.raises(DataError, match="written by another job"):
        merge(folder)
    first.write_bytes(second.read_bytes())
    with pytest.raises(DataError, match="not the rows 0 to 4"):
        merge(folder)
    first.write_bytes(good[:-9])
    with pytest.raises(DataError, match="a damaged part"):
        merge(folder)
    first.write_bytes(good)
    (folder / "part-000005-of-000006.parquet").write_bytes(good)
    with pytest.raises(DataError, match="is not a part of this job"):
        merge(folder)


def test_a_folder_belongs_to_one_model_one_dataset_and_one_setting(images, model, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    other = copy.deepcopy(model)
    torch.nn.init.ones_(other.embed.patch.bias)
    with pytest.raises(DataError, match=r"belongs to another job \(model_key was"):
        embed(images, other, folder, piece=5, batch_size=2)
    with pytest.raises(DataError, match="dtype was float16"):
        embed(images, model, folder, piece=5, batch_size=2, dtype="float32")
    fewer = shutil.copytree(images, tmp_path / "fewer")
    (fewer / "a" / "00.png").rename(fewer / "a" / "99.png")
    with pytest.raises(DataError, match="data_key was"):
        embed(fewer, model, folder, piece=5, batch_size=2)
    assert content(folder) == content(whole)


def test_answers_are_those_of_the_classifier(images, model, tmp_path):
    predict(images, model, tmp_path, piece=7, batch_size=3, top=2)
    merge(tmp_path, tmp_path / "all.parquet")
    rows = pq.read_table(tmp_path / "all.parquet").to_pylist()
    (wanted,) = Classifier(model).predict([images / rows[20]["key"]], top=2)
    assert [a["label"] for a in rows[20]["predictions"]] == [a.label for a in wanted]
    assert rows[20]["predictions"][0]["probability"] == pytest.approx(wanted[0].probability, abs=1e-6)
    assert rows[5]["predictions"] is None


def test_a_classifier_gives_vectors_too_and_an_encoder_no_answers(images, model, whole, tmp_path):
    embed(images, Classifier(model), tmp_path / "vectors", piece=5, batch_size=2)
    assert merge(tmp_path / "vectors", tmp_path / "a.parquet").images == 24
    merge(whole, tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    with pytest.raises(ConfigError, match="which has no predictions; pass a Classifier"):
        predict(images, Encoder(model), tmp_path / "predictions")


def test_a_threshold_that_is_not_applied_is_said(images, model, tmp_path, capsys):
    other = copy.deepcopy(model)
    other.meta = other.meta.replace(threshold=0.9)
    predict(images, other, tmp_path, piece=50)
    note = "rejects images below a threshold of 0.9 on the probability; the written predictions"
    assert note in capsys.readouterr().err


def test_images_without_classes_have_no_labels(images, model, tmp_path):
    embed(images / "b", model, tmp_path / "out", piece=100)
    merge(tmp_path / "out", tmp_path / "all.parquet")
    rows = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert [row["key"] for row in rows] == [f"{number}.png" for number in range(12, 24)]
    assert {row["label"] for row in rows} == {None}


def test_a_part_of_which_too_much_cannot_be_read_is_not_written(images, model, tmp_path):
    folder = shutil.copytree(images, tmp_path / "images")
    for number in (6, 7):
        (folder / "a" / f"0{number}.png").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"3 of 5 images cannot be read, more than 25%, such as a/05.*; the part from image 5 on is not"
    ):
        embed(folder, model, tmp_path / "out", piece=5, batch_size=2)
    assert [path.name[:11] for path in (tmp_path / "out").glob("part-*")] == ["part-000000"]
    with pytest.raises(DataError, match=r"image 5 on is not written; max_unreadable= sets the limit$"):
        embed(folder, model, tmp_path / "out", piece=5, batch_size=2)
    embed(folder, model, tmp_path / "out", piece=5, batch_size=2, max_unreadable=0.6)
    assert merge(tmp_path / "out").to_json()["unreadable"] == 3


@pytest.mark.filterwarnings("error")  # numpy warns of values that overflow in float16
def test_a_model_with_outputs_that_are_not_finite_is_blamed_and_not_the_images(images, model, tmp_path):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.norm.weight.fill_(1e9)
        broken.head.weight.fill_(float("nan"))
    for job in (embed, predict):
        with pytest.raises(NotFiniteError) as caught:
            job(images, broken, tmp_path / job.__name__, piece=5, batch_size=2)
        assert str(caught.value) == (
            f"{images}: the model produced NaN or infinite outputs for 5 of 5 images, such as a/00.png; "
            "the part from image 0 on is not written"
        )


def test_a_result_behind_a_url_is_that_of_a_folder(images, model, whole, tmp_path):
    pytest.importorskip("fsspec")
    embed(images, model, f"memory://{tmp_path.name}", piece=5, batch_size=2)
    merge(f"memory://{tmp_path.name}", tmp_path / "a.parquet")
    merge(whole, tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"images": 10**18}, "1000000000000000000 is not between"),
        (
            {"images": 10**8, "piece": 1},
            r"job.json describes 100,000,000 parts, which do not include part-000000-of-000005.parquet; if it",
        ),
        ({"images": "24"}, "images='24' is not an integer"),
        ({"width": None}, "width=None is not"),
        ({"width": 10**12}, "width=1000000000000 is not between"),
        ({"width": 17}, "written by another job"),
        ({"dtype": "float64"}, "dtype='float64' is not one of"),
        ({"task": ["embed"]}, "task=.* is not one of"),
        ({"model": 5}, "model=5 is not"),
        ({"data": {}}, "data=.* is not"),
    ],
)
def test_a_description_that_cannot_be_is_refused(whole, tmp_path, changes, text):
    folder = shutil.copytree(whole, tmp_path / "copy")
    job = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps(job | changes))
    with pytest.raises(DataError, match=text):
        merge(folder)
    (folder / "job.json").write_text(json.dumps({name: value for name, value in job.items() if name not in changes}))
    with pytest.raises(DataError, match="is missing"):
        merge(folder)


def replaced(table, name, values, kind):
    return table.set_column(table.column_names.index(name), name, pa.array(values, kind))


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.drop(["vector"]),
        lambda table: table.drop(["error"]),
        lambda table: table.append_column("more", table["key"]),
        lambda table: replaced(table, "key", range(5), pa.int64()),
        lambda table: replaced(table, "vector", [[1.0] * 8] * 5, pa.list_(pa.float16(), 8)),
    ],
)
def test_a_part_with_other_columns_is_refused_and_not_made_again(images, model, whole, tmp_path, change):
    folder = shutil.copytree(whole, tmp_path / "copy")
    part = sorted(folder.glob("part-*"))[1]
    table = pq.read_table(part)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), part)
    before = part.read_bytes()
    with pytest.raises(DataError, match="its columns do not match the job"):
        merge(folder, tmp_path / "all.parquet")
    with pytest.raises(DataError, match="its columns do not match the job"):
        embed(images, model, folder, piece=5, batch_size=2)
    assert part.read_bytes() == before
    assert not (tmp_path / "all.parquet").exists()


def test_a_part_that_was_edited_is_refused_and_not_made_again(images, model, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    part = sorted(folder.glob("part-*"))[1]
    table = pq.read_table(part)
    for name, values in {"label": ["zebra"] * 5, "vector": [np.ones(16, np.float16)] * 5}.items():
        changed = replaced(table, name, values, table.schema.field(name).type)
        pq.write_table(changed.replace_schema_metadata(table.schema.metadata), part)
        before = part.read_bytes()
        for work in (lambda: merge(folder), lambda: embed(images, model, folder, piece=5, batch_size=2)):
            with pytest.raises(DataError, match=f"{part.name}: edited since it was written; remove it and run"):
                work()
        assert part.read_bytes() == before
    pq.write_table(table, part)  # the same rows, by another writer
    assert merge(folder).images == 24


@pytest.mark.parametrize("damaged", [b"", b'{"task', b"[]", b"\x00\xff"])
def test_a_damaged_description_is_one_line_that_tells_how_to_get_it_back(images, model, whole, tmp_path, damaged):
    folder = shutil.copytree(whole, tmp_path / "copy")
    (folder / "job.json").write_bytes(damaged)
    for work in (lambda: merge(folder), lambda: embed(images, model, folder, piece=5, batch_size=2)):
        with pytest.raises(DataError, match=r"job.json: .*; remove it and run the job again, which keeps the parts"):
            work()
    (folder / "job.json").unlink()
    embed(images, model, folder, piece=5, batch_size=2)
    assert content(folder) == content(whole)


@pytest.mark.slow
def test_every_flipped_byte_of_a_part_is_noticed_and_mended(images, model, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    part = sorted(folder.glob("part-*"))[1]
    good, table = part.read_bytes(), pq.read_table(part)
    for place in range(4, len(good), 11):
        part.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
        try:
            found = open_result(folder).table(1)
        except DataError:
            continue
        assert found.equals(table), place
    part.write_bytes(good)
    place = pq.ParquetFile(part).metadata.row_group(0).column(4).data_page_offset + 100
    part.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
    embed(images, model, folder, piece=5, batch_size=2)
    assert content(folder) == content(whole)


def test_merging_writes_over_no_file_of_the_job(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    for name in content(folder):
        with pytest.raises(FileError, match="this file belongs to the job itself"):
            merge(folder, folder / name)
    with pytest.raises(FileError, match="a URL"):
        merge(folder, Path("s3://bucket/all.parquet"))
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(FileError, match="not a regular file"):
        merge(folder, tmp_path / "pipe.parquet")
    assert content(folder) == content(whole)


def test_a_rank_that_is_no_number_is_named(images, model, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK='first' is not an integer"):
        embed(images, model, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"shard": (0, 4)}, ConfigError, "shard=0/4 is not one of 1/4 to 4/4"),
        ({"piece": 0}, ConfigError, "piece=0"),
        ({"dtype": "int8"}, ConfigError, "dtype='int8'"),
        ({"out": ""}, FileError, "the name of the output folder is empty"),
        ({"out": __file__}, FileError, "not a folder"),
        ({"out": "s3://"}, FileError, "the name of the output folder is empty"),
    ],
)
def test_bad_arguments_get_one_line(images, model, tmp_path, arguments, error, text):
    with pytest.raises(error, match=text):
        embed(images, model, **{"out": tmp_path, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_transform_of_ones_own_is_refused_with_one_line(images, model, tmp_path):
    encoder = Encoder(model).with_preprocess(lambda image: torch.zeros(3, 16, 16))
    with pytest.raises(ConfigError, match="a bulk job needs preprocessing settings, not a callable"):
        embed(images, encoder, tmp_path)


@pytest.mark.slow
def test_a_killed_job_loses_at_most_its_part_and_ends_with_the_same_bytes(images, model, whole, tmp_path):
    save(model, tmp_path / "model")
    stuck = (
        "import time; from vitruvian.bulk.job import Job; from vitruvian.cli.app import main\n"
        "real, calls = Job.results, []\n"
        "def results(self, pixels):\n"
        "    calls.append(1); time.sleep(100 * (len(calls) > 7)); return real(self, pixels)\n"
        "Job.results = results; main()"
    )
    arguments = [
        "embed",
        images,
        "--model",
        tmp_path / "model",
        "--out",
        tmp_path / "out",
        "--piece",
        5,
        "--batch-size",
        2,
    ]
    process = subprocess.Popen([sys.executable, "-c", stuck, *map(str, arguments)])
    for _ in patience(120):
        if process.poll() is not None or list((tmp_path / "out").glob("part-000001*")):
            break
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert sorted(name[:11] for name in content(tmp_path / "out")) == ["job.json", "part-000000", "part-000001"]
    embed(images, tmp_path / "model", tmp_path / "out", piece=5, batch_size=2)
    embed(images, tmp_path / "model", tmp_path / "again", piece=5, batch_size=2)
    assert content(tmp_path / "out") == content(tmp_path / "again")


def test_a_disk_that_is_full_ends_the_job_with_one_line(images, model, tmp_path, monkeypatch):
    import vitruvian.files

    def full(path):
        raise OSError(28, "No space left on device", os.fspath(path))

    monkeypatch.setattr(vitruvian.files, "sync", full)
    with pytest.raises(FileError, match="cannot be written: No space left on device"):
        embed(images, model, tmp_path, piece=5)
    assert list(tmp_path.iterdir()) == []
