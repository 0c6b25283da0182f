"""One cache directory; scratch directories end with their process; a lock is held by one process at a time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitruvian.cache import Lock, cache_folder, file_lock
from vitruvian.errors import FileError


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_lock_is_held_by_one_process_that_can_be_named_and_free_when_it_dies(tmp_path, ending):
    code = """if True:
        import sys, time
        from pathlib import Path
        from vitruvian.cache import Lock
        lock = Lock(Path(sys.argv[1]))
        assert lock.acquire(wait=False)
        print("held", flush=True)
        time.sleep(60)
    """
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        lock = Lock(path)
        assert not lock.acquire(wait=False)
        assert lock.holder().startswith(f"process {other.pid} on ")
        with file_lock(path, wait=False) as free:
            assert not free
        other.send_signal(ending)
        other.wait(60)
        assert lock.acquire(wait=True)
        assert lock.holder().startswith(f"process {os.getpid()} on ")
        lock.release()


def test_a_lock_where_none_can_be_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="lock: cannot be locked: "), file_lock(tmp_path / "file" / "lock"):
        pass


@pytest.mark.parametrize(
    ("own", "shared", "wanted"),
    [
        ("~/c", "/else", "HOME/c"),
        ("/c", "/else", "/c"),
        ("", "/else", "/else/vitruvian"),
        ("", "~/else", "HOME/else/vitruvian"),
        ("", "", "HOME/.cache/vitruvian"),
    ],
)
def test_there_is_one_cache_folder(monkeypatch, tmp_path, own, shared, wanted):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VITRUVIAN_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", shared)
    assert cache_folder() == Path(wanted.replace("HOME", str(tmp_path)))


def test_a_scratch_folder_ends_with_its_process():
    code = "from vitruvian.cache import scratch_folder as s; f = s(); (f / 'x').touch(); print(f); assert s() != f"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0
    folder = Path(ended.stdout.strip())
    assert folder.parent.name.startswith("vitruvian-scratch-")
    assert not folder.parent.exists()
