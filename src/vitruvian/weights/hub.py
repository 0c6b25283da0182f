"""A published name -> a local file or folder: from the cache if it is there, else fetched and checked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from types import ModuleType

from vitruvian.cache import cache_folder
from vitruvian.catalog import (
    REPOSITORY_SCHEME,
    VARIANTS,
    canonical,
    find_published,
    published_for,
    published_names,
    web_address,
)
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
from vitruvian.files import read_object
from vitruvian.progress import print_status, waiting
from vitruvian.text import describe_error
from vitruvian.weights.download import SUFFIXES, cached_path, fetch
from vitruvian.weights.files import GRAPH_ENDINGS, SETTING_FILES
from vitruvian.weights.tokenizer import TOKENIZER_FILES

ASKING_SECONDS = 10.0
"""Until a hub that does not answer is given up."""
VIEWS = ("preprocessor_config.json", "processor_config.json")
"""Files of which one says how transformers prepares images; the second is that of a model for images and text."""
DESCRIPTIONS = (*SETTING_FILES, *TOKENIZER_FILES)
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
"""Names of weights in a repository, the best first; what runs no code comes before a pickle."""


DEFAULT = "deit3_small_patch16_224.fb_in22k_ft_in1k"
"""What is used where no weights are named: the cost of ViT-S/16, and 83.1% of ImageNet as its authors report."""
BUNDLED = Path(str(files("vitruvian") / "bundled"))
"""The model that the package carries, if it does: ten classes, for where nothing can be downloaded."""


def default_source() -> str:
    """The published default, from the cache or downloaded once, or else the model in the package; said on stderr."""
    return _default("no model is named", "the small one in the package knows {labels}", give="model")


def default_weights() -> str:
    """The same to start a training from."""
    instead = "starting from the small model in the package, which sees {rows} x {columns} pixels"
    return _default("no weights are named", instead, give="weights")


def _default(unnamed: str, instead: str, *, give: str) -> str:
    try:
        resolve_source(DEFAULT)
    except (HubError, MissingExtraError, FileError) as error:
        if not (BUNDLED / "config.json").is_file():
            raise HubError(f"{unnamed} and the default cannot be downloaded; give {argument(give)}: {error}") from error
        box = read_object(BUNDLED / "config.json", raises=CheckpointError)
        rows, columns = box["preprocess"]["image_size"]
        said = instead.format(labels=", ".join(box["labels"]), rows=rows, columns=columns)
        why = f" ({error})" if isinstance(error, MissingExtraError) else ""
        print_status(f"{unnamed} and none could be downloaded{why}: {said}")
        return str(BUNDLED)
    print_status(f"{unnamed}: using {DEFAULT}")
    return DEFAULT


def resolve_source(name: str, *, cache: Path | None = None, offline: bool | None = None, verify: bool = False) -> Path:
    """The local file (Google, torchvision, DINO, BiT) or folder (Hugging Face, timm) of published weights.

    `name` is one of `published.names()`, a `gs://` or https address of a file, or any Hugging Face id, with an optional
    `@revision`. What is in the cache is used without asking the network; `offline` (by default $HF_HUB_OFFLINE) never
    asks it. `cache` replaces both caches, ours and Hugging Face's; `verify` reads a cached file to compare its sha256.
    """
    base, _, revision = name.partition("@")
    row = find_published(base)
    location = row.location if row else _location(base)
    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
    if location.startswith(REPOSITORY_SCHEME):
        source = Repository(location.removeprefix(REPOSITORY_SCHEME), revision, cache)
        return source.folder(offline=offline)
    if revision:
        raise HubError(f"only Hugging Face repositories have revisions; leave out @{revision}", where=name)
    path = cached_path(location, cache or cache_folder())
    return fetch(location, path, sha256_prefix=row.sha256_prefix if row else "", offline=offline, verify=verify)


def require_packages(name: str) -> None:
    """Refuse to begin where published weights of this name do not exist, or a package to fetch them is missing."""
    base = name.partition("@")[0]
    row = find_published(base)
    if (row.location if row else _location(base)).startswith(REPOSITORY_SCHEME):
        require("huggingface_hub", "hub")


def _location(name: str) -> str:
    """The location of a name that is not in the table, or the error that helps best."""
    if name.startswith(("gs://", "https://")):
        return web_address(name)
    if name.endswith((*SUFFIXES, *GRAPH_ENDINGS)) or name.startswith((".", "/", "~")) or "\\" in name:
        raise CheckpointError("no such file or folder", where=name)
    identifier = name.removeprefix(REPOSITORY_SCHEME)
    if re.fullmatch(r"[\w.-]+/(?!\d+(-distilled)?$)[\w.-]+", identifier, re.ASCII):  # `ViT-B/16` is no repository
        return REPOSITORY_SCHEME + identifier
    see = "(`vit models PATTERN` lists them; a path or a Hugging Face id like google/vit-base-patch16-224 will do too)"
    unknown = UnknownNameError("weights", name, [*published_names(), *VARIANTS], see=see)
    if "." in name:  # a shape's name has no tag
        raise unknown
    try:
        variant, _ = canonical(name)
    except UnknownNameError:
        raise unknown from None
    rows = [row.name for row in published_for(variant)]
    more = f" and {len(rows) - 8} more (see `vit models {variant}`)" if len(rows) > 8 else ""
    choice = f"its published weights are {', '.join(rows[:8])}{more}" if rows else "nobody published weights of it"
    raise ConfigError(f"{name} is a shape, not weights; {choice}")


class Repository:
    """One revision of a model on Hugging Face."""

    def __init__(self, name: str, revision: str, cache: Path | None) -> None:
        self.hub: ModuleType = require("huggingface_hub", "hub")
        self.errors: ModuleType = require("huggingface_hub.errors", "hub")
        try:
            require("huggingface_hub.utils", "hub").validate_repo_id(name)
        except ValueError:
            raise HubError("no such file or folder, and not an id that Hugging Face allows", where=name) from None
        if revision and not re.fullmatch(r"[A-Za-z0-9](?:[\w/-]|\.(?!\.))*", revision, re.ASCII):
            raise HubError(f"{name}@{revision}: {revision!r} is not a branch, tag or commit")
        self.name = name
        self.revision = revision or "main"
        self.cache = cache / "huggingface" if cache else None

    def folder(self, *, offline: bool) -> Path:
        """The folder with the weights and the files that describe them."""
        folder = self._cached()
        if folder and not offline:
            self._complete(folder)
        if folder:
            return folder
        if offline:
            raise HubError(self._instead("working offline"))
        return self._download()

    def _cached(self) -> Path | None:
        """The folder in the cache, if all of its weights are there."""
        found = (self._find(file) for file in (*WEIGHTS, *DESCRIPTIONS))
        folder = next((Path(path).parent for path in found if isinstance(path, str)), None)
        return folder if folder and _has_weights(folder) else None

    def _find(self, file: str) -> object:
        """A path, None, or the library's mark for a file that the repository is known not to have."""
        return self.hub.try_to_load_from_cache(self.name, file, cache_dir=self.cache, revision=self.revision)

    def _complete(self, folder: Path) -> None:
        """Fetches the preprocessing if another program cached the weights alone; without network, goes on as it is."""
        config = folder / "config.json"
        text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
        if '"pretrained_cfg"' in text or '"preprocess"' in text:
            return  # timm and our own folders describe themselves
        found, file = [self._find(file) for file in VIEWS], VIEWS[0]
        if any(isinstance(path, str) for path in found) or None not in found:
            return  # one is there, or there is none
        try:
            present = self._files()  # fails at once without network, where a download would first retry for long
            for file in [name for name in VIEWS if name in present] or VIEWS[:1]:
                self.hub.hf_hub_download(self.name, file, cache_dir=self.cache, revision=folder.name)
        except Exception as error:  # the library's transport decides what a broken network raises
            print_status(
                f"note: {self.name}: {file} could not be downloaded ({type(error).__name__}: {describe_error(error)})"
            )

    def _files(self) -> list[str]:
        with waiting(f"waiting for Hugging Face to describe {self.name} ..."):
            model = self.hub.HfApi().model_info(self.name, revision=self.revision, timeout=ASKING_SECONDS)
        return [file.rfilename for file in model.siblings or ()]

    def _download(self) -> Path:
        try:
            if files := _chosen(self._files()):
                folder = self.hub.snapshot_download(
                    self.name, revision=self.revision, cache_dir=self.cache, allow_patterns=files
                )
                return Path(folder)
        except self.errors.GatedRepoError as error:
            page = f"https://huggingface.co/{self.name}"
            raise HubError(f"asks for consent; give it at {page}, then run `hf auth login`", where=self.name) from error
        except self.errors.RepositoryNotFoundError as error:
            near = nearest(self.name, published_names())
            hint = f"did you mean {' or '.join(near)}?" if near else "if it is private, run `hf auth login`"
            raise HubError(
                f"no such file or folder, and no such model on Hugging Face; {hint}", where=self.name
            ) from error
        except self.errors.RevisionNotFoundError as error:
            raise HubError(f"has no revision {self.revision!r}", where=self.name) from error
        except Exception as error:  # as above
            raise HubError(self._instead(f"{type(error).__name__}: {error}")) from error
        raise HubError(f"has none of {', '.join(WEIGHTS)}, the files that can be read", where=self.name)

    def _instead(self, reason: str) -> str:
        reason = " ".join(reason.split())
        at = "" if self.revision == "main" else f" --revision {self.revision}"
        cache = self.cache or Path(require("huggingface_hub.constants", "hub").HF_HUB_CACHE)
        place = cache / f"models--{self.name.replace('/', '--')}"
        return (
            f"{self.name}: no such path, not in the cache, and could not be downloaded ({reason}); "
            f"where there is a network, run `hf download {self.name}{at}` and copy the folder {place.name} of its "
            f"HF_HOME/hub to {place}, or pass the path of a copy instead of the name"
        )


def _chosen(files: Iterable[str]) -> list[str]:
    """Of all files in a repository, the descriptions and one set of weights; nothing if it has no weights."""
    present = set(files)
    best = next((file for file in WEIGHTS if file in present), None)
    if best is None:
        return []
    shards = [file for file in present if re.fullmatch(r"model-\d+-of-\d+\.safetensors", file)]
    return [
        *(file for file in DESCRIPTIONS if file in present),
        best,
        *(shards if best.endswith("index.json") else []),
    ]


def _has_weights(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / WEIGHTS[0]).is_file():
        return any((folder / file).is_file() for file in WEIGHTS)
    try:
        shards = set(read_object(index)["weight_map"].values())
    except (FileError, KeyError, AttributeError, TypeError):
        return False
    return all((folder / shard).is_file() for shard in shards)
