"""Data that is broken or hostile: paths that lead out, bombs, pipes, links in circles, files that are cut short."""

import gzip
import os
import socket
import tarfile

import numpy as np
import pytest
from making import add_member, idx_bytes, make_folder, make_idx, make_shard, png

from vitruvian.data import pixels, sources
from vitruvian.data.augment import Augment, choose_crop, train_transform
from vitruvian.data.decode import decode
from vitruvian.data.doctor import diagnose
from vitruvian.data.folder import find_images, open_lists
from vitruvian.data.formats import open_dataset
from vitruvian.errors import DataError, ImageError

pytestmark = pytest.mark.timeout(60)  # where a test would wait for a pipe's other end


@pytest.mark.parametrize("path", ["../secret.png", "/etc/passwd", "a/../../secret.png"])
def test_every_line_of_a_list_must_stay_inside(tmp_path, path):
    make_folder(tmp_path / "set", ("a", "b"))
    (tmp_path / "set/train.txt").write_text(f"a/0.png 0\nb/0.png 1\n{path} 1\n")
    with pytest.raises(DataError, match="points outside its folder"):
        open_lists("set", tmp_path / "set", {"train": tmp_path / "set/train.txt"})


def test_every_path_in_a_parquet_file_must_stay_inside(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "secret.png").write_bytes(png(9))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/in.png").write_bytes(png(3))
    cells = [{"bytes": None, "path": path} for path in ("in.png", "../secret.png", str(tmp_path / "secret.png"))]
    table = pyarrow.table({"image": cells, "label": [0, 1, 1]})
    parquet.write_table(table, tmp_path / "set/train.parquet")
    train = open_dataset(tmp_path / "set").train
    assert train.read(0) == png(3)
    for index in (1, 2):
        with pytest.raises(DataError, match="points outside its folder"):
            train.read(index)


@pytest.mark.parametrize("size", [(1, 100_000), (100_000, 1)])
def test_a_long_image_is_not_blown_up_before_its_window_is_cut(size):
    settings = Augment(image_size=(224, 224), crop="pad")
    _, scaled = choose_crop(size, settings, np.random.default_rng(0))
    assert scaled[0] * scaled[1] < 10_000_000
    image = np.zeros((*size, 3), np.uint8)
    assert train_transform(settings)(image, np.random.default_rng(0)).shape == (3, 224, 224)


def test_a_gzip_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(pixels, "MAX_UNPACKED_BYTES", 2**20)
    make_idx(tmp_path / "mnist")
    bomb = gzip.compress(idx_bytes(np.zeros((10, 1000, 1000))))
    (tmp_path / "mnist/train-images-idx3-ubyte.gz").write_bytes(bomb)
    with pytest.raises(DataError, match="unpacks to far more data than images need"):
        open_dataset(tmp_path / "mnist")


def test_an_archive_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(pixels, "MAX_ARCHIVE_BYTES", 2**20)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        add_member(archive, "x", bytes(2**20))
        add_member(archive, "batches.meta", b"")
    with pytest.raises(DataError, match="unpacks to more data than CIFAR has"):
        open_dataset(tmp_path / "cifar-10-python.tar.gz")


def test_a_member_too_large_for_an_image_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_IMAGE_BYTES", 50)
    make_shard(tmp_path / "train.tar", range(4))
    with pytest.raises(ImageError, match=r"0000\.png: 0 MB is too large for an image"):
        open_dataset(tmp_path).train.read(0)


def special(folder, name):
    """A pipe, a socket and a device of this name."""
    os.mkfifo(folder / f"pipe-{name}")
    server = socket.socket(socket.AF_UNIX)
    here = os.open(".", os.O_RDONLY)
    os.chdir(folder)  # the name of a socket is short
    server.bind(f"socket-{name}")
    os.chdir(here)
    os.close(here)
    server.close()
    (folder / f"device-{name}").symlink_to("/dev/zero")
    return [folder / f"{kind}-{name}" for kind in ("pipe", "socket", "device")]


def test_pipes_sockets_and_devices_among_images_are_left_out(tmp_path):
    make_folder(tmp_path / "set")
    special(tmp_path / "set/cat", "x.png")
    data = open_dataset(tmp_path / "set")
    assert len(data.train) == 6
    assert "3 non-regular files (broken link, pipe or device)" in data.notes[0]
    assert len(find_images([tmp_path / "set"])) == 6


def test_pipes_sockets_and_devices_by_name_are_refused_at_once(tmp_path):
    for path in special(tmp_path, "x.png"):
        with pytest.raises(ImageError, match="this is a pipe, a device or a socket, not an image"):
            decode(path)
        with pytest.raises(ImageError, match="not a regular file"):
            sources.read_file(path)


