"""Files are written whole or not at all, and read with one clear line."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys

import pytest

from vitruvian import files
from vitruvian.errors import CheckpointError, FileError
from vitruvian.files import (
    atomic_open,
    atomic_path,
    check_writable,
    digest,
    parse_json,
    parse_toml,
    read_json,
    read_object,
    read_text,
    remove_unfinished,
    write_bytes,
    write_json,
    write_text,
)


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_made_with_its_folders_and_nothing_else(tmp_path):
    path = write_bytes(tmp_path / "a" / "b" / "file", b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file"]


def test_a_new_file_has_the_permissions_that_the_user_asks_for(tmp_path):
    old = os.umask(0o027)
    try:
        path = write_text(tmp_path / "file", "x")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_the_old_file_stays_when_the_disk_is_full(tmp_path, monkeypatch):
    path = write_text(tmp_path / "file", "old")
    monkeypatch.setattr(files, "_fsync", full_disk)
    with pytest.raises(FileError, match="file: cannot be written: No space left on device"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_old_file_stays_when_writing_is_interrupted(tmp_path):
    path = write_text(tmp_path / "file", "old")

    def interrupted() -> None:
        with atomic_open(path) as file:
            file.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_of_what_is_read_meanwhile_is_not_blamed_on_what_is_written(tmp_path):
    with pytest.raises(FileNotFoundError, match="elsewhere"), atomic_open(tmp_path / "file") as file:
        file.write((tmp_path / "elsewhere").read_bytes())


def test_a_folder_that_is_a_file_is_said_so(tmp_path):
    write_text(tmp_path / "a", "")
    with pytest.raises(FileError, match=r"b: cannot be written: (Not a directory|File exists)"):
        write_text(tmp_path / "a" / "b", "")


def test_a_place_where_nothing_can_be_written_is_refused_before_anything_is(tmp_path):
    check_writable(tmp_path / "new" / "deep" / "file.txt")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"inner.txt: cannot be written: Not a directory"):
        check_writable(tmp_path / "file" / "inner.txt")


def test_a_whole_folder_takes_its_place_and_other_files_in_it_stay(tmp_path):
    for content in ("old", "new"):
        with atomic_path(tmp_path / "model") as new:
            new.mkdir()
            (new / "weights").write_text(content)
            assert content == "old" or (tmp_path / "model" / "weights").read_text() == "old"
        (tmp_path / "model" / "notes").touch()
    assert (tmp_path / "model" / "weights").read_text() == "new"
    assert sorted(os.listdir(tmp_path / "model")) == ["notes", "weights"]
    assert os.listdir(tmp_path) == ["model"]


def test_what_a_killed_process_left_is_removed_after_a_day_or_when_asked(tmp_path):
    code = """if True:
        import os, sys
        from pathlib import Path
        from vitruvian.files import atomic_path
        with atomic_path(Path(sys.argv[1])) as new:
            new.write_text("half")
            os.kill(os.getpid(), 9)
    """
    assert run(code, tmp_path / "file").returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    write_text(tmp_path / "file", "other process")
    assert left.exists()
    os.utime(left, (0, 0))
    write_text(tmp_path / "file", "next day")
    assert os.listdir(tmp_path) == ["file"]
    assert run(code, tmp_path / "a" / "file").returncode == -signal.SIGKILL
    remove_unfinished(tmp_path)
    assert list(tmp_path.rglob("*")) == [tmp_path / "file", tmp_path / "a"]


def test_a_name_that_is_not_unicode_is_one_line_where_a_text_cannot_hold_it(tmp_path):
    with pytest.raises(FileError, match=r"a: cannot be written: 'caf\\\\udce9.png' is not Unicode") as caught:
        write_text(tmp_path / "a", os.fsdecode(b"caf\xe9.png"))
    assert "\n" not in str(caught.value)


def test_json_comes_back_whatever_is_in_it(tmp_path):
    content = {"label": "Größe 😀", "path": os.fsdecode(b"caf\xe9.png"), "numbers": [1, 2.5, None]}
    assert read_json(write_json(tmp_path / "a.json", content)) == content
    assert "Größe" in write_json(tmp_path / "b.json", {"label": "Größe"}).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not valid JSON: Expecting property name"),
        (b"", "not valid JSON: Expecting value"),
        (b"[" * 100_000, "not valid JSON: nested more than 100 deep"),
        (b"[" * 500 + b"]" * 500, "not valid JSON: nested more than 100 deep"),
        (b"9" * 5000, "not valid JSON: a number has thousands of digits"),
        (b'{"a": "\xff"}', "not UTF-8 text: byte 0xff at 7"),
        (b"[1]", "contains a JSON list, not an object"),
    ],
)
def test_bad_json_is_one_line(tmp_path, content, reason):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_object(path, raises=CheckpointError)
    assert str(caught.value).startswith(f"{path}: {reason}")
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(tmp_path / "a") == [1]
    assert read_text(tmp_path / "a") == "[1]"


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a" + ".a" * 5000 + " = 1", "[" + "a." * 500 + "a]"])
def test_toml_nested_deep_is_one_line(text):
    with pytest.raises(FileError, match=r"^recipe: not valid TOML: nested more than 100 deep$"):
        parse_toml(text, "recipe")


def test_a_toml_number_of_thousands_of_digits_is_one_line():
    with pytest.raises(FileError, match=r"^recipe: not valid TOML: a number has thousands of digits$"):
        parse_toml(f"a = {'9' * 5000}", "recipe")


def test_nesting_within_the_limit_is_read():
    assert parse_json("[" * 99 + "]" * 99, "text") is not None


@pytest.mark.skipif(os.name == "nt", reason="no FIFOs")
def test_only_regular_files_of_reasonable_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileError, match="fifo: not a regular file"):
        read_json(tmp_path / "fifo")
    with pytest.raises(FileError, match="nowhere: cannot be read: No such file or directory"):
        read_json(tmp_path / "nowhere")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(FileError, match="huge: 65 MiB exceeds the limit of 64 MiB"):
        read_json(tmp_path / "huge")


def test_a_digest_is_the_published_one(tmp_path):
    path = write_bytes(tmp_path / "file", b"abc")
    assert digest(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest(path, "md5") == "900150983cd24fb0d6963f7d28e17f72"


def test_json_of_any_kind_of_number_is_read_as_python_reads_it():
    assert parse_json(json.dumps({"a": [1, 1.5, float("inf")]}), "x") == {"a": [1, 1.5, float("inf")]}
