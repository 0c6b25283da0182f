"""`vit` as a process: interrupted at any moment, without stderr, with libraries that chatter, on a full disk."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from PIL import Image

from vitruvian.errors import FileError
from vitruvian.weights.load import load
from vitruvian.weights.save import save

VIT = [sys.executable, "-m", "vitruvian"]


@pytest.mark.parametrize("delay_seconds", [0.1, 0.25, 0.5, 1.0, 2.0])
def test_an_interrupt_ends_a_command_at_once_without_a_traceback(weights, photos, delay_seconds):
    command = [*VIT, "predict", *[str(photos)] * 400, "--model", str(weights)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(delay_seconds)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode in (130, 0) or (delay_seconds < 0.3 and process.returncode in (1, -signal.SIGINT))
    if process.returncode == 130:
        assert "Traceback" not in said
        assert len(said.splitlines()) <= 2


def test_without_stderr_nothing_of_an_error_lands_on_stdout(tmp_path):
    command = " ".join([*VIT, "predict", str(tmp_path / "nowhere.png"), "--model", str(tmp_path / "none"), "2>&-"])
    ended = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""


def test_what_c_libraries_say_does_not_reach_the_user(tmp_path):
    code = """if True:
        import os, sys
        from vitruvian.__main__ import open_streams
        open_streams()
        os.write(2, b"TIFFFillStrip: Read error on strip 0\\n")
        print("ours", file=sys.stderr)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == "ours\n"


def test_a_broken_tiff_is_one_line(tmp_path, weights):
    Image.effect_noise((64, 64), 50).save(tmp_path / "a.tif", compression="tiff_lzw")
    whole = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "a.tif").write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    command = [*VIT, "predict", str(tmp_path / "a.tif"), "--model", str(weights)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert all("a.tif" in line or "could not be read" in line for line in ended.stderr.splitlines())


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


def test_weights_saved_in_another_process_have_the_same_bytes(weights, tmp_path):
    code = "import sys, vitruvian as vt; m = vt.load(sys.argv[1]); [vt.save(m, *a.split('=')) for a in sys.argv[2:]]"
    found = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        places = [f"{folder / name}={family}" for name, family in (("n", "native"), ("t.safetensors", "timm"))]
        subprocess.run([sys.executable, "-c", code, str(weights), *places], check=True, timeout=120, env=os.environ)
        found.append([path.read_bytes() for path in (folder / "n" / "model.safetensors", folder / "t.safetensors")])
    assert found[0] == found[1] == found[2]
