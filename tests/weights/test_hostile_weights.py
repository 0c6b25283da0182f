"""Parsers of untrusted bytes: a model or one line, never another exception, a hang or gigabytes."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import shutil
import zipfile

import numpy as np
import pytest
import torch
from checkpoints import path_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from vitruvian.errors import CheckpointError
from vitruvian.weights.load import best_trial, load

QUICK = settings(
    max_examples=40, deadline=5000, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MAX_BYTES = 2**30
"""More memory than that, for files of a few kilobytes, is an attack that succeeded."""

NAMES = st.sampled_from(
    ["patch_embed.proj.weight", "cls_token", "pos_embed", "blocks.0.norm1.weight", "blocks.99999999.norm1.weight",
     "embedding/kernel", "Transformer/encoderblock_0/LayerNorm_0/scale", "embed.patch.weight", "root.weight",
     "conv_proj.weight", "embeddings.patch_embeddings.projection.weight", "head.weight", "norm.weight", "a", ""]
)  # fmt: skip
SHAPES = st.lists(st.integers(0, 6), max_size=5).map(tuple)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


def tried(path):
    """Load, and allow one line; the peak of the process's memory must not grow by what no small file may ask for."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(CheckpointError):
        load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_BYTES >> 10


@QUICK
@given(
    st.binary(max_size=200), st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x10\0\0\0\0\0\0\0{", b"\x93NUMPY"])
)
def test_any_bytes(tmp_path, content, start):
    (tmp_path / "w.bin").write_bytes(start + content)
    tried(tmp_path / "w.bin")


@QUICK
@given(
    st.dictionaries(NAMES.filter(bool), st.tuples(SHAPES, st.sampled_from(["f2", "f4", "i8", "c8", "?"])), max_size=6)
)
def test_any_arrays_in_an_npz(tmp_path, arrays):
    np.savez(tmp_path / "w.npz", **{name: np.ones(shape, kind) for name, (shape, kind) in arrays.items()})
    tried(tmp_path / "w.npz")


@QUICK
@given(st.text("{}'():,<f4 descrshapefortran_orderTrue0123456789", max_size=80))
def test_any_header_of_an_npy_member(tmp_path, header):
    text = header.encode().ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("embedding/kernel.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    tried(tmp_path / "w.npz")


@pytest.mark.slow
@QUICK
@given(
    st.dictionaries(
        NAMES,
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "F99", "BOOL"]),
                "shape": st.lists(st.integers(-1, 2**40), max_size=4),
                "data_offsets": st.lists(st.integers(-1, 2**40), min_size=2, max_size=2),
            }
        )
        | JSON,
        max_size=4,
    ),
    st.binary(max_size=64),
)
def test_any_header_of_safetensors(tmp_path, header, data):
    text = json.dumps(header).encode()
    (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    tried(tmp_path / "w.safetensors")


PARTS = st.recursive(
    st.none() | st.integers(-5, 5) | st.text(max_size=5) | st.builds(torch.ones, SHAPES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.sampled_from(["model", "teacher"]), inner),
    max_leaves=8,
)


@QUICK
@given(PARTS)
def test_any_contents_of_a_pytorch_file(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    tried(tmp_path / "w.pth")


@QUICK
@given(st.data())
def test_any_byte_of_a_pytorch_file_may_be_another(tmp_path, data):
    buffer = io.BytesIO()
    torch.save({"patch_embed.proj.weight": torch.ones(4, 3, 2, 2)}, buffer, _use_new_zipfile_serialization=False)
    content = bytearray(buffer.getvalue())
    for _ in range(3):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "w.pth").write_bytes(content)
    tried(tmp_path / "w.pth")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
@QUICK
@given(data=st.data())
def test_any_settings_beside_the_weights(tmp_path, data, file):
    folder = tmp_path / "hf"
    if not folder.exists():
        shutil.copytree(path_of("huggingface_vit"), folder)
    known = json.loads((path_of("huggingface_vit") / file).read_text())
    changes = data.draw(
        st.dictionaries(st.sampled_from([*known, "size", "crop_size", "rescale_factor"]), JSON, max_size=3)
    )
    (folder / file).write_text(json.dumps(known | changes))
    tried(folder)


@pytest.mark.slow
@QUICK
@given(data=st.data())
def test_any_description_of_native_weights(tmp_path, data):
    folder = tmp_path / "native"
    if not folder.exists():
        from vitruvian.weights.save import save

        save(load(path_of("google_vit")), folder)
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    part = data.draw(st.sampled_from(["architecture", "preprocess", ""]))
    inside = config[part] if part else config
    inside.update(data.draw(st.dictionaries(st.sampled_from(list(inside)), JSON, max_size=2)))
    (folder / "config.json").write_text(json.dumps(config))
    tried(folder)


SIX_GIGABYTES = b"\x8a\x05" + (6 * 10**9).to_bytes(5, "little")
PICKLES = {
    "bytearray": b"\x80\x02cbuiltins\nbytearray\n" + SIX_GIGABYTES + b"\x85R.",
    "a bytearray in a dictionary": b"\x80\x02}K\x01c__builtin__\nbytearray\n" + SIX_GIGABYTES + b"\x85Rs.",
    "a key of nested tuples": b"\x80\x02})" + b"\x85" * 2_000_000 + b"K\x01s.",
    "a key of nested pairs": b"\x80\x02})" + b"K\x01\x86" * 1_000_000 + b"K\x01s.",
    "a memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
}


@pytest.mark.parametrize("archived", [True, False])
@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_would_fill_memory_or_stack_is_not_loaded(tmp_path, name, archived):
    if archived:
        with zipfile.ZipFile(tmp_path / "w.pth", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", PICKLES[name])
    else:
        (tmp_path / "w.pth").write_bytes(PICKLES[name])
    with pytest.raises(CheckpointError, match=r"w.pth: (the pickle would fill the memory|tuples are nested more than)"):
        load(tmp_path / "w.pth")


@pytest.mark.parametrize("name", ["blocks.%s.norm1.weight" % ("9" * 5000), "\x1b[31mred\x07", "n" * 10_000, "a\0b"])
def test_any_name_of_a_tensor_is_one_short_printable_line(tmp_path, name):
    tensors = load_file(path_of("timm_vit")) | {name: torch.zeros(2)}
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "w.safetensors")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize("trial", [{"top1": "x"}, {}, {"top1": int("9" * 400)}, {"top1": [1]}])
def test_a_damaged_record_of_a_sweep_is_one_line(tmp_path, trial):
    trials = [{"kind": "test", "state": "done", "folder": "a", **trial}]
    (tmp_path / "sweep.json").write_text(json.dumps({"trials": trials}))
    with pytest.raises(CheckpointError, match=r"sweep.json: (damaged or not supported|not valid JSON: a number has)"):
        load(tmp_path)


@pytest.mark.parametrize(("metric", "best"), [("top1", "b"), ("map", "b"), ("mae", "a")])
def test_the_best_trial_of_a_sweep_depends_on_its_metric(tmp_path, metric, best):
    trials = [{"kind": "test", "state": "done", "folder": name, metric: value} for name, value in (("a", 1), ("b", 2))]
    (tmp_path / "sweep.json").write_text(json.dumps({"metric": "top1", "trials": trials}))
    assert best_trial(tmp_path) == tmp_path / best
