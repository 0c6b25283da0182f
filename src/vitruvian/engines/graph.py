"""An exported graph file as a model, with its preprocessing and labels."""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from vitruvian.cache import cache_folder
from vitruvian.catalog import imagenet_labels
from vitruvian.config import TOLERANCE, CascadeConfig, GraphConfig, ModelConfig, ModelMeta, Preprocess, ViTConfig
from vitruvian.engines.runtimes import DEVICES, FEATURES, FORMATS, OpenGraph, Session, installed, is_quantized, versions
from vitruvian.errors import CheckpointError, ConfigError, ConversionError, FileError, argument, parsing
from vitruvian.files import file_stamp, parse_object, read_object, short_hash, write_json
from vitruvian.machine import processor_name
from vitruvian.model.build import Model
from vitruvian.progress import print_status
from vitruvian.settings import Size, as_size
from vitruvian.weights.checkpoint_files import Description, prefer_processor
from vitruvian.weights.families.huggingface import read_labels, read_preprocessor, read_size
from vitruvian.weights.families.timm_config import read_preprocess

GRAPH_FILES = ("model.onnx", "onnx/model.onnx", "model.xml", "openvino_model.xml")  # in a folder without weights
SINGLE_FILES = ("single.onnx", "single.xml")  # beside it or beside weights, for single images
CASCADE_FILE = "cascade.json"  # beside the graph of a cascade; its first pass is the graph `first`
FEATURE_OUTPUTS = ("pooler_output", "image_embeds", FEATURES, "embeddings")  # of other exporters; these are not logits
LOGITS_ONLY = "exported graphs return logits only; load the original weights instead"
CRASH_TEST = """
import sys, torch
from pathlib import Path
from vitruvian.engines.runtimes import OpenGraph, Session
path, engine = Path(sys.argv[1]), sys.argv[2]
session = Session(path, engine)
for run in (session, OpenGraph(path, engine)):
    for batch_size in (1, 2, 7, 16, 32):
        run(torch.zeros(batch_size, *(side or 224 for side in session.shape[1:])))
"""
"""Runs a graph at several batch sizes, for any batch and as `vit predict` does."""
CRASH_TEST_SECONDS = 600  # after which a runtime counts as deadlocked


class Graph(nn.Module):
    """An exported graph as a module: normalized pixels (B, channels, rows, columns) -> logits (B, K)."""

    def __init__(self, graph: OpenGraph, config: ModelConfig | GraphConfig, meta: ModelMeta) -> None:
        super().__init__()
        self.graph, self.config, self.meta = graph, config, meta
        self.single: Session | None = None
        """A faster graph for single images, without a cascade; in the file `single` beside this one."""

    def forward(self, pixels: Tensor) -> Tensor:
        self.check_size(*pixels.shape[1:])
        return self.graph(pixels) if self.single is None or len(pixels) > 1 else self.single(pixels)

    def check_size(self, *sides: int) -> None:
        """Raise ConfigError if the graph cannot run images of (channels, rows, columns)."""
        shape = self.graph.single.shape[1:]
        if any(expected not in (None, side) for side, expected in zip(sides, shape)):
            expected_size, actual_size = ("x".join(str(side or "any") for side in size) for size in (shape, sides))
            raise ConfigError(
                f"the graph takes images of {expected_size}, not {actual_size}",
                where=self.graph.path,
                hint=f"omit {argument('image_size')}, or export it with {argument('dynamic_size', True)} "
                "(vit export --dynamic-size)",
            )
        if isinstance(self.config, ViTConfig):
            self.config.grid_of((sides[1], sides[2]))  # raises if the patches do not divide it

    def first_pass(self) -> "Graph":
        """The first, cheaper graph of a cascade, in the file `first` beside this one."""
        path = self.graph.path
        first = open_graph(path.with_name(f"first{path.suffix}"), engine=self.graph.engine)
        outputs = first.graph.single.num_outputs, self.graph.single.num_outputs
        if outputs[0] != outputs[1]:
            reason = f"has {outputs[0]} outputs, the graph after it in the cascade has {outputs[1]}"
            raise CheckpointError(reason, where=first.graph.path)
        return first

    def features(self, pixels: Tensor) -> Tensor:
        """The output `features` (B, F) of graphs exported with it; others raise ConfigError."""
        if FEATURES not in self.graph.single.widths:
            raise ConfigError(LOGITS_ONLY, where=self.graph.path, hint="or export it with --features (features=True)")
        self.check_size(*pixels.shape[1:])
        return self.graph(pixels, FEATURES)

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(LOGITS_ONLY, where=self.graph.path)


