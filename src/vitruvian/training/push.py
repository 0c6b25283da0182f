"""A model on the Hugging Face Hub: one repository that transformers, timm and `load` open, with a model card."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitruvian.cache import scratch_folder
from vitruvian.errors import ConversionError, HubError, require
from vitruvian.files import read_object, write_text
from vitruvian.model.build import Model
from vitruvian.text import describe_error
from vitruvian.training.run_folder import CARD_FILE, Run, model_card
from vitruvian.weights.convert import TOLERANCE, compare
from vitruvian.weights.description import Description
from vitruvian.weights.load import RUN_FILE, load
from vitruvian.weights.save import write

LIBRARIES = {"huggingface": "transformers", "timm": "timm"}  # by the family of their files


def push(
    source: Model | str | Path, name: str, *, private: bool = False, license: str = "", report: str | Path | None = None
) -> str:
    """Upload a model to a repository of the Hugging Face Hub, which is created if it does not exist.

    transformers and timm open it if they can express the model, and `load` in any case.

    Args:
        source: A run, a model, or a file, directory or published name.
        name: The repository, such as "user/photos"; `private` makes a new one private.
        license: The license for the card, such as "mit"; by default that of the weights a run started from, if known.
        report: A folder of `vit evaluate --out`, whose numbers the card then has.

    Returns:
        The address of the repository. Raises HubError if the Hub refuses the upload or cannot be reached.
    """
    hub = require("huggingface_hub", "hub")
    with TemporaryDirectory(dir=scratch_folder()) as folder:
        write_repository(source, Path(folder) / "model", license=license, report=report, repository=name)
        try:
            hub.create_repo(name, private=private, exist_ok=True)
            hub.upload_folder(repo_id=name, folder_path=f"{folder}/model", commit_message="Upload the model")
        except Exception as error:  # of huggingface_hub and of what is below it
            raise HubError(describe_error(error), where=name, hint="`hf auth login` stores a token") from error
    return f"{hub.constants.ENDPOINT}/{name}"


def write_repository(source: Model | str | Path, folder: Path, **card: Any) -> None:
    """Write the files of a repository into a new folder; the weights are read back and compared with the model."""
    model, notes, libraries = source if isinstance(source, Model) else load(source), list[str](), list[str]()
    with TemporaryDirectory(dir=scratch_folder()) as scratch:
        timm, more = Path(scratch) / "timm", dict[str, Any]()
        for family, path in (("timm", timm), ("huggingface", folder), ("native", folder)):
            if family == "native" and libraries:
                break
            try:
                notes += write(model, path, family, config=more)
            except ConversionError as error:
                notes.append(error.reason)
                continue
            if family == "timm":  # beside the files of transformers, under another name
                more = read_object(path / "config.json")
                more["pretrained_cfg"]["hf_hub_filename"] = "timm.bin"  # timm then looks for timm.safetensors
            libraries += [LIBRARIES[family]] if family in LIBRARIES else []
            compared = compare(model, load(path), family=family, path=path, seed=0)
            if not compared["largest_difference"] <= TOLERANCE * max(1.0, compared["largest_output"]):
                raise ConversionError(f"the {family} weights that were read back differ", hint="please report this")
        if "timm" in libraries and "transformers" in libraries:
            shutil.copyfile(timm / "model.safetensors", folder / "timm.safetensors")
        elif "timm" in libraries:
            shutil.copytree(timm, folder)
    write_text(folder / CARD_FILE, card_of(model, source, libraries=libraries[::-1], notes=notes, **card))


def card_of(model: Model, source: object, *, report: str | Path | None = None, **more: Any) -> str:
    """The model card of a model, with the facts of a run if `source` is one, and of a report of `vit evaluate`."""
    is_run = isinstance(source, str | Path) and (Path(source).expanduser() / RUN_FILE).is_file()
    numbers = None if report is None else read_object(Path(report).expanduser() / "evaluation.json")
    run = Run.open(str(source)) if is_run else None
    return model_card(Description.of(model), run, report=numbers, **more)
