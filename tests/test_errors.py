"""Errors are built from fields and formatted in one place."""

import pickle

import pytest

from vitruvian.errors import (
    CheckpointError,
    ConfigError,
    FileError,
    Interrupted,
    MissingExtraError,
    UnknownNameError,
    argument,
    parsing,
)


def test_the_text_is_where_reason_and_hint():
    error = CheckpointError("has 10 classes", where="w.npz", hint="pass num_classes=10")
    assert str(error) == "w.npz: has 10 classes; pass num_classes=10"
    assert (error.where, error.reason, error.hint) == ("w.npz", "has 10 classes", "pass num_classes=10")
    assert str(FileError("plain text")) == "plain text"


def test_a_newline_in_a_path_keeps_the_text_in_one_line():
    assert str(FileError("missing", where="a\nb")) == "a\\nb: missing"


def test_arguments_are_spelled_in_python_unless_the_error_has_another_spelling():
    error = ConfigError(f"{argument('num_heads', 3)} does not divide 40", hint=f"pass {argument('num_heads')}")
    assert error.parameter == "num_heads"
    assert str(error) == "num_heads=3 does not divide 40; pass num_heads="
    error.spell = lambda name, value: f"--{name} {value}".strip()
    assert str(error) == "--num_heads 3 does not divide 40; pass --num_heads"
    assert error.reason == "--num_heads 3 does not divide 40"


def test_replace_adds_where_and_hint_and_keeps_the_rest():
    inner = ConfigError(f"{argument('num_heads', 0)} is not at least 1", where="architecture")
    outer = inner.replace(CheckpointError, where="config.json", hint="write it again")
    assert type(outer) is CheckpointError
    assert str(outer) == "config.json: architecture: num_heads=0 is not at least 1; write it again"
    assert outer.parameter == "num_heads"
    assert str(inner) == "architecture: num_heads=0 is not at least 1"
    assert type(inner.replace(where="x")) is ConfigError


def test_an_unknown_name_has_fields_and_suggestions():
    error = UnknownNameError("model", "vit-b-16", ["ViT-B/16", "BiT-R50x1"], see="(see `vit models`)")
    assert (error.kind, error.name) == ("model", "vit-b-16")
    assert str(error) == "unknown model 'vit-b-16'; did you mean ViT-B/16? (see `vit models`)"
    assert str(UnknownNameError("model", "zzz", ["ViT-B/16"], see="(here: x)")) == "unknown model 'zzz' (here: x)"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("reason", where="here", hint=f"pass {argument('num_heads', 2)}"),
        UnknownNameError("model", "a", ["ab"]),
        Interrupted("stopped", 15),
        MissingExtraError("install it", where="s3://x"),
    ],
)
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (RecursionError("maximum recursion depth exceeded"), "nested too deep"),
        (MemoryError(), "not enough memory"),
        (OverflowError("too large"), "too large"),
        (KeyError("a"), "KeyError: 'a'"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "'utf-8' codec can't decode byte"),
    ],
)
def test_a_boundary_turns_any_exception_into_one_line_that_names_the_file(raised, reason):
    with pytest.raises(CheckpointError) as caught, parsing("w.bin", CheckpointError):
        raise raised
    assert str(caught.value).startswith(f"w.bin: damaged or not supported ({reason}")
    assert caught.value.__cause__ is raised


def test_a_boundary_passes_errors_raised_on_purpose_and_names_files_of_the_system():
    error = FileError("bad")
    with pytest.raises(FileError) as caught, parsing("w.bin", CheckpointError):
        raise error
    assert caught.value is error
    with pytest.raises(CheckpointError, match=r"^w.bin: depth=0 is not"), parsing("w.bin", CheckpointError):
        raise ConfigError("depth=0 is not positive")
    with pytest.raises(CheckpointError, match=r"^x: cannot be read: No such file"), parsing("w.bin", CheckpointError):
        raise FileNotFoundError(2, "No such file", "x")


def test_control_characters_and_endless_names_do_not_reach_the_text_of_an_error():
    text = str(CheckpointError("\x1b[31m" + "n" * 10_000, where="a\nb\x07"))
    assert text.startswith("a\\nb\\x07: \\x1b[31mnnn")
    assert len(text) == 1000


def test_an_os_error_of_a_library_is_damage_and_one_of_the_system_is_not():
    with (
        pytest.raises(FileError, match=r"^a\.bin: not a table \(no more data\)$"),
        parsing("a.bin", FileError, reason="not a table"),
    ):
        raise OSError("no more data")
    with pytest.raises(FileError, match=r"none: cannot be read: "), parsing("a.bin", FileError, reason="not a table"):
        open("none/none", "rb").close()
