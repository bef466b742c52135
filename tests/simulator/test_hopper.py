"""What Hopper does beside the program: it happens once it is waited for, and not before."""

import inspect
import re

import pytest
import torch

from iris.errors import IrisTimeoutError, SharedMemoryRaceError
from iris.simulator import ACTIVE, grid
from simulator import hopper_kernels as kernels
from simulator import hopper_matmuls as matmuls

assert ACTIVE

NEWER = hasattr(kernels.tma, "async_load")


def run(launch):
    kernel, programs, arguments, options = launch
    kernel[programs](*arguments, **options)


def values(*shape, dtype=torch.bfloat16):
    """Different everywhere, as far as the type has enough values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.setattr(grid, "limit_s", 0.5)


# TMA ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e5m2, torch.int32])
@pytest.mark.parametrize("shape", [(64, 128), (50, 208), (1, 16)])
def test_a_ragged_copy_through_two_buffers(dtype, shape):
    source = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
    around = torch.full((shape[0] + 1, shape[1] + 16), 7).to(dtype)
    target = around[:-1, :-16]
    run(kernels.launch_copy(source, target))
    assert torch.equal(target.float(), source.float())
    target.zero_()
    assert around.float().sum() == 7 * (around.numel() - target.numel())


@pytest.mark.parametrize("padding", ["zero", "nan"])
@pytest.mark.parametrize("row, column", [(0, 0), (-3, 16), (5, -32), (40, 0)])
def test_a_block_is_filled_outside_the_tensor(padding, row, column):
    source, out = values(10, 40), torch.zeros(16, 64, dtype=torch.bfloat16)
    block = kernels.descriptor(source, [16, 64])
    block.padding = padding
    kernels.read_block[(1,)](block, out, row, column, 16, 64)
    around = torch.full((100, 200), 0.0 if padding == "zero" else float("nan"), dtype=torch.bfloat16)
    around[30:40, 60:100] = source
    torch.testing.assert_close(out, around[30 + row : 46 + row, 60 + column : 124 + column], equal_nan=True)


@pytest.mark.parametrize("row, column", [(-3, 16), (5, -32)])
def test_no_block_is_stored_before_the_tensor(row, column):
    target = torch.zeros(10, 48, dtype=torch.bfloat16)
    block = kernels.descriptor(target, [16, 64])
    with pytest.raises(ValueError, match=rf"stored at \[{row}, {column}\]: .* begins before the tensor") as caught:
        kernels.write_block[(1,)](block, target, torch.zeros(1, dtype=torch.bfloat16), row, column, 16, 64, "read")
    assert "write_block" in [frame.name for frame in caught.traceback]


def test_a_descriptor_that_the_kernel_makes():
    source, out = values(10, 40), torch.ones(16, 64, dtype=torch.bfloat16)
    kernels.read_block_of[(1,)](source, out, 10, 40, 2, 0, 16, 64)
    expected = torch.zeros_like(out)
    expected[:8, :40] = source[2:]
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "how", ["read", pytest.param("visible", marks=pytest.mark.skipif(not NEWER, reason="Triton 3.6 has no read_only"))]
)
def test_a_store_is_read_before_it_can_be_seen(how):
    target, seen = torch.zeros(8, 16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    kernels.write_block[(1,)](kernels.descriptor(target, [8, 16]), target, seen, 0, 0, 8, 16, how)
    assert seen.item() == (5 if how == "visible" else 0)
    assert torch.equal(target, torch.full_like(target, 5))


@pytest.mark.skipif(not NEWER, reason="this Triton's TMA cannot add")
@pytest.mark.parametrize("how, combine", [("add", torch.add), ("max", torch.maximum)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16])
def test_a_store_that_combines(how, combine, dtype):
    target, seen = torch.arange(160).reshape(10, 16).to(dtype) - 110, torch.zeros(1, dtype=dtype)
    expected = target.clone()
    expected[6:] = combine(target[6:], torch.tensor(5, dtype=dtype))
    kernels.write_block[(1,)](kernels.descriptor(target, [8, 16]), target, seen, 6, 0, 8, 16, how)
    assert torch.equal(target, expected)


# Shared memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [-1, 0, 1, 2])
@pytest.mark.parametrize("how", ["", "arrive", "load"])
def test_what_lies_beside_shared_memory_may_be_named_and_not_used(first, how):
    # As `(i - 1) % 2` does, which is -1 at first: `%` is C's in Triton.
    if how and first not in (0, 1):
        with pytest.raises(IndexError, match=f"index {first} of 2 in shared memory"):
            kernels.name_beside[(1,)](torch.zeros(128), first, how)
    else:
        kernels.name_beside[(1,)](torch.zeros(128), first, how)


def test_a_slice_lies_within_shared_memory():
    with pytest.raises(IndexError, match="elements 100 to 164 of 128"):
        kernels.name_beside[(1,)](torch.zeros(128), 0, "slice")


def test_an_index_needs_a_layout_of_what_lies_after_it():
    with pytest.raises(
        ValueError, match=r"\[2, 128\] cannot be indexed: its layout, of order \[1, 0\], has that dimension"
    ):
        kernels.name_beside[(1,)](torch.zeros(128), 0, "of all dimensions")


# mbarriers ------------------------------------------------------------------------------------------------------------


def test_phases_end_with_their_arrivals():
    out = torch.zeros(1)
    kernels.phases[(1,)](out, 2)
    assert out.item() == 1


@pytest.mark.parametrize(
    "forget, missing",
    [
        ("arrive", "phase 0 of an mbarrier, which lacks 1 of 2 arrivals"),
        ("bytes", "phase 1 of an mbarrier, which lacks 0 of 2 arrivals and 64 announced bytes"),
    ],
)
def test_a_phase_that_does_not_end_is_reported_with_its_place(limit, forget, missing):
    with pytest.raises(IrisTimeoutError) as error:
        kernels.phases[(2,)](torch.zeros(1), 2, forget)
    assert "kernel 'phases'" in str(error.value)
    line = line_of(kernels.phases, f"mbarrier.wait(barrier, {missing[6]})\n")
    place = f"programs (0, 0, 0), (1, 0, 0) at {kernels.__file__}:{line} in phases"
    assert f"{place}: waits for {missing}\n" in str(error.value)


def line_of(kernel, text):
    lines, first = inspect.getsourcelines(kernel.fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("arrivals", [1, 3])
def test_arrivals_are_counted(limit, arrivals):
    """With one, the second arrival is the next phase's, and the wait for phase 0 is for the third."""
    with pytest.raises(IrisTimeoutError, match=f"phase 0 .* 1 of {arrivals} arrivals"):
        kernels.phases[(1,)](torch.zeros(1), arrivals)


