"""The service with models of several labels and of numbers."""

import io

import pytest
import torch
from PIL import Image
from tiny_service import tiny_vit

from vitruvian.targets import Target


def model_of(target, score):
    model = tiny_vit()
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    labels = tuple(f"output {index}" for index in range(model.config.num_classes))
    count = len(labels)
    fitted = {"thresholds": (0.0,) + (1.0,) * (count - 1)} if score == "sigmoid" else {}
    if score == "identity":
        fitted = {"mean": (5.0,) * count, "std": (2.0,) * count, "margins": (1.0,) * count}
    model.meta = model.meta.replace(labels=labels, score_function=score, target=Target(kind=target, **fitted))
    return model


@pytest.mark.slow
def test_predictions_have_flags_or_values(client_of):
    client = client_of({"labels": model_of("multi", "sigmoid"), "numbers": model_of("number", "identity")})
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(buffer, "PNG")

    def predict(model):
        reply = client.post("/predict", files={"image": buffer.getvalue()}, data={"model": model, "top": 2})
        (result,) = reply.json()["results"]
        return result["predictions"]

    assert {p["label"] for p in predict("labels") if p["predicted"]} == {"output 0"}
    for number in predict("numbers"):
        assert "probability" not in number
        assert number["interval"] == pytest.approx([number["value"] - 1, number["value"] + 1])
