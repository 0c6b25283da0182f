"""The paper's numbers: complete, consistent with each other, and with the tasks and recipes here."""

import re
import statistics

import pytest

from vitruvian.study.paper import beside, paper_rows, paper_tables, paper_text
from vitruvian.study.transfer import TABLE5_TASKS
from vitruvian.tasks import all_tasks, vtab_tasks
from vitruvian.training import read_recipe

OTHER_COLUMNS = {"vtab", "tpu_core_days", "epochs", "exaflops", "average", "top1", "top5"}
OTHER_COLUMNS |= {"input", "every_layer", "every_layer_shared"}


@pytest.mark.parametrize(
    ("table", "rows", "numbers"),
    [
        ("table2", 5, 35),
        ("table5", 14, 84),
        ("table6", 18, 144),
        ("table7", 4, 24),
        ("table8", 4, 8),
        ("table9", 3, 69),
    ],
)
def test_no_cell_of_a_table_is_missing(table, rows, numbers):
    """Table 6 counts epochs and compute too, Table 9 the mean and the means of the three groups."""
    found = paper_rows(table)
    assert (len(found), sum(len(row.values) for row in found)) == (rows, numbers)
    groups = {f"vtab-{task.group}" for task in vtab_tasks()}
    assert {column for row in found for column in row.values} <= set(all_tasks()) | OTHER_COLUMNS | groups


def test_averages_are_those_of_their_tasks():
    for row in paper_rows("table7"):
        tasks = ("imagenet", "cifar10", "cifar100", "pets", "flowers102")
        assert statistics.fmean(row.values[task] for task in tasks) == pytest.approx(row.values["average"], abs=0.0101)
    for row, total in zip(paper_rows("table9"), paper_rows("table2")):
        mean = statistics.fmean(row.values[task.name] for task in vtab_tasks())
        assert mean == pytest.approx(row.values["vtab"], abs=0.1)
        assert mean == pytest.approx(total.values["vtab"], abs=0.1)


def test_tables_agree_where_they_have_the_same_runs():
    six = {(row.model, row.values["epochs"]): row.values for row in paper_rows("table6")}
    for row in paper_rows("table5"):
        epochs = 14 if row.model == "L/16" else 7
        if row.pretrained_on == "JFT-300M" and row.model != "H/14":  # other runs of H/14
            assert row.values.items() <= six[f"ViT-{row.model}", epochs].items()
    for row in paper_rows("table7"):
        if row.model.endswith("Adam"):
            name = {"ResNet50 Adam": "ResNet50x1"}.get(row.model, row.model.removesuffix(" Adam"))
            values = {column: value for column, value in row.values.items() if column != "average"}
            assert values.items() <= six[name, 7].items()


def test_recipes_promise_what_the_paper_reports():
    by = {(row.pretrained_on, row.model): row.values["imagenet"] for row in paper_rows("table5")}
    promised = {"jft-b": ("JFT-300M", "B/16"), "jft-h14": ("JFT-300M", "H/14"), "imagenet21k": ("ImageNet-21k", "L/16")}
    for recipe, row in promised.items():
        assert f"{by[row]:.2f}%" in read_recipe(f"paper-{recipe}").result


def test_rows_stand_beside_measured_ones_with_their_deviations():
    rows = beside(["pets", "vtab"], "table5", "table2")
    assert ["Table 5", "B/16, ImageNet-21k", "94.43", "-"] in rows
    assert ["Table 2", "L/16, JFT-300M", "97.32 ± 0.11", "76.28 ± 0.46"] in rows
    assert not any("Noisy Student" in name for _, name, *_ in rows)  # neither was measured
    assert paper_text(["digits"], ["table5"], "x") == ""
    text = paper_text(["imagenet", "exaflops"], ["table6"], "small models")
    assert re.search(r"ResNet200x3, JFT-300M, 14 epochs +87\.22 +3306\n", text)
    assert ["Table 2", "Noisy Student EfficientNet-L2, JFT-300M unlabeled", "88.4"] in beside(["imagenet"], "table2")
    assert beside(["learned"], "table8") == []
    assert ["Table 8", "learned, JFT-300M", "64.206"] in beside(["input"], "table8")
    assert ["Table 9", "L/16, JFT-300M", "63.5", "85.6"] in beside(["vtab-sun397", "vtab-Natural"], "table9")
    assert text.endswith("arXiv 2010.11929v2; here small models")
    assert paper_tables()["objectnet"]["rows"] == [["H/14", "JFT-300M", {"top1": 61.7, "top5": 82.1}]]
    assert set(TABLE5_TASKS) <= set(all_tasks())
