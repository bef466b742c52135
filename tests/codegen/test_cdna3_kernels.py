"""The fused operations' Gluon kernels compile for CDNA3 and CDNA4, to what their description says of them."""

import re

import pytest
import torch
from covering import EVERYTHING, covering

from codegen.offline import by_turns, compile_for
from iris.ops.cdna3.all_gather_matmul import cdna3_all_gather_matmul
from iris.ops.cdna3.arguments import SHARED_MEMORY
from iris.ops.cdna3.matmul_all_gather import cdna3_matmul_all_gather
from iris.ops.cdna3.matmul_reduce import cdna3_matmul_reduce
from iris.ops.cdna3.product import WARPS
from iris.ops.kernel_arguments import Cdna3Tiling, Channel, Matrix, by_name

NAMES = ["all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce"]
LARGEST = (256, 256, 64)
TILES = [(256, 64, 64), (256, 128, 64), LARGEST, (128, 128, 128), (64, 256, 64)]
# Whether A and B lie by rows.
LINES = [(True, False), (False, True), (True, True)]
W, N = 4, 4096
INT64, INT32 = torch.zeros(16, dtype=torch.int64), torch.zeros(4096, dtype=torch.int32)
INSTRUCTIONS = {
    ("gfx942", torch.bfloat16): "v_mfma_f32_16x16x16_bf16",
    ("gfx942", torch.float16): "v_mfma_f32_16x16x16_f16",
    ("gfx950", torch.bfloat16): "v_mfma_f32_16x16x32_bf16",
    ("gfx950", torch.float16): "v_mfma_f32_16x16x32_f16",
}


def launch(name, tile, dtype, by_lines_a, by_lines_b, share=N // W):
    """The kernel and its arguments."""
    memory = torch.zeros(4096, dtype=dtype)
    a = Matrix(memory, *((N, 1) if by_lines_a else (1, N)))
    b = Matrix(memory, *((1, N) if by_lines_b else (N, 1)))
    tiling = Cdna3Tiling(*tile, GROUP=8, XCDS=8, CHUNK=1, BY_LINES_A=by_lines_a, BY_LINES_B=by_lines_b)
    given = {"channel": Channel(INT64, INT32), "a": a, "b": b, "bias": memory, "out": Matrix(memory, N, 1)}
    given |= {"N": N, "K": N, "W": W, "TILING": tiling}
    if name == "all_gather_matmul":
        # A lies by rows: a copy does, if it does not.
        given |= {"gathered": memory, "a": memory, "m": share, "SENDERS": 19}
        kernel, given["TILING"] = cdna3_all_gather_matmul, tiling._replace(BY_LINES_A=True)
    else:
        kernel = cdna3_matmul_all_gather if name == "matmul_all_gather" else cdna3_matmul_reduce
        given |= {"out_context": INT64, "M": N}
        if kernel is cdna3_matmul_reduce:
            given |= {"parts": memory, "share": share, "ALL_REDUCE": name == "matmul_all_reduce"}
    return kernel, by_name(kernel, **given)


def compiled(target, *of_launch, **more):
    kernel, args = launch(*of_launch, **more)
    return compile_for(target, kernel, *args, num_warps=WARPS.value)


def loop(text):
    """The instructions of a step, in their order: the one piece of code that multiplies."""
    (piece,) = [each for each in re.split(r"^(?=\.LBB)", text, flags=re.M) if "v_mfma" in each]
    return re.findall(r"^\s+([a-z]+_\w+(?: vmcnt\(\d+\))?)", piece, flags=re.M)


CASES = covering(NAMES, TILES, ["gfx942", "gfx950"], [torch.bfloat16, torch.float16], LINES)


@pytest.mark.parametrize(("name", "tile", "target", "dtype", "by_lines"), CASES if EVERYTHING else CASES[::2])
def test_fused_operations(name, tile, target, dtype, by_lines):
    code = compiled(target, name, tile, dtype, *by_lines)
    assert code.shared <= SHARED_MEMORY
    step = loop(code.text)
    assert INSTRUCTIONS[target, dtype] in step
    # All loads have 16 bytes, and so have all reads of shared memory.
    assert {each for each in step if "buffer_load" in each} == {"buffer_load_dwordx4"}
    assert {each for each in step if "ds_read" in each} == {"ds_read_b128"}
    assert any(each.startswith("ds_write_b") for each in step)
    # What they bring is waited for before the next step's writes to shared memory, and not beside the products. A
    # sum leaves the largest tile too few registers: there something may be kept in memory.
    if name == "matmul_all_gather" or tile != LARGEST:
        begin = step.index("buffer_load_dwordx4")
        assert not [each for each in step[begin:] if "vmcnt" in each], step
        assert not [each for each in step if each.startswith("scratch")]
    # Peers and memory get 16 bytes at a time.
    assert set(re.findall(r"global_store_(?:dwordx\d|short)\w*", code.text)) == {"global_store_dwordx4"}
    assert "global_load_dwordx4" in code.text or name == "matmul_all_gather"


def test_one_row_for_each_rank():
    """A number that is 1 is a constant when it is compiled."""
    assert compiled("gfx942", "matmul_all_reduce", (64, 64, 64), torch.bfloat16, True, True, share=1).text


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", by_turns(NAMES))
def test_releases_come_after_a_barrier(target, name):
    code = compiled(target, name, (256, 64, 64), torch.bfloat16, True, True)
    lines = code.ttgir.splitlines()
    releases = [i for i, line in enumerate(lines) if " release, " in line]
    assert releases and "buffer_wbl2 sc0 sc1" in code.text
    for i in releases:
        before = [each for each in lines[max(0, i - 25) : i] if "barrier" in each or "tt.store" in each]
        assert before and "barrier" in before[-1], lines[max(0, i - 25) : i + 1]
