"""A file with an exported graph as a model: it answers, and carries what it takes to be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from vitruvian.catalog import imagenet_labels
from vitruvian.config import CascadeConfig, GraphConfig, ModelConfig, ModelMeta, Preprocess, ViTConfig
from vitruvian.engines.sessions import FORMATS, OpenGraph, Session
from vitruvian.engines.trial import check_alive
from vitruvian.errors import CheckpointError, ConfigError, argument
from vitruvian.files import parse_object, read_object
from vitruvian.settings import Size, as_size
from vitruvian.weights.description import Description
from vitruvian.weights.families.huggingface_json import labels_of, preprocess_of
from vitruvian.weights.families.timm_view import published_view
from vitruvian.weights.files import prefer_processor

GRAPH_FILES = ("model.onnx", "onnx/model.onnx", "model.xml", "openvino_model.xml")
"""What a folder without weights is searched for."""
CASCADE_FILE = "cascade.json"
"""Beside the graph of a cascade, whose first pass is the file `first`."""
FEATURES = ("pooler_output", "image_embeds", "features", "embeddings")
"""Outputs of other exporters' graphs that are no logits."""
ALONE = "an exported graph gives logits alone; take the weights that it was made of"


class Graph(nn.Module):
    """A graph with preprocessing and labels: normalized pixels (B, channels, rows, columns) -> logits (B, K)."""

    def __init__(self, graph: OpenGraph, config: ModelConfig | GraphConfig, meta: ModelMeta) -> None:
        super().__init__()
        self.graph = graph
        self.config = config
        self.meta = meta

    def forward(self, pixels: Tensor) -> Tensor:
        self.check_size(*pixels.shape[1:])
        return self.graph(pixels)

    def check_size(self, *sides: int) -> None:
        """Refuse images (channels, rows, columns) of another size than the graph takes."""
        shape = self.graph.single.shape[1:]
        if any(wanted not in (None, side) for side, wanted in zip(sides, shape)):
            fixed, found = ("x".join(str(each or "any") for each in which) for which in (shape, sides))
            raise ConfigError(
                f"the graph takes images of {fixed}, not {found}",
                where=self.graph.path,
                hint=f"leave {argument('image_size')} out, or export it with {argument('dynamic_size', True)} "
                "(vit export --dynamic-size)",
            )
        if isinstance(self.config, ViTConfig):
            self.config.grid_of((sides[1], sides[2]))  # refuses what the patches do not divide

    def first_pass(self) -> Graph:
        """The cheaper graph that a cascade asks first, beside this one."""
        return open_graph(first_beside(self.graph.path), engine=self.graph.engine)

    def features(self, pixels: Tensor) -> NoReturn:
        raise ConfigError(ALONE)

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(ALONE)


def first_beside(path: Path) -> Path:
    """Where the first pass of a cascade lies."""
    return path.with_name(f"first{path.suffix}")


def find_graph(source: str | Path) -> Path | None:
    """The graph that a path means; None for weights and for published names."""
    path = Path(source).expanduser()
    if path.is_dir():
        held = next((path / name for name in GRAPH_FILES if (path / name).is_file()), None)
        return None if any(path.glob("*.safetensors")) or any(path.glob("*.bin.index.json")) else held
    if path.suffix == ".pt2" and path.is_file():
        raise CheckpointError(f"{path}: a program of torch.export, for torch.export.load; give ONNX or OpenVINO")
    return path if path.suffix in (".onnx", ".xml") and path.is_file() else None


