"""Mixed batches: targets that add up, and shares that equal what is seen."""

import numpy as np
import pytest
import torch

from vitruvian.data.augment import Augment, cutmix_box, mix, mixing_partners
from vitruvian.errors import ConfigError

MIXUP, CUTMIX = Augment(mixup_alpha=0.4), Augment(cutmix_alpha=1.0)


def batch(count=6, rows=12, columns=20):
    """Images of one level each, which is also their class."""
    labels = torch.arange(count)
    return labels.float().view(-1, 1, 1, 1).expand(count, 3, rows, columns).contiguous(), labels


def mixed(settings, seed=0, count=6, **options):
    pixels, labels = batch(count)
    return mix(pixels, labels, classes=count, settings=settings, rng=np.random.default_rng(seed), **options)


@pytest.mark.parametrize("settings", [MIXUP, CUTMIX, Augment(mixup_alpha=0.4, cutmix_alpha=1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shares_of_classes_add_up_to_one(settings, smoothing):
    for seed in range(20):
        _, targets = mixed(settings, seed, smoothing=smoothing)
        assert torch.allclose(targets.sum(1), torch.ones(6), atol=1e-6)
        assert targets.min() >= 0


@pytest.mark.parametrize("settings", [MIXUP, CUTMIX])
@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_shares_equal_what_is_seen_of_each_image(settings, count):
    for seed in range(20):
        pixels, targets = mixed(settings, seed, count)
        # an image's mean level is the mean of its classes, weighted by their shares
        assert torch.allclose(pixels.mean((1, 2, 3)), targets @ torch.arange(count).float(), atol=1e-4)


def test_mixup_blends_everywhere_and_cutmix_pastes_a_rectangle():
    assert all(len(image.unique()) == 1 for image in mixed(MIXUP, 1)[0])
    pasted = mixed(CUTMIX, 1)[0][0, 0] == 1
    rows, columns = pasted.nonzero(as_tuple=True)
    assert 0 < pasted.sum() < pasted.numel()
    assert pasted.sum() == (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)


def test_the_pasted_area_has_the_expectation_of_its_draw_and_stays_inside():
    rng = np.random.default_rng(0)
    for kept in (0.0, 0.3, 1.0):
        for _ in range(200):
            box = cutmix_box((31, 17), kept, rng)
            assert 0 <= box.top <= box.top + box.rows <= 31
            assert 0 <= box.left <= box.left + box.columns <= 17
            assert box.rows * box.columns <= (1 - kept) * 31 * 17
    assert max(cutmix_box((30, 30), 0.75, rng).rows for _ in range(100)) == 15


def test_a_batch_in_two_parts_is_mixed_as_in_one():
    settings = Augment(mixup_alpha=0.4, cutmix_alpha=1.0)
    pixels, labels = torch.randn(8, 3, 10, 10), torch.arange(8)
    for seed in range(10):
        whole = mix(pixels, labels, classes=8, settings=settings, rng=np.random.default_rng(seed))
        parts = [
            mix(pixels[half], labels[half], classes=8, settings=settings, rng=np.random.default_rng(seed))
            for half in (slice(0, 4), slice(4, 8))
        ]
        assert all(torch.equal(one, torch.cat(both)) for one, both in zip(whole, zip(*parts), strict=True))


def test_views_of_one_image_are_not_mixed_among_themselves():
    assert mixing_partners(7).tolist() == [1, 0, 3, 2, 5, 4, 6]
    assert mixing_partners(9, repeats=2).tolist() == [2, 3, 0, 1, 6, 7, 4, 5, 8]


def test_smoothing_spreads_a_share_over_all_classes():
    _, targets = mixed(Augment(), smoothing=0.12)
    assert targets[2].tolist() == pytest.approx([0.02, 0.02, 0.90, 0.02, 0.02, 0.02])


def test_without_alpha_or_by_chance_a_batch_stays_as_it_is():
    pixels, labels = batch()
    assert mixed(Augment())[1].argmax(1).equal(labels)
    kept = [torch.equal(mixed(MIXUP.replace(mixup_prob=0.3), seed)[0], pixels) for seed in range(300)]
    assert 180 <= sum(kept) <= 240  # 210, give or take 3.8 standard deviations
    assert torch.equal(mixed(MIXUP.replace(mixup_prob=0.0))[0], pixels)


def test_with_two_alphas_each_way_is_taken_half_of_the_time():
    settings = Augment(mixup_alpha=0.4, cutmix_alpha=1.0)
    pasted = sum(len(mixed(settings, seed)[0][0].unique()) > 1 for seed in range(300))
    assert 110 <= pasted <= 180  # 150 less a few rectangles without area, give or take 3.5 standard deviations


def test_mixing_leaves_the_batch_it_was_given_alone():
    for settings in (MIXUP, CUTMIX):
        pixels, labels = batch()
        mix(pixels, labels, classes=6, settings=settings, rng=np.random.default_rng(1))
        assert torch.equal(pixels, batch()[0])


def test_pixels_that_are_not_normalized_are_refused():
    with pytest.raises(
        ConfigError, match=r"mixing needs normalized pixels, not torch.uint8: call normalize_batch first"
    ):
        mix(
            torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
            torch.tensor([0, 1]),
            classes=2,
            settings=MIXUP,
            rng=np.random.default_rng(),
        )
