"""What the examples launch compiles for every target, fits its shared memory, and moves 16 bytes at a time.

Their own wrappers launch it, with their tiles, warps and stages, on a GPU that is not there: kernels and arguments are
only written down. Tensors are without memory, so sizes are those of real use.
"""

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from covering import EVERYTHING
from triton.runtime.jit import JITFunction, KernelInterface

from codegen.offline import TARGETS, compile_for, targets_by_turns
from codegen.operations import is_data

EXAMPLES = Path(__file__).parents[2] / "examples"
# Bytes that a program may have: of H100 and H200, B200, MI300 and MI350.
SHARED_MEMORY = {"sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
W = 4


class Context:
    """What the wrappers ask an Iris context for."""

    device = torch.device("meta")

    def __init__(self, multiprocessors):
        self.multiprocessors = multiprocessors

    def get_rank(self):
        return 1

    def get_num_ranks(self):
        return W

    def get_cu_count(self):
        return self.multiprocessors

    def get_device_context(self):
        return tensor(64, dtype=torch.int64)

    def empty(self, *size, dtype=torch.float32):
        return tensor(*size, dtype=dtype)

    zeros = empty

    def is_symmetric(self, tensor):
        return True

    def barrier(self):
        pass

    device_barrier = barrier


class Launch(NamedTuple):
    kernel: KernelInterface
    grid: tuple
    arguments: tuple
    options: dict

    @property
    def name(self):
        return self.kernel.fn.__name__


def tensor(*size, dtype=torch.bfloat16):
    return torch.empty(*size, dtype=dtype, device="meta")


def launches(folder, call, multiprocessors=132, target="sm_90"):
    """What ``call`` has the folder's wrapper launch on such a GPU."""
    written = []

    def write_down(kernel, grid):
        return lambda *arguments, **options: written.append(Launch(kernel, grid, arguments, options))

    with (
        mock.patch.object(torch.version, "hip", "a version" if target.startswith("gfx") else None),
        mock.patch.multiple(torch.cuda, Stream=mock.DEFAULT, stream=mock.DEFAULT, current_stream=mock.DEFAULT),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (10 if target == "sm_100" else 9, 0)),
        mock.patch.multiple(torch.distributed, all_gather_into_tensor=mock.DEFAULT),
        mock.patch.object(KernelInterface, "__getitem__", write_down),
        mock.patch.object(sys, "path", [str(EXAMPLES / folder), str(EXAMPLES), *sys.path]),
    ):
        # Neighbours of other examples have these names too.
        for name in ("kernel", "wrapper"):
            sys.modules.pop(name, None)
        call(importlib.import_module("wrapper"), Context(multiprocessors))
    return written


