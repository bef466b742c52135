"""The fused operations in Triton multiply each dtype by the matrix cores of each target that has them for it."""

import pytest
import torch
from covering import EVERYTHING, thorough

from codegen.offline import compile_for
from codegen.test_every_kernel import arguments_of
from iris.ops.all_gather_matmul import all_gather_matmul
from iris.ops.choose import by_triton
from iris.ops.matmul_all_gather import matmul_all_gather
from iris.ops.matmul_reduce import matmul_reduce
from iris.ops.portable import TritonKernels

SCALES, BF16 = torch.zeros(4096), torch.zeros(4096, dtype=torch.bfloat16)
# CDNA3 has formats of fp8 of its own, and takes others to fp16.
INSTRUCTIONS = {
    ("sm_90", torch.float8_e4m3fn): ".f32.e4m3.e4m3",
    ("sm_90", torch.float8_e5m2): ".f32.e5m2.e5m2",
    ("sm_90", torch.float32): ".f32.tf32.tf32",
    ("gfx942", torch.float8_e4m3fn): "v_mfma_f32_32x32x8_f16",
    ("gfx942", torch.float8_e4m3fnuz): "v_mfma_f32_32x32x16_fp8_fp8",
    ("gfx942", torch.float8_e5m2fnuz): "v_mfma_f32_32x32x16_bf8_bf8",
    ("gfx950", torch.float8_e4m3fn): "v_mfma_f32_32x32x64_f8f6f4",
    ("gfx950", torch.float8_e5m2): "v_mfma_f32_32x32x64_f8f6f4",
}


KERNELS = [all_gather_matmul, matmul_all_gather, matmul_reduce]
# The kernels by turns, and in `make test-all` each with all.
CASES = [
    pytest.param(*case, kernel, id=f"{case[0]}-{case[1]}-{kernel.fn.__name__}")
    for number, case in enumerate(INSTRUCTIONS)
    for turn, kernel in enumerate(KERNELS)
    if EVERYTHING or number % len(KERNELS) == turn
]


# The dtypes that are multiplied with factors.
SCALED = list(dict.fromkeys(dtype for _, dtype in INSTRUCTIONS))


def arguments(kernel, dtype):
    """Of a product of this dtype with factors, B by columns."""
    given = dict.fromkeys(["a", "b", "gathered"], torch.zeros(4096).to(dtype)) | {"out": BF16, "parts": BF16}
    given |= {"scale_a": SCALES, "scale_b": SCALES, "SCALED": True, "BLOCK_K": 32 if dtype == torch.float32 else 64}
    return arguments_of(kernel, **given, stride_bk=1, stride_bn=4096)


@pytest.mark.parametrize(("target", "dtype", "kernel"), CASES if EVERYTHING else CASES[::2])
def test_products(target, dtype, kernel):
    code = compile_for(target, kernel, *arguments(kernel, dtype), num_warps=8, num_stages=2)
    assert INSTRUCTIONS[target, dtype] in code.text
    if target == "sm_90" and dtype.itemsize == 1:
        # The tensor cores add up a step from zero, and float32 the steps: as many additions as a thread has sums.
        assert code.text.count("add.f32") >= 256 * 64 // 256


# Bytes that a program may have: of H100 and H200, and of MI300.
SHARED_MEMORY = {"sm_90": 227 << 10, "gfx942": 64 << 10}
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]


def as_chosen(kernel, dtype):
    """Arguments and options of a product of this dtype, with what is chosen for a GPU (of `torch.version.hip`)."""
    config = by_triton(dtype.itemsize, on_gpu=True)
    a, out = torch.zeros(4096).to(dtype), torch.zeros(4096, dtype=dtype if dtype.itemsize > 1 else torch.bfloat16)
    given = dict.fromkeys(["a", "b", "gathered"], a) | {"out": out, "parts": out}
    given |= {"BLOCK_M": config.block_size_m, "BLOCK_N": config.block_size_n}
    given |= {"BLOCK_K": config.block_size_k * 2 // max(2, dtype.itemsize)}
    return arguments_of(kernel, **given), TritonKernels.options(config)


@pytest.mark.parametrize("kernel", [KERNELS[0], *map(thorough, KERNELS[1:])], ids=lambda kernel: kernel.fn.__name__)
@pytest.mark.parametrize(
    "target, dtype", [(target, dtype) for dtype in DTYPES for target in SHARED_MEMORY][: None if EVERYTHING else 1]
)
def test_what_is_chosen_fits_shared_memory(target, dtype, kernel, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0" if target.startswith("gfx") else None)
    arguments, options = as_chosen(kernel, dtype)
    code = compile_for(target, kernel, *arguments, **options)
    assert code.shared <= SHARED_MEMORY[target]
