"""Published weights by name: a local file or folder, from the cache or downloaded and verified.

Files of an address are cached by us: beside `ViT-B_16.npz` is `ViT-B_16.npz.json` with the address, size and SHA-256;
during a download there are also `.part`, which a later call resumes, and `.lock`, on which other processes wait. Files
on Hugging Face are cached by `huggingface_hub`.
"""

import csv
import http.client
import math
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote, urlsplit

from vitruvian import catalog
from vitruvian.cache import cache_folder, file_lock
from vitruvian.catalog import REPOSITORY_SCHEME
from vitruvian.cost import parameters
from vitruvian.errors import (
    CheckpointError,
    ConfigError,
    FileError,
    HubError,
    MissingExtraError,
    UnknownNameError,
    argument,
    nearest,
    require,
)
from vitruvian.files import digest, read_object, read_text, sync, write_json
from vitruvian.progress import Progress, print_status, waiting
from vitruvian.text import describe_error
from vitruvian.weights.checkpoint_files import GRAPH_ENDINGS, SETTING_FILES, TOKENIZER_FILES, WEIGHT_FILES

PERMISSIVE = ("Apache-2.0", "MIT", "BSD-3-Clause")
HUB_TIMEOUT_SECONDS = 10.0
PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # the second for images and text
DESCRIPTIONS = (*SETTING_FILES, *TOKENIZER_FILES)
WEIGHTS = [name for name in WEIGHT_FILES if name != "pytorch_model.bin.index.json"]
WEIGHTS.sort(key=lambda name: name.endswith(".bin"))
"""Weights in a repository, in order of preference; formats that run no code come before pickles."""
DEFAULT = catalog.RECOMMENDED
BUNDLED = Path(str(files("vitruvian") / "bundled"))
"""The bundled model of ten classes, if present, for machines that cannot download."""


def default_source(parameter: Literal["model", "weights"] = "model") -> str:
    """The default model, or the bundled one if it cannot be downloaded; reported on stderr.

    `parameter` is what the caller left out: a model to use, or weights to start training from.
    """
    try:
        resolve_source(DEFAULT)
    except (HubError, MissingExtraError, FileError) as error:
        if not (BUNDLED / "config.json").is_file():
            reason = f"no {parameter} given, and the default cannot be downloaded: {error}"
            raise HubError(reason, hint=f"pass {argument(parameter)}") from error
        config = read_object(BUNDLED / "config.json", raises=CheckpointError)
        rows, columns = config["preprocess"]["image_size"]
        chosen = f"starting from the bundled model with an input of {rows} x {columns} pixels"
        if parameter == "model":
            chosen = f"using the bundled model, which knows {', '.join(config['labels'])}"
        reason = f" ({error})" if isinstance(error, MissingExtraError) else ""
        print_status(f"no {parameter} given, and the default could not be downloaded{reason}: {chosen}")
        return str(BUNDLED)
    print_status(f"no {parameter} given, using {DEFAULT}")
    return DEFAULT


def resolve_source(name: str, *, cache: Path | None = None, offline: bool | None = None, verify: bool = False) -> Path:
    """The local file (Google, torchvision, DINO, BiT) or folder (Hugging Face, timm) of published weights.

    Args:
        name: A published name, a `gs://` or https address of a file, or a Hugging Face id with an optional `@revision`.
        cache: Replaces both caches, ours and Hugging Face's.
        offline: Use the cache only; by default $HF_HUB_OFFLINE. Cached weights never need the network.
        verify: Compare the SHA-256 of a cached file.
    """
    base, _, revision = name.partition("@")
    location = _location(base)
    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
    if location.startswith(REPOSITORY_SCHEME):
        return Repository(location.removeprefix(REPOSITORY_SCHEME), revision, cache).folder(offline=offline)
    if revision:
        raise HubError(f"only Hugging Face repositories have revisions; leave out @{revision}", where=name)
    row, path = catalog.find_published(base), cached_path(location, cache or cache_folder())
    return fetch(location, path, sha256_prefix=row.sha256_prefix if row else "", offline=offline, verify=verify)


