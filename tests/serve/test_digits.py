"""The model that is served where none is named."""

from __future__ import annotations

from vitruvian.serve.digits import SETTINGS, digits_model


def test_the_digits_model_is_trained_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path))
    said: list[str] = []
    short = (*SETTINGS, "epochs=1", "max_train_samples=64")
    first = digits_model(said.append, short)
    second = digits_model(said.append, ("epochs=nonsense",))
    assert said == [
        "no --model: training one on the built-in digits, about a minute, once",
        f"no --model: serving the digits model in {tmp_path / 'models' / 'digits'}",
        f"no --model: serving the digits model in {tmp_path / 'models' / 'digits'}",
    ]
    assert first.labels == second.labels == tuple("0123456789")
    assert first.config.grid == (8, 8)
    assert all((a == b).all() for a, b in zip(first.state_dict().values(), second.state_dict().values()))
