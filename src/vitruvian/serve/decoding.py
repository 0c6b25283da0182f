"""Uploaded images to normalized pixels, in this process or, if that takes long, in one of limited time and memory.

This module is imported without torch, so that the other process starts quickly.
"""

import math
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitruvian.config import Preprocess
from vitruvian.data.decode import CostlyImageError, decode
from vitruvian.data.preprocess import image_pixels, resize_for_display
from vitruvian.errors import ImageError, VitruvianError
from vitruvian.machine import trim_memory
from vitruvian.settings import Size

MAX_BYTES = 2**32  # of memory of the other process
NICENESS = 10  # of the other process, relative to this one: the model comes first
LARGE_PIXELS = 4_000_000  # after decoding a larger image, freed memory is returned; the C library would keep it
CHEAP = 4 * LARGE_PIXELS  # in pixels of an ordinary JPEG; images that cost more are decoded in the other process


class Upload(NamedTuple):
    """A decoded image, without the image at its full size, which may take a hundred megabytes."""

    pixels: NDArray[np.float32]  # normalized (channels, rows, columns)
    preview: Image.Image | None  # at a size for the screen, if requested
    size: Size  # of the full-size image


def load_upload(data: bytes, preprocess: Preprocess, max_pixels: int, preview: bool, max_cost: float = CHEAP) -> Upload:
    """Decode and preprocess an image; raises ImageError, or CostlyImageError before decoding it."""
    is_large = True
    try:
        image = decode(data, max_pixels=max_pixels, max_cost=max_cost)
        is_large = image.width * image.height > LARGE_PIXELS
        shown = resize_for_display(image) if preview else None
        upload = Upload(image_pixels(image, preprocess), shown, (image.height, image.width))
        del image
        return upload
    except CostlyImageError:
        is_large = False
        raise
    finally:
        if is_large:
            trim_memory()


class DecodingProcess:
    """`load_upload` in a process of low priority, which another thread may kill."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None
        self.is_killed = False

    def load(self) -> Upload:
        """Start the process and wait for its result; raises ImageError."""
        command = [sys.executable, "-P", "-c", "from vitruvian.serve.decoding import main; main()"]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # each of its threads would reserve memory
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment) as process:
            self.process = process
            if self.is_killed:
                process.kill()
            if sys.platform != "win32":
                os.setpriority(os.PRIO_PROCESS, process.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS))
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError), process.stdin as stdin:
                pickle.dump(self.arguments, stdin, 5)  # in one write; `communicate` would take the GIL for every 4 KB
            output = process.stdout.read()
        if process.returncode:
            raise ImageError("decoding takes too much time or memory, or crashes the decoder")
        result = pickle.loads(output)
        if isinstance(result, VitruvianError):
            raise result
        assert isinstance(result, Upload)
        return result

    def kill(self) -> None:
        """End the process, or keep it from starting to decode."""
        self.is_killed = True
        if self.process is not None:
            self.process.kill()


def main() -> None:
    """The other process: arguments from stdin, an upload or an error to stdout."""
    with suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    data, preprocess, max_pixels, preview = pickle.load(sys.stdin.buffer)
    try:
        result: Upload | VitruvianError = load_upload(data, preprocess, max_pixels, preview, math.inf)
    except VitruvianError as error:
        result = error
    sys.stdout.buffer.write(pickle.dumps(result))
