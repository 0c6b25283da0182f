"""The image sizes over a run, and their compute."""

import pytest

from vitruvian.catalog import resolve
from vitruvian.cost import multiply_adds
from vitruvian.training.recipe import Recipe
from vitruvian.training.splits import Stage, resolution_stages, run_multiply_adds

CONFIG = resolve("ViT-Ti/16")


@pytest.mark.parametrize(
    ("resolutions", "stages"),
    [
        ((), [Stage(0, 10, (224, 224))]),
        (((0.0, 128),), [Stage(0, 10, (128, 128))]),
        (((0.5, 128), (0.8, 256)), [Stage(0, 5, (224, 224)), Stage(5, 8, (128, 128)), Stage(8, 10, (256, 256))]),
        (((1.0, 128),), [Stage(0, 10, (224, 224))]),
    ],
)
def test_stages_follow_each_other_without_a_gap(resolutions, stages):
    assert list(resolution_stages(Recipe(steps=10, resolutions=resolutions), (224, 224), 10)) == stages


def test_work_is_that_of_each_step_at_its_own_size():
    recipe = Recipe(steps=10, batch_size=4, resolutions=((0.5, 128),))
    work = run_multiply_adds(recipe, CONFIG, resolution_stages(recipe, (224, 224), 10))
    assert work == 3 * 4 * 5 * (multiply_adds(CONFIG, 224) + multiply_adds(CONFIG, 128))


def test_tokens_left_out_save_work_where_there_are_tokens():
    recipe = Recipe(steps=10, patch_drop=0.5)
    stages = resolution_stages(recipe, (224, 224), 10)
    whole = recipe.replace(patch_drop=0.0)
    assert run_multiply_adds(recipe, CONFIG, stages) == run_multiply_adds(whole, CONFIG, stages) / 2
    resnet = resolve("BiT-R50x1")
    assert run_multiply_adds(recipe, resnet, stages) == run_multiply_adds(whole, resnet, stages)
