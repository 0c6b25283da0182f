"""`vit export --to web` and its siblings: what is missing, unknown or in the way is one line."""

from __future__ import annotations

import pytest

from vitruvian.engines import web


def test_a_missing_runtime_and_an_existing_folder_are_one_line(vit, tmp_path, monkeypatch, weights):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(web, "DOWNLOAD_URL", (tmp_path / "nowhere").as_uri())
    code, _, err = vit("export", weights, "site", "--to", "web")
    assert code == 1
    assert "onnxruntime-web 1.30.0 is not in node_modules and cannot be downloaded (" in err
    assert err.endswith("; run `npm install --no-save onnxruntime-web@1.30.0` here\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine.txt").write_text("mine")
    for option, hint in (([], ", or replace it with --overwrite"), (["--overwrite"], " or remove it")):
        code, _, err = vit("export", weights, "site", "--to", "web", *option)
        assert (code, err.splitlines()[-1]) == (1, f"error: site: already exists; choose another name{hint}")
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["litert", "coreml"])
def test_a_format_that_is_not_written_is_one_line(vit, name):
    code, out, err = vit("export", "model", "out", "--to", name)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].endswith(f"'{name}' is not one of 'onnx', 'openvino', 'torch', 'executorch', 'web'.")
