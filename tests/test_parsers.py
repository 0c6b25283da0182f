"""Files that anyone may have written are read or answered with one line, whatever is in them."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitruvian import Classifier, create_model
from vitruvian.config import Preprocess, ViTConfig
from vitruvian.data.doctor import diagnose
from vitruvian.data.formats import open_dataset
from vitruvian.data.names import find_classes
from vitruvian.data.pack import pack, read_state
from vitruvian.errors import ConfigError, VitruvianError
from vitruvian.files import parse_json, parse_toml
from vitruvian.training.checkpoint import read_position
from vitruvian.training.recipe import change_recipe, read_recipe, to_toml
from vitruvian.training.run_folder import Run, read_journal
from vitruvian.weights.load import load

DEEP, DIGITS, NAME = "[" * 50_000, "9" * 5_000, '{"%s": 1}' % ("n" * 50_000)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(error, start=""):
    assert str(error).startswith(start)
    assert "\n" not in str(error)
    assert len(str(error)) < 600


def weights_folder(name):
    def read(folder):
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        load(folder)

    return name, read


READERS = {
    "config.json": weights_folder("config.json"),
    "preprocessor_config.json": weights_folder("preprocessor_config.json"),
    "run.json": ("run.json", lambda folder: Run.open(folder).facts),
    "unreadable.json": ("unreadable.json", lambda folder: Run(folder).unreadable),
    "metrics.jsonl": ("metrics.jsonl", lambda folder: list(read_journal(folder / "metrics.jsonl"))),
    "position.json": ("position.json", read_position),
    "pack.json": ("pack.json", read_state),
    "classes.json": ("classes.json", find_classes),
    "recipe.toml": ("recipe.toml", lambda folder: read_recipe(folder / "recipe.toml")),
}


@pytest.mark.parametrize("content", [DEEP, DIGITS, f'{{"a": {DIGITS}}}', '{"a":' * 50_000, NAME, "", "\ud800"])
@pytest.mark.parametrize("reader", READERS)
def test_a_hostile_file_is_one_short_line(tmp_path, reader, content):
    name, read = READERS[reader]
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogatepass") + b"\n")
    try:
        read(tmp_path)
    except VitruvianError as error:
        check(error)
    else:
        assert content == NAME  # an object with a long name may be what the file should hold


@pytest.mark.parametrize("text", [DEEP, DIGITS, "{a=" * 5000, "a." * 5000 + "b", "-" + DIGITS, "'" * 5000])
@pytest.mark.parametrize("key", ["epochs", "seed", "architecture", "augment.hflip", "n" * 5000, "a." * 5000 + "b"])
def test_a_hostile_change_is_one_short_line(key, text):
    with pytest.raises(VitruvianError) as caught:
        change_recipe(read_recipe("digits"), [f"{key}={text}"])
    check(caught.value)


@pytest.mark.parametrize("number", [10**25, -(10**30), 2**31])
def test_an_endless_batch_or_number_of_workers_is_one_short_line(number, tmp_path):
    attempts = [
        lambda: Classifier(create_model("ViT-Ti/16", image_size=32)).predict([], batch_size=number),
        lambda: pack("digits", tmp_path / "packed", workers=number),
        lambda: diagnose(open_dataset("digits"), workers=number),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError, match=r"^(batch_size|workers)=") as caught:
            attempt()
        check(caught.value)


@pytest.mark.slow
@QUICK
@given(st.text(), st.text(), st.lists(st.text(), max_size=3))
def test_any_text_in_a_recipe_comes_back_from_its_file(tmp_path, weights, about, freeze):
    recipe = read_recipe("digits").replace(weights=weights, about=about, freeze=tuple(freeze))
    (tmp_path / "recipe.toml").write_bytes(to_toml(recipe.to_json()).encode("utf-8"))
    assert read_recipe(tmp_path / "recipe.toml") == recipe


@QUICK
@given(st.binary())
def test_any_bytes_are_json_and_toml_or_one_line(data):
    for parse in (parse_json, parse_toml):
        try:
            parse(data, "here")
        except VitruvianError as error:
            check(error, start="here: not ")


@QUICK
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=20))
@pytest.mark.slow
def test_a_description_of_anything_is_settings_or_one_line(value):
    for kind in (ViTConfig, Preprocess):
        for name in kind().to_json():
            try:
                kind.from_json({name: value})
            except VitruvianError as error:
                check(error)
