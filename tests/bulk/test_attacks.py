"""What happens to bulk jobs: stopped, doubled, without disk, without rights, and with a bucket that goes away."""

from __future__ import annotations

import http.server
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

import vitruvian.bulk.job  # noqa: F401, so that no copy of this process imports it
from forked import Forked
from vitruvian.bulk import embed, merge
from vitruvian.data import remote
from vitruvian.errors import DataError, FileError
from vitruvian.weights.save import save

pytest.importorskip("pyarrow")

UNREADABLE = 1  # the exit code of a finished job, since one of its images cannot be read


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def work(images, model, tmp_path_factory):
    """The words of a job but for its output, and its result."""
    folder = tmp_path_factory.mktemp("work")
    save(model, folder / "model")
    embed(images, folder / "model", folder / "whole", piece=5, batch_size=2)
    words = ["embed", images, "--model", folder / "model", "--piece", "5", "--batch-size", "2", "--out"]
    return [str(word) for word in words], content(folder / "whole")


def parts_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*"))


def slow(seconds: float) -> None:
    """Let each batch take so long."""
    from vitruvian.bulk.job import Job

    real = Job.results

    def results(self, pixels):
        time.sleep(seconds)
        return real(self, pixels)

    Job.results = results


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_is_told_to_stop_leaves_whole_parts_and_goes_on(work, tmp_path, number):
    words, whole = work
    out = tmp_path / "out"
    process = Forked(*words, out, first=lambda: slow(0.05))
    process.until(lambda: len(parts_of(out)) >= 2)
    os.kill(process.pid, number)
    ended = process.wait()
    assert ended.code != 0
    assert "Traceback" not in ended.err
    assert 2 <= len(parts_of(out)) < 5
    assert all(whole[path.name] == path.read_bytes() for path in parts_of(out))
    assert Forked(*words, out).wait().code == UNREADABLE
    assert content(out) == whole


@pytest.mark.slow
def test_two_writers_of_one_folder_give_the_bytes_of_one(work, tmp_path):
    words, whole = work
    both = [Forked(*words, tmp_path / "out", first=lambda: slow(0.02)) for _ in range(2)]
    assert UNREADABLE in {process.wait().code for process in both} <= {0, UNREADABLE}  # 0 if the other wrote the last
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_a_disk_without_room_is_one_line_and_costs_no_part(work, tmp_path):
    words, whole = work
    out = tmp_path / "out"
    assert Forked(*words, out, "--shard", "1/5").wait().code == 0
    before = content(out)
    room = max(map(len, before.values())) // 2

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    found = Forked(*words, out, first=limit).wait()
    assert found.code == 1, found
    assert found.err.splitlines()[-1].startswith("error: ")
    assert "cannot be written: File too large" in found.err.splitlines()[-1]
    assert content(out) == before
    assert Forked(*words, out).wait().code == UNREADABLE
    assert content(out) == whole


@pytest.fixture
def bucket(monkeypatch):
    """An S3 server that can be stopped and started again; its content stays."""
    pytest.importorskip("s3fs")
    moto, boto3 = pytest.importorskip("moto.server"), pytest.importorskip("boto3")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    class Server:
        def start(self) -> None:
            self.server = moto.ThreadedMotoServer(port=port, verbose=False)
            self.server.start()

        def stop(self) -> None:
            self.server.stop()

    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.01)
    set_endpoint(monkeypatch, port)
    running = Server()
    running.start()
    boto3.client("s3").create_bucket(Bucket="bulk")
    yield running
    running.stop()


def set_endpoint(monkeypatch, port: int) -> None:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # of earlier endpoints
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")


@pytest.mark.slow
def test_a_bucket_that_vanishes_half_way_is_one_line_and_the_job_goes_on_when_it_is_back(
    bucket, images, model, tmp_path
):
    def track(amounts, total):
        for number, amount in enumerate(amounts):
            yield amount
            if number == 6:  # in the third part
                bucket.stop()

    with pytest.raises(
        FileError, match=r"part-00000[12]-of-000005\.parquet: cannot be written: \w+Error: .*4 attempts"
    ):
        embed(images, model, "s3://bulk/vectors", piece=5, batch_size=2, track=track)
    bucket.start()
    with pytest.raises(DataError, match=r"[34] of 5 parts are missing"):
        merge("s3://bulk/vectors")
    embed(images, model, "s3://bulk/vectors", piece=5, batch_size=2)
    merge("s3://bulk/vectors", tmp_path / "a.parquet")
    embed(images, model, tmp_path / "here", piece=5, batch_size=2)
    merge(tmp_path / "here", tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


class Forbidden(http.server.BaseHTTPRequestHandler):
    def refuse(self) -> None:
        body = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = refuse

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_a_bucket_without_rights_is_one_line_at_once(images, model, tmp_path, monkeypatch):
    pytest.importorskip("s3fs")
    waits: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forbidden) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        set_endpoint(monkeypatch, server.server_port)
        with pytest.raises(DataError, match=r"s3://locked/vectors: access denied \(403\)"):
            embed(images, model, "s3://locked/vectors", piece=5, batch_size=2)
        with pytest.raises(DataError, match=r"s3://locked/data.*: access denied \(403\)"):
            embed("s3://locked/data", model, tmp_path / "out", piece=5, batch_size=2)
        server.shutdown()
    assert waits == []
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_endpoint_that_does_not_answer_is_given_up_soon(monkeypatch):
    pytest.importorskip("s3fs")
    options = remote.options_for("s3://bucket/x")["config_kwargs"]
    assert (options["connect_timeout"], options["retries"]) == (remote.CONNECT_SECONDS, {"max_attempts": 0})
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        set_endpoint(monkeypatch, closed.getsockname()[1])
        waits: list[float] = []
        monkeypatch.setattr(remote.time, "sleep", waits.append)
        with pytest.raises(
            DataError, match=r"s3://bucket/x: cannot be read: EndpointConnectionError: .* \(4 attempts\)"
        ):
            remote.remote_files("s3://bucket/x", ".tar")
    assert len(waits) == remote.ATTEMPTS - 1