@pytest.mark.parametrize("ending", ["tar", "parquet", "csv"])
def test_pipes_for_shards_and_tables_do_not_hang(tmp_path, ending):
    special(tmp_path, f"x.{ending}")
    for data in (tmp_path, tmp_path / f"pipe-x.{ending}", tmp_path / f"*.{ending}"):
        with pytest.raises(DataError):
            open_dataset(data)


def test_a_pipe_in_a_manifest_is_an_unreadable_image(tmp_path):
    make_folder(tmp_path)
    special(tmp_path, "x.png")
    (tmp_path / "list.csv").write_text("path,label\ncat/0.png,cat\ndog/0.png,dog\npipe-x.png,dog\n")
    with pytest.raises(ImageError, match="not a regular file"):
        open_dataset(tmp_path / "list.csv").train.read(2)


def test_a_pipe_that_the_shell_hands_over_is_read(tmp_path):
    out, into = os.pipe()
    os.write(into, png(7))
    os.close(into)
    assert decode(f"/dev/fd/{out}").getpixel((0, 0)) == (7, 0, 7)
    os.close(out)


def test_a_link_to_itself_stops_neither_the_doctor_nor_a_search(tmp_path):
    make_folder(tmp_path / "set", each=6)
    (tmp_path / "set/cat/loop").symlink_to("loop")
    (tmp_path / "set/cat/loop.png").symlink_to("loop.png")
    (tmp_path / "set/loop").symlink_to("loop")
    assert diagnose(tmp_path / "set").splits == {"train": 12}
    assert len(find_images([tmp_path / "set"])) == 12


def test_a_shard_cut_between_two_members_is_not_whole(tmp_path):
    whole = make_shard(tmp_path / "whole.tar", range(6)).read_bytes()
    (tmp_path / "cut").mkdir()
    members = 12 * 1024  # an image and a label of one block each, with their headers
    (tmp_path / "cut/train.tar").write_bytes(whole[: members - 4096])
    with pytest.raises(DataError, match=r"train.tar: truncated after byte 8192: no zeros mark its end"):
        open_dataset(tmp_path / "cut")
    (tmp_path / "cut/train.tar").write_bytes(whole[: members + 512])
    assert len(open_dataset(tmp_path / "cut").train) == 6


@pytest.mark.parametrize("data", ["", "  "])
def test_an_empty_name_is_not_the_folder_here(tmp_path, monkeypatch, data):
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="the name of the data is empty"):
        open_dataset(data)
    assert len(open_dataset(".").train) == 6


def shard_with(path, *members):
    """A good shard followed by members (name, header changes, content)."""
    with tarfile.open(path, "w") as archive:
        for number in range(4):
            add_member(archive, f"{number}.png", png(number))
            add_member(archive, f"{number}.cls", str(number % 2).encode())
        for name, changes in members:
            member = tarfile.TarInfo(name)
            for field, value in changes.items():
                setattr(member, field, value)
            archive.addfile(member)
    return path


def test_a_sample_of_hard_links_is_refused_by_name(tmp_path):
    links = [(f"9.{end}", {"type": tarfile.LNKTYPE, "linkname": f"0.{end}"}) for end in ("png", "cls")]
    with pytest.raises(DataError, match=r"train.tar: the member '9.png' is a link to '0.png', which is not supported"):
        open_dataset(shard_with(tmp_path / "train.tar", *links))


def test_a_sparse_member_is_refused_by_name(tmp_path):
    sparse = ("9.png", {"pax_headers": {"GNU.sparse.map": "0,0", "GNU.sparse.size": "4096"}})
    with pytest.raises(DataError, match=r"train.tar: the member '9.png' is sparse, which is not supported"):
        open_dataset(shard_with(tmp_path / "train.tar", sparse))


@pytest.mark.parametrize(
    "size",
    [-512, -1024, -1, 2**70, int("9" * 400)],
    ids=lambda size: f"{size:.0e}"[:6] if abs(size) < 2**80 else "digits",
)
@pytest.mark.parametrize("way", ["header", "pax"])
def test_an_impossible_size_of_a_member_is_one_line(tmp_path, size, way):
    whole = shard_with(tmp_path / "train.tar").read_bytes()
    member = tarfile.TarInfo("9.png")
    if way == "pax":
        member.pax_headers = {"size": str(size)}
        header = member.tobuf(tarfile.PAX_FORMAT)
    else:
        header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
        header[124:136] = (size % 2**95).to_bytes(12, "big") if size < 2**95 else b"9" * 12
        header[124] |= 0x80 | (0x7F if size < 0 else 0)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    end = whole.rstrip(b"\0")
    end += bytes(-len(end) % 512)
    (tmp_path / "train.tar").write_bytes(end + header + bytes(1024))
    with pytest.raises(DataError, match=r"tar: (the member '9.png' states a negative size|not a complete tar|damaged)"):
        open_dataset(tmp_path / "train.tar")
