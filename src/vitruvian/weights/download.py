"""An address -> a checked file in the cache: continued when interrupted, kept with its checksum, used offline later.

Beside `ViT-B_16.npz` stands `ViT-B_16.npz.json` with the address, size and sha256; while a download is under way there
are also `.part`, which a later call continues, and `.lock`, on which other processes wait.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from vitruvian.cache import file_lock
from vitruvian.errors import FileError, HubError
from vitruvian.files import digest, read_object, sync, write_json
from vitruvian.progress import Progress
from vitruvian.text import describe_error

TIMEOUT_SECONDS = 30.0
RETRY_SECONDS = (1.0, 4.0)
"""Waits before the second and the third attempt."""
BLOCK_BYTES = 1 << 20
SUFFIXES = (".npz", ".pth", ".pt", ".bin", ".safetensors")


class InterruptedTransferError(Exception):
    """A transfer that may succeed when tried again; its text is the reason."""


def cached_path(url: str, cache: Path) -> Path:
    """The place of an address in the cache: the folder of its host, then its own path; never outside `cache`."""
    parts = urlsplit(url)
    segments = unquote(parts.path).removeprefix("/").split("/")
    plain = all(re.fullmatch(r"[\w+-][\w.+-]*", segment, re.ASCII) for segment in segments)
    host = re.fullmatch(r"[a-z0-9][a-z0-9.-]*", parts.netloc)
    if parts.scheme != "https" or not host or not plain or parts.query or not segments[-1].endswith(SUFFIXES):
        raise HubError(
            f"{url}: is not an address of weights; wanted https://host/folder/file{'|'.join(SUFFIXES)} of plain letters"
        )
    return cache.joinpath(parts.netloc, *segments)


def fetch(url: str, path: Path, *, sha256_prefix: str = "", offline: bool = False, verify: bool = False) -> Path:
    """`path`, holding the file of `url`: as it is if already there, else downloaded.

    A file with a record is trusted when its size fits; `verify` compares the sha256 too. A file put there by hand is
    checked once, and then has a record. A failed download says where to put the file instead.
    """
    try:
        if _is_intact(path, url, sha256_prefix, verify):
            return path
        if offline:
            damage = ", and the copy there is damaged" if path.exists() else ""
            raise HubError(_instead(url, path, f"working offline{damage}"))
        with file_lock(path.with_name(f"{path.name}.lock")):
            if not _is_intact(path, url, sha256_prefix, verify):
                _download(url, path, sha256_prefix)
    except (OSError, FileError) as error:
        raise HubError(
            f"{path}: cannot be read or written ({describe_error(error)}); "
            f"set VITRUVIAN_CACHE to a folder where that is possible"
        ) from error
    return path


def _instead(url: str, path: Path, reason: str) -> str:
    return (
        f"{url}: not in the cache, and could not be downloaded ({reason}); "
        f"put the file at {path}, or pass the path of a copy instead of the name"
    )


def _read_record(path: Path) -> dict[str, Any]:
    try:
        return read_object(path.with_name(f"{path.name}.json"))
    except FileError:
        return {}


def _write_record(path: Path, **record: Any) -> None:
    write_json(path.with_name(f"{path.name}.json"), record)


def _is_intact(path: Path, url: str, sha256_prefix: str, verify: bool) -> bool:
    """Whether the file is there and whole; one put there by hand must pass the checks, or is an error."""
    if not path.is_file():
        return False
    record, size = _read_record(path), path.stat().st_size
    if record.get("sha256"):
        return bool(size == record.get("size") and (not verify or digest(path) == record["sha256"]))
    try:
        sha256 = _check(path, size, "", sha256_prefix)
    except InterruptedTransferError as fault:
        raise HubError(f"{path}: {fault}; remove it, or replace it by the file of {url}") from None
    _write_record(path, url=url, size=size, sha256=sha256)
    return True


def _download(url: str, path: Path, sha256_prefix: str) -> None:
    """Puts the whole, checked file of `url` at `path`, in one step that another process cannot see half of."""
    part, reason = path.with_name(f"{path.name}.part"), ""
    path.unlink(missing_ok=True)  # only a damaged copy can be here
    for wait in (0.0, *RETRY_SECONDS):
        time.sleep(wait)
        try:
            size, md5 = _transfer(url, path, part)
            try:
                sha256 = _check(part, size, md5, sha256_prefix)
            except InterruptedTransferError:
                part.unlink()
                raise
            break
        except InterruptedTransferError as fault:
            reason = str(fault)
    else:
        raise HubError(_instead(url, path, reason))
    sync(part)
    os.replace(part, path)
    _write_record(path, url=url, size=path.stat().st_size, sha256=sha256)


def _mirrored(url: str) -> str:
    """The address to ask: under $VITRUVIAN_MIRROR, which holds the same tree as the cache, if that is set."""
    parts, mirror = urlsplit(url), os.environ.get("VITRUVIAN_MIRROR", "").rstrip("/")
    path = quote(unquote(parts.path))
    return f"{mirror}/{parts.netloc}{path}" if mirror else f"https://{parts.netloc}{path}"


def _transfer(url: str, path: Path, part: Path) -> tuple[int | None, str]:
    """Brings `part` to the length that the server promises, continuing what is there if the file is still the same.

    Returns that length and the md5, as far as the server tells them.
    """
    start = part.stat().st_size if part.is_file() else 0
    validator = str(_read_record(path).get("validator", ""))
    headers = {"User-Agent": "vitruvian"}
    if start and validator:
        headers |= {"Range": f"bytes={start}-", "If-Range": validator}
    source = _mirrored(url)
    try:
        with urllib.request.urlopen(urllib.request.Request(source, headers=headers), timeout=TIMEOUT_SECONDS) as reply:
            return _receive(reply, url=url, path=path, part=part)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                raise HubError(_instead(url, path, f"{source} answers {error.code} {error.reason}")) from None
            raise InterruptedTransferError(f"{source} answers {error.code} {error.reason}") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, socket.gaierror):  # no network: waiting does not bring it back
            raise HubError(_instead(url, path, "no network")) from None
        raise InterruptedTransferError(str(cause) or type(cause).__name__) from None


def _receive(reply: http.client.HTTPResponse, *, url: str, path: Path, part: Path) -> tuple[int | None, str]:
    """Writes what the server sends to the end of `part`, or over it if the server starts from the beginning."""
    if not reply.url.startswith("https://") and not os.environ.get("VITRUVIAN_MIRROR"):
        raise HubError(f"{url}: leads to {reply.url}, which is not encrypted; refused")
    continued = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", reply.headers.get("Content-Range", ""))
    if reply.status == 206 and (not continued or int(continued[1]) != part.stat().st_size):
        part.unlink()
        raise InterruptedTransferError("the server continued at another place")
    length = continued[2] if continued else reply.headers.get("Content-Length")
    size = int(length) if length and length.isdecimal() else None
    if reply.status != 206:
        etag, modified = reply.headers.get("ETag", ""), reply.headers.get("Last-Modified", "")
        part.unlink(missing_ok=True)
        _write_record(path, url=url, validator=modified if etag.startswith("W/") else etag or modified)
    with part.open("ab") as file, Progress(path.name, size, unit="bytes") as progress:
        while block := reply.read(BLOCK_BYTES):
            file.write(block)
            progress.update(file.tell())
        if size is not None and file.tell() < size:
            raise InterruptedTransferError(f"the connection ended after {file.tell():,} of {size:,} bytes")
    hashes = dict(re.findall(r"(\w+)=([\w+/=]+)", ",".join(reply.headers.get_all("x-goog-hash") or [])))
    return size, base64.b64decode(hashes.get("md5", "")).hex()  # which Google's storage sends


def _check(path: Path, promised: int | None, promised_md5: str, sha256_prefix: str) -> str:
    """The file's sha256, if it has the promised length, kind and checksums."""
    size = path.stat().st_size
    if promised is not None and size != promised:
        raise InterruptedTransferError(f"has {size:,} bytes, wanted {promised:,}")
    kind = path.name.removesuffix(".part").rpartition(".")[2]
    if not _is_of_kind(path, kind):
        raise InterruptedTransferError(f"is not a whole .{kind} file (another page in its place?)")
    if promised_md5 and (md5 := digest(path, "md5")) != promised_md5:
        raise InterruptedTransferError(f"has md5 {md5}, wanted {promised_md5}")
    sha256 = digest(path)
    if not sha256.startswith(sha256_prefix):
        raise InterruptedTransferError(f"has sha256 {sha256[:8]}..., wanted {sha256_prefix}...")
    return sha256


def _is_of_kind(path: Path, kind: str) -> bool:
    """Whether the file begins, and a zip archive also ends, as files of this kind do."""
    with path.open("rb") as file:
        head = file.read(9)
    if kind == "safetensors":  # eight bytes of header length, then JSON
        return head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size
    if kind != "npz" and head.startswith(b"\x80\x02"):  # a .pth of before 2020 is a bare pickle
        return True
    return zipfile.is_zipfile(path)
