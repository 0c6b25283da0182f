"""Runs `vit` commands with a pretend accelerator: a PyTorch backend whose tensors are held on the CPU.

A tensor of the backend mixed with one of the CPU is an error, as on a GPU. Reads a JSON list of commands from stdin
and prints the exit code and the output of each as JSON. The backend is global, so this is a process of its own.
"""

import io
import json
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

COPIES = ("_to_copy", "copy_", "_copy_from", "_copy_from_and_resize")


class PretendModule(_DummyBackendModule):
    def synchronize(self, device=None):
        pass

    def get_device_name(self, device=None):
        return "Pretend 100"

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


class Held(torch.Tensor):
    """A tensor of the pretend device."""

    @staticmethod
    def __new__(cls, value):
        layout = {"strides": value.stride(), "storage_offset": value.storage_offset(), "dtype": value.dtype}
        held = torch.Tensor._make_wrapper_subclass(cls, value.shape, device="pretend:0", **layout)
        held.value = value
        return held

    def tolist(self):
        return self.value.tolist()

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return compute(op, *args, **(kwargs or {}))


def compute(op, *args, **kwargs):
    values, _ = tree_flatten((args, kwargs))
    foreign = [x for x in values if isinstance(x, torch.Tensor) and not isinstance(x, Held) and x.dim()]
    if foreign and op._schema.name.removeprefix("aten::") not in COPIES and "index" not in op._schema.name:
        raise RuntimeError(f"{op} has tensors of two devices, pretend and cpu")
    device = kwargs.get("device")

    def on_cpu(x):
        is_ours = isinstance(x, torch.device) and x.type == "pretend"
        return x.value if isinstance(x, Held) else torch.device("cpu") if is_ours else x

    args, kwargs = tree_map(on_cpu, (args, kwargs))
    result = op(*args, **kwargs)
    is_read = device is not None and torch.device(device).type == "cpu"
    return result if is_read else tree_map_only(torch.Tensor, Held, result)


def on_device(make):
    """`torch.tensor(values, device=...)`, which PyTorch lacks for backends in Python: made on the CPU, then moved."""
    return lambda *args, device=None, **kwargs: make(*args, **kwargs).to(device or "cpu")


def serve(model, image):
    """Predictions and facts of the service."""
    from fastapi.testclient import TestClient

    from vitruvian.inference import Encoder
    from vitruvian.serve.app import create_app

    app, service = create_app({"tiny": Encoder(model).model}, engine="auto")
    with TestClient(app, base_url="http://localhost") as client:
        service.find_model(None).warm.result()
        for route in ("predict", "explain", "embed"):
            with open(image, "rb") as file:
                print(client.post(f"/{route}", files={"image": file}).text)
        print(client.get("/models").text)


def run(command):
    from vitruvian.cli.app import main

    out, err, code = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO()), 0
    sys.argv = ["vit", *command]
    with redirect_stdout(out), redirect_stderr(err):
        try:
            serve(*command[1:]) if command[0] == "serve-in-process" else main()
        except SystemExit as end:
            code = end.code
        except Exception:
            traceback.print_exc()
            code = 3
    for stream in (out, err):
        stream.flush()
    return code, *(stream.buffer.getvalue().decode() for stream in (out, err))


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend("pretend", PretendModule())
    library = torch.library.Library("_", "IMPL", "PrivateUse1")
    library.fallback(compute, "PrivateUse1")
    autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # nothing is cast
    torch.tensor, torch.as_tensor = on_device(torch.tensor), on_device(torch.as_tensor)
    print(json.dumps([run(command) for command in json.load(sys.stdin)]))
