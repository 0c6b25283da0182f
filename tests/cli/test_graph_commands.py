"""`vit export`, `vit bench`, and an exported graph in place of weights."""

import csv
import json

import pytest
import torch
from PIL import Image

import vitruvian as vt
from vitruvian.catalog import title_of
from vitruvian.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.openvino


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    config = vt.ViTConfig(image_size=16, patch_size=8, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=3)
    model = vt.build(config)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    model.meta = model.meta.replace(labels=("cat", "dog", "owl"))
    folder = tmp_path_factory.mktemp("graphs")
    vt.save(model, folder / "native")
    Image.linear_gradient("L").convert("RGB").save(folder / "a.jpg")
    return folder


def test_an_exported_graph_predicts_and_other_commands_say_what_they_need(native, vit):
    image, graph = native / "a.jpg", native / "graph"
    code, out, err = vit("export", native / "native", graph, "--to", "openvino", "--json")
    assert code == 0, err
    assert json.loads(out)["image_size"] == [16, 16]
    answers = [vit("predict", image, "--model", model, "--json") for model in (native / "native", graph)]
    assert [ran.code for ran in answers] == [0, 0], answers
    wanted, found = (json.loads(ran.out)["predictions"] for ran in answers)
    assert [a["label"] for a in found] == [a["label"] for a in wanted]
    assert [a["probability"] for a in found] == pytest.approx([a["probability"] for a in wanted], abs=1e-5)
    code, _, err = vit("explain", image, "--model", graph / "model.xml", "--out", native / "page")
    assert code == 1
    assert "an exported graph does not expose its attention; load the original weights instead" in err
    code, _, err = vit("predict", image, "--model", graph, "--labels", "cat, dog")
    assert (code, "exported graphs return logits only" in err) == (1, True)
    with pytest.raises(CheckpointError, match="an exported graph"):
        vt.load(graph / "model.xml")
    folder = native / "folder.onnx"
    folder.mkdir()
    code, _, err = vit("predict", image, "--model", folder)
    assert (code, "folder.onnx: the folder contains none of model.safetensors" in err) == (1, True), err
    with pytest.raises(ConfigError, match=r"model\.xml: exported graphs return logits only"):
        vt.Classifier(graph).features(torch.zeros(1, 3, 16, 16))


def test_nothing_is_written_over_unless_asked(native, vit, tmp_path):
    (tmp_path / "folder").mkdir()  # an empty folder is no result
    refusal = "already exists; choose another name, or replace it with --overwrite\n"
    for command, place in [("export", tmp_path / "x.onnx"), ("convert", tmp_path / "folder")]:
        assert vit(command, native / "native", place).code == 0
        before = sorted(path.stat().st_mtime_ns for path in [place, *place.glob("*")])
        assert vit(command, native / "native", place) == (1, "", f"error: {place}: {refusal}")
        assert sorted(path.stat().st_mtime_ns for path in [place, *place.glob("*")]) == before
        assert vit(command, native / "native", place, "--overwrite").code == 0
        assert sorted(path.stat().st_mtime_ns for path in [place, *place.glob("*")]) != before
    optimize = ("optimize", native / "native", tmp_path / "folder", "--calibrate", tmp_path, "--only", "cascade")
    refusal = f"error: {tmp_path / 'folder'}: already exists; choose another name or remove it\n"
    assert vit(*optimize) == (1, "", refusal)


def test_bench_prints_tables_and_writes_rows(native, vit):
    arguments = ("--engine", "torch", "--batches", "1,2", "--rounds", "1")
    code, out, err = vit("bench", "--model", native / "native", *arguments)
    assert code == 0, err
    assert "norms, sums, head" in out
    rows, few = native / "rows.csv", (*arguments, "--precision", "bf16", "--csv", native / "rows.csv")
    assert vit("bench", "--model", native / "native", *few).code == 0
    with rows.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [(row["engine"], row["batch_size"]) for row in written] == [
        (engine, size) for size in "12" for engine in ("torch", "torch:bf16")
    ]
    assert {row["model"] for row in written} == {str(title_of(vt.load(native / "native").config))}
    for row in written:
        assert f"torch {torch.__version__}" in row["versions"]
        assert float(row["images_per_second"]) > 0
        assert (float(row["difference"]) < 1e-5) == (row["engine"] == "torch")  # bf16 has 8 bits
        assert row["processor"]
        assert str(native) not in str(row)
    assert vit("bench", "--model", native / "native", "--csv", "rows.txt").code == 2
    for batches in ("0", "all", "65537"):
        assert vit("bench", "--model", native / "native", "--batches", batches).code == 2


def test_bench_measures_an_exported_graph(native, vit):
    weights, graph = native / "native", native / "bench.onnx"
    assert vit("export", weights, graph).code == 0
    few = ("--batches", "1,3", "--rounds", "1", "--json")
    code, out, err = vit("bench", "--model", graph, *few)
    assert code == 0, err
    found = json.loads(out)
    assert [(each["engine"], each["batch_size"]) for each in found["speeds"]] == [
        ("onnxruntime", 1),
        ("onnxruntime", 3),
    ]
    assert list(found["shares"]) == ["decode", "resize", "model"]
    code, out, err = vit("bench", "--model", graph, "--engine", "openvino", *few)
    assert code == 0, err
    assert {each["engine"] for each in json.loads(out)["speeds"]} == {"openvino"}
    for arguments, words in (
        (("--engine", "torch"), "run in onnxruntime or openvino, not in torch"),
        (("--tome-r", "1"), "exported graphs return logits only"),
        (("--num-heads", "2"), "error: --num-heads is for weights"),
        (("--image-size", "32"), "takes images of 3x16x16, not 3x32x32"),
    ):
        code, _, err = vit("bench", "--model", graph, *arguments, *few)
        assert (code, words in err) == (1, True), err
