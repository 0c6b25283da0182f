"""Reading files: data only, and one line for whatever is wrong with them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import TOLERANCE, arrays_of, largest_difference, path_of
from safetensors.torch import load_file, save_file

from vitruvian.errors import CheckpointError
from vitruvian.weights import checkpoint_files
from vitruvian.weights.create import create_model
from vitruvian.weights.load import load
from vitruvian.weights.save import save


def one_line(path, match):
    """Loading must fail with a CheckpointError of one line that names the file."""
    with pytest.raises(CheckpointError, match=match) as caught:
        load(path, num_heads=4)
    assert type(caught.value) is CheckpointError
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def copy_folder(tmp_path):
    return shutil.copytree(path_of("huggingface_vit"), tmp_path / "hf")


class Malicious:
    """Runs a command when unpickled by a reader that executes what it reads."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


class TestBrokenFiles:
    @pytest.mark.parametrize("name", ["google_vit", "timm_vit", "torchvision_vit"])
    @pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
    def test_a_truncated_file_is_one_line(self, name, share, tmp_path):
        data = path_of(name).read_bytes()
        path = tmp_path / path_of(name).name
        path.write_bytes(data[: max(1, int(len(data) * share))])
        one_line(path, "broken or truncated|not an npz")

    @pytest.mark.parametrize("name", ["google_vit", "timm_vit", "torchvision_vit"])
    def test_noise_in_the_middle_never_shows_a_foreign_error(self, name, tmp_path):
        data = bytearray(path_of(name).read_bytes())
        path = tmp_path / path_of(name).name
        generator = np.random.default_rng(0)
        for _ in range(40):
            noisy = bytearray(data)
            for place in generator.integers(0, len(data), 30):
                noisy[place] = generator.integers(0, 256)
            path.write_bytes(noisy)
            with contextlib.suppress(CheckpointError):
                load(path, num_heads=4)

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b"", "the file is empty"),
            (b"hello, this is not a checkpoint at all", "not an npz, safetensors or PyTorch file"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
            (b"PK\x03\x04 and then nothing", "broken or truncated archive"),
            (b"\x80\x02rubbish", "broken or truncated torch file"),
            (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", "broken or truncated safetensors file"),
        ],
    )
    def test_what_is_no_checkpoint_is_said_to_be_none(self, content, text, tmp_path):
        (tmp_path / "w.bin").write_bytes(content)
        one_line(tmp_path / "w.bin", text)

    def test_an_npz_of_objects_is_not_unpickled(self, tmp_path):
        np.savez(tmp_path / "w.npz", a=np.array([Malicious(tmp_path / "ran")], dtype=object))
        one_line(tmp_path / "w.npz", "Object arrays cannot be loaded")
        assert not (tmp_path / "ran").exists()

    def test_an_npz_of_words_is_refused(self, tmp_path):
        np.savez(tmp_path / "w.npz", a=np.array(["word"]))
        one_line(tmp_path / "w.npz", "contains <U4, not numbers")

    def test_a_pickle_that_would_run_code_is_refused(self, tmp_path):
        torch.save({"model": Malicious(tmp_path / "ran")}, tmp_path / "w.pth")
        one_line(tmp_path / "w.pth", "the file contains Python objects that would run code")
        (tmp_path / "old.pth").write_bytes(pickle.dumps(Malicious(tmp_path / "ran"), protocol=2))
        one_line(tmp_path / "old.pth", "run code|broken")
        assert not (tmp_path / "ran").exists()

    def test_an_array_larger_than_memory_is_one_line(self, tmp_path):
        header = b"\x93NUMPY\x01\x00v\x00" + str({"descr": "<f4", "fortran_order": False, "shape": (2**50,)}).encode()
        with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
            archive.writestr("embedding/kernel.npy", header.ljust(127) + b"\n")
        one_line(tmp_path / "w.npz", "broken or truncated npz file")

    def test_an_archive_that_unpacks_to_far_more_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(checkpoint_files, "MAX_FREE_BYTES", 2**20)
        np.savez_compressed(tmp_path / "w.npz", a=np.zeros(10_000_000, dtype=np.float32))
        one_line(tmp_path / "w.npz", "the archive would unpack to 0.0 GiB")

    def test_a_pipe_is_refused_before_it_is_opened(self, tmp_path):
        os.mkfifo(tmp_path / "w.pth")
        one_line(tmp_path / "w.pth", "not a regular file")

    def test_a_dictionary_that_holds_itself_ends(self, tmp_path):
        content = {"epoch": 1}
        content["model"] = content
        torch.save(content, tmp_path / "w.pth")
        one_line(tmp_path / "w.pth", "no tensors among its entries epoch, model")

    def test_one_value_repeated_to_gigabytes_is_refused(self, tmp_path):
        torch.save({"patch_embed.proj.weight": torch.zeros(1).expand(2**34)}, tmp_path / "w.pth")
        one_line(tmp_path / "w.pth", "its tensors would expand to 64.0 GiB")

    def test_tensors_without_values_are_refused(self, tmp_path):
        torch.save({"patch_embed.proj.weight": torch.zeros(3, 3, device="meta")}, tmp_path / "w.pth")
        one_line(tmp_path / "w.pth", "'patch_embed.proj.weight' is a meta tensor, not an array of numbers")
        torch.save({"patch_embed.proj.weight": torch.eye(3).to_sparse()}, tmp_path / "sparse.pth")
        one_line(tmp_path / "sparse.pth", "is a torch.sparse_coo tensor|broken")

    def test_an_empty_name_is_not_the_current_folder(self):
        with pytest.raises(CheckpointError, match="the name of the weights is empty"):
            load("")

    def test_a_file_without_tensors_is_said_to_have_none(self, tmp_path):
        torch.save({"epoch": 3}, tmp_path / "w.pth")
        one_line(tmp_path / "w.pth", "no tensors among its entries epoch")
        torch.save([1, 2], tmp_path / "list.pth")
        one_line(tmp_path / "list.pth", "contains a list, not a dictionary of tensors")
        save_file({}, tmp_path / "w.safetensors")
        one_line(tmp_path / "w.safetensors", "contains no tensors")

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["google_vit", "timm_deit_distilled", "timm_registers_placed", "torchvision_vit"])
    @pytest.mark.parametrize("shape", [(), (3,), (2, 2), (1, 1, 3), (1, 0, 32), (1, 2, 3, 4)])
    def test_an_array_of_any_other_shape_never_shows_a_foreign_error(self, name, shape, monkeypatch):
        loading = importlib.import_module("vitruvian.weights.load")  # the package exports its function by this name
        checkpoint = checkpoint_files.read_checkpoint(path_of(name))
        for array in checkpoint.tensors:
            if "block" in array and "0" not in array:
                continue
            changed = dataclasses.replace(checkpoint, tensors=checkpoint.tensors | {array: torch.ones(shape)})
            monkeypatch.setattr(loading, "read_checkpoint", lambda path, changed=changed: changed)
            with pytest.raises(CheckpointError):
                load(path_of(name), num_heads=4)

    def test_arrays_of_the_wrong_rank_are_one_line(self, tmp_path):
        for name in ("embedding/kernel", "Transformer/posembed_input/pos_embedding", "cls", "head/kernel"):
            np.savez(tmp_path / "w.npz", **(arrays_of("google_vit") | {name: np.ones(3, dtype=np.float32)}))
            one_line(tmp_path / "w.npz", "shape")