def cached_names() -> list[str]:
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    repositories = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    names = []
    for name, row in catalog.PUBLISHED.items():
        folder = f"models--{row.location.removeprefix(REPOSITORY_SCHEME).replace('/', '--')}"
        file = cache_folder() / row.location.removeprefix("https://")
        names += [name] * (file.is_file() or any(repositories.glob(f"{folder}/snapshots/*/*model*")))
    return names


def require_packages(name: str) -> None:
    """Raise if no published weights have this name, or the package to download them is missing."""
    if _location(name.partition("@")[0]).startswith(REPOSITORY_SCHEME):
        require("huggingface_hub", "hub")


def _location(name: str) -> str:
    """The location of published weights; raises the most helpful error if there is none."""
    if row := catalog.find_published(name):
        return row.location
    if match := re.fullmatch(r"augreg/([\w+.-]+-do_[\w+.-]+)", name, re.ASCII):  # any of the AugReg checkpoints
        return catalog.web_address(f"{catalog.AUGREG}/{match[1]}.npz")
    if name.startswith(("gs://", "https://")):
        return catalog.web_address(name)
    if name.endswith((*SUFFIXES, *GRAPH_ENDINGS)) or name.startswith((".", "/", "~")) or "\\" in name:
        raise CheckpointError("no such file or folder", where=name)
    identifier = name.removeprefix(REPOSITORY_SCHEME)
    if re.fullmatch(r"[\w.-]+/(?!\d+(-distilled)?$)[\w.-]+", identifier, re.ASCII):  # `ViT-B/16` is not a repository
        return REPOSITORY_SCHEME + identifier
    see = "(see `vit models PATTERN`; a path or a Hugging Face id like google/vit-base-patch16-224 works too)"
    here = [path.parent.name for kind in ("run", "config") for path in Path().glob(f"*/{kind}.json")]
    unknown = UnknownNameError("weights", name, [*here, *catalog.published_names(), *catalog.VARIANTS], see=see)
    if "." in name:  # a shape's name has no tag
        raise unknown
    try:
        variant, _ = catalog.canonical(name)
    except UnknownNameError:
        raise unknown from None
    rows = [row.name for row in catalog.published_for(variant)]
    more = f" and {len(rows) - 4} more (see `vit models {variant}`)" if len(rows) > 4 else ""
    choice = f"its published weights are {', '.join(rows[:4])}{more}" if rows else "it has no published weights"
    scratch = f"`vit train DATA --arch {name}` trains it from scratch"
    raise ConfigError(f"{name} is an architecture, not weights; {choice}; {scratch}")


