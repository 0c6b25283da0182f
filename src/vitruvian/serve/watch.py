"""A folder of models that are served: they are added, replaced and removed while the service runs."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitruvian.engines.graph import Graph
from vitruvian.errors import ConfigError, VitruvianError
from vitruvian.files import file_stamp
from vitruvian.model.build import Model
from vitruvian.serve.service import Service
from vitruvian.text import describe_error
from vitruvian.weights.load import locate

POLL_SECONDS = 1.0  # between two looks; a model whose files are the same in both is complete
ENDINGS = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".onnx", ".pt2")  # of models that are one file
log = logging.getLogger("vitruvian.serve")

Look = dict[str, list[Any]]  # the stamps of the files of each model, by its name


class WatchedFolder:
    """Serves each file of weights, model directory, graph and finished run in a folder under its name.

    Args:
        folder: Names that begin with a dot are left out, so that a model can be written there and then renamed.
        load: From a path to the model in memory.
    """

    def __init__(self, folder: Path, load: Callable[[Path], Model | Graph]) -> None:
        self.folder, self.load = folder, load
        self.paths: dict[str, Path] = {}
        self.current = self.look()  # what was loaded, or could not be

    def look(self) -> Look:
        """The models that are in the folder now."""
        stamps: Look = {}
        try:
            paths = sorted(self.folder.iterdir())
        except OSError as error:
            raise ConfigError(f"cannot be read: {describe_error(error)}", where=self.folder) from None
        for path in paths:
            if path.name.startswith(".") or not (path.is_dir() or path.suffix in ENDINGS):
                continue
            with suppress(OSError, VitruvianError):  # it was removed meanwhile, or is a run that has not finished
                model = locate(path)
                files = sorted(file for file in model.iterdir() if file.is_file()) if model.is_dir() else [model]
                if files:
                    name = path.name if path.is_dir() else path.stem
                    stamps[name], self.paths[name] = [[str(file.resolve()), *file_stamp(file)] for file in files], path
        return stamps

    def follow(self, service: Service, stopped: threading.Event) -> None:
        """Serve what is in the folder, until `stopped`. A model that cannot be loaded does not replace another."""
        before, fixed = self.current, set(service.models) - set(self.current)
        while not stopped.wait(POLL_SECONDS):
            try:
                now = self.look()
            except ConfigError as error:
                log.error("%s", error)
                continue
            for name in self.current.keys() - now.keys() - fixed:
                del self.current[name]
                if service.remove(name):
                    log.info("%s is no longer served", name)
                else:
                    log.warning("%s was removed from %s, but stays: there is no other model", name, self.folder)
            for name, stamps in now.items():
                if stamps == before.get(name) and stamps != self.current.get(name):
                    self.current[name] = stamps
                    self._add(service, name, name in fixed)
            before = now

    def _add(self, service: Service, name: str, is_fixed: bool) -> None:
        try:
            if is_fixed:
                raise ConfigError("--model has this name; rename the model in the folder", where=self.paths[name])
            with ThreadPoolExecutor(1) as loader:  # whose OpenMP workers end with it; see `batching`
                model = loader.submit(self.load, self.paths[name]).result()
            service.add(name, model)
            log.info("%s is served from %s", name, self.paths[name])
        except Exception as error:  # whatever it is, the other models are served
            known = isinstance(error, VitruvianError)
            log.error("%s is not served: %s", name, error, exc_info=None if known else error)
