"""Every kernel of the repository compiles for every target, with wide accesses and ordered releases."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from codegen.offline import TARGETS, compile_for
from codegen.operations import is_barrier, is_data, releases

ROOT = Path(__file__).parents[2]
# Where kernels are defined, and the folder from which the file imports its neighbours.
FILES = [
    *(ROOT / "iris").rglob("*.py"),
    *(ROOT / "examples").rglob("*.py"),
    *(ROOT / "benchmarks").rglob("*.py"),
]

# An argument for each parameter that a kernel may have.
INT32, INT64, FLOAT32 = (torch.zeros(4096, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.float32))
ARGUMENTS = {
    "context_tensor": INT64,
    "heap_bases": INT64,
    **dict.fromkeys(["source", "target", "inbox", "result", "slots", "remote_target"], FLOAT32),
    **dict.fromkeys(["flag", "flags", "full", "taken", "arrived", "counter"], INT32),
    **dict.fromkeys(["links", "out"], INT64),
    **dict.fromkeys(["n", "times", "steps", "rounds"], 4096),
    **dict.fromkeys(["rank", "peer", "num_ranks", "round", "first"], 3),
    "BLOCK": 2048,
    "VECTOR": 4,
}
# A link's chain is followed, and counters counted, one element at a time.
SCALAR = {"ping_pong", "chase", "count_up", "count", "_barrier_kernel"}


def load(file):
    if ROOT / "iris" in file.parents:
        return importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    sys.path.insert(0, str(file.parent))
    try:
        spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}".replace("-", "_"), file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(file.parent))


def kernels():
    """The kernels that each file defines: jitted functions that are launched, not called from others."""
    for file in FILES:
        text = file.read_text()
        if "jit" not in text or file.name == "__main__.py" or "language" in file.parts:
            continue
        module = load(file)
        for name, value in vars(module).items():
            if isinstance(value, (JITFunction, GluonJITFunction)) and Path(value.fn.__code__.co_filename) == file:
                yield pytest.param(value, id=f"{file.relative_to(ROOT)}:{name}")


@pytest.mark.parametrize("kernel", list(kernels()))
@pytest.mark.parametrize("target", TARGETS)
def test_kernel(target, kernel):
    arguments = ARGUMENTS | ({"counter": INT64} if kernel.fn.__name__ == "count_up" else {})
    compiled = compile_for(target, kernel, *[arguments[name] for name in kernel.arg_names])
    operations = compiled.operations()
    if kernel.fn.__name__ not in SCALAR:
        assert any(map(is_data, operations)), operations
    for release in releases(operations):
        before = operations[:release]
        stores = [i for i, each in enumerate(before) if is_data(each) and "st" in each]
        assert any(map(is_barrier, before[stores[-1] + 1 if stores else 0 :])), operations


def test_no_kernel_is_missing():
    """The examples, the benchmarks, the demo and the library have kernels of their own, and they were found."""
    found = [str(parameter.id) for parameter in kernels()]
    for place in ("iris/device_barrier", "iris/demo", "examples/01_store", "examples/06_message", "benchmarks/"):
        assert any(each.startswith(place) for each in found), (place, found)
