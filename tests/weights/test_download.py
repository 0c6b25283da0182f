"""Downloads against a real server on the loopback: what arrives, what is refused, what the error says."""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from vitruvian import progress
from vitruvian.cache import cache_folder
from vitruvian.errors import HubError
from vitruvian.weights import hub
from vitruvian.weights.hub import cached_path, fetch

URL = "https://storage.googleapis.com/vit_models/imagenet21k/ViT-B_16.npz"


def npz(seed: int = 0, count: int = 1000) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, weights=np.random.default_rng(seed).random(count))
    return buffer.getvalue()


class Server(ThreadingHTTPServer):
    """Serves `content` at every address; each request takes one number off `cuts`: bytes to send, or minus a status."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = npz()
        self.headers = {"ETag": '"one"'}
        self.cuts: list[int] = []
        self.ranges: list[str | None] = []
        self.paths: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, asked = self.server, self.headers["Range"]
        server.ranges.append(asked)
        server.paths.append(self.path)
        cut = server.cuts.pop(0) if server.cuts else len(server.content)
        if cut < 0:
            self.send_error(-cut)
            return
        start = 0
        if asked and self.headers["If-Range"] == server.headers.get("ETag"):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(server.content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        self.send_header("Content-Length", str(len(server.content) - start))
        for name, value in server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(server.content[start : start + cut])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("VITRUVIAN_MIRROR", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(hub, "RETRY_SECONDS", (0.0, 0.0))
        yield server
        server.shutdown()
        thread.join(60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return cached_path(URL, tmp_path)


def test_a_download_is_kept_with_its_address_size_and_checksum(server, path):
    assert fetch(URL, path) == path
    assert path.read_bytes() == server.content
    assert json.loads(path.with_name("ViT-B_16.npz.json").read_text()) == {
        "url": URL,
        "size": len(server.content),
        "sha256": hashlib.sha256(server.content).hexdigest(),
    }
    assert not path.with_name("ViT-B_16.npz.part").exists()


def test_a_mirror_holds_the_tree_of_the_cache(server, tmp_path):
    url = "https://storage.googleapis.com/vit_models/imagenet21k+imagenet2012/ViT-B_16.npz"
    place = fetch(url, cached_path(url, tmp_path))
    assert place.relative_to(tmp_path).as_posix() == url.removeprefix("https://")
    assert server.paths == ["/storage.googleapis.com/vit_models/imagenet21k%2Bimagenet2012/ViT-B_16.npz"]


def test_the_second_call_asks_nobody(server, path):
    fetch(URL, path)
    fetch(URL, path, offline=True, verify=True)
    fetch(URL, path)
    assert len(server.ranges) == 1


def test_an_interrupted_transfer_continues_where_it_stopped(server, path):
    server.cuts = [3000]
    fetch(URL, path)
    assert server.ranges == [None, "bytes=3000-"]
    assert path.read_bytes() == server.content


def test_a_later_call_continues_what_an_earlier_one_left(server, path):
    server.cuts = [1000, 1000, 1000]
    with pytest.raises(HubError, match=r"the connection ended after 3,000 of [\d,]+ bytes\); put the file at"):
        fetch(URL, path)
    fetch(URL, path)
    assert server.ranges[-1] == "bytes=3000-"
    assert path.read_bytes() == server.content


def test_a_file_that_changed_meanwhile_is_started_over(server, path):
    server.cuts = [1000, -503, -503]
    with pytest.raises(HubError, match="503"):
        fetch(URL, path)
    server.content, server.headers = npz(seed=1), {"ETag": '"two"'}
    fetch(URL, path)
    assert path.read_bytes() == server.content


def test_a_server_that_names_no_version_is_not_asked_to_continue(server, path):
    server.headers, server.cuts = {}, [1000]
    fetch(URL, path)
    assert server.ranges == [None, None]
    assert path.read_bytes() == server.content


def test_part_of_a_file_that_is_now_shorter_is_thrown_away(server, path):
    server.cuts = [4000, -503, -503]
    with pytest.raises(HubError):
        fetch(URL, path)
    server.content = npz(count=10)
    fetch(URL, path)
    assert server.ranges[-2:] == ["bytes=4000-", None]
    assert path.read_bytes() == server.content


def test_a_wrong_checksum_is_refused_and_leaves_nothing(server, path):
    with pytest.raises(HubError, match=r"has sha256 \w{8}\.\.\., expected c867db91\.\.\."):
        fetch(URL, path, sha256_prefix="c867db91")
    assert len(server.ranges) == 3
    assert not path.exists()
    assert not path.with_name("ViT-B_16.npz.part").exists()


def test_a_page_in_place_of_weights_is_refused(server, path):
    server.content = b"<html>please log in</html>"
    with pytest.raises(HubError, match=r"is not a complete \.npz file"):
        fetch(URL, path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
        ("a.pth", b"\x80\x02}q\x00."),
        ("a.pt", npz()),
    ],
)
def test_every_kind_of_weights_is_recognized(server, tmp_path, name, content):
    server.content = content
    assert fetch(f"https://example.org/{name}", tmp_path / name).read_bytes() == content


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.safetensors", b"Not Found, try {elsewhere}"),
        ("a.safetensors", b"\x02\0\0\0\0\0\0\0<>"),
        ("a.npz", b"Not Found"),
        ("a.pth", b"Not Found"),
    ],
)
def test_no_kind_of_weights_is_a_text(server, tmp_path, name, content):
    server.content = content
    with pytest.raises(HubError, match="is not a complete"):
        fetch(f"https://example.org/{name}", tmp_path / name)


def test_a_missing_file_is_asked_for_once(server, path):
    server.cuts = [-404]
    with pytest.raises(HubError, match=rf"^{URL}: .*responded 404 .*put the file at {re.escape(str(path))}, or pass"):
        fetch(URL, path)
    assert len(server.ranges) == 1


def test_a_busy_server_is_asked_again(server, path):
    server.cuts = [-503, -429]
    fetch(URL, path)
    assert len(server.ranges) == 3


def test_offline_the_error_says_which_file_to_put_where(path):
    wanted = f"{URL}: not in the cache, and could not be downloaded (working offline); "
    wanted += f"put the file at {path}, or pass the path"
    with pytest.raises(HubError, match=re.escape(wanted)):
        fetch(URL, path, offline=True)


def test_a_server_out_of_reach_is_an_error_of_one_line(server, path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_MIRROR", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"^.*refused\); put the file at .*$"):
        fetch(URL, path)


def test_a_file_put_there_by_hand_is_checked_once_and_used(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(npz())
    assert fetch(URL, path, offline=True) == path
    assert json.loads(path.with_name("ViT-B_16.npz.json").read_text())["size"] == len(npz())


def test_a_wrong_file_put_there_by_hand_is_refused_not_replaced(server, path):
    path.parent.mkdir(parents=True)
    path.write_bytes(npz()[:-10])
    with pytest.raises(
        HubError, match=r"is not a complete \.npz file .*; remove it, or replace it by the file of https"
    ):
        fetch(URL, path)
    assert path.exists()
    assert server.ranges == []


def test_a_damaged_copy_is_fetched_again_or_told_of(server, path):
    fetch(URL, path)
    path.write_bytes(server.content[:-10])
    with pytest.raises(HubError, match="working offline, and the cached copy is damaged"):
        fetch(URL, path, offline=True)
    server.cuts = [1000, 1000, 1000]
    with pytest.raises(HubError, match="the connection ended"):
        fetch(URL, path)
    fetch(URL, path)
    assert path.read_bytes() == server.content


def test_a_changed_byte_is_found_on_request(server, path):
    fetch(URL, path)
    flipped = bytearray(server.content)
    flipped[500] ^= 1
    path.write_bytes(flipped)
    assert fetch(URL, path, offline=True) == path
    with pytest.raises(HubError, match="damaged"):
        fetch(URL, path, offline=True, verify=True)


def test_two_at_a_time_download_once(server, path):
    threads = [threading.Thread(target=fetch, args=(URL, path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(server.ranges) == 1
    assert path.read_bytes() == server.content


def test_an_unencrypted_detour_is_refused(server, path, monkeypatch):
    detour = f"http://127.0.0.1:{server.server_port}/x.npz"
    monkeypatch.delenv("VITRUVIAN_MIRROR")
    monkeypatch.setattr(hub, "_mirror", lambda url: detour)
    with pytest.raises(HubError, match=f"redirects to {detour}, which is not encrypted"):
        fetch(URL, path)


def test_a_cache_that_cannot_be_written_names_its_setting(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HubError, match=r"cannot be read or written \(.*\); set VITRUVIAN_CACHE"):
        fetch(URL, tmp_path / "file" / "a.npz")


@pytest.mark.parametrize(
    "url",
    [
        "https://host/../../secret.npz",
        "https://host/%2e%2e/secret.npz",
        "https://host/a/..%2fsecret.npz",
        "https://host//etc/secret.npz",
        "https://../secret.npz",
        "https://user@host/a.npz",
        "https://host/.hidden.npz",
        "https://host/a b.npz",
        "https://host/a.npz?b=c",
        "https://host/a.sh",
        "http://host/a.npz",
        "file:///etc/a.npz",
    ],
)
def test_no_address_leaves_the_cache(url, tmp_path):
    with pytest.raises(HubError, match="not a URL of weights"):
        cached_path(url, tmp_path)


def test_an_address_has_one_place_however_it_is_spelt(tmp_path):
    plain = cached_path("https://host/imagenet21k+imagenet2012/ViT-B_16.npz", tmp_path)
    assert cached_path("https://host/imagenet21k%2Bimagenet2012/ViT-B_16.npz", tmp_path) == plain


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.delenv("VITRUVIAN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "vitruvian"
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/shared/vitruvian")
    monkeypatch.setenv("VITRUVIAN_CACHE", "/own")
    assert cache_folder() == Path("/own")


def test_a_long_download_shows_its_progress_as_lines_where_there_is_no_terminal(server, path, monkeypatch, capsys):
    fetch(URL, path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    server.content = bytes(3 << 20) + npz()
    path.unlink()
    fetch(URL, path)
    assert capsys.readouterr().err.startswith("ViT-B_16.npz: 1.0 MB of 3.2 MB\n")