ImageModel = Model | Graph


def find_graph(source: str | Path) -> Path | None:
    """Path of the graph in a file or folder; None for weights and published names."""
    path = Path(source).expanduser()
    if path.is_dir():
        if any(path.glob("*.safetensors")) or any(path.glob("*.bin.index.json")):
            return None
        return next((path / name for name in GRAPH_FILES if (path / name).is_file()), None)
    if path.suffix == ".pt2" and path.is_file():
        raise CheckpointError("a torch.export program, for torch.export.load", where=path, hint="use ONNX or OpenVINO")
    return path if path.suffix in (".onnx", ".xml") and path.is_file() else None


def open_graph(path: Path, *, engine: str = "auto", image_size: int | Size | None = None) -> Graph:
    """Open a graph from our exporter, or from another one with its JSON files beside it.

    By default OpenVINO runs `.xml` files and ONNX Runtime `.onnx` files.
    """
    if engine.startswith("onnxruntime") and path.suffix == ".xml":
        reason = f"{argument('engine', engine)} cannot run OpenVINO files"
        raise ConfigError(reason, where=path, hint="use the default engine")
    default = "openvino" if path.suffix == ".xml" else "onnxruntime"
    chosen = engine if engine in {*FORMATS, *DEVICES} else default
    with parsing(path, CheckpointError):
        check_survives(path, chosen)
        graph = OpenGraph(path, chosen)
        if chosen in DEVICES:
            cpu, shape = DEVICES[chosen][0], (2, *(side or 224 for side in graph.single.shape[1:]))
            pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            expected, logits = Session(path, cpu)(pixels), graph(pixels)
            if not (logits - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max())):
                raise ConversionError(
                    f"the logits of {chosen} differ from those of {cpu}", where=path, hint=f"use {cpu}"
                )
        session = graph.single
        config, meta = embedded_description(path, session) if session.metadata else external_description(path, session)
        if path.name in GRAPH_FILES and (path.parent / CASCADE_FILE).is_file():
            cascade = CascadeConfig.from_json(read_object(path.parent / CASCADE_FILE, raises=CheckpointError))
            meta = meta.replace(cascade=cascade)
    model = Graph(graph, config, meta)
    single = single_graph(path.parent)
    if single is not None and path.name in GRAPH_FILES and engine in ("auto", "torch"):
        model.single = open_single(single, session.shape[1:], session.num_outputs)
    if image_size is not None:
        model.meta = meta.replace(preprocess=meta.preprocess.with_image_size(image_size))
        model.check_size(config.in_channels, *as_size(image_size))
    return model


def single_graph(folder: Path) -> Path | None:
    """Find the graph for single images in a folder, beside weights or the graph for batches."""
    return next((folder / name for name in SINGLE_FILES if (folder / name).is_file()), None)


def open_single(path: Path, shape: tuple[int | None, ...], num_outputs: int) -> Session | None:
    """Open a graph for single images of this shape; None, with a note, if its runtime is missing."""
    engine = "openvino" if path.suffix == ".xml" else "onnxruntime"
    if engine not in installed():
        print_status(f"note: single images are computed like batches, because {engine} is not installed")
        return None
    with parsing(path, CheckpointError):
        check_survives(path, engine)
        session = Session(path, engine, batch_size=1)
        if (session.shape[1:], session.num_outputs) != (shape, num_outputs):
            raise CheckpointError("its input or output differs from that of the model beside it", where=path)
    return session


def embedded_description(path: Path, session: Session) -> tuple[ModelConfig, ModelMeta]:
    """The description that our exporter embeds; raises CheckpointError if it contradicts the graph."""
    description = Description.from_json(parse_object(session.metadata, path, raises=CheckpointError), str(path))
    channels, classes = description.config.in_channels, description.config.num_classes
    if channels != session.shape[1] or classes not in (0, session.num_outputs):
        reason = f"the description has {channels} channels and {classes} classes, the graph has {session.shape[1]} and"
        hint = "export it again"
        raise CheckpointError(f"{reason} {session.num_outputs}: it belongs to another graph", where=path, hint=hint)
    return description.config, description.meta