class Repository:
    """One revision of a model on Hugging Face."""

    def __init__(self, name: str, revision: str, cache: Path | None) -> None:
        self.hub = require("huggingface_hub", "hub")
        try:
            require("huggingface_hub.utils", "hub").validate_repo_id(name)
        except ValueError:
            raise HubError("no such file or folder, and not a valid Hugging Face id", where=name) from None
        if revision and not re.fullmatch(r"[A-Za-z0-9](?:[\w/-]|\.(?!\.))*", revision, re.ASCII):
            raise HubError(f"{revision!r} is not a branch, tag or commit", where=f"{name}@{revision}")
        self.name = name
        self.revision = revision or "main"
        self.cache = cache / "huggingface" if cache else None

    def folder(self, *, offline: bool) -> Path:
        """The folder with the weights and the files that describe them."""
        paths = (self._find(file) for file in (*WEIGHTS, *DESCRIPTIONS))
        folder = next((Path(path).parent for path in paths if isinstance(path, str)), None)
        if folder is None or not _has_weights(folder):
            if offline:
                raise self._unavailable("working offline")
            return self._download()
        if not offline:
            self._complete(folder)
        return folder

    def _find(self, file: str) -> object:
        """A path, None, or the library's sentinel for a file known to be missing in the repository."""
        return self.hub.try_to_load_from_cache(self.name, file, cache_dir=self.cache, revision=self.revision)

    def _complete(self, folder: Path) -> None:
        """Download the preprocessing if another program cached only the weights; without a network, skip it."""
        config = folder / "config.json"
        text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
        if '"pretrained_cfg"' in text or '"preprocess"' in text:
            return  # folders of timm and our own contain it
        paths, file = [self._find(file) for file in PREPROCESSOR_FILES], PREPROCESSOR_FILES[0]
        if any(isinstance(path, str) for path in paths) or None not in paths:
            return  # one is cached, or the repository has none
        try:
            present = self._files()  # fails at once without network; a download would retry first
            for file in [name for name in PREPROCESSOR_FILES if name in present] or PREPROCESSOR_FILES[:1]:
                self.hub.hf_hub_download(self.name, file, cache_dir=self.cache, revision=folder.name)
        except Exception as error:  # depends on the library's transport
            why = f"{type(error).__name__}: {describe_error(error)}"
            print_status(f"note: {self.name}: {file} could not be downloaded ({why})")

    def _files(self) -> list[str]:
        with waiting(f"waiting for Hugging Face to describe {self.name} ..."):
            model = self.hub.HfApi().model_info(self.name, revision=self.revision, timeout=HUB_TIMEOUT_SECONDS)
        return [file.rfilename for file in model.siblings or ()]

    def _download(self) -> Path:
        errors = require("huggingface_hub.errors", "hub")
        try:
            if names := _needed_files(self._files()):
                options = {"revision": self.revision, "cache_dir": self.cache}
                return Path(self.hub.snapshot_download(self.name, allow_patterns=names, **options))
        except errors.GatedRepoError as error:
            raise self._restricted() from error
        except errors.RepositoryNotFoundError as error:
            near = nearest(self.name, catalog.published_names())
            hint = f"did you mean {' or '.join(near)}?" if near else "if it is private, run `hf auth login`"
            reason = "no such file or folder, and no such model on Hugging Face"
            raise HubError(reason, where=self.name, hint=hint) from error
        except errors.RevisionNotFoundError as error:
            raise HubError(f"has no revision {self.revision!r}", where=self.name) from error
        except Exception as error:  # as above
            if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
                raise self._restricted() from error
            raise self._unavailable(f"{type(error).__name__}: {error}") from error
        raise HubError(f"contains none of {', '.join(WEIGHTS)}", where=self.name)

    def _restricted(self) -> HubError:
        hint = f"accept its terms at https://huggingface.co/{self.name}, then run `hf auth login`"
        return HubError("access to this model is restricted", where=self.name, hint=hint + open_alternative(self.name))

    def _unavailable(self, reason: str) -> HubError:
        revision = "" if self.revision == "main" else f" --revision {self.revision}"
        cache = self.cache or Path(require("huggingface_hub.constants", "hub").HF_HUB_CACHE)
        folder = cache / f"models--{self.name.replace('/', '--')}"
        if near := nearest(self.name, map(str, Path().glob("*/*"))):
            return HubError("no such file or folder, and no network", where=self.name, hint=f"did you mean {near[0]}?")
        return HubError(
            f"no such path, not in the cache, and could not be downloaded ({' '.join(reason.split())})",
            where=self.name,
            hint=f"on a machine with a network, run `hf download {self.name}{revision}` and copy the folder "
            f"{folder.name} of its HF_HOME/hub to {folder}, or pass the path of a copy instead of the name",
        )


def _needed_files(files: Iterable[str]) -> list[str]:
    """The descriptions and one set of weights among the files of a repository; empty if it has no weights."""
    present = set(files)
    best = next((file for file in WEIGHTS if file in present), None)
    if best is None:
        return []
    is_index = best.endswith("index.json")
    shards = [file for file in present if is_index and re.fullmatch(r"model-\d+-of-\d+\.safetensors", file)]
    return [*(file for file in DESCRIPTIONS if file in present), best, *shards]


