"""Studies that train models: every cell of the paper's tables, shared runs, seeds, resuming, the page and the plot."""

import json
import os
import signal
import statistics

import pytest
from PIL import Image

from forked import ranks
from vitruvian.cost import multiply_adds
from vitruvian.errors import ConfigError, TrainingError, UnknownNameError
from vitruvian.study.ablation import plan_study, run_study, study_kinds
from vitruvian.study.paper import paper_rows
from vitruvian.training import Interrupted, read_recipe
from vitruvian.training.initial_model import config_of
from vitruvian.training.integrations import Listener

FAMILIES = ("study-vit", "study-hybrid", "study-resnet")
SMALL = ("workers=0", "batch_size=16", "steps=2", "eval_every=0", "log_every=2")
TINY = (*SMALL, "architecture.width=24", "architecture.mlp_dim=24", "architecture.depth=2")  # three heads


def settings_of(name):
    """ResNets have no depth, and studies with both kinds of models keep theirs."""
    rows = {row.recipe or study_kinds()[name].recipe for row in study_kinds()[name].rows}
    return SMALL if "study-resnet" in rows else TINY


def small_study(folder, name="data-size", **changes):
    chosen = {"rows": ["ViT", "ResNet"], "columns": ["50", "all"], "seeds": 1, "settings": SMALL, "out": folder}
    return plan_study(name, "digits", **(chosen | changes))


def test_the_families_train_alike_and_cost_about_the_same():
    recipes = [read_recipe(name).to_json() for name in FAMILIES]
    own = {"name", "about", "command", "model", "image_size", "architecture", "augment"}
    assert all({key for key in recipe if recipe[key] != recipes[0][key]} <= own for recipe in recipes)
    costs = [multiply_adds(config_of(read_recipe(name), 10)) for name in FAMILIES]
    assert max(costs) < 1.25 * min(costs)


def test_the_plain_vit_is_the_papers():
    config = config_of(read_recipe("study-vit"), 10)
    assert (config.pool, config.cls_token, config.pos_embed) == ("token", True, "learned")


def test_positions_has_every_cell_of_table_8(tmp_path):
    study = plan_study("positions", "digits", out=tmp_path / "study")
    paper = {(row.model, column): value for row in paper_rows("table8") for column, value in row.values.items()}
    recipes = [cell.runs[0].recipe for cell in study.cells]
    ours = {
        (recipe.architecture["pos_embed"], recipe.architecture["pos_embed_at"]): cell.paper
        for recipe, cell in zip(recipes, study.cells)
    }
    assert ours == paper
    assert all([run.recipe.seed for run in cell.runs] == [0, 1, 2] for cell in study.cells)


def test_the_numbers_of_table_7_and_section_46_stand_beside_their_cells(tmp_path):
    optimizer = plan_study("optimizer", "digits", seeds=1, out=tmp_path / "study")
    assert [(cell.column, cell.paper) for cell in optimizer.cells] == [
        ("Adam", 89.33),
        ("SGD", 88.79),
        ("Adam", 94.01),
        ("SGD", 93.72),
    ]
    assert [cell.runs[0].recipe.optimizer for cell in optimizer.cells] == ["adamw", "sgd"] * 2
    masked = plan_study("self-supervision", "digits", seeds=1, columns=["all"], out=tmp_path / "study")
    assert [cell.paper for cell in masked.cells] == [77.91, 79.9, 84.15]


def test_the_lines_of_figure_8_meet_in_one_model_that_is_trained_once(tmp_path):
    study = plan_study("shape", "digits", out=tmp_path / "study")
    centers = [cell for cell in study.cells if cell.column == "1"]
    assert len(centers) == 5
    assert {run.folder.name for cell in centers for run in cell.runs} == {f"depth-1-seed-{seed}" for seed in range(3)}
    assert len(study.runs) == 3 * (5 * 2 + 1)
    shapes = {(cell.row, cell.column): cell.runs[0].recipe.architecture for cell in study.cells}
    assert [shapes["depth", factor]["depth"] for factor in ("0.5", "1", "2")] == [2, 4, 8]
    assert shapes["patch size", "0.5"]["patch_size"] == 2
    assert shapes["depth, width and MLP", "2"] == shapes["depth", "2"] | {"width": 192, "mlp_dim": 384}


