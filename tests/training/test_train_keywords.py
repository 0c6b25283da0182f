"""`train` takes the settings of a recipe as keywords and as a mapping."""

import numpy as np
import pytest
from making_weights import tiny_weights
from runs import TINY

import vitruvian as vt
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.training.recipe import join_changes
from vitruvian.training.run_folder import EVENTS_FOLDER

TABLE = {
    "architecture": {"depth": 1, "width": 16, "mlp_dim": 16, "num_heads": 2, "patch_size": 4},
    "steps": 2, "batch_size": 32, "warmup": 0, "eval_every": 0.2, "log_every": 3,
}  # fmt: skip


@pytest.mark.slow
def test_keywords_a_mapping_and_strings_give_the_same_run_with_tensorboard_events(tmp_path):
    strings = vt.train("digits", out=tmp_path / "strings", settings=[*TINY, "steps=2", "lr=0.002"], progress=False)
    mapping = vt.train("digits", out=tmp_path / "mapping", settings=TABLE | {"lr": 0.002}, progress=False)
    keywords = vt.train("digits", out=tmp_path / "keywords", lr=0.002, progress=False, **TABLE)
    recipes = [run.recipe.replace(command="", time="", result="") for run in (strings, mapping, keywords)]
    assert recipes[0] == recipes[1] == recipes[2]
    assert recipes[0].lr == 0.002
    assert list((keywords.folder / EVENTS_FOLDER).iterdir())


@pytest.mark.slow
def test_weights_are_the_second_argument(tmp_path):
    weights = tiny_weights(tmp_path)
    run = vt.train("digits", weights, out=tmp_path / "run", steps=1, batch_size=16, workers=0, progress=False)
    assert run.recipe.weights == str(weights)


def test_values_of_other_libraries_and_tables_are_changes(tmp_path):
    keywords = {"lr": np.float32(0.5), "weights": tmp_path, "augment": {"hflip": 0}, "freeze": ("embed.*",)}
    keywords["lrs"] = np.array([0.5, 2.0])
    assert join_changes({"final": "best"}, keywords, ()) == {
        "final": "best",
        "lr": 0.5,
        "weights": tmp_path,
        "augment.hflip": 0,
        "freeze": ("embed.*",),
        "lrs": [0.5, 2.0],
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"epohcs": 1}, "unknown argument 'epohcs'; did you mean epochs"),
        ({"listener": []}, "unknown argument 'listener'; did you mean listeners?"),
        ({"learning_rate": 0.1}, "unknown setting 'learning_rate': called lr here"),
        ({"num_classes": 2}, "num_classes cannot be set: it comes from the data, which has one folder or label per"),
        ({"epochs": 1, "settings": ["epochs=2"]}, "'epochs=1' contradicts 'epochs=2' in settings"),
        ({"lr": None}, "lr=None is not a value; leave it out for the default"),
        ({"lr": object}, "lr=<class 'object'> is not a number"),
        ({"settings": "epochs=2"}, "settings='epochs=2' is one string; pass a list or"),
        ({"settings": {"epohcs": 2}}, "unknown setting 'epohcs'; did you mean epochs"),
        ({"lr": "fast"}, "lr='fast' is not a number"),
    ],
)
def test_a_wrong_keyword_is_answered_in_one_sentence(arguments, text):
    with pytest.raises(ConfigError) as error:
        vt.train("digits", **arguments)
    assert str(error.value).startswith(text)


def test_resume_suggests_its_own_arguments():
    with pytest.raises(UnknownNameError, match="unknown argument 'setting'; did you mean settings"):
        vt.resume("runs/missing", setting=[])