class TestTorchFiles:
    def test_options_of_the_training_script_do_no_harm(self, tmp_path):
        """Facebook's checkpoints keep an argparse.Namespace beside the weights."""
        content = {"model": load_file(path_of("timm_vit")), "args": argparse.Namespace(lr=0.1), "optimizer": {"a": 1}}
        torch.save(content, tmp_path / "w.pth")
        model = load(tmp_path / "w.pth", num_heads=4)
        assert largest_difference(model, "timm_vit") < TOLERANCE
        assert model.meta.origin.split("; assumed")[0].endswith("not used: args, optimizer")

    def test_the_format_before_zip_archives_is_read(self, tmp_path):
        tensors = torch.load(path_of("torchvision_vit"), weights_only=True)
        torch.save(tensors, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
        assert largest_difference(load(tmp_path / "w.pth", num_heads=4), "torchvision_vit") < TOLERANCE

    def test_the_teacher_comes_before_other_entries(self, tmp_path):
        tensors = load_file(path_of("timm_vit"))
        wrong = {name: tensor + 1 for name, tensor in tensors.items()}
        torch.save({"student": wrong, "model": wrong, "teacher": tensors}, tmp_path / "w.pth")
        assert largest_difference(load(tmp_path / "w.pth", num_heads=4), "timm_vit") < TOLERANCE


class TestFolders:
    def test_sharded_weights_are_put_together(self, tmp_path):
        folder = copy_folder(tmp_path)
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        places = {}
        for part, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
            save_file({name: tensors[name] for name in names}, folder / f"model-{part}.safetensors")
            places |= dict.fromkeys(names, f"model-{part}.safetensors")
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))
        assert largest_difference(load(folder), "huggingface_vit") < TOLERANCE
        (folder / "model-1.safetensors").unlink()
        one_line(folder, r"the part 'model-1.safetensors' is missing")
        index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
        one_line(folder, "is not a file in the directory of the index")
        index.write_text(json.dumps({"weight_map": {"nowhere": "model-0.safetensors"}}))
        one_line(folder, "1 of its tensors are in none of the parts, such as 'nowhere'")
        index.write_text("{}")
        one_line(folder, "'weight_map' is missing")

    def test_a_pytorch_bin_is_read_too(self, tmp_path):
        folder = copy_folder(tmp_path)
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        assert largest_difference(load(folder), "huggingface_vit") < TOLERANCE

    def test_the_weights_file_of_a_folder_stands_for_the_folder(self):
        model = load(path_of("huggingface_vit") / "model.safetensors")
        assert model.meta.labels[0] == "class_0"

    def test_a_folder_without_weights_says_what_it_looked_for(self, tmp_path):
        one_line(tmp_path, r"the folder contains none of model.safetensors, ")

    @pytest.mark.parametrize("content", ["{", "[1]", "\x00\xff", "[" * 100_000, '{"image_size": "large"}'])
    def test_a_broken_config_is_one_line(self, content, tmp_path):
        folder = copy_folder(tmp_path)
        (folder / "config.json").write_text(content)
        one_line(folder, r"config.json")