def open_graph(path: Path, *, engine: str = "auto", image_size: int | Size | None = None) -> Graph:
    """The model in a graph: of our own export, or of another with its JSON files beside it.

    Unless an engine is named, OpenVINO runs `.xml`, and ONNX Runtime `.onnx`.
    """
    if engine == "onnxruntime" and path.suffix == ".xml":
        raise ConfigError(f"{argument('engine', engine)} does not run {path.name}; leave it out")
    chosen = engine if engine in FORMATS else "openvino" if path.suffix == ".xml" else "onnxruntime"
    check_alive(path, chosen)
    graph = OpenGraph(path, chosen)
    session = graph.single
    config, meta = described_inside(path, session) if session.carried else described_beside(path, session)
    if path.name in GRAPH_FILES and (path.parent / CASCADE_FILE).is_file():
        cascade = CascadeConfig.from_json(read_object(path.parent / CASCADE_FILE, raises=CheckpointError))
        meta = meta.replace(cascade=cascade)
    if image_size is None:
        return Graph(graph, config, meta)
    model = Graph(graph, config, meta.replace(preprocess=meta.preprocess.at(image_size)))
    model.check_size(config.in_channels, *as_size(image_size))
    return model


def described_inside(path: Path, session: Session) -> tuple[ModelConfig, ModelMeta]:
    """What a file of ours says of itself, if that is true of its graph."""
    found = Description.from_json(parse_object(session.carried, path, raises=CheckpointError), str(path))
    stated, held = (found.config.in_channels, found.config.num_classes), (session.shape[1], session.outputs)
    if stated[0] != held[0] or stated[1] not in (0, held[1]):
        raise CheckpointError(
            f"{path}: describes a model of {stated[0]} channels and {stated[1]} classes, and its graph has {held[0]} "
            f"and {held[1]}: the description belongs to another graph; export it again"
        )
    return found.config, found.meta


def described_beside(path: Path, session: Session) -> tuple[GraphConfig, ModelMeta]:
    """What the JSON files beside a graph, or above a folder `onnx`, say; transformers' and timm's are read."""
    folders = [path.parent, path.parent.parent] if path.parent.name == "onnx" else [path.parent]
    found: dict[str, dict[str, Any]] = {}
    for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
        file = next((folder / name for folder in folders if (folder / name).is_file()), None)
        found[name] = read_object(file, raises=CheckpointError) if file else {}
    prefer_processor(found)
    cfg = found["config.json"].get("pretrained_cfg")
    _, channels, rows, columns = session.shape
    sizes = (found["preprocessor_config.json"].get("crop_size"), found["preprocessor_config.json"].get("size"))
    size = (rows, columns) if rows and columns else stated_size(cfg, found["config.json"], *sizes)
    assert channels is not None
    if size is None:
        raise CheckpointError(f"{path}: neither the graph nor a config.json beside it says its image size")
    if isinstance(cfg, dict):
        view = published_view(cfg, size)
    elif found["preprocessor_config.json"]:
        view = preprocess_of(found["preprocessor_config.json"], size)
    else:
        view = Preprocess(image_size=size, mean=(0.5,) * channels, std=(0.5,) * channels, stated=False)
    names = labels_of(found["config.json"])
    if isinstance(cfg, dict):
        names = found["config.json"].get("label_names") or (imagenet_labels() if session.outputs == 1000 else None)
    config = GraphConfig(
        image_size=size, in_channels=channels, num_classes=0 if session.output in FEATURES else session.outputs
    )
    labels = tuple(map(str, names)) if names and len(names) == session.outputs else None
    return config, ModelMeta(preprocess=view, labels=labels, origin=f"graph {path.name}")


def stated_size(cfg: Any, config: dict[str, Any], *sizes: Any) -> Size | None:
    """The first size that a file states."""
    stated = [cfg["input_size"][1:]] if isinstance(cfg, dict) and isinstance(cfg.get("input_size"), list) else []
    for value in (*stated, config.get("image_size"), *sizes):
        if isinstance(value, dict):
            value = [value.get("height", value.get("shortest_edge")), value.get("width", value.get("shortest_edge"))]
        pair = value if isinstance(value, list) else [value, value]
        if len(pair) == 2 and all(isinstance(side, int) and side > 0 for side in pair):
            return pair[0], pair[1]
    return None
