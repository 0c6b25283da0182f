"""What a record calls data and weights: the same thing from every folder."""

from vitruvian.training.run_folder import absolute_data, absolute_path


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