def _has_weights(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / WEIGHTS[0]).is_file():
        return any((folder / file).is_file() for file in WEIGHTS)
    try:
        shards = set(read_object(index)["weight_map"].values())
    except (FileError, KeyError, AttributeError, TypeError):
        return False
    return all((folder / shard).is_file() for shard in shards)


DOWNLOAD_TIMEOUT_SECONDS = 30.0
RETRY_SECONDS = (1.0, 4.0)  # waits before the second and the third attempt
BLOCK_BYTES = 1 << 20
SUFFIXES = (".npz", ".pth", ".pt", ".bin", ".safetensors")


class InterruptedTransferError(Exception):
    """A transfer that may succeed if retried; the text is the reason."""


def cached_path(url: str, cache: Path) -> Path:
    """The path of an address in the cache: a folder per host, then the path of the address."""
    parts = urlsplit(url)
    segments = unquote(parts.path).removeprefix("/").split("/")
    is_plain = all(re.fullmatch(r"[\w+-][\w.+-]*", segment, re.ASCII) for segment in segments)
    host = re.fullmatch(r"[a-z0-9][a-z0-9.-]*", parts.netloc)
    if parts.scheme != "https" or not host or not is_plain or parts.query or not segments[-1].endswith(SUFFIXES):
        expected = f"https://host/folder/file{'|'.join(SUFFIXES)}"
        raise HubError(f"not a URL of weights, expected {expected} in ASCII", where=url)
    return cache.joinpath(parts.netloc, *segments)


def fetch(url: str, path: Path, *, sha256_prefix: str = "", offline: bool = False, verify: bool = False) -> Path:
    """Download `url` to `path` unless it is there, and return `path`.

    A file with a record is trusted if its size fits; `verify` compares the SHA-256 too. A file that the user put there
    is checked once and gets a record. If the download fails, the error says where to put the file.
    """
    try:
        if _is_intact(path, url, sha256_prefix, verify):
            return path
        if offline:
            damage = ", and the cached copy is damaged" if path.exists() else ""
            raise _unavailable(url, path, f"working offline{damage}")
        with file_lock(path.with_name(f"{path.name}.lock")):
            if not _is_intact(path, url, sha256_prefix, verify):
                _download(url, path, sha256_prefix)
    except (OSError, FileError) as error:
        reason = f"cannot be read or written ({describe_error(error)})"
        raise HubError(reason, where=path, hint="set VITRUVIAN_CACHE to a writable folder") from error
    return path


def open_alternative(name: str) -> str:
    """The end of a hint: weights of similar size under a permissive license, with a head if `name` has one."""
    row = catalog.find_published(name) or catalog.find_published(f"{REPOSITORY_SCHEME}{name}")
    if row is None:
        return ""
    size = math.log(parameters(catalog.VARIANTS[row.variant]))
    distances = {
        other: abs(math.log(parameters(catalog.VARIANTS[other.variant])) - size)
        for other in catalog.PUBLISHED.values()
        if other.license in PERMISSIVE and bool(other.classes) == bool(row.classes) and other.location != row.location
    }
    closest = min(distances, key=lambda other: distances[other])
    return f", or use {closest.name} ({closest.license}, {closest.variant}), which is open to everyone"


def _unavailable(url: str, path: Path, reason: str, instead: str = "") -> HubError:
    return HubError(
        f"not in the cache, and could not be downloaded ({reason})",
        where=url,
        hint=f"put the file at {path}, or pass the path of a copy instead of the name{instead}",
    )


def _record(path: Path) -> Path:
    """The file with the address, size and SHA-256 of a cached file."""
    return path.with_name(f"{path.name}.json")


def _read_record(path: Path) -> dict[str, Any]:
    try:
        return read_object(_record(path))
    except FileError:
        return {}


