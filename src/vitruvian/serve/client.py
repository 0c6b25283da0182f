"""A client of `vit serve`: predictions, vectors and explanations of images, computed by a service."""

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from vitruvian.errors import ImageError, VitruvianError
from vitruvian.explain.explainer import METHODS, Explained, Map, Method
from vitruvian.files import read_bytes
from vitruvian.inference import ImageResult, Prediction


class Client:
    """Requests to a service. The methods with `_async` are the same for `await`.

    Args:
        url: Address of the service, such as `http://127.0.0.1:8000`.
        model: Name of one of its models; by default the first.
        api_key: The key of the service, if it requires one.
        timeout: Time limit of a request, in seconds.

    Raises:
        ImageError: An image cannot be read, by the client or by the service.
        VitruvianError: The service cannot be reached, or refuses a request.
    """

    def __init__(self, url: str, *, model: str = "", api_key: str = "", timeout: float = 60.0) -> None:
        self.url, self.model, self.timeout = url.rstrip("/"), model, timeout
        self._headers = {"Content-Type": "application/json"} | ({"X-API-Key": api_key} if api_key else {})

    def predict(self, image: str | Path | bytes, *, top: int = 5, labels: Sequence[str] = ()) -> ImageResult:
        """The most probable classes of an image, a file or its content; `labels` are for CLIP and SigLIP."""
        options = {"top": top} | ({"labels": list(labels)} if labels else {})
        name, (result,) = _name(image), self._send("/predict", image, options)["results"]
        prediction_set = tuple(result["prediction_set"]) if "prediction_set" in result else None
        return ImageResult(name, _predictions(result), "", result["rejected"], prediction_set)

    def embed(self, image: str | Path | bytes) -> NDArray[np.float32]:
        """The feature vector of an image (F,)."""
        (result,) = self._send("/embed", image, {})["results"]
        return np.array(result["vector"], np.float32)

    def explain(self, image: str | Path | bytes, *, maps: Sequence[Method] = METHODS, target: str = "") -> Explained:
        """Maps of what the predictions of an image, or the class `target`, depend on."""
        content = self._send("/explain", image, {"maps": list(maps), "target": target})
        arrays = tuple(
            Map(name=m["map"], title=m["title"], values=np.array(m["values"], np.float32), index=m["class"])
            for m in content["maps"]
        )
        return Explained(path=_name(image), predictions=_predictions(content), maps=arrays)

    async def predict_async(self, image: str | Path | bytes, **options: Any) -> ImageResult:
        """`predict` in a thread."""
        return await asyncio.to_thread(self.predict, image, **options)

    async def embed_async(self, image: str | Path | bytes) -> NDArray[np.float32]:
        """`embed` in a thread."""
        return await asyncio.to_thread(self.embed, image)

    async def explain_async(self, image: str | Path | bytes, **options: Any) -> Explained:
        """`explain` in a thread."""
        return await asyncio.to_thread(self.explain, image, **options)

    def _send(self, path: str, image: str | Path | bytes, options: dict[str, Any]) -> Any:
        file = image if isinstance(image, bytes) else read_bytes(Path(image), raises=ImageError)
        model = {"model": self.model} if self.model else {}
        body = {"images": [{"data": base64.b64encode(file).decode()}], **model, **options}
        try:
            request = Request(self.url + path, json.dumps(body).encode(), self._headers)
            with urlopen(request, timeout=self.timeout) as response:
                return json.load(response)
        except HTTPError as error:
            with error:
                content = error.read().decode("utf-8", "replace")
            is_problem = error.headers.get_content_type() == "application/problem+json"
            reason = json.loads(content)["detail"] if is_problem else f"status {error.code}"
            raise (ImageError if error.code == 422 else VitruvianError)(reason, where=self.url) from None
        except (URLError, OSError, ValueError) as error:
            raise VitruvianError(f"no response: {getattr(error, 'reason', error)}", where=self.url) from error


def _name(image: str | Path | bytes) -> str:
    return "image" if isinstance(image, bytes) else str(image)


def _predictions(result: dict[str, Any]) -> tuple[Prediction, ...]:
    """Predictions from their JSON; those of numbers have no probability."""
    intervals = [None if p.get("interval") is None else tuple(p["interval"]) for p in result["predictions"]]
    return tuple(
        Prediction(**{"probability": 0.0, **p, "interval": interval})
        for p, interval in zip(result["predictions"], intervals)
    )
