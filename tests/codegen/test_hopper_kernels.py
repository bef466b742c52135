"""The fused operations' Gluon kernels compile for Hopper, to what their description says of them."""

import contextlib
import re

import pytest
import torch
from covering import covering
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from codegen.offline import by_turns, compile_for
from iris.ops.hopper.all_gather_matmul import hopper_all_gather_matmul, start
from iris.ops.hopper.arguments import tensor_map
from iris.ops.hopper.matmul_all_gather import hopper_matmul_all_gather
from iris.ops.hopper.matmul_reduce import hopper_matmul_reduce
from iris.ops.hopper.pipeline import PANEL
from iris.ops.hopper.writer import STRIP
from iris.ops.kernel_arguments import (
    Channel,
    Epilogue,
    Extents,
    HopperTiling,
    SplitTiles,
    by_name,
    matrix,
)

NAMES = ["all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce"]
W, M, N, K = 4, 4096, 2048, 1024
INT64, INT32 = torch.zeros(16, dtype=torch.int64), torch.zeros(4096, dtype=torch.int32)


def peers(matrix):
    block = [1, STRIP.value, PANEL.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(matrix, [100, *matrix.shape], [1 << 20, matrix.stride(0), 1], block, layout)


def arguments(name, tile, by_columns, split, dtype=torch.bfloat16, lines=(False, False)):
    (rows, columns), depth = tile, 128 // dtype.itemsize
    own, all_rows = torch.empty(M, K, dtype=dtype), torch.empty(W * M, K, dtype=dtype)
    narrow = dtype.itemsize == 1
    a_by_columns = by_columns and not narrow and name != "all_gather_matmul"
    a = torch.empty(K, M, dtype=dtype).t() if a_by_columns else own
    b = torch.empty(N, K, dtype=dtype).t() if by_columns else torch.empty(K, N, dtype=dtype)
    bias, out = torch.empty(N, dtype=torch.bfloat16), torch.empty(W * M, N, dtype=torch.bfloat16)
    tiling = HopperTiling(
        *tile,
        STAGES=3,
        GROUP=8,
        TRANS_A=a_by_columns,
        TRANS_B=by_columns,
        SCALE_A_PER_ROW=lines[0],
        SCALE_B_PER_COLUMN=lines[1],
        SPLIT=split,
        ALL_REDUCE=name == "matmul_all_reduce",
        PACED=name == "matmul_all_gather" and not split,
    )
    given = {
        "channel": Channel(INT64, INT32),
        "tensor_map_a": tensor_map(a, [rows // 2, depth]),
        "tensor_map_b": tensor_map(b, [depth, columns]),
        "epilogue": Epilogue(bias, *((torch.empty(W * M), torch.empty(N)) if narrow else (None, None))),
        **{"W": W, "TILING": tiling},
    }
    if "reduce" in name:
        given |= {"out_context": INT64, "parts_places": INT32, "out": matrix(out)}
        given |= {"M": M, "share": M // W, "extents": Extents(N, K)}
        maps = {"tensor_map_parts": peers(out), "tensor_map_peers": peers(out)}
        return hopper_matmul_reduce, by_name(hopper_matmul_reduce, **given, **maps)
    given |= {"split_tiles": SplitTiles(torch.empty(1 << 20), INT32), "splits": 3, "last": 5}
    if name == "matmul_all_gather":
        given |= {"tensor_map_peers": peers(out), "places": INT32, "M": M, "N": N, "K": K}
        return hopper_matmul_all_gather, by_name(hopper_matmul_all_gather, **given)
    given |= {"out": matrix(out), "m": M, "together": 2, "extents": Extents(N, K, 1024)}
    gathered = tensor_map(all_rows, [rows // 2, depth])
    return hopper_all_gather_matmul, by_name(hopper_all_gather_matmul, tensor_map_gathered=gathered, **given)


CASES = covering(NAMES, [(128, 256), (128, 64), (256, 128)], [False, True], [False, True])
CASES_OF_FP8 = covering(NAMES, [(128, 128), (128, 64)], [(True, True), (True, False)])


def of_fp8(name, tile, lines):
    return arguments(name, tile, True, "gather" in name, torch.float8_e4m3fn, lines)


@pytest.mark.parametrize(("name", "tile", "by_columns", "split"), by_turns(CASES))
def test_fused_operations(name, tile, by_columns, split):
    kernel, given = arguments(name, tile, by_columns, split)
    text = compile_for("sm_90", kernel, *given, num_warps=4).text
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor.2d.shared" in text and "setmaxnreg" in text
    # What goes to peers goes by TMA, and is waited for until it is there.
    sends = name != "all_gather_matmul"
    assert ("cp.async.bulk.tensor.3d.global" in text) == ("cp.async.bulk.wait_group 0" in text) == sends
    assert ("fence.proxy.async;" in text) == (name != "matmul_all_gather")
    # TMA finds what was stored to shared memory: the barriers, and the products of each multiplier.
    assert text.count("fence.proxy.async.shared::cta") >= 3
    # What is stored from registers, is 16 bytes at a time: sums, what stays here, what a split hands over.
    split = split and "reduce" not in name
    assert ("st.global.v4.b32" in text) == (name != "matmul_all_gather" or split)
    # Each of 128 threads of a multiplier: its products of half a tile.
    of_splits = tile[0] // 2 * tile[1] // 128 // 4
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) >= (2 * of_splits if split else 0)
    assert not split or "global.v2" not in text
    # Who sends and is done takes the next by a ticket: programs their tiles, and adders their panels.
    assert text.count("atom.global.gpu.relaxed.add.u32") == (2 if "reduce" in name else 1 if sends else 0)
    assert ("%clock64" in text) == (name == "matmul_all_gather" and not split)
    assert ("cp.async.bulk.tensor.3d.shared" in text) == ("reduce" in name)
    memory = [line for line in text.splitlines() if re.search(r"\b(ld|st|atom|red)\.(?!param|shared)|griddep", line)]
    assert ["griddepcontrol.wait" in line for line in memory] == [True] + [False] * (len(memory) - 1)


@pytest.mark.parametrize(("name", "tile", "lines"), by_turns(CASES_OF_FP8))
def test_fused_operations_of_fp8(name, tile, lines):
    kernel, given = of_fp8(name, tile, lines)
    text = compile_for("sm_90", kernel, *given, num_warps=4).text
    products = re.findall(rf"wgmma\.mma_async\S*m64n{tile[1]}k32\.f32\.e4m3\.e4m3 .*, (\S+), 1, 1;", text)
    # Two multipliers: of a stage's four products the first begins with zero, and is waited for with the others.
    assert [product == "0" for product in products] == [True, False, False, False] * 2
    assert text.count("wgmma.wait_group.sync.aligned 0;") == 2
    # What comes of a stage is added up by each thread of a multiplier.
    assert len(re.findall(r"add\.f32|add\.rn\.f32", text)) >= 2 * tile[0] // 2 * tile[1] // 128


def test_the_start_of_a_call_waits_for_the_launch_before_it():
    text = compile_for("sm_90", start, INT64, INT32, W, num_warps=1).text
    memory = [line for line in text.splitlines() if re.search(r"\b(ld|st|atom|red)\.(?!param|shared)|griddep", line)]
    assert "griddepcontrol.wait" in memory[0] and any("release" in line for line in memory)


@gluon.jit
def kernel_with_barrier(count, out, USED: gl.constexpr, INVALIDATED: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    if INVALIDATED:
        mbarrier.invalidate(barrier)
        another = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(another, count=1)
        mbarrier.invalidate(another)
    # One thread counts, and hands the number to the others through shared memory.
    number = gl.atomic_add(count, 1)
    if USED:
        mbarrier.arrive(barrier, count=1)
        mbarrier.wait(barrier, 0)
    gl.store(out + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])), number)


@pytest.mark.parametrize(("used", "invalidated"), [(True, False), (False, True), (False, False)])
def test_memory_of_a_barrier_that_nobody_uses_is_found_to_be_used_otherwise(used, invalidated):
    """By the check of `compile_for`, which all kernels undergo; not after the barrier's end."""
    right = used or invalidated
    with contextlib.nullcontext() if right else pytest.raises(AssertionError, match="a barrier's memory"):
        compiled = compile_for("sm_90", kernel_with_barrier, INT32, INT32, used, invalidated, num_warps=4)
    if invalidated:
        places = re.findall(r"mbarrier\.init\S* \[(\S+?)\]", compiled.text)
        assert len(places) == 2, "two barriers, of which"
        assert len(set(places)) == 1, "the second is where the first was"