def test_the_recipe_of_the_paper_drops_what_is_for_small_machines(tmp_path):
    options = {"recipe": "paper-jft-b", "seeds": 1, "out": tmp_path / "study"}
    with pytest.raises(ConfigError, match="head measures few-shot accuracy; set eval_fewshot"):
        plan_study("head", "digits", **options)
    study = plan_study("head", "digits", settings=["eval_fewshot=digits"], **options)
    recipe = study.cells[-1].runs[0].recipe
    assert (recipe.model, recipe.image_size, recipe.loss) == ("ViT-B/16", 224, "bce")
    assert recipe.architecture["representation_size"] == 0
    assert [round(cell.runs[0].recipe.lr, 6) for cell in study.cells[:3]] == [0.00024, 0.0008, 0.0024]
    assert "5-shot accuracy on digits, one seed" in study.differs


def test_cells_are_every_family_at_every_size_with_equal_steps(tmp_path):
    study = small_study(tmp_path / "study")
    names = [run.folder.name for run in study.runs]
    assert names == [f"{row}-{size}-seed-0" for row in ("ViT", "ResNet") for size in (50, "all")]
    assert [cell.images for cell in study.cells] == [50, 1438, 50, 1438]
    first, second = study.runs[:2]
    assert first.multiply_adds == 3 * multiply_adds(config_of(first.recipe, 10)) * 2 * 16 == second.multiply_adds
    assert not (tmp_path / "study").exists()


def test_the_small_defaults_shift_every_model_by_the_same_part_of_its_image(tmp_path):
    recipes = [cell.runs[0].recipe for cell in plan_study("data-size", "digits", out=tmp_path / "study").cells]
    assert {recipe.augment.padding / recipe.image_size for recipe in recipes} == {1 / 16}
    assert {(recipe.steps, recipe.lr, recipe.augment.hflip) for recipe in recipes} == {(600, 3e-3, 0.0)}


def test_settings_of_the_caller_replace_those_for_small_machines(tmp_path):
    study = small_study(tmp_path / "study", settings=[*SMALL, "image_size=24"])
    assert {run.recipe.image_size for run in study.runs} == {24}


def test_smaller_views_count_as_less_work(tmp_path):
    whole = small_study(tmp_path / "study").runs[0]
    half = small_study(tmp_path / "study", settings=[*SMALL, "train_scale=0.5"]).runs[0]
    assert half.multiply_adds < whole.multiply_adds / 3


