"""BiT-HyperRule: the settings of the recipe `finetune-bit` follow the number and the size of the images."""

import numpy as np
import pytest
from PIL import Image

import vitruvian as vt
from vitruvian.data.augment import Augment, train_transform
from vitruvian.training.finetune import protocol_for
from vitruvian.training.optimizer import Schedule
from vitruvian.training.planning import apply_hyperrule, choose_recipe
from vitruvian.training.recipe import read_recipe


class Images:
    """As many images as asked for, all of one size."""

    def __init__(self, count, rows=300, columns=400):
        self.count, self.pixels = count, np.zeros((rows, columns, 3), np.uint8)

    def __len__(self):
        return self.count

    def read(self, index):
        return self.pixels


def rule(images, step):
    """The learning rate of a step as the paper's appendix states it, None after the last; written independently."""
    if images < 20_000:
        boundaries = [100, 200, 300, 400, 500]
    elif images < 500_000:
        boundaries = [500, 3000, 6000, 9000, 10_000]
    else:
        boundaries = [500, 6000, 12_000, 18_000, 20_000]
    if step >= boundaries[4]:
        return None
    if step < boundaries[0]:
        return 0.003 * step / boundaries[0]
    return 0.003 * 0.1 ** len([boundary for boundary in boundaries[1:4] if step > boundary])


@pytest.mark.parametrize("images", [1, 5_000, 19_999, 20_000, 50_000, 499_999, 500_000, 1_281_167])
def test_length_schedule_and_mixup_follow_the_number_of_images(images):
    recipe = apply_hyperrule(read_recipe("finetune-bit"), Images(images))
    schedule = Schedule(recipe, recipe.steps)
    assert rule(images, recipe.steps - 1) is not None
    assert rule(images, recipe.steps) is None
    for step in range(recipe.steps):
        assert schedule.lr_at(step) == pytest.approx(rule(images, step), rel=1e-12), step
    assert recipe.augment.mixup_alpha == (0.1 if images >= 20_000 else 0.0)
    assert (recipe.optimizer, recipe.momentum, recipe.batch_size, recipe.weight_decay) == ("sgd", 0.9, 512, 0.0)


@pytest.mark.parametrize(
    ("rows", "columns", "before", "after"),
    [(32, 32, 160, 128), (95, 96, 160, 128), (96, 96, 512, 480), (40, 400, 512, 480), (375, 500, 512, 480)],
)
def test_the_resolution_follows_the_area_of_the_images(rows, columns, before, after):
    recipe = apply_hyperrule(read_recipe("finetune-bit"), Images(100, rows, columns))
    assert recipe.image_size == after
    assert round(recipe.augment.precrop * after) == before


@pytest.mark.parametrize(("limit", "below", "above"), [(20_000, 500, 10_000), (500_000, 10_000, 20_000)])
def test_a_subset_counts_by_its_own_size_at_the_limits(limit, below, above):
    recipe = read_recipe("finetune-bit")
    for count, steps in ((limit - 1, below), (limit, above)):
        small = apply_hyperrule(recipe.replace(max_train_samples=count), Images(600_000, 8, 8))
        assert (small.steps, small.image_size, small.augment.mixup_alpha) == (steps, 128, 0.1 if count >= 20_000 else 0)


def test_a_random_crop_is_cut_from_the_squashed_image():
    settings = Augment(image_size=(120, 120), crop="random", precrop=512 / 480, hflip=0, output="uint8")
    ramp = np.repeat(np.linspace(0, 255, 256, dtype=np.uint8)[None, :, None], 64, axis=0).repeat(3, axis=2)
    lefts = set()
    for seed in range(40):
        pixels = train_transform(settings)(ramp, np.random.default_rng(seed))
        assert pixels.shape == (3, 120, 120)
        lefts.add(round(float(pixels[0, 60, 0]) / 2))
        assert float(pixels[0, 60, -1] - pixels[0, 60, 0]) == pytest.approx(119 / 128 * 255, abs=3)
    assert lefts == set(range(9))  # 128 - 120 pixels to move in


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for label in "ab":
        for index in range(6):
            path = tmp_path / "photos" / label / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8)).save(path)
    return tmp_path / "photos"


def test_given_settings_take_precedence_and_the_rule_is_applied_once(photos):
    recipe = choose_recipe(str(photos), "finetune-bit", settings=["steps=10", "image_size=64"])
    assert (recipe.steps, recipe.image_size, recipe.warmup, recipe.bit_hyperrule) == (10, 64, 0.2, False)
    assert choose_recipe(str(photos), recipe) == recipe
    protocol = protocol_for(photos, "weights.npz", recipe="finetune-bit", settings=["batch_size=4"])
    assert (protocol.recipe.steps, protocol.recipe.image_size, protocol.lrs) == (500, 128, (0.003,))


def test_the_recipe_trains_a_resnet(photos, tmp_path):
    model = vt.create_model("BiT-R50x1", num_classes=3, image_size=64, stages=(1,), width=32)
    vt.save(model, tmp_path / "bit")
    settings = ["steps=3", "image_size=32", "batch_size=4", "grad_accum_steps=1", "workers=0"]
    run = vt.train(
        str(photos),
        recipe="finetune-bit",
        weights=tmp_path / "bit",
        out=tmp_path / "run",
        settings=settings,
        progress=False,
    )
    assert run.finished
