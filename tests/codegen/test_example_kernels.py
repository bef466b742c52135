"""The kernels of the examples with a folder of their own compile for every target, and their loads are wide."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from codegen.offline import TARGETS, compile_for, targets_by_turns
from codegen.operations import is_data
from iris.ops.hopper.arguments import tensor_map

EXAMPLES = Path(__file__).parents[2] / "examples"

DTYPES = (torch.bfloat16, torch.float32, torch.int32, torch.int64)
BF16, FP32, INT32, INT64 = (torch.zeros(4096, dtype=dtype) for dtype in DTYPES)
SQUARE = torch.empty(4096, 4096, dtype=torch.bfloat16)
# An argument for each parameter that a GEMM has: matrices by rows, all multiples of 16.
GEMM = {
    **{"context_tensor": INT64, "W": 4},
    **dict.fromkeys(["a", "b", "c"], BF16),
    **dict.fromkeys(["M", "N", "K", "stride_am", "stride_bk", "stride_cm"], 4096),
    **dict.fromkeys(["stride_ak", "stride_bn", "stride_cn"], 1),
    **{"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64},
}
# By folder: what its kernels take besides, or otherwise.
ARGUMENTS = {
    "07_gemm_all_scatter": {},
    "07_gemm_all_scatter/gluon": {"a": tensor_map(SQUARE, [64, 64]), "b": tensor_map(SQUARE, [64, 256]), "STAGES": 3},
    "08_gemm_all_reduce_atomics": {"sums": FP32, "arrived": INT32, "epochs": INT32, "GROUP_M": 8},
    "09_gemm_one_shot_all_reduce": {"part": BF16, "flags": INT32, "GROUP_M": 8},
    "10_gemm_all_scatter_wg_specialization": {"finished": INT32, "meetings": INT32, "epochs": INT32, "SENDERS": 16},
    "11_gemm_all_scatter_producer_consumer": {"finished": INT32, "meetings": INT32, "epochs": INT32},
    "12_gemm_all_scatter_bulk_synchronous": {},
    "13_flash_decode": {
        **dict.fromkeys(["epochs", "ended", "arrived"], INT64),
        **dict.fromkeys(["q", "k", "v", "out"], BF16),
        **dict.fromkeys(["partial", "gathered", "share"], FP32),
        **{"lengths": INT32, "pairs": 64, "capacity": 16384, "scale": 0.1},
        **{"GROUP": 4, "DIM": 128, "KV_HEADS": 8, "CHUNKS": 2, "BLOCK": 128},
    },
    "14_all_gather_gemm": {
        **{"gathered": BF16, "arrived": INT32, "epochs": INT32, "m": 4096, "SENDERS": 16, "SEND_K": 128},
    },
    "15_ring_attention": {
        **dict.fromkeys(["epochs", "tickets", "arrived", "freed"], INT64),
        **dict.fromkeys(["q", "k", "v", "out", "blocks"], BF16),
        **dict.fromkeys(["totals", "highests", "weights"], FP32),
        **{"heads": 16, "length": 2048, "scale": 0.1, "rank": 3, "first_step": 0, "steps": 4},
        **{"stride_owner": 16 * 4096 * 128, "DIM": 128, "CAUSAL": True, "FIRST": True, "LAST": True},
        **{"SLOTS": 8, "SENDERS": 16, "SEND_M": 64, "BLOCK_N": 64},
    },
    "16_moe_dispatch_combine": {
        **dict.fromkeys(["x", "inbox", "weights", "results", "out"], BF16),
        **dict.fromkeys(["experts", "order", "rows", "tallies", "tallied", "table", "counted", "epochs"], INT32),
        **{"counts": INT32, "stride_counts": 32, "gates": torch.zeros(4096), "T": 4096, "H": 2048, "E": 32},
        **{"EXPERTS": 32, "LOCAL": 8, "TOP": 2, "PAIRS": 64, "BLOCK_T": 4, "BLOCK_H": 1024},
    },
}
# For one GPU alone.
ONLY = {"07_gemm_all_scatter/gluon": ("sm_90",)}


def kernels():
    """What each kernel.py launches: jitted functions whose parameters all have an argument."""
    for folder, own in ARGUMENTS.items():
        file = EXAMPLES / folder / "kernel.py"
        spec = importlib.util.spec_from_file_location(folder, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[folder] = module
        spec.loader.exec_module(module)
        for name, value in vars(module).items():
            if isinstance(value, (JITFunction, GluonJITFunction)) and not name.startswith("_"):
                if Path(value.fn.__code__.co_filename) == file:
                    yield pytest.param(value, GEMM | own, ONLY.get(folder, tuple(TARGETS)), id=f"{folder}:{name}")


def with_targets():
    for number, kernel in enumerate(kernels()):
        for target in targets_by_turns(number):
            if target in kernel.values[2]:
                yield pytest.param(target, *kernel.values[:2], id=f"{target}-{kernel.id}")


@pytest.mark.parametrize(("target", "kernel", "arguments"), with_targets())
def test_kernel(target, kernel, arguments):
    compiled = compile_for(target, kernel, *[arguments[name] for name in kernel.arg_names])
    assert any(map(is_data, compiled.operations()))