def test_recipes_can_be_rows(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "study-vit"\nlr = 5e-4')
    study = small_study(tmp_path / "study", rows=["ViT", "study-hybrid", str(tmp_path / "mine.toml")], columns=["50"])
    assert [cell.row for cell in study.cells] == ["ViT", "study-hybrid", "mine"]
    assert [run.recipe.lr for run in study.runs] == [3e-3, 1e-3, 5e-4]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": ["Vit"]}, UnknownNameError, "ViT"),
        ({"rows": ["ViT", "ViT"]}, ConfigError, "the rows ViT, ViT must have different names"),
        ({"columns": ["few"]}, UnknownNameError, "there are 100, 300, 1000, all"),
        ({"recipe": "study-vit"}, ConfigError, "each row of data-size has its own recipe"),
        ({"columns": ["2000"]}, ConfigError, "has 1438 training images"),
    ],
)
def test_what_does_not_exist_is_refused(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        small_study(tmp_path / "study", **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(study_kinds()))
def test_every_study_runs_and_shows_the_paper_beside_its_results(tmp_path, name, capsys):
    kind = study_kinds()[name]
    columns = {"data-size": ["50"], "compute": ["2"], "few-shot": ["75"], "axial": ["2"], "self-supervision": ["50"]}
    study = plan_study(
        name,
        "digits",
        columns=columns.get(name, ()),
        settings=settings_of(name),
        seeds=2 if name == "head" else 1,
        out=tmp_path / "study",
    )
    run_study(study, report=lambda text: None, progress=False)
    record = json.loads((tmp_path / "study" / "study.json").read_text())
    assert record["study"] == name
    for cell in record["cells"]:
        assert cell["state"] == "done"
        assert all(0 <= value <= 100 for value in cell["values"])
        assert cell["mean"] == statistics.fmean(cell["values"])
        assert (cell["deviation"] is None) == (len(cell["values"]) == 1)
    page = (tmp_path / "study" / "report.html").read_text()
    assert kind.finding in page
    assert "arXiv 2010.11929v2; here models of up to" in page
    for cell in study.cells:
        assert cell.paper is None or str(cell.paper) in page
    assert (tmp_path / "study" / "study.png").is_file() == bool(kind.x)
    assert ("of the paper: top-1 on ImageNet" in page) == (name in ("data-size", "compute"))
    assert ("Table 7" in study.paper_text()) == (name == "optimizer")
    heard = []
    run_study(study, report=heard.append, progress=False)
    assert all(text.endswith("(already done)") for text in heard)


class StopAt(Listener):
    def __init__(self, step):
        self.left = step

    def stepped(self, step):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped_and_repeats_nothing(tmp_path):
    study = small_study(tmp_path / "study")
    with pytest.raises(Interrupted, match="stopped in ViT-all-seed-0; run the same command"):
        run_study(study, listeners=[StopAt(3)], report=lambda text: None)
    assert [cell.state for cell in study.cells] == ["done", "begun", "waiting", "waiting"]
    first = (study.runs[0].folder / "model" / "model.safetensors").stat().st_mtime_ns
    heard = []
    run_study(small_study(tmp_path / "study"), report=heard.append)
    assert [text.rpartition(": ")[2] for text in heard] == [
        "ViT-50-seed-0 (already done)",
        "ViT-all-seed-0 (resuming)",
        "ResNet-50-seed-0",
        "ResNet-all-seed-0",
    ]
    assert (study.runs[0].folder / "model" / "model.safetensors").stat().st_mtime_ns == first
    assert {line.name: [x for x, _ in line.points] for line in study.lines()} == {
        "ViT": [50.0, 1438.0],
        "ResNet": [50.0, 1438.0],
    }
    assert "4 of 4 runs done" in (tmp_path / "study" / "report.html").read_text()
    with Image.open(tmp_path / "study" / "study.png") as plot:
        assert plot.width == 760
    other = small_study(tmp_path / "study", settings=[*SMALL, "batch_size=8"])
    with pytest.raises(TrainingError, match="batch_size=16 when the run began, not 8; choose another out="):
        run_study(other, report=lambda text: None)


@pytest.mark.slow
def test_two_processes_share_the_runs_and_one_speaks(tmp_path):
    settings = [word for setting in SMALL for word in ("--set", setting)]
    words = ["study", "data-size", "digits", "--columns", "50", "--rows", "ViT", "--seeds", "1", "--json"]
    printed = []
    for count in (1, 2):
        done, *silent = [
            process.wait() for process in ranks(*words, *settings, "--out", tmp_path / str(count), count=count)
        ]
        assert done.code == 0, done.err
        assert done.err.count("run 1 of 1: ViT-50-seed-0") == 1
        assert [end.out for end in silent] == [""] * (count - 1)
        printed.append(json.loads(done.out)["runs"][0])
    one, two = printed
    assert two["loss"] == pytest.approx(one["loss"], rel=2e-4)  # sums in another order
    assert (two["state"], two["count"]) == ("done", one["count"])


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TrainingError, match="exists and is not a study; choose another out="):
        small_study(tmp_path)
