"""Tokenizers that make their library panic or abort are one line, and do not end this process."""

import json

import pytest
from two_towers import without

from vitruvian.errors import CheckpointError
from vitruvian.weights.zero_shot import load_text

CHANGES = {
    "prefix": {"model": {"continuing_subword_prefix": "x" * 1000}},
    "characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "template": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "nobody", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_tokenizer_that_panics_is_one_line(clip, tmp_path, name):
    folder = without(clip[0], tmp_path / "clip", "tokenizer.json")
    content = json.loads((clip[0] / "tokenizer.json").read_text())
    for key, value in CHANGES[name].items():
        content[key] = {**content[key], **value} if key == "model" else value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"tokenizer.json: the tokenizer cannot be read: ") as caught:
        load_text(folder)
    assert str(caught.value).isprintable()


def test_a_deeply_nested_tokenizer_never_reaches_the_library(clip, tmp_path):
    folder = without(clip[0], tmp_path / "clip", "tokenizer.json")
    (folder / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not valid JSON: nested more than 100 deep"):
        load_text(folder)


def test_a_tokenizer_is_tried_once_for_each_file(clip, monkeypatch):
    load_text(clip[0])
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("tried again"))
    load_text(clip[0])