def all_scatter(wrapper, ctx, M=8192, N=4608, K=36864):
    wrapper.matmul_all_scatter(ctx, tensor(M, N), tensor(M, K), tensor(K, N // W))


def all_reduce(wrapper, ctx, *of_parts, M=4096, N=8192, K=14336):
    workspace = wrapper.Workspace(ctx, M, N, *of_parts)
    wrapper.matmul_all_reduce(ctx, tensor(M, N), tensor(M, K // W), tensor(K // W, N), workspace)


def one_shot(wrapper, ctx):
    all_reduce(wrapper, ctx, torch.bfloat16)


def decode(wrapper, ctx, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, forms=(True, False)):
    batch, capacity = 8, 8192
    q, k = tensor(batch, heads, dim, dtype=dtype), tensor(batch, kv_heads, capacity, dim, dtype=dtype)
    for fused in forms:
        flash_decode = wrapper.FlashDecode(ctx, batch, heads, kv_heads, dim, capacity, dtype, fused)
        flash_decode(q, q, k, k, tensor(batch, dtype=torch.int32))


def all_gather(wrapper, ctx, M=8192, N=2048, K=8192):
    b, c = tensor(K, N), tensor(M, N)
    wrapper.all_gather_matmul_by_pull(ctx, c, tensor(M // W, K), b)
    wrapper.all_gather_matmul_by_push(ctx, c, b, wrapper.Workspace(ctx, M // W, K, b.dtype))


def ring(wrapper, ctx, heads=16, length=2048, dim=128, dtype=torch.bfloat16):
    q, sizes = tensor(heads, 2, length, dim, dtype=dtype), (ctx, heads, length, dim, dtype)
    wrapper.RingAttention(*sizes)(q, q, q, q)
    wrapper.GatherThenAttend(*sizes)(q, q, q, q)


CALLS = [
    # First, and so for gfx942, whose shared memory its tiles of float32 fill.
    ("08_gemm_all_reduce_atomics", all_reduce),
    ("07_gemm_all_scatter/gluon", all_scatter),
    ("07_gemm_all_scatter", all_scatter),
    ("09_gemm_one_shot_all_reduce", one_shot),
    ("10_gemm_all_scatter_wg_specialization", all_scatter),
    ("11_gemm_all_scatter_producer_consumer", all_scatter),
    ("12_gemm_all_scatter_bulk_synchronous", all_scatter),
    ("13_flash_decode", decode),
    ("14_all_gather_gemm", all_gather),
    ("15_ring_attention", ring),
    # Multi-head latent attention: many wide heads to one of keys and values.
    ("13_flash_decode", partial(decode, heads=128, kv_heads=1, dim=576, forms=[True])),
]
# Where keys take most of the memory, and where the weights do.
LARGE = [
    ("13_flash_decode", partial(decode, heads=128, kv_heads=1, dim=32, dtype=torch.float32, forms=[True])),
    ("15_ring_attention", partial(ring, dim=1024)),
    ("15_ring_attention", partial(ring, dim=32, dtype=torch.float32)),
]
# For one GPU alone.
ONLY = {"07_gemm_all_scatter/gluon": ("sm_90",)}


def kernels():
    """Each kernel of each call, for the targets whose turn it is."""
    number = 0
    for folder, call in CALLS + (LARGE if EVERYTHING else []):
        by_target = {target: launches(folder, call, target=target) for target in ONLY.get(folder, TARGETS)}
        for at, launch in enumerate(by_target["sm_90"]):
            for target in targets_by_turns(number):
                if target in by_target:
                    yield pytest.param(target, by_target[target][at], id=f"{target}-{folder}:{launch.name}")
            number += 1


@pytest.mark.parametrize(("target", "launch"), list(kernels()))
def test_kernel(target, launch):
    compiled = compile_for(target, launch.kernel, *launch.arguments, **launch.options)
    assert any(map(is_data, compiled.operations()))
    assert compiled.shared <= SHARED_MEMORY[target]


@pytest.mark.parametrize("folder", dict(CALLS))
def test_every_kernel_is_launched(folder):
    written = [launch for example, call in CALLS if example == folder for launch in launches(example, call)]
    own = written[0].kernel.fn
    assert {launch.name for launch in written} == {
        name
        for name, value in own.__globals__.items()
        if isinstance(value, JITFunction) and value.fn.__code__.co_filename == own.__code__.co_filename
        if not name.startswith("_")
    }


FEW = pytest.mark.parametrize("multiprocessors", [2, 14, 16, 20])


@FEW
@pytest.mark.parametrize(
    ("folder", "call"),
    [
        ("10_gemm_all_scatter_wg_specialization", all_scatter),
        ("14_all_gather_gemm", all_gather),
        ("15_ring_attention", ring),
    ],
)
def test_few_programs_have_both_roles(folder, call, multiprocessors):
    (launch,) = [each for each in launches(folder, call, multiprocessors) if "SENDERS" in each.kernel.arg_names]
    senders = launch.arguments[launch.kernel.arg_names.index("SENDERS")]
    assert 0 < senders < launch.grid[0] <= multiprocessors


@FEW
def test_two_kernels_fit_few_multiprocessors(multiprocessors):
    producer, consumer = launches("11_gemm_all_scatter_producer_consumer", all_scatter, multiprocessors)
    assert producer.grid[0] > 0 < consumer.grid[0]
    assert producer.grid[0] + consumer.grid[0] <= multiprocessors


def test_two_kernels_need_two_multiprocessors():
    with pytest.raises(ValueError, match="this GPU has one multiprocessor"):
        launches("11_gemm_all_scatter_producer_consumer", all_scatter, multiprocessors=1)
