"""Zip archives: extracted safely, once, and opened like the folder they contain."""

import io
import stat
import zipfile

import pytest
from making import level_of, png

from vitruvian.data import folder as folders
from vitruvian.data.folder import find_images
from vitruvian.data.formats import open_dataset, open_images
from vitruvian.errors import DataError

PHOTOS = {"cat/0.png": png(0), "cat/1.png": png(1), "dog/2.png": png(2)}


def make_zip(path, members=PHOTOS, **changes):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            for field, value in changes.items():
                setattr(info, field, value)
            file.writestr(info, content, zipfile.ZIP_DEFLATED)
    return path


@pytest.mark.parametrize("above", ["", "photos/", "a/b/"])
def test_an_archive_of_class_folders_is_a_dataset(tmp_path, above):
    path = make_zip(tmp_path / "a.zip", {above + name: content for name, content in PHOTOS.items()})
    data = open_dataset(path)
    assert (data.name, data.classes, data.train.labels().tolist()) == (str(path), ("cat", "dog"), [0, 0, 1])
    assert [level_of(data.train.read(i)) for i in range(3)] == [0, 1, 2]


def test_an_archive_may_contain_a_manifest(tmp_path):
    members = {"list.csv": b"path,label\nimages/0.png,b\nimages/1.png,a\n"}
    members |= {f"images/{n}.png": png(n) for n in range(2)}
    assert open_dataset(make_zip(tmp_path / "a.zip", members)).train.labels().tolist() == [1, 0]


def test_images_without_labels_are_listed(tmp_path):
    path = make_zip(tmp_path / "a.zip", {"0.png": png(0), "1.png": png(1), "notes.txt": b"x"})
    assert [name[-5:] for name in find_images([path])] == ["0.png", "1.png"]
    assert len(open_images(path)["all"]) == 2


def test_an_archive_is_extracted_once_and_again_when_it_changes(tmp_path, monkeypatch):
    path = make_zip(tmp_path / "a.zip")
    open_dataset(path)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "extract", lambda *_: pytest.fail("extracted again"))
        open_dataset(path)
    make_zip(path, PHOTOS | {"dog/3.png": png(3)})
    assert len(open_dataset(path).train) == 4


def test_what_macos_adds_is_counted(tmp_path):
    path = make_zip(tmp_path / "a.zip", PHOTOS | {"__MACOSX/cat/._0.png": b"x"})
    assert open_dataset(path).notes == ("skipped 1 file of macOS in __MACOSX/",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../x.png", "points outside the archive"),
        ("/etc/x.png", "points outside the archive"),
        ("C:/x.png", "points outside the archive"),
        ("a\\..\\..\\x.png", "points outside the archive"),
    ],
)
def test_members_outside_are_refused_by_name(tmp_path, name, message):
    with pytest.raises(DataError, match=rf"a\.zip: the member '.*x\.png' {message}"):
        open_dataset(make_zip(tmp_path / "a.zip", {**PHOTOS, name: b"x"}))


@pytest.mark.parametrize(("mode", "message"), [(stat.S_IFLNK, "is a link"), (stat.S_IFIFO, "is not a regular file")])
def test_links_and_devices_are_refused_by_name(tmp_path, mode, message):
    path = make_zip(tmp_path / "a.zip", external_attr=(mode | 0o777) << 16)
    with pytest.raises(DataError, match=rf"the member 'cat/0\.png' {message}"):
        open_dataset(path)


def test_an_encrypted_member_is_refused_by_name(tmp_path):
    content = bytearray(make_zip(tmp_path / "a.zip").read_bytes())
    place = content.index(b"PK\x01\x02")  # the flags of the first member in the directory
    content[place + 8] |= 1
    (tmp_path / "a.zip").write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"the member 'cat/0\.png' is encrypted"):
        open_dataset(tmp_path / "a.zip")


def test_an_archive_that_expands_too_much_is_refused_before_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "ALLOWED_BYTES", 1000)
    path = make_zip(tmp_path / "a.zip", {"cat/0.png": bytes(10**6)})
    monkeypatch.setattr(folders, "extract", lambda *_: pytest.fail("extracted"))
    with pytest.raises(DataError, match=r"its [\d,]+ bytes would expand to 1,000,000; unpack it if you trust it"):
        open_dataset(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_occurs_twice_is_refused(tmp_path):
    path = make_zip(tmp_path / "a.zip")
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("cat/0.png", b"other")
    with pytest.raises(DataError, match=r"the member 'cat/0\.png' occurs twice"):
        open_dataset(path)


def test_broken_archives_are_one_line(tmp_path):
    whole = make_zip(tmp_path / "a.zip").read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w"):
        pass
    wrong = bytearray(whole)
    wrong[60] ^= 255  # in the compressed bytes of the first image
    for content in (b"", b"x", whole[:-30], whole[30:], bytes(wrong), buffer.getvalue()):
        (tmp_path / "b.zip").write_bytes(content)
        with pytest.raises(DataError, match=r"b\.zip: "):
            open_dataset(tmp_path / "b.zip")
