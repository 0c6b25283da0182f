"""How far a dataset is packed: `pack.json`, brought up to date after each shard."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitruvian.data.pack.encode import PackSettings
from vitruvian.data.pack.shard import Shard, Skipped
from vitruvian.data.sources.base import Dataset, Source
from vitruvian.errors import DataError
from vitruvian.files import is_unfinished, read_object, write_json

FILE = "pack.json"
VERSION = 1


@dataclass(slots=True)
class SplitState:
    """How far one split is packed."""

    examples: int
    """In the source, readable or not."""
    digest: str
    """Of their keys and labels."""
    shards: list[Shard] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The number of the first example that is in no finished shard."""
        return self.shards[-1].stop if self.shards else 0

    @property
    def images(self) -> int:
        return sum(shard.images for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


@dataclass(slots=True)
class PackState:
    """All of `pack.json`."""

    settings: PackSettings
    source: str
    splits: dict[str, SplitState]
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    version: int = VERSION

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, dataclasses.asdict(self))


def fresh_state(data: Dataset, settings: PackSettings) -> PackState:
    """The state before the first shard."""
    splits = {name: SplitState(len(source), digest_of(source)) for name, source in data.splits.items()}
    weighted = any(source.weight(index) != 1.0 for source in data.splits.values() for index in known(source))
    notes = ["the weights of the examples are not kept: shards have no place for them"] if weighted else []
    return PackState(settings, data.name, splits, notes)


def known(source: Source) -> range:
    """The examples about which something can be said without fetching them: none of a remote source."""
    return range(len(source) if source.blocks is None else 0)


def digest_of(source: Source) -> str:
    """A hash of all keys, labels and class names, to know the same data again."""
    digest = hashlib.sha256(json.dumps(source.classes).encode())
    for index in known(source):
        digest.update(f"{source.label(index)} {source.key(index)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def resumed_state(folder: Path, fresh: PackState) -> PackState:
    """The state found in a folder that was packed before, or `fresh` for a new one; refuses any other folder."""
    if not (folder / FILE).exists():
        strangers = [path.name for path in folder.iterdir() if not is_unfinished(path)]
        if strangers:
            raise DataError(
                f"{folder}: not empty (it has {sorted(strangers)[0]}) and not made by vit pack; name a new folder"
            )
        return fresh
    found = read_state(folder)
    differences = difference(found, fresh)
    if differences:
        raise DataError(
            f"{folder}: was packed with {differences}; name another folder, or delete this one to pack anew"
        )
    damaged = [forget_damaged(folder / name, split) for name, split in found.splits.items()]
    found.complete = found.complete and not any(damaged)
    return found


def read_state(folder: Path) -> PackState:
    """What `pack.json` says."""
    path = folder / FILE
    try:
        content = read_object(path, raises=DataError)
        splits = {name: split_state(split) for name, split in content["splits"].items()}
        settings = PackSettings.from_json(content["settings"])
        return PackState(settings, content["source"], splits, content["notes"], content["complete"], content["version"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not what vit pack writes ({error}); delete the folder to pack anew") from error


def split_state(content: dict[str, Any]) -> SplitState:
    shards = [Shard(**shard) for shard in content["shards"]]
    skipped = [Skipped(**skipped) for skipped in content["skipped"]]
    return SplitState(content["examples"], content["digest"], shards, skipped)


def difference(found: PackState, wanted: PackState) -> str:
    """What differs between a packed folder and what is asked for, as `side=256, not 224`."""
    old, new = found.settings.to_json(), wanted.settings.to_json()
    parts = [f"{name}={old[name]}, not {new[name]}" for name in new if old[name] != new[name]]
    if found.version != wanted.version:
        parts.append(f"version {found.version} of the layout, not {wanted.version}")
    if list(found.splits) != list(wanted.splits):
        parts.append(f"the splits {', '.join(found.splits)}, not {', '.join(wanted.splits)}")
    for name in found.splits.keys() & wanted.splits.keys():
        was, now = found.splits[name], wanted.splits[name]
        if (was.examples, was.digest) != (now.examples, now.digest):
            parts.append(f"other images or labels in {name} ({was.examples:,} then, {now.examples:,} now)")
    return "; ".join(parts)


def forget_damaged(folder: Path, split: SplitState) -> bool:
    """Whether a shard is missing or has another size; it and those after it are then packed again."""
    for number, shard in enumerate(split.shards):
        path = folder / shard.file
        if not path.is_file() or path.stat().st_size != shard.bytes:
            del split.shards[number:]
            split.skipped = [skipped for skipped in split.skipped if skipped.index < split.start]
            return True
    return False
