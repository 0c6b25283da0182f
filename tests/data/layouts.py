"""Small folders in the layouts in which the datasets of tasks are distributed."""

import json

import numpy as np
import scipy.io
from making import make_cifar_binary, make_cifar_pickles, png
from PIL import Image, ImageFont

from vitruvian.catalog import imagenet_ids


def make_image(path, level=0, size=(4, 3)):
    """A file whose pixels have one level, whatever its name ends with; its bytes tell the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if size == (4, 3):
        path.write_bytes(png(level))
    else:
        Image.new("RGB", size, (level, level, level)).save(path, "PNG")


def make_flowers(root):
    """8 images of 3 classes: 2 to train on, 2 for validation, 4 for testing."""
    folder = root / "flowers102"
    for number in range(1, 9):
        make_image(folder / "jpg" / f"image_{number:05d}.jpg", number)
    labels = np.array([[1, 2, 1, 2, 3, 3, 1, 2]], np.uint8)
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": labels}, do_compression=True)
    sets = {"trnid": np.array([[8, 1]], float), "valid": np.array([[2, 5]]), "tstid": np.array([[3, 4, 6, 7]])}
    scipy.io.savemat(folder / "setid.mat", sets)


def make_pets(root):
    folder = root / "pets"
    rows = {"trainval": ["Abyssinian_1", "american_bulldog_7", "Bengal_10"], "test": ["american_bulldog_9", "Bengal_2"]}
    numbers = {"Abyssinian": 1, "american_bulldog": 2, "Bengal": 3}
    (folder / "annotations").mkdir(parents=True)
    for name, images in rows.items():
        lines = [f"{key} {numbers[key.rpartition('_')[0]]} 1 1" for key in images]
        (folder / "annotations" / f"{name}.txt").write_text("\n".join(lines) + "\n")
        for level, key in enumerate(images):
            make_image(folder / "images" / f"{key}.jpg", level)
    header = "#Image CLASS-ID SPECIES BREED ID\n"
    (folder / "annotations" / "list.txt").write_text(header + "Abyssinian_1 1 1 1\n")


def make_imagenet(root, *, flat=False):
    """Two classes of training images, and validation images 1, 2 and 3 of the classes 2, 0 and 2."""
    folder, ids = root / "imagenet", imagenet_ids()
    for number in (0, 2):
        make_image(folder / "train" / ids[number] / f"{ids[number]}_1.JPEG", number)
    for number, label in enumerate((2, 0, 2), 1):
        inside = "" if flat else ids[label]
        make_image(folder / "val" / inside / f"ILSVRC2012_val_{number:08d}.JPEG", 50 + number, size=(30, 40))
    if flat:
        kit = folder / "ILSVRC2012_devkit_t12" / "data"
        kit.mkdir(parents=True)
        order = [2, 1, 0]  # the kit's own order of classes
        dtype = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O")]
        rows = [(float(place + 1), ids[number], "a word") for place, number in enumerate(order)]
        scipy.io.savemat(kit / "meta.mat", {"synsets": np.array(rows, dtype).reshape(-1, 1)}, do_compression=True)
        (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n3\n1\n")
    (folder / "real.json").write_text("[[2], [0, 1], []]")


def make_vtab(root, name="kitti", classes=4):
    folder = root / "vtab-1k" / name
    folder.mkdir(parents=True)
    for file, inside, count in (("train800", "train", 8), ("val200", "val", 4), ("test", "test", 6)):
        lines = []
        for number in range(count):
            make_image(folder / "images" / inside / f"{number:06d}.jpg", number)
            lines.append(f"images/{inside}/{number:06d}.jpg {number % classes}")
        (folder / f"{file}.txt").write_text("\n".join(lines) + "\n")
    both = [(folder / f"{file}.txt").read_text() for file in ("train800", "val200")]
    (folder / "train800val200.txt").write_text("".join(both))


def make_objectnet(root):
    folder = root / "objectnet" / "objectnet-1.0"
    for level, name in enumerate(("air_freshener", "banana")):
        path = folder / "images" / name / f"{level}.png"
        path.parent.mkdir(parents=True)
        image = Image.new("RGB", (8, 6), (255, 0, 0))
        image.paste((10 * level, 0, 0), (1, 1, 7, 5))
        image.save(path)
    (folder / "mappings").mkdir()
    names = {"air_freshener": "Air freshener", "banana": "Banana"}
    (folder / "mappings" / "folder_to_objectnet_label.json").write_text(json.dumps(names))


def make_vizwiz(root, *, labels=True):
    folder = root / "vizwiz"
    for number in range(3):
        make_image(folder / "images" / f"VizWiz_train_{number:08d}.jpg", number)
    names = [path.name for path in sorted((folder / "images").iterdir())]
    images = [{"file_name": name, "labels": [1, number]} for name, number in zip(names, (440, 508, 440))]
    content = {
        "categories": [{"id": 440, "name": "beer bottle"}, {"id": 508, "name": "computer keyboard"}],
        "images": images if labels else names,
    }
    (folder / "annotations.json").write_text(json.dumps(content))


def make_mafw(root):
    folder = root / "mafw"
    lists = folder / "Train & Test Set" / "single" / "no_caption" / "set_1"
    lists.mkdir(parents=True)
    for clip in range(1, 5):
        for frame in range(5):
            make_image(folder / "data" / "frames" / f"{clip:05d}" / f"{frame:03d}.jpg", 10 * clip + frame)
    (lists / "train.txt").write_text("00001.mp4 anger\n00002.mp4 surprise\n")
    (lists / "test.txt").write_text("00003.mp4 disappointment\n00004.mp4 anger\n")


def make_omni(root, *, downloaded=False):
    folder = root / "omnibenchmark" / "car"
    for split, labels in (("train", (3, 7, 3)), ("val", (7, 3)), ("test", (3, 7))):
        inside = f"car.{split}" if downloaded else split
        lines = []
        for number, label in enumerate(labels):
            make_image(folder / inside / "images" / f"{number}_c.jpg", number)
            lines.append(f"{inside}/images/{number}_c.jpg {label}")
        path = folder / inside / "record.txt" if downloaded else folder / f"{split}.txt"
        path.write_text("\n".join(lines) + "\n")


def make_variants(root):
    """ImageNet-A, -R and -V2."""
    ids = imagenet_ids()
    for name in ("imagenet-a", "imagenet-r"):
        for number in (6, 11):
            make_image(root / name / name / ids[number] / "0.jpg", number)
    for number in (0, 10, 9):
        make_image(root / "imagenet-v2" / "imagenetv2-matched-frequency-format-val" / str(number) / "x.jpeg", number)


def make_watermark(root):
    """The font of ImageNet-W's name: any that draws will do."""
    make_imagenet(root)
    fonts = root / "imagenet-w" / "fonts"
    fonts.mkdir(parents=True)
    default = ImageFont.load_default(36)
    (fonts / "SourceHanSerifSC-ExtraLight.otf").write_bytes(default.path.getvalue())


def make_cifar(root, name="cifar10"):
    (root / name).mkdir(parents=True)
    make_cifar_binary(root / name / "cifar-10-batches-bin")


def make_cifar_python(root):
    (root / "cifar10").mkdir(parents=True)
    make_cifar_pickles(root / "cifar10" / "cifar-10-batches-py")
