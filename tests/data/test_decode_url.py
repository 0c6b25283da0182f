"""Images behind URLs, from a server on this machine."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from making import png

from vitruvian.data import decode as decode_module
from vitruvian.data.decode import decode
from vitruvian.errors import ImageError


class Images(BaseHTTPRequestHandler):
    """Serves an image, and whatever a hostile server may send."""

    def do_GET(self):
        self.timeout = 20
        if self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", self.path[4:])
            self.end_headers()
            return
        status = 404 if self.path == "/missing.png" else 200
        self.send_response(status)
        length = {"/short.png": 10**6, "/slow.png": 10**6}.get(self.path)
        if length:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.path == "/slow.png":
            self.server.stop.wait(20)
        elif self.path == "/drip.png":
            while not self.server.stop.wait(0.02):
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return
        elif self.path == "/endless.png":
            try:
                while not self.server.stop.is_set():
                    self.wfile.write(bytes(2**16))
            except OSError:
                return
        else:
            self.wfile.write(b"<html>" if self.path == "/page" else png(7))

    def log_message(self, *_):
        pass


@contextmanager
def serving():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Images)
    server.daemon_threads, server.stop = True, threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.stop.set()
        server.shutdown()
        server.server_close()
        thread.join(20)


@pytest.fixture(scope="module")
def url():
    with serving() as address:
        yield address


def test_an_image_behind_a_url_is_read_like_a_file(url):
    assert decode(f"{url}/a.png").tobytes() == decode(png(7)).tobytes()
    assert decode(f"{url}/to?/a.png").tobytes() == decode(png(7)).tobytes()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.png", r"/missing\.png: cannot be downloaded \(HTTP 404, Not Found\)"),
        ("page", "this is a web page"),
        ("short.png", "bytes are missing"),
        ("to?file:///etc/passwd", "cannot be downloaded"),
        ("to?ftp://127.0.0.1/x.png", "cannot be downloaded"),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(url, path, message):
    with pytest.raises(ImageError, match=message) as caught:
        decode(f"{url}/{path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", ["http://", "http://[", "http://127.0.0.1:99999/a.png", "http://a b/c.png"])
def test_a_url_that_is_none_is_one_line(bad):
    with pytest.raises(ImageError, match="cannot be downloaded"):
        decode(bad)


def test_size_and_time_are_limited(url, monkeypatch):
    monkeypatch.setattr(decode_module, "MAX_URL_BYTES", 2**20)
    with pytest.raises(ImageError, match=r"endless\.png: more than 1 MB; download it first"):
        decode(f"{url}/endless.png")
    monkeypatch.setattr(decode_module, "URL_SECONDS", 0.1)
    with pytest.raises(ImageError, match=r"drip\.png: not received within 0\.1 s"):
        decode(f"{url}/drip.png")
    monkeypatch.setattr(decode_module, "URL_WAIT_SECONDS", 0.1)
    with pytest.raises(ImageError, match=r"slow\.png: cannot be downloaded"):
        decode(f"{url}/slow.png")


def test_the_command_predicts_images_behind_urls(url, capsys, monkeypatch):
    from vitruvian.cli.app import main
    from vitruvian.weights.hub import BUNDLED

    words = ["predict", f"{url}/a.png", f"{url}/missing.png", "-m", str(BUNDLED), "--json"]
    monkeypatch.setattr("sys.argv", ["vit", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    good, bad = capsys.readouterr().out.splitlines()
    assert (caught.value.code, f"{url}/a.png" in good, "HTTP 404" in bad) == (1, True, True)
