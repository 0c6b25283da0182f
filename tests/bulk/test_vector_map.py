"""The map of vectors: its layout, its page in a browser, and other columns."""

import base64
import csv
import time

import numpy as np
import pytest

from vitruvian.bulk import embed
from vitruvian.bulk.vector_map import encode_column, layout, read_columns, vector_map
from vitruvian.data.formats import open_dataset
from vitruvian.errors import DataError

pytest.importorskip("sklearn")
pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def vectors(images, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    embed(images, model, folder, piece=5, batch_size=2, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def page(vectors, images, tmp_path_factory):
    """With another column of labels, which misses the first image."""
    out = tmp_path_factory.mktemp("map")
    rows = [f"{path},{path.stem},{'cat' if 'a' in path.parts[-2] else 'dog'}" for path in sorted(images.rglob("*.png"))]
    (out / "more.csv").write_text("\n".join(["path,number,label", *rows[1:]]))
    return vector_map(vectors, out / "map.html", columns=out / "more.csv")


def clusters(count):
    rng = np.random.default_rng(0)
    centers, of = 5 * rng.normal(size=(3, 16)), np.arange(count) % 3
    return (centers[of] + 0.3 * rng.normal(size=(count, 16))).astype(np.float32), of


def separation(positions, of):
    """Distance of the centers of groups over the size of the groups."""
    centers = np.array([positions[of == k].mean(axis=0) for k in range(3)])
    apart = min(np.linalg.norm(centers[i] - centers[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    return apart / max(np.linalg.norm(positions[of == k] - centers[k], axis=1).mean() for k in range(3))


@pytest.mark.slow
def test_groups_stay_together_and_a_layout_repeats(monkeypatch):
    vectors, of = clusters(120)
    positions = layout(vectors)
    assert separation(positions, of) > 3
    np.testing.assert_array_equal(layout(vectors), positions)
    monkeypatch.setattr("vitruvian.bulk.vector_map.LANDMARKS", 60)
    assert separation(layout(vectors), of) > 3


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_few_vectors_have_places(count):
    positions = layout(clusters(count)[0])
    assert positions.shape == (count, 2)
    assert np.isfinite(positions).all()


def test_columns_are_numbers_or_names():
    def decode(column):
        return np.frombuffer(base64.b64decode(column["codes"]), "<u2").tolist()

    number = encode_column("p", ["0.5", "", "1.5", "1.0"])
    assert (number["ends"], decode(number)) == ([0.5, 1.5], [0, 65535, 65534, 32767])
    names = encode_column("label", ["b", "", "a10", "a9"])
    assert (names["names"], decode(names)) == (["", "a9", "a10", "b"], [3, 0, 2, 1])
    assert encode_column("same", ["nan", "1", "inf"])["names"] == ["1", "inf", "nan"]


def test_columns_of_other_images_are_refused(tmp_path):
    table = tmp_path / "more.csv"
    for content, reason in (
        ("a,b\n1,2\n", "no column 'key' or 'path'"),
        ("", "no column 'key' or 'path'"),
        ("key,b\nx.jpg,2\n", "none of its keys is one of the vectors, such as y.jpg"),
    ):
        table.write_text(content)
        with pytest.raises(DataError, match=reason):
            read_columns(table, ["y.jpg"], "photos")
    table.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as CSV"):
        read_columns(table, ["y.jpg"], "photos")
    table.write_text("path,b\nphotos/y.jpg,2\nz.jpg,3\n")
    assert read_columns(table, ["y.jpg", "z.jpg", "w.jpg"], "photos") == {"b": ["2", "3", ""]}


@pytest.mark.slow
def test_a_selection_is_made_in_the_page_and_downloaded(page, images, browser, visit, monkeypatch):
    visit(page.as_uri())
    options = [option.text for option in browser.find_elements("css selector", "#column option")]
    assert options == ["label", "number", "label (more.csv)"]
    assert "23 images" in page.read_text()
    assert "1 without a vector left out" in page.read_text()
    legend = browser.find_elements("css selector", "#legend button")
    assert [button.text for button in legend] == ["a", "b"]
    legend[1].click()
    assert browser.find_element("id", "status").text == "12 of 23 images are selected:"
    legend[0].click()
    browser.find_element("id", "save").click()
    target = browser.downloads / "selection.csv"
    for _ in range(100):
        if target.is_file():
            break
        time.sleep(0.1)
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[-1] == {"path": f"{images}/b/23.png", "label": "b", "label (more.csv)": "dog"}
    assert len(rows) == 23
    monkeypatch.setenv("VITRUVIAN_DATA", str(images))  # the download is in another folder
    assert open_dataset(target).classes == ("a", "b")
    browser.find_element("id", "clear").click()
    assert browser.find_element("id", "status").text == "No image is selected."
    drag = """const box = canvas.getBoundingClientRect();
        const spot = (x, y) => ({clientX: box.left + x * box.width, clientY: box.top + y * box.height, pointerId: 1});
        canvas.setPointerCapture = () => {};
        canvas.onpointerdown({...spot(0, 0), shiftKey: true});
        for (const corner of [[1, 0], [1, 1], [0, 1]]) canvas.onpointermove(spot(...corner));
        canvas.onpointerup({});
        canvas.onkeydown({key: "+", preventDefault() {}});"""
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": drag})
    assert browser.find_element("id", "status").text == "23 of 23 images are selected:"
    browser.execute_cdp_cmd(
        "Runtime.evaluate", {"expression": "at('column').selectedIndex = 1; at('column').onchange()"}
    )
    assert browser.find_element("id", "legend").text.split() == ["1", "23"]
    colors = "new Set(new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size"
    time.sleep(0.5)  # the next frame
    drawn = browser.execute_cdp_cmd("Runtime.evaluate", {"expression": colors})["result"]["value"]
    assert drawn > 10  # a color for each number, and the background
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
