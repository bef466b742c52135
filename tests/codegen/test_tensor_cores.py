"""The kernels that tests/simulator runs are Gluon that compiles, to the instructions that they are about."""

import pytest
import torch
from simulator import cdna_kernels, hopper_kernels, hopper_matmuls

from codegen.offline import compile_for

M, N, K = 4096, 2048, 1024
NEWER = hasattr(hopper_kernels.tma, "async_load")


def compiled(target, launch):
    kernel, _, arguments, options = launch
    return compile_for(target, kernel, *arguments, **options).text


def operands(dtype):
    return torch.empty(M, K, dtype=dtype), torch.empty(N, K, dtype=dtype), torch.empty(M, N, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("launch", [hopper_matmuls.launch_matmul, hopper_matmuls.launch_specialized_matmul])
def test_products_on_hopper(launch, dtype):
    text = compiled("sm_90", launch(*operands(dtype)))
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor.2d.shared" in text and "mbarrier.try_wait" in text


FORGOTTEN = {
    hopper_matmuls.launch_matmul: ["load", "product", "result", "store"],
    hopper_matmuls.launch_specialized_matmul: ["arrive", "expect", "order"],
}


@pytest.mark.parametrize("launch, forget", [(launch, name) for launch, names in FORGOTTEN.items() for name in names])
def test_what_is_forgotten_is_nothing_that_the_compiler_sees(launch, forget):
    assert compiled("sm_90", launch(*operands(torch.bfloat16))) != compiled(
        "sm_90", launch(*operands(torch.bfloat16), FORGET=forget)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e5m2, torch.int32])
def test_copies_on_hopper(dtype):
    source, target = torch.empty(M, N, dtype=dtype), torch.empty(M, N, dtype=dtype)
    text = compiled("sm_90", hopper_kernels.launch_copy(source, target))
    assert "cp.async.bulk.tensor.2d.shared" in text and "cp.async.bulk.tensor.2d.global" in text


TILES = [64, 32], [32, 64], [64, 64]
BLOCK = hopper_kernels.descriptor(torch.empty(64, 64, dtype=torch.int32), [8, 16])
LINE, ONE = torch.empty(4096), torch.empty(1, dtype=torch.int32)
A, B, C = (hopper_kernels.descriptor(torch.empty(shape, dtype=torch.bfloat16), shape) for shape in TILES)
SMALL = {
    "read_block": ((BLOCK, ONE, 0, 0, 8, 16), "mbarrier.arrive.expect_tx"),
    "write_block": ((BLOCK, ONE, ONE, 0, 0, 8, 16, "read"), "cp.async.bulk.wait_group.read"),
    "read_block_of": ((LINE, ONE, 64, 64, 0, 0, 8, 16), "tensormap.replace"),
    "write_twice": ((BLOCK, ONE, 8, 16, "load"), "cp.async.bulk.tensor.2d.shared"),
    "hand_over": ((LINE,), "mbarrier.try_wait"),
    "hand_to_tma": ((BLOCK, "reader"), "fence.proxy.async"),
    "phases": ((ONE, 2), "mbarrier.arrive"),
    "misused": (("often",), "mbarrier.arrive"),
    "product of shared memory": ((A, B, C, 64, 64, 32, False, True), "wgmma.mma_async"),
    "product of registers": ((A, B, C, 64, 64, 32, True, False), "wgmma.mma_async"),
    "copy_by_threads": ((LINE, LINE, 4096, 128, False), "cp.async.wait_group"),
    "copy_by_threads with a barrier": ((LINE, LINE, 4096, 128, True), "cp.async.mbarrier.arrive"),
}
if NEWER:
    SMALL["write_block visibly"] = ((BLOCK, ONE, ONE, 0, 0, 8, 16, "visible"), "cp.async.bulk.wait_group \t")
    SMALL["write_block adding"] = ((BLOCK, ONE, ONE, 0, 0, 8, 16, "add"), "cp.reduce.async.bulk.tensor")


@pytest.mark.parametrize("name", SMALL)
def test_single_operations_on_hopper(name):
    arguments, instruction = SMALL[name]
    kernels = hopper_matmuls if name.startswith("product") else hopper_kernels
    text = compiled("sm_90", (getattr(kernels, name.split()[0]), None, arguments, {}))
    assert instruction in text


@pytest.mark.parametrize("target, version, direct", [("gfx942", 3, False), ("gfx950", 4, False), ("gfx950", 4, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "fp8"])
def test_products_on_cdna(target, version, direct, dtype):
    if dtype == "fp8":  # each generation's own
        dtype = {3: torch.float8_e4m3fnuz, 4: torch.float8_e4m3fn}[version]
    text = compiled(target, cdna_kernels.launch_matmul(*operands(dtype), version, direct))
    assert "v_mfma_f32_32x32x" in text
    assert ("lds" in "".join(line for line in text.splitlines() if "buffer_load" in line)) == direct


@pytest.mark.parametrize("other", [0.0, None])
def test_a_copy_past_registers_on_cdna4(other):
    launch = (cdna_kernels.copy_past_registers, None, (LINE, LINE, 4096, 1024), {"OTHER": other})
    assert "global_load_lds_dwordx4" in compiled("gfx950", launch)


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_a_masked_buffer_load_on_cdna(target):
    text = compiled(target, (cdna_kernels.load_past_the_end, None, (LINE, LINE, 4096, 1024), {}))
    assert "buffer_load_dwordx4" in text and "buffer_store_dwordx4" in text


@pytest.mark.parametrize("a, b", [("e4m3", "e5m2"), ("e2m1", "e4m3")])
def test_a_product_with_factors_on_cdna4(a, b):
    stored = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}
    exponents = torch.empty(4096, dtype=torch.uint8)
    pointers = (torch.empty(1, dtype=stored[a]), exponents, torch.empty(1, dtype=stored[b]), exponents, LINE)
    launch = (cdna_kernels.mfma_scaled, None, (*pointers, a, b, 64, 32, 128), {"num_warps": 2})
    assert "v_mfma_scale_f32_32x32x64" in compiled("gfx950", launch)


@pytest.mark.skipif(not NEWER, reason="this Triton has neither slices of registers nor hints")
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_a_slice_of_registers_and_a_hint_on_cdna(target):
    assert "global_store" in compiled(target, (cdna_kernels.lower_half, None, (LINE, LINE), {}))


def test_the_compiler_fences_nothing_between_partitions():
    """The simulator therefore says that it is missing."""
    assert "fence.proxy.async" not in compiled("sm_90", (hopper_kernels.hand_to_tma, None, (BLOCK, ""), {}))