def _is_intact(path: Path, url: str, sha256_prefix: str, verify: bool) -> bool:
    """Whether the file is present and complete; raises if one that the user put there fails the checks."""
    if not path.is_file():
        return False
    record, size = _read_record(path), path.stat().st_size
    if record.get("sha256"):
        return bool(size == record.get("size") and (not verify or digest(path) == record["sha256"]))
    try:
        sha256 = _check(path, size, sha256_prefix)
    except InterruptedTransferError as fault:
        raise HubError(str(fault), where=path, hint=f"remove it, or replace it by the file of {url}") from None
    write_json(_record(path), {"url": url, "size": size, "sha256": sha256})
    return True


def _download(url: str, path: Path, sha256_prefix: str) -> None:
    """Download and verify, then move the file to `path` atomically."""
    part, reason = path.with_name(f"{path.name}.part"), ""
    path.unlink(missing_ok=True)  # only a damaged copy can be here
    for wait in (0.0, *RETRY_SECONDS):
        time.sleep(wait)
        is_received = False
        try:
            size = _transfer(url, path, part)
            is_received = True
            sha256 = _check(part, size, sha256_prefix)
            break
        except InterruptedTransferError as fault:
            reason = str(fault)
            if is_received:  # other bytes than promised: do not resume them
                part.unlink()
    else:
        raise _unavailable(url, path, reason)
    sync(part)
    os.replace(part, path)
    write_json(_record(path), {"url": url, "size": path.stat().st_size, "sha256": sha256})


def _mirror(url: str) -> str:
    """The address under $VITRUVIAN_MIRROR, a copy of the cache's tree, if that is set; else `url`."""
    parts, mirror = urlsplit(url), os.environ.get("VITRUVIAN_MIRROR", "").rstrip("/")
    path = quote(unquote(parts.path))
    return f"{mirror}/{parts.netloc}{path}" if mirror else f"https://{parts.netloc}{path}"


def _transfer(url: str, path: Path, part: Path) -> int | None:
    """Download to `part`, resuming if the file on the server is unchanged; returns the length that it states."""
    start = part.stat().st_size if part.is_file() else 0
    validator = str(_read_record(path).get("validator", ""))
    resume = {"Range": f"bytes={start}-", "If-Range": validator} if start and validator else {}
    source = _mirror(url)
    try:
        request = urllib.request.Request(source, headers={"User-Agent": "vitruvian"} | resume)
        with urllib.request.urlopen(request, timeout=DOWNLOAD_TIMEOUT_SECONDS) as reply:
            if not reply.url.startswith("https://") and not os.environ.get("VITRUVIAN_MIRROR"):
                raise HubError(f"redirects to {reply.url}, which is not encrypted", where=url)
            return _receive(reply, url, path, part)
    except urllib.error.HTTPError as error:
        with error:
            reason = f"{source} responded {error.code} {error.reason}"
            if error.code == 416:
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                instead = open_alternative(url) if error.code in (401, 403) else ""
                raise _unavailable(url, path, reason, instead) from None
            raise InterruptedTransferError(reason) from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, socket.gaierror):  # no network: retrying does not help
            raise _unavailable(url, path, "no network") from None
        raise InterruptedTransferError(str(cause) or type(cause).__name__) from None


def _receive(reply: http.client.HTTPResponse, url: str, path: Path, part: Path) -> int | None:
    """Append the response to `part`, or replace it if the server starts from the beginning."""
    continued = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", reply.headers.get("Content-Range", ""))
    if reply.status != 206:
        etag, modified = reply.headers.get("ETag", ""), reply.headers.get("Last-Modified", "")
        part.unlink(missing_ok=True)
        write_json(_record(path), {"url": url, "validator": modified if etag.startswith("W/") else etag or modified})
    elif not continued or int(continued[1]) != part.stat().st_size:
        part.unlink()
        raise InterruptedTransferError("the server resumed at another position")
    length = continued[2] if continued else reply.headers.get("Content-Length")
    size = int(length) if length and length.isdecimal() else None
    with part.open("ab") as file, Progress(path.name, size, unit="bytes") as progress:
        while block := reply.read(BLOCK_BYTES):
            file.write(block)
            progress.update(file.tell())
        if size is not None and file.tell() < size:
            raise InterruptedTransferError(f"the connection ended after {file.tell():,} of {size:,} bytes")
    return size


