"""Training from shards behind a URL: only what is used is fetched, and a killed run goes on to the same bits."""

import http.server
import os
import signal
import threading
from functools import partial

import pytest
from runs import TINY, changes, identical, lines, same_model, weights

from forked import Forked, vit
from vitruvian.data import remote
from vitruvian.errors import DataError
from vitruvian.training import train

pytest.importorskip("fsspec")
SETTINGS = (*TINY, "workers=0", "steps=4", "eval_every=1")


class Server(http.server.SimpleHTTPRequestHandler):
    """A folder over HTTP, without ranges, that notes which shards are fetched."""

    fetched: list[str] = []  # noqa: RUF012

    def do_GET(self):
        if self.path.endswith(".tar"):
            self.fetched.append(self.path.rpartition("/")[2])
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(shards):
    """The shards behind an HTTP server, and the names of those that were fetched."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=shards)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", Server.fetched
        server.shutdown()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing is cached before a test."""
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_a_shard_is_fetched_once_when_it_is_used_or_soon_will_be(site, tmp_path):
    url, fetched = site
    fetched.clear()
    run = train(url, recipe="digits", out=tmp_path / "run", settings=SETTINGS)
    assert run.finished
    trained = [name for name in fetched if name.startswith("train")]
    assert len(trained) == len(set(trained)) <= 3  # four steps need two, and the third is fetched ahead
    assert [name for name in fetched if name.startswith("test")] == ["test-000000.tar"]


@pytest.mark.slow
def test_the_site_gives_the_same_run_as_the_folder(site, shards, tmp_path):
    runs = [
        train(data, recipe="digits", out=tmp_path / name, settings=SETTINGS)
        for name, data in (("a", site[0]), ("b", f"file://{shards}"))
    ]
    assert identical(*map(weights, (run.folder for run in runs)))


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["labels", "masked"])
def test_data_larger_than_the_disk_is_trained_on_and_reported(site, tmp_path, monkeypatch, objective):
    monkeypatch.setattr(remote, "MAX_CACHE_BYTES", 2_000_000)
    recipe = "masked" if objective == "masked" else "digits"
    run = train(site[0], recipe=recipe, out=tmp_path / "run", settings=[*SETTINGS, "image_size=8"])
    assert (run.folder / "model" / "model.safetensors").exists()
    assert "report.html" in os.listdir(run.folder)


class Refusing(http.server.BaseHTTPRequestHandler):
    """403 for everything, as an object store refuses."""

    def do_GET(self):
        answer = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("url", ["s3://digits/v1", "{}/v1/", "{}/v1/train-000.tar"])
def test_a_server_that_refuses_is_one_line_at_once(tmp_path, monkeypatch, url):
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()  # of earlier endpoints
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_ENDPOINT_URL", place)
        monkeypatch.setattr(remote, "ATTEMPTS", 1)  # nothing is tried again
        with pytest.raises(DataError, match=r"access denied \(403\): .*; check the credentials"):
            train(url.format(place), recipe="digits", out=tmp_path / "run", settings=SETTINGS)
        server.shutdown()
    assert not (tmp_path / "run").exists()


def killed_and_resumed(url, folder, settings):
    """A run that is killed once it has a checkpoint, and then continued."""
    process = Forked("train", url, "--recipe", "digits", "--out", folder, *changes(*settings))
    ended = process.until(lambda: list(folder.glob("checkpoints/step-*"))).kill()
    assert ended.code == -signal.SIGKILL
    finished = vit("train", "--resume", folder)
    assert finished.code == 0, finished.err
    assert "step 0 of" not in finished.err


@pytest.mark.slow
@pytest.mark.parametrize("place", ["site", "bucket"])
def test_a_killed_run_from_a_url_ends_with_the_bits_of_an_unbroken_one(request, shards, tmp_path, place):
    url = request.getfixturevalue(place)
    settings = (f"workers={int(place == 'site')}", "steps=60", "checkpoint_steps=5", "eval_every=0.5")
    expected = train(
        f"file://{shards}", recipe="digits", out=tmp_path / "whole", settings=[*TINY, *settings, "workers=0"]
    )
    killed_and_resumed(url if isinstance(url, str) else url[0], tmp_path / "run", settings)
    assert same_model(tmp_path / "run", expected.folder)
    assert lines(tmp_path / "run") == lines(expected.folder)