@pytest.mark.parametrize(
    "misuse, message",
    [
        ("early", "before init"),
        ("often", "more than 2 arrivals"),
        ("phase", "0 or 1, not 2"),
        ("late", "after invalidate"),
    ],
)
def test_misuse_of_a_barrier_is_an_error(misuse, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        kernels.misused[(1,)](misuse)


# Copies by threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [128, 300, 1000])
@pytest.mark.parametrize("barrier", [False, True])
def test_a_copy_by_threads(n, barrier):
    source, out = values(n, dtype=torch.float32), torch.full((1024,), -1.0)
    kernels.copy_by_threads[(1,)](source, out, n, 128, barrier)
    assert torch.equal(out[:n], source)
    assert torch.all(out[n : -(-n // 128) * 128] == 0)


# Products -------------------------------------------------------------------------------------------------------------


def operands(M, N, K, dtype):
    return values(M, K, dtype=dtype), values(N, K, dtype=dtype), torch.zeros(M, N, dtype=torch.bfloat16)


def check_product(launch, a, b, c):
    run(launch)
    torch.testing.assert_close(c, (a.float() @ b.float().T).bfloat16())


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_forms_of_a_product(registers, added):
    a, b, c = values(64, 32), values(32, 64), torch.zeros(64, 64)
    blocks = [kernels.descriptor(tensor, list(tensor.shape)) for tensor in (a, b, c)]
    matmuls.product[(1,)](*blocks, 64, 64, 32, registers, added)
    torch.testing.assert_close(c, (1 + added) * (a.float() @ b.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape, stages", [((64, 64, 64), 2), ((100, 144, 208), 3), ((65, 8, 400), 4)])
def test_a_pipelined_product(dtype, shape, stages):
    a, b, c = operands(*shape, dtype)
    check_product(matmuls.launch_matmul(a, b, c, stages=stages), a, b, c)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape, stages", [((128, 64, 64), 1), ((200, 144, 400), 2), ((65, 72, 208), 4)])
def test_a_product_by_partitions(dtype, shape, stages):
    a, b, c = operands(*shape, dtype)
    check_product(matmuls.launch_specialized_matmul(a, b, c, stages=stages), a, b, c)


@pytest.mark.parametrize(
    "forget, place",
    [
        ("arrive", ("load_tiles", "mbarrier.wait(freed", [2], "lacks 2 of 2 arrivals")),
        ("expect", ("multiply", "mbarrier.wait(loaded", [0, 1], "lacks 1 of 1 arrivals")),
    ],
)
def test_partitions_that_wait_for_each_other_are_reported(limit, forget, place):
    function, line, partitions, missing = getattr(matmuls, place[0]), *place[1:]
    with pytest.raises(IrisTimeoutError) as error:
        run(matmuls.launch_specialized_matmul(*operands(128, 64, 400, torch.bfloat16), FORGET=forget))
    assert "kernel 'specialized_matmul'" in str(error.value)
    where = f"{matmuls.__file__}:{line_of(function, line)} in {place[0]}"
    for partition in partitions:
        who = re.escape(f"partition {partition} of program (0, 0, 0) at {where}")
        caller = r"(, called by \S+:\d+ in \w+)?"
        assert re.search(f"{who}{caller}: waits for phase 0 of mbarrier 0 of 2, which {missing}", str(error.value))


# What is not waited for -----------------------------------------------------------------------------------------------


def forgetful_copy(forget, columns):
    source, target = values(32, columns), torch.zeros(32, columns, dtype=torch.bfloat16)
    run(kernels.launch_copy(source, target, FORGET=forget))
    return target, source


def forgetful_copy_by_threads(forget, n):
    source, out = values(n, dtype=torch.float32), torch.zeros(n)
    kernels.copy_by_threads[(1,)](source, out, n, 128, False, forget)
    return out, source


def forgetful_product(forget, K):
    a, b, c = operands(128, 64, K, torch.bfloat16)
    run(matmuls.launch_matmul(a, b, c, FORGET=forget))
    return c, (a.float() @ b.float().T).bfloat16()


@pytest.mark.parametrize(
    "kernel, forget, size",
    [
        (forgetful_copy, "load", 128),
        (forgetful_copy, "store", 400),
        (forgetful_copy_by_threads, "copy", 1024),
        (forgetful_product, "load", 128),
        (forgetful_product, "product", 400),
        (forgetful_product, "result", 400),
        (forgetful_product, "store", 400),
    ],
)
def test_a_wait_that_is_missing_gives_wrong_numbers(kernel, forget, size):
    found, expected = kernel("", size)
    torch.testing.assert_close(found, expected)
    found, expected = kernel(forget, size)
    assert not torch.allclose(found, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("second", ["load", "store"])
def test_a_place_that_is_written_while_a_copy_to_it_is_under_way_holds_poison(second):
    source, out = values(32, 32), torch.zeros(16, 32, dtype=torch.bfloat16)
    block = kernels.descriptor(source, [16, 32])
    kernels.write_twice[(1,)](block, out, 16, 32, second)
    assert torch.equal(out, torch.full_like(out, 5) if second == "store" else source[16:])
    kernels.write_twice[(1,)](block, out, 16, 32, second, "wait")
    assert torch.all(out.isnan())


@pytest.mark.parametrize("forget", ["load", "order", "order of one", "arrival of one"])
def test_partitions_race_in_whatever_order_they_run(forget):
    with pytest.raises(SharedMemoryRaceError, match="a race in shared memory") as error:
        run(matmuls.launch_specialized_matmul(*operands(128, 64, 400, torch.bfloat16), FORGET=forget))
    reads = f"reads by wgmma at {matmuls.__file__}:{line_of(matmuls.multiply, 'product = warpgroup_mma(')}"
    assert reads in str(error.value)
    assert f"partition 2 writes by TMA at {matmuls.__file__}:" in str(error.value)


def test_a_block_that_a_partition_stores_must_be_waited_for():
    out = torch.zeros(32, 32)
    kernels.hand_over[(1,)](out)
    assert torch.all(out == 5)
    with pytest.raises(SharedMemoryRaceError) as error:
        kernels.hand_over[(1,)](out, "wait")
    read = f"partition 1 reads at {kernels.__file__}:{line_of(kernels.take, 'block.load')}"
    written = f"partition 0 writes at {kernels.__file__}:{line_of(kernels.put, 'block.store')}"
    assert f"{read} what {written}, and nothing orders the two" in str(error.value)


@pytest.mark.parametrize("fence", ["writer", "reader", ""])
def test_a_block_that_one_partition_stores_and_tma_reads_for_another_wants_a_fence(fence):
    target = torch.zeros(32, 32)
    launch = kernels.hand_to_tma, (1,), [kernels.descriptor(target, [32, 32]), fence], {}
    if fence:
        run(launch)
        assert torch.all(target == 5)
    else:
        with pytest.raises(SharedMemoryRaceError, match="no fence_async_shared stands between the two"):
            run(launch)


@pytest.mark.parametrize("kernel", [forgetful_copy, forgetful_product])
def test_a_barrier_that_is_used_again_must_have_been_waited_for(kernel):
    with pytest.raises(RuntimeError, match="an earlier phase has not been waited for"):
        kernel("load", 400)