def _check(path: Path, promised: int | None, sha256_prefix: str) -> str:
    """The file's SHA-256, if it has the expected length, format and checksum."""
    size = path.stat().st_size
    if promised is not None and size != promised:
        raise InterruptedTransferError(f"has {size:,} bytes, expected {promised:,}")
    kind = path.name.removesuffix(".part").rpartition(".")[2]
    with path.open("rb") as file:
        head = file.read(9)
    if kind == "safetensors":  # eight bytes of header length, then JSON
        is_complete = head[8:] == b"{" and int.from_bytes(head[:8], "little") < size
    else:  # a .pth from before 2020 is a bare pickle
        is_complete = (kind != "npz" and head.startswith(b"\x80\x02")) or zipfile.is_zipfile(path)
    if not is_complete:
        raise InterruptedTransferError(f"is not a complete .{kind} file (perhaps an error page)")
    sha256 = digest(path)
    if not sha256.startswith(sha256_prefix):
        raise InterruptedTransferError(f"has sha256 {sha256[:8]}..., expected {sha256_prefix}...")
    return sha256


# The 50,000 checkpoints of "How to train your ViT?" (AugReg), found by the index file of their release.
AUGREG_INDEX = f"{catalog.AUGREG}/index.csv"
AUGREG_DATASETS = dict.fromkeys(("imagenet", "imagenet-1k", "imagenet1k"), "i1k")
AUGREG_DATASETS |= dict.fromkeys(("imagenet21k", "imagenet-21k"), "i21k")
AUGREG_COLUMNS = (
    "name", "ds", "final_val", "adapt_ds", "adapt_resolution", "adapt_final_test", "filename", "adapt_filename",
)  # fmt: skip


def find_augreg(terms: str, index: str | Path | None = None) -> list[dict[str, Any]]:
    """The rows of the index that have all terms, the most accurate after fine-tuning first.

    Args:
        terms: Separated by commas, such as `S/16, imagenet, 300ep`: values of columns (`light1`, `384`) or parts of
            file names (`wd_0.1`, `i21k`). A model is named as in the index: B/16, R26+S/32.
        index: The index file; by default the copy in the cache.

    Returns:
        The columns of the index, and `weights`: the name for `vitruvian.load`.

    Raises:
        HubError: There is no index file; says where to get it.
        FileError: It is not the index, or no checkpoint has these terms.
    """
    default = cache_folder() / catalog.web_address(AUGREG_INDEX).removeprefix("https://")
    path = Path(index).expanduser() if index else default
    if not path.is_file():
        hint = f"download {catalog.web_address(AUGREG_INDEX)} and put it there, or pass its path with --index"
        raise HubError("the index of the AugReg checkpoints is not here", where=path, hint=hint)
    reader = csv.DictReader(read_text(path).splitlines())
    if missing := [column for column in AUGREG_COLUMNS if column not in (reader.fieldnames or ())]:
        raise FileError(f"not the index of the AugReg checkpoints: no column {missing[0]!r}", where=path)
    rows: list[dict[str, Any]] = list(reader)
    if cut := [line for line, row in enumerate(rows, 2) if None in row.values()]:
        raise FileError(f"line {cut[0]} is incomplete; download the index again", where=path)
    words = [AUGREG_DATASETS.get(term, term) for term in (part.strip().lower() for part in terms.split(",")) if term]
    for word in words:
        rows = [row for row in rows if word in words_of(row)]
        if not rows:
            raise FileError(f"no AugReg checkpoint has {word!r} (with the terms before it)", where=path)
    for row in rows:
        row["weights"] = f"augreg/{row['adapt_filename'] or row['filename']}"
    return sorted(rows, key=lambda row: -float(row["adapt_final_test"] or 0))


def words_of(row: dict[str, Any]) -> set[str]:
    """All values of a row, and the parts of its file names."""
    parts = f"{row['filename']}-{row['adapt_filename']}".lower().split("-")
    return {str(value).lower() for value in row.values()} | set(parts)
