"""`vit` as a process: interrupted at any moment, without stderr, with libraries that chatter, on a full disk."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from forked import Forked, patience
from vitruvian.__main__ import protect_streams
from vitruvian.errors import FileError
from vitruvian.weights.load import load
from vitruvian.weights.save import save

VIT = [sys.executable, "-m", "vitruvian"]


def cpu_seconds(pid):
    """What a process has computed so far, and not how long it had to wait for a turn."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.parametrize("after", ["0.1", "0.8", "1.6", "the first answers"])
def test_an_interrupt_ends_a_command_at_once_without_a_traceback(weights, photos, tmp_path, after):
    """Seconds of the process's own time, while it imports; or in the middle of its work."""
    command = [*VIT, "predict", *[str(photos)] * 2000, "--batch-size", "1", "--model", str(weights)]
    answers, errors = tmp_path / "answers", tmp_path / "errors"
    # Files, because a process whose pipe nobody reads stops when the pipe is full, and then computes no more.
    with (
        answers.open("wb") as out,
        errors.open("wb") as err,
        subprocess.Popen(command, stdout=out, stderr=err) as process,
    ):
        for _ in patience(120):
            if answers.stat().st_size if after == "the first answers" else cpu_seconds(process.pid) >= float(after):
                break
            assert process.poll() is None, errors.read_text()
        before = resource.getrusage(resource.RUSAGE_CHILDREN), cpu_seconds(process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    after_seconds = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - sum(before[0][:2]) - before[1]
    assert process.returncode == 130 or (after == "0.1" and process.returncode in (1, -signal.SIGINT))
    assert after_seconds < 1  # of 10 and more for all images
    if process.returncode == 130:
        said = errors.read_text()
        assert "Traceback" not in said
        assert len(said.splitlines()) <= 2


@pytest.mark.slow
def test_without_stderr_nothing_of_an_error_lands_on_stdout(tmp_path):
    command = " ".join([*VIT, "predict", str(tmp_path / "nowhere.png"), "--model", str(tmp_path / "none"), "2>&-"])
    ended = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""


def test_what_c_libraries_say_does_not_reach_the_user(tmp_path):
    code = """if True:
        import os, sys
        from vitruvian.__main__ import protect_streams
        protect_streams()
        os.write(2, b"TIFFFillStrip: Read error on strip 0\\n")
        print("ours", file=sys.stderr)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == "ours\n"


def test_a_broken_tiff_is_one_line(tmp_path, weights):
    Image.effect_noise((64, 64), 50).save(tmp_path / "a.tif", compression="tiff_lzw")
    whole = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "a.tif").write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    ended = Forked("predict", tmp_path / "a.tif", "--model", weights, first=protect_streams).wait()
    assert all("a.tif" in line or "could not be read" in line for line in ended.err.splitlines())


@pytest.mark.parametrize(
    ("family", "name"),
    [("native", "n"), ("timm", "t.safetensors"), ("timm", "t.pth"), ("google", "g.npz"), ("huggingface", "h")],
)
def test_a_full_disk_is_one_line_and_the_old_weights_stay(weights, tmp_path, family, name):
    model = load(weights)
    save(model, tmp_path / name, family)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    before = [path.read_bytes() for path in files]
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(map(len, before)) // 2, old[1]))  # as on a full disk
    try:
        with pytest.raises(FileError, match=f"{name}: cannot be written: File too large"):
            save(model, tmp_path / name, family)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file()] == files
    assert [path.read_bytes() for path in files] == before


@pytest.mark.slow
def test_weights_saved_in_another_process_have_the_same_bytes(weights, tmp_path):
    names = {"n": "native", "t.safetensors": "timm"}
    for name, family in names.items():
        save(load(weights), tmp_path / name, family)
    (tmp_path / "other").mkdir()
    code = "import sys, vitruvian as vt; m = vt.load(sys.argv[1]); [vt.save(m, *a.split('=')) for a in sys.argv[2:]]"
    words = [f"{tmp_path / 'other' / name}={family}" for name, family in names.items()]
    env = {**os.environ, "PYTHONHASHSEED": "7"}  # another order of sets
    subprocess.run([sys.executable, "-c", code, str(weights), *words], check=True, timeout=120, env=env)
    for file in ("n/model.safetensors", "t.safetensors"):
        assert (tmp_path / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