def kernel_file(path):
    """A Google file of a ViT with 60 MB of kernels, which are stored transposed."""
    model = create_model("ViT-S/16", depth=8, width=400, num_heads=4, mlp_dim=1600, num_classes=10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02)
    save(model, path, "google")
    return model


@pytest.mark.slow
def test_a_changed_byte_of_a_large_array_is_noticed(tmp_path):
    path = tmp_path / "model.npz"
    kernel_file(path)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    one_line(path, "broken or truncated npz file: Bad CRC-32|has another checksum than stated")


PEAK_OF_LOADING = """
import sys
from pathlib import Path
from vitruvian.weights.load import load
import numpy, torch, vitruvian.weights.families.registry

def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))

load(sys.argv[2])  # what the first call imports
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = memory("VmRSS")
model = load(sys.argv[1])
total = sum(float(parameter.detach().sum()) for parameter in model.parameters())  # reads every page
print(memory("VmHWM") - before)
"""


def shard(folder):
    """Split the weights of a folder into three files with an index, as transformers writes large models."""
    tensors, names = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    for part in range(3):
        names |= dict.fromkeys(list(tensors)[part::3], f"model-{part}.safetensors")
        chosen = {name: tensors[name] for name, file in names.items() if file == f"model-{part}.safetensors"}
        save_file(chosen, folder / f"model-{part}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is known on Linux only")
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("model.npz", "google"),
        ("model.safetensors", "timm"),
        ("model.pth", "timm"),
        ("folder", "native"),
        ("folder", "huggingface"),  # whose queries, keys and values are joined
        ("shards", "huggingface"),
    ],
)
def test_loading_takes_the_memory_of_the_file_once(tmp_path, name, family):
    path, tiny = tmp_path / name, tmp_path / f"tiny{Path(name).suffix}"
    save(kernel_file(tmp_path / "source.npz"), path, family)
    save(create_model("ViT-Ti/16", depth=1, width=64, num_heads=1, mlp_dim=16), tiny, family)
    if name == "shards":
        shard(path)
    command = [sys.executable, "-c", PEAK_OF_LOADING, str(path), str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    files = [path] if path.is_file() else path.glob("*.safetensors")
    assert int(done.stdout) < 1.2 * sum(file.stat().st_size for file in files)
