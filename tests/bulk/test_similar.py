"""Neighbors: what numpy finds, the same through an index, and a page of them."""

import json
import shutil

import numpy as np
import pytest

from vitruvian.bulk import embed, predict
from vitruvian.bulk.similar import VectorSearch, similar
from vitruvian.bulk.storage import DIGEST, IDENTITY, digest_of
from vitruvian.cache import cache_folder
from vitruvian.errors import DataError, ImageError
from vitruvian.inference import Encoder
from vitruvian.model.build import build

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def vectors(images, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    embed(images, model, folder, piece=5, batch_size=2, dtype="float32")
    return folder


def write_with_digest(table, part):
    """Write a part with other rows and a digest that fits them, so that the change is not noticed."""
    pq.write_table(
        table.replace_schema_metadata({IDENTITY: table.schema.metadata[IDENTITY], DIGEST: digest_of(table)}), part
    )


def test_the_nearest_image_is_the_image_itself_and_the_order_is_that_of_cosines(images, model, vectors):
    (found,) = similar([images / "b" / "17.png"], vectors, model=Encoder(model), top=4)
    rows = [row for part in sorted(vectors.glob("part-*")) for row in pq.read_table(part).to_pylist()]
    known = {row["index"]: np.array(row["vector"]) for row in rows if row["vector"] is not None}
    query = known[17]
    cosine = {i: v @ query / np.linalg.norm(v) / np.linalg.norm(query) for i, v in known.items()}
    best = sorted(cosine, key=lambda i: -cosine[i])[:4]
    assert [neighbor.index for neighbor in found] == best
    assert (found[0].key, found[0].label) == ("b/17.png", "b")
    assert [n.similarity for n in found] == pytest.approx([cosine[i] for i in best], abs=1e-5)


def test_an_index_finds_what_comparing_all_finds_and_is_made_once(images, model, vectors, monkeypatch):
    pytest.importorskip("usearch")
    queries = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)
    wanted = VectorSearch(vectors, exact=True).nearest(queries, 5)
    found = VectorSearch(vectors, exact=False).nearest(queries, 5)
    assert [[n.index for n in each] for each in found] == [[n.index for n in each] for each in wanted]
    monkeypatch.setattr("vitruvian.bulk.similar.blocks", lambda tables: pytest.fail("made again"))
    assert VectorSearch(vectors, exact=False).nearest(queries, 5) == found


def test_an_index_of_other_vectors_or_a_damaged_one_is_made_again(images, model, vectors, tmp_path):
    pytest.importorskip("usearch")
    queries = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)
    wanted = VectorSearch(vectors, exact=False).nearest(queries, 5)
    (index,) = (cache_folder() / "search").glob("*.usearch")
    for content in (index.read_bytes()[:200], bytes(index.stat().st_size)):
        index.write_bytes(content)
        assert VectorSearch(vectors, exact=False).nearest(queries, 5) == wanted
    folder = shutil.copytree(vectors, tmp_path / "copy")
    part = sorted(folder.glob("part-*"))[1]
    table = pq.read_table(part)
    turned = table["vector"].combine_chunks().take(pa.array([4, 3, 2, 1, 0]))
    write_with_digest(table.set_column(4, table.schema.field("vector"), turned), part)
    assert VectorSearch(folder, exact=False).nearest(queries, 5) != wanted
    assert VectorSearch(folder, exact=False).nearest(queries, 5) == VectorSearch(folder, exact=False).nearest(
        queries, 5
    )


def test_vectors_that_are_not_finite_and_none_at_all_are_said(vectors, model, tmp_path):
    folder = shutil.copytree(vectors, tmp_path / "copy")
    part = sorted(folder.glob("part-*"))[2]
    table = pq.read_table(part)
    column = pa.array([[float("nan")] * 16] * 5, table.schema.field("vector").type)
    write_with_digest(table.set_column(4, table.schema.field("vector"), column), part)
    with pytest.raises(DataError, match="the vectors from image 10 on are not finite"):
        VectorSearch(folder)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_text("no image")
    embed(tmp_path / "bad", model, tmp_path / "none", max_unreadable=1.0)
    for exact in (True, False):
        with pytest.raises(DataError, match="none of the 1 images has a vector"):
            VectorSearch(tmp_path / "none", exact=exact)


def test_another_model_is_refused(images, model, vectors):
    other = build(model.config, seed=5)
    with pytest.raises(DataError, match="not the model that made the vectors"):
        similar([images / "b" / "17.png"], vectors, model=Encoder(other))


def test_answers_are_no_vectors_and_a_broken_image_is_said(images, model, vectors, tmp_path):
    predict(images, model, tmp_path / "answers", piece=50)
    with pytest.raises(DataError, match="predictions, not vectors"):
        VectorSearch(tmp_path / "answers")
    with pytest.raises(ImageError, match=r"05\.png: .*not an image"):
        similar([images / "a" / "05.png"], vectors, model=Encoder(model))


def test_the_command_prints_neighbors_and_writes_thumbnails(images, model, tmp_path, monkeypatch, capsys):
    from vitruvian.cli.app import main
    from vitruvian.weights.save import save

    save(model, tmp_path / "model")
    embed(images, tmp_path / "model", tmp_path / "vectors")
    arguments = ["similar", images / "b" / "13.png", "--in", tmp_path / "vectors", "--top", 3, "--json"]
    monkeypatch.setattr("sys.argv", ["vit", *map(str, arguments), "--out", str(tmp_path / "page.html")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, None)
    line = capsys.readouterr().out.splitlines()[0]
    assert json.loads(line)["neighbors"][0]["key"] == "b/13.png"
    page = (tmp_path / "page.html").read_text()
    assert page.count("<img") == 4
    assert "b/13.png" in page
