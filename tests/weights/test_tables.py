"""Laws of the two-way tables."""

from __future__ import annotations

import pytest
import torch

from vitruvian.errors import CheckpointError
from vitruvian.weights.families.registry import READERS
from vitruvian.weights.families.tables import LAYOUTS, TABLES, Row, Table

MEMBERS = [member for members in READERS.values() for member in members]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: type(member).__name__)
def test_no_name_stands_in_a_table_twice(member):
    for names in ([row.native for row in member.table.rows], [n for row in member.table.rows for n in row.foreign]):
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "shape", "parts"),
    [
        ("same", (5,), 1),
        ("dense", (6, 8), 1),
        ("conv", (6, 3, 2, 2), 1),
        ("pointwise", (6, 8), 1),
        ("stacked", (6, 8), 3),
        ("heads_in", (24, 8), 3),
        ("heads_in", (8, 8), 1),
        ("heads_bias", (24,), 3),
        ("heads_out", (8, 8), 1),
    ],
)
def test_what_a_kind_writes_it_reads_back(name, shape, parts):
    kind = LAYOUTS[name]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    written = kind.write(tensor, parts, 4)
    assert len(written) == parts
    assert all(kind.rank in (None, part.dim()) for part in written)
    assert torch.equal(kind.read(written), tensor)


def test_holes_are_filled_with_block_and_unit_numbers():
    table = Table(
        rows=(Row("blocks.{i}.w", ("b{i}",)), Row("stages.{s}.{u}.w", ("s{S}/u{U:02d}",))),
        block=r"b(\d+)",
        unit=r"s(\d+)/u(\d+)",
        first_unit=1,
    )
    native, unused = table.read({"b11": torch.ones(1), "s2/u03": torch.ones(1), "other": torch.ones(1)})
    assert sorted(native) == ["blocks.11.w", "stages.1.2.w"]
    assert unused == ["other"]


def test_parts_that_do_not_fit_together_are_named():
    table = Table(rows=(Row("qkv", ("q", "k"), LAYOUTS["stacked"]),))
    with pytest.raises(CheckpointError, match=r"do not fit together: 'q' \(2, 3\), 'k' \(2, 4\)"):
        table.read({"q": torch.ones(2, 3), "k": torch.ones(2, 4)})


def test_a_line_of_names_stands_for_a_row_per_word_and_several_arrays_of_one():
    rows = [(row.native, row.foreign) for row in TABLES["huggingface_clip"].rows]
    assert ("blocks.{i}.mlp.fc2.bias", ("encoder.layers.{i}.mlp.fc2.bias",)) in rows
    assert (
        "blocks.{i}.attn.qkv.weight",
        tuple(f"encoder.layers.{{i}}.self_attn.{p}_proj.weight" for p in "qkv"),
    ) in rows
    kinds = {row.native: row.layout for row in TABLES["bit"].rows}
    assert kinds["head.weight"] is LAYOUTS["pointwise"]
    assert kinds["head.bias"] is LAYOUTS["same"]
