"""A wheel and an sdist that install and work where there is nothing but Python and the packages that they name."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vitruvian import __version__

ROOT = Path(__file__).parents[1]
NOT_COPIED = ignore_patterns(".*", "build", "dist", "site", "runs", "*.egg-info", "__pycache__")
MAX_WHEEL_BYTES = 9 << 20  # 8 MB of them may be the model
IN_THE_WHEEL = (
    "py.typed",
    "__init__.pyi",
    "bundled/model.safetensors",
    "bundled/config.json",
    "recipes/paper-imagenet.toml",
    "serve/page/main.js",
    "report/templates/page_inside.html",
    "serve/page/cat.jpg",
    "report/templates/page_web.html",
    "data/doctor/review.js",
    "report/templates/base.html",
    "report/templates/style.css",
    "data/digits.npz",
    "published.csv",
    "weights/families/timm.json",
)
IN_THE_SDIST = (
    "pyproject.toml",
    "LICENSE",
    "Dockerfile",
    "Makefile",
    "constraints.txt",
    "mkdocs.yml",
    "docs/index.md",
    "benchmarks/peers.txt",
    "tests/test_package.py",
)


def add_required(package: Distribution, names: set[str]) -> None:
    """Add the names of all packages that a package requires, without extras, to `names`."""
    for requirement in map(Requirement, package.requires or ()):
        name = canonicalize_name(requirement.name)
        if name not in names and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            names.add(name)
            add_required(distribution(name), names)


def link(name: str, folder: Path) -> None:
    """What a package has installed beside its neighbors, in another folder."""
    package = distribution(name)
    for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(Path(str(package.locate_file(top))))


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that was made from it."""
    source = copytree(ROOT, tmp_path_factory.mktemp("source") / "project", ignore=NOT_COPIED)
    done = run(sys.executable, "-m", "build", "--no-isolation", cwd=source)
    assert done.returncode == 0, done.stderr
    return source / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and, of other packages, those that its core requires."""
    home = tmp_path_factory.mktemp("environment")
    assert run(sys.executable, "-m", "venv", "--without-pip", home / "env", cwd=home).returncode == 0
    wheel, bin = next(built.glob("*.whl")), home / "env" / "bin"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", bin / "python")
    done = run(*pip, "install", "--no-index", "--no-deps", wheel, cwd=home)
    assert done.returncode == 0, done.stderr
    (packages,) = (home / "env").glob("lib/python*/site-packages")
    (metadata,) = packages.glob("vitruvian-*.dist-info")
    names: set[str] = {"vitruvian"}
    add_required(PathDistribution(metadata), names)
    for name in names - {"vitruvian"}:
        link(name, packages)
    return bin


@pytest.mark.slow
def test_the_wheel_has_the_package_alone_and_all_of_it(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"vitruvian", f"vitruvian-{__version__}.dist-info"}
    assert {f"vitruvian/{name}" for name in IN_THE_WHEEL} <= set(names)
    files = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src" / "vitruvian").rglob("*.*")}
    assert {name for name in files if "__pycache__" not in name} <= set(names)
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


@pytest.mark.slow
def test_the_sdist_has_what_a_build_and_the_tests_need(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*IN_THE_SDIST, *(f"src/vitruvian/{name}" for name in IN_THE_WHEEL)} <= names
    tests = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("*.py")}
    assert tests <= names


@pytest.mark.slow
def test_an_empty_environment_predicts_with_the_model_in_the_package(installed, tmp_path):
    vit = installed / "vit"
    assert run(vit, "--version", cwd=tmp_path).stdout.split()[-1] == __version__
    (photo,) = installed.parent.glob("lib/*/site-packages/vitruvian/serve/page/cat.jpg")
    done = run(vit, "predict", photo, "--top", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cat" in done.stdout
    assert "no model given, and the default could not be downloaded" in done.stderr
    assert "paper-imagenet" in run(vit, "train", "--recipes", cwd=tmp_path).stdout


@pytest.mark.slow
def test_an_empty_environment_names_the_extra_that_a_command_needs(installed, tmp_path):
    done = run(installed / "vit", "serve", cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install '.[serve]'" in done.stderr
    assert "Traceback" not in done.stderr
