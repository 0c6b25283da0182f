"""What a record calls data and weights: the same thing from every folder."""

from vitruvian.training.run_folder import absolute_data, absolute_path, describe_result


def test_a_path_that_exists_is_kept_in_full_and_a_published_name_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute_path("photos") == str(tmp_path / "photos")
    assert absolute_path("google/vit-base-patch16-224") == "google/vit-base-patch16-224"
    assert absolute_data("photos") == str(tmp_path / "photos")
    assert absolute_data("s3://bucket/photos-{0000..0009}.tar") == "s3://bucket/photos-{0000..0009}.tar"


def test_a_built_in_name_stays_itself_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute_data("digits") == "digits"
    assert absolute_path("digits") == str(tmp_path / "digits")


def test_the_error_of_a_single_image_has_no_interval():
    mae = {"mae": 3.0, "mae_low": 3.0, "mae_high": 3.0}
    assert describe_result(mae | {"count": 1}, "held out") == "mean absolute error 3 on 1 image (held out)"
    several = describe_result(mae | {"count": 2}, "held out")
    assert several == "mean absolute error 3 (95% confidence interval 3 to 3) on 2 images (held out)"
