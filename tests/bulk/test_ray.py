"""Ray: the rows of one process, also when a worker dies."""

import os
from pathlib import Path

import pytest

from vitruvian.bulk import embed
from vitruvian.bulk.job import PartActor
from vitruvian.bulk.ray import predict
from vitruvian.errors import ConfigError
from vitruvian.inference import Classifier
from vitruvian.weights.save import save

pq = pytest.importorskip("pyarrow.parquet")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def ray():
    """A local cluster whose workers compute as this process does."""
    found = pytest.importorskip("ray")
    found.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield found
    found.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Ray itself
def test_a_dead_worker_costs_no_rows(ray, images, model, tmp_path, monkeypatch):
    save(model, tmp_path / "model")
    embed(images, tmp_path / "model", tmp_path / "here", piece=5, batch_size=2)
    mark = tmp_path / "died"

    class Dying(PartActor):
        def __call__(self, batch):
            if int(batch["id"][0]) == 3 and not mark.exists():
                mark.touch()
                os._exit(1)
            return super().__call__(batch)

    monkeypatch.setattr("vitruvian.bulk.job.PartActor", Dying)
    embed(str(images), str(tmp_path / "model"), tmp_path / "ray", piece=5, batch_size=2, on="ray")
    assert mark.exists()
    assert content(tmp_path / "ray") == content(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_dataset_of_rays_own_gets_answers(ray, images, model, tmp_path):
    import ray.data

    save(model, tmp_path / "model")
    paths = [str(images / "a" / "00.png"), str(images / "a" / "05.png")]
    rows = predict(ray.data.from_items([{"path": path} for path in paths]), tmp_path / "model", workers=1).take_all()
    good, bad = sorted(rows, key=lambda row: row["path"])
    (wanted,) = Classifier(tmp_path / "model").predict([paths[0]])
    assert [answer["label"] for answer in good["predictions"]] == [answer.label for answer in wanted]
    assert "not an image" in bad["error"]


def test_ray_needs_names_that_every_node_can_open(images, model, tmp_path):
    with pytest.raises(ConfigError, match="a model that every node can open"):
        embed(images, model, tmp_path, on="ray")
    with pytest.raises(ConfigError, match="on='dask' is not 'ray'"):
        embed(images, model, tmp_path, on="dask")
