"""OpenCV, on one thread."""

from __future__ import annotations

import functools
from typing import Any

from vitruvian.errors import require


@functools.cache
def opencv() -> Any:
    """The module cv2, told to stay on the calling thread.

    A view is one core's work and workers bring the others; OpenCV's own threads would also not survive the fork
    that starts a worker.
    """
    module = require("cv2", "train")
    module.setNumThreads(0)
    return module