def external_description(path: Path, session: Session) -> tuple[GraphConfig, ModelMeta]:
    """A description from the JSON files of transformers or timm beside the graph, or above its folder `onnx`."""
    folders = [path.parent, path.parent.parent] if path.parent.name == "onnx" else [path.parent]
    files: dict[str, dict[str, Any]] = {}
    for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
        file = next((folder / name for folder in folders if (folder / name).is_file()), None)
        files[name] = read_object(file, raises=CheckpointError) if file else {}
    prefer_processor(files)
    model_config, processor = files["config.json"], files["preprocessor_config.json"]
    timm = model_config.get("pretrained_cfg")
    _, channels, rows, columns = session.shape
    assert channels is not None
    size = (rows, columns) if rows and columns else first_size(timm, model_config, processor)
    if size is None:
        raise CheckpointError("neither the graph nor a config.json beside it states its image size", where=path)
    names = read_labels(model_config)
    if isinstance(timm, dict):
        preprocess = read_preprocess(timm, size)
        names = model_config.get("label_names") or (imagenet_labels() if session.num_outputs == 1000 else None)
    elif processor:
        preprocess = read_preprocessor(processor, size)
    else:
        preprocess = Preprocess(image_size=size, mean=(0.5,) * channels, std=(0.5,) * channels, stated=False)
    classes = 0 if session.output in FEATURE_OUTPUTS else session.num_outputs
    config = GraphConfig(image_size=size, in_channels=channels, num_classes=classes)
    labels = tuple(map(str, names)) if names and len(names) == session.num_outputs else None
    return config, ModelMeta(preprocess=preprocess, labels=labels, origin=f"graph {path.name}")


def first_size(timm: Any, model_config: dict[str, Any], processor: dict[str, Any]) -> Size | None:
    """The first image size that one of the JSON files states."""
    sizes = [model_config.get("image_size"), processor.get("crop_size"), processor.get("size")]
    if isinstance(timm, dict) and isinstance(timm.get("input_size"), list):
        sizes.insert(0, timm["input_size"][1:])
    for size in sizes:
        with suppress(CheckpointError):
            return read_size(size.get("shortest_edge", size) if isinstance(size, dict) else size, "size")
    return None


def check_runs(path: Path, engine: str, *, crashes_only: bool = False) -> None:
    """Raise ConversionError if the runtime crashes or hangs with this int8 graph in a separate process, or fails."""
    command = [sys.executable, "-c", CRASH_TEST, str(path), engine]
    hint = f"use {argument('engine', 'onnxruntime')}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CRASH_TEST_SECONDS)
    except subprocess.TimeoutExpired as error:
        reason = f"{engine} did not finish within {CRASH_TEST_SECONDS} s on this machine"
        raise ConversionError(reason, where=path, hint=hint) from error
    if done.returncode == 0 or (crashes_only and done.returncode > 0):
        return
    lines = done.stderr.strip().splitlines() or ["no reason given"]
    reason = lines[-1] if done.returncode > 0 else signal.Signals(-done.returncode).name
    crashed = f"crashed with {reason} on this machine"
    failure = crashed if crashes_only else f"cannot run int8 on this machine ({reason})"
    raise ConversionError(f"{engine} {failure}", where=path, hint=hint)


def check_survives(path: Path, engine: str) -> None:
    """Raise ConversionError if OpenVINO would crash this process with an int8 graph.

    It may use instructions that a virtual machine lacks. The result is cached for this file and machine.
    """
    if engine != "openvino" or not is_quantized(path):
        return
    key = short_hash([str(path.resolve()), file_stamp(path), processor_name(), versions([engine])])
    file = cache_folder() / "engines" / f"{key}.tried.json"
    with suppress(FileError):
        if read_object(file).get("alive") is True:
            return
    print_status(f"note: testing int8 in {engine} in a separate process, once for this file ...")
    check_runs(path, engine, crashes_only=True)
    with suppress(FileError):
        write_json(file, {"alive": True})
