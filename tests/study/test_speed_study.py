"""Figure 12 without weights: speed and the largest batch by input size, measured once."""

import json

from vitruvian.study.speed import speed_study

SMALL = {"batches": [1, 2], "rounds": 1}


def test_larger_images_take_more_memory_and_what_is_measured_is_kept(tmp_path):
    heard = []
    cells = speed_study(tmp_path, models=["ViT-Ti/16"], sizes=[32, 64, 72], report=heard.append, **SMALL)
    small, large, odd = cells
    assert small.images_per_second > 0
    assert small.largest_batch > 2 * large.largest_batch > 0  # four times as many patches
    assert odd.images_per_second is None
    assert "72" in odd.missing
    less = speed_study(tmp_path / "less", models=["ViT-Ti/16"], sizes=[32], memory=8.0, report=heard.append, **SMALL)
    assert 0.49 < less[0].largest_batch / small.largest_batch < 0.51
    heard.clear()
    again = speed_study(tmp_path, models=["ViT-Ti/16"], sizes=[32, 64, 72], report=heard.append, **SMALL)
    assert again == cells
    assert all(text.endswith("(already done)") for text in heard)
    assert [cell["image_size"] for cell in json.loads((tmp_path / "study.json").read_text())["cells"]] == [32, 64, 72]
    page = (tmp_path / "report.html").read_text()
    assert "Largest batch in 16 GB" in page
    assert "Figure 12" in page
