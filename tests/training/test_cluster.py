"""Plans for clusters: the work is the paper's, and devices share what they hold."""

import pytest

from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.training.planning import cluster_lines, cluster_plan


@pytest.mark.parametrize(
    ("recipe", "settings", "exaflops", "tolerance"),
    [
        ("paper-jft-h14", [], 4262, 5e-3),
        ("paper-jft-l16", [], 783, 5e-3),
        ("paper-jft-l16", ["epochs=14"], 1567, 5e-3),
        ("paper-jft-l32", [], 196, 5e-3),
        ("paper-jft-b", [], 224, 5e-3),
        ("paper-jft-b", ["model=ViT-B/32"], 55, 0.03),
        ("paper-jft-r50-b", [], 274, 5e-3),
        ("paper-jft-r50-b", ["model=R50+ViT-L/16", "epochs=14"], 1668, 5e-3),
        ("paper-jft-resnet", [], 50, 0.05),
        ("paper-jft-resnet", ["model=BiT-R152x2"], 563, 0.05),
        ("paper-jft-resnet", ["architecture.stages=[3,24,36,3]", "architecture.width=192", "epochs=14"], 3306, 0.05),
    ],
)
def test_the_work_of_the_papers_runs_is_what_its_appendix_states(recipe, settings, exaflops, tolerance):
    """Table 6: pre-training compute in exaFLOPs; its ResNets are 4 to 5% below a count of all their convolutions."""
    found = cluster_plan(recipe, "64 x A100", settings=settings)
    assert 2 * found.run_multiply_adds / 1e18 == pytest.approx(exaflops, rel=tolerance)


def test_the_papers_cores_reached_a_third_of_their_peak():
    found = cluster_plan("paper-jft-h14", "2500 x TPUv3-core")
    assert found.paper_days == 2500
    assert found.paper_utilization == pytest.approx(0.32, abs=0.005)
    assert found.seconds == pytest.approx(86_400 * found.paper_utilization / 0.4)
    said = cluster_lines(found)[-1]
    assert "2,500 TPUv3-core-days (Table 2), 32% of their peak of 61.5 TFLOPS each" in said
    assert "88.04% on ImageNet after fine-tuning at 384 (Table 5)" in said


def test_twice_the_devices_take_half_the_time_and_hold_half_the_weights():
    one, two = (cluster_plan("paper-jft-h14", f"{count} x H100") for count in (32, 64))
    assert one.seconds == pytest.approx(2 * two.seconds)
    assert one.weight_bytes["fsdp, full"] == pytest.approx(2 * two.weight_bytes["fsdp, full"], rel=1e-6)
    assert one.weight_bytes["ddp"] == two.weight_bytes["ddp"] == 8 * one.weight_bytes["fsdp, hybrid"]


def test_what_does_not_fit_is_said():
    lines = "\n".join(cluster_lines(cluster_plan("paper-jft-h14", "8 x L4")))
    assert "too much without grad_checkpointing" in lines


def test_data_of_ones_own_are_counted():
    assert cluster_plan("digits", "1 x L4", data="digits").images == 1438


def test_a_part_of_the_data_costs_its_share():
    """Figure 4: B/32 on 9 million images of JFT-300M."""
    whole, part = (
        cluster_plan("paper-jft-b", "8 x A100", model="ViT-B/32", settings=settings)
        for settings in ([], ["max_train_samples=9000000"])
    )
    assert part.images == 9_000_000
    assert part.run_multiply_adds == pytest.approx(whole.run_multiply_adds * 9 / 303, rel=1e-4)


def test_a_cluster_or_a_recipe_that_says_too_little_is_refused():
    with pytest.raises(ConfigError, match="cluster='A100' is not a number of devices and their name"):
        cluster_plan("paper-jft-h14", "A100")
    with pytest.raises(UnknownNameError, match="unknown accelerator 'B1000'"):
        cluster_plan("paper-jft-h14", "8 x B1000")
    with pytest.raises(ConfigError, match="the size of the dataset for the recipe 'photos' is unknown; give DATA"):
        cluster_plan("photos", "8 x A100")
