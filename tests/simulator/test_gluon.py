"""Gluon kernels on the CPU: the language without its layouts."""

import pytest
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.errors import NotInSimulatorError, SharedMemoryRaceError
from iris.simulator import ACTIVE

assert ACTIVE

LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SHARED_1D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def shapes(x, out, M: gl.constexpr, N: gl.constexpr):
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, TILE))
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, TILE))
    offsets = rows[:, None] * N + gl.expand_dims(columns, 0)
    tile = gl.load(x + offsets, mask=offsets < M * N - 1, other=-1.0)
    tile = gl.convert_layout(tile, TILE)
    turned = gl.reshape(gl.permute(tile, (1, 0)), (M * N,))
    low, high = gl.split(gl.join(turned, turned + 100.0))
    flat = gl.arange(0, M * N, layout=LAYOUT)
    gl.store(out + flat, low)
    gl.store(out + M * N + flat, gl.where(flat % 2 == 0, high, gl.zeros_like(high)))
    gl.store(out + 2 * M * N + rows, gl.sum(tile, axis=1) + gl.full((M,), 0.5, gl.float32, LAYOUT))
    gl.store(out + 2 * M * N + M + columns, gl.max(tile, axis=0))
    gl.atomic_add(out + 2 * M * N + M + N + flat * 0, gl.full((M * N,), 1.0, gl.float32, LAYOUT))


def test_shapes_reductions_and_atomics():
    M, N = 4, 8
    x, out = torch.randn(M, N), torch.zeros(2 * M * N + M + N + 1)
    shapes[(1,)](x, out, M, N)
    tile = x.clone()
    tile[-1, -1] = -1
    flat = tile.T.reshape(-1)
    expected = [flat, torch.where(torch.arange(M * N) % 2 == 0, flat + 100, 0), tile.sum(1) + 0.5, tile.amax(0)]
    torch.testing.assert_close(out, torch.cat([*expected, torch.tensor([float(M * N)])]))


@gluon.jit
def buffered_matmul(a, b, out, N: gl.constexpr, K: gl.constexpr, BK: gl.constexpr):
    rows = gl.arange(0, N, layout=gl.SliceLayout(1, TILE))[:, None]
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, TILE))[None, :]
    steps = gl.arange(0, BK, layout=gl.SliceLayout(0, TILE))
    buffers = gl.allocate_shared_memory(gl.bfloat16, [2, 2, N, BK], SHARED)
    acc = gl.zeros((N, N), gl.float32, TILE)
    left: gl.constexpr = gl.DotOperandLayout(0, TILE, 0)
    right: gl.constexpr = gl.DotOperandLayout(1, TILE, 0)
    for k in range(0, K, BK):
        buffer = buffers.index((k // BK) % 2)
        buffer.index(0).store(gl.load(a + rows * K + k + steps[None, :]))
        buffer.slice(1, 1).reshape([N, BK]).store(gl.load(b + rows * K + k + steps[None, :]))  # b is transposed
        acc = gl.dot_fma(buffer.index(0).load(left), buffer.index(1).permute([1, 0]).load(right), acc)
    gl.store(out + rows * N + columns, acc)


def test_matmul_through_shared_memory():
    N, K = 16, 32
    a, b = torch.randn(N, K).bfloat16(), torch.randn(N, K).bfloat16()
    out = torch.zeros(N, N)
    buffered_matmul[(1,)](a, b, out, N, K, 8)
    torch.testing.assert_close(out, a.float() @ b.float().T, rtol=1e-5, atol=1e-5)


NEWER = pytest.mark.skipif(not hasattr(gl.shared_memory_descriptor, "gather"), reason="Triton 3.9 has it")


@gluon.jit
def gather_and_scatter(x, out, scattered, first, M: gl.constexpr, N: gl.constexpr):
    """Gather half a block with its columns reversed; and scatter a column to these places of a row of zeros."""
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, TILE))[:, None]
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, TILE))[None, :]
    block = gl.allocate_shared_memory(gl.float32, [2 * M, N], SHARED)
    block.store(gl.load(x + gl.arange(0, 2 * M, layout=gl.SliceLayout(1, TILE))[:, None] * N + columns))
    gl.store(out + rows * N + columns, block.gather(first + N - 1 - columns + rows * 0, 1))
    zeros = gl.allocate_shared_memory(gl.float32, [M, N], SHARED, gl.zeros((M, N), gl.float32, TILE))
    zeros.scatter(gl.load(x + rows), (columns // 2) * 2, 1)
    gl.store(scattered + rows * N + columns, zeros.load(TILE))


@NEWER
def test_elements_of_shared_memory_by_their_indices():
    M, N = 4, 16
    x, out, scattered = torch.randn(2 * M, N), torch.zeros(M, N), torch.zeros(M, N)
    gather_and_scatter[(1,)](x, out, scattered, 0, M, N)
    assert torch.equal(out, x[:M].flip(1))
    assert torch.equal(scattered, torch.where(torch.arange(N) % 2 == 0, x.reshape(-1)[:M, None], 0))
    for first in (1, -1):
        with pytest.raises(IndexError, match=f"index {N if first > 0 else -1} of {N} in shared memory"):
            gather_and_scatter[(1,)](x, out, scattered, first, M, N)


@gluon.jit
def scatter_even(block, out, first, N: gl.constexpr):
    even = 2 * gl.arange(0, N // 2, layout=LAYOUT)
    block.scatter(gl.full((N // 2,), 1, gl.int32, LAYOUT), even, 0)


@gluon.jit
def gather_from(block, out, first, N: gl.constexpr):
    i = gl.arange(0, N // 2, layout=LAYOUT)
    gl.store(out + i, block.gather(first + 2 * i, 0))


@gluon.jit
def scatter_and_gather(out, first, N: gl.constexpr):
    """One partition scatters to the even places, another gathers from ``first`` on every second one."""
    block = gl.allocate_shared_memory(gl.int32, [N], SHARED_1D, gl.zeros((N,), gl.int32, LAYOUT))
    gl.warp_specialize([(scatter_even, (block, out, first, N)), (gather_from, (block, out, first, N))], [4], [24])


@NEWER
def test_partitions_race_for_the_elements_that_they_access_and_no_others():
    N = 128
    out = torch.ones(N // 2, dtype=torch.int32)
    scatter_and_gather[(1,)](out, 1, N)
    assert torch.all(out == 0)
    with pytest.raises(SharedMemoryRaceError, match="an mbarrier is not waited for"):
        scatter_and_gather[(1,)](out, 0, N)


@gluon.jit
def bits(x, out, KIND: gl.constexpr, N: gl.constexpr):
    i = gl.arange(0, N, layout=LAYOUT)
    memory = gl.allocate_shared_memory(x.dtype.element_ty, [N], SHARED_1D, gl.load(x + i))
    gl.store(out + i, memory._reinterpret(KIND, [N], SHARED_1D).load(LAYOUT))


@gluon.jit
def bits_of_newer_triton(x, out, KIND: gl.constexpr, N: gl.constexpr):
    i = gl.arange(0, N, layout=LAYOUT)
    memory = gl.allocate_shared_memory(x.dtype.element_ty, [N], SHARED_1D, gl.load(x + i))
    gl.store(out + i, memory.reinterpret(KIND, [N], SHARED_1D).load(LAYOUT))


@pytest.mark.parametrize(
    "dtype, kind, seen",
    [
        (torch.float32, torch.int32, gl.int32),
        (torch.bfloat16, torch.int16, gl.int16),
        (torch.float8_e4m3fn, torch.int8, gl.int8),
    ],
)
def test_shared_memory_reinterpreted(dtype, kind, seen):
    x, out = torch.randn(32).to(dtype), torch.zeros(32, dtype=kind)
    kernel = bits if hasattr(gl.shared_memory_descriptor, "_reinterpret") else bits_of_newer_triton
    kernel[(1,)](x, out, seen, 32)
    assert torch.equal(out, x.view(kind))


@gluon.jit
def amd_buffers(x, out, n, N: gl.constexpr):
    i = gl.arange(0, N, layout=LAYOUT)
    values = gl.amd.cdna3.buffer_load(x, i, mask=i < n, other=3)
    gl.amd.cdna3.buffer_store(values, out, i)
    gl.amd.cdna3.buffer_atomic_add(out, i, values, mask=i < 2)


def test_amd_buffer_operations():
    x, out = torch.arange(1, 9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    amd_buffers[(1,)](x, out, 6, 8)
    assert out.tolist() == [2, 4, 3, 4, 5, 6, 3, 3]


@gluon.jit
def producer(memory, ready, taken, x, rounds):
    for i in range(rounds):
        gl.nvidia.hopper.mbarrier.wait(taken, (i & 1) ^ 1)
        memory.store(gl.load(x + i * 4 + gl.arange(0, 4, layout=LAYOUT)))
        gl.nvidia.hopper.mbarrier.arrive(ready, count=1)


@gluon.jit
def consumer(memory, ready, taken, out, rounds):
    for i in range(rounds):
        gl.nvidia.hopper.mbarrier.wait(ready, i & 1)
        gl.store(out + i * 4 + gl.arange(0, 4, layout=LAYOUT), memory.load(LAYOUT) * 2 + gl.num_warps())
        gl.nvidia.hopper.mbarrier.arrive(taken, count=1)
    return (rounds,)


@gluon.jit
def pipeline(x, out, rounds):
    memory = gl.allocate_shared_memory(gl.int32, [4], SHARED_1D)
    ready = gl.allocate_shared_memory(gl.int64, [1], gl.nvidia.hopper.mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], gl.nvidia.hopper.mbarrier.MBarrierLayout())
    gl.nvidia.hopper.mbarrier.init(ready, count=1)
    gl.nvidia.hopper.mbarrier.init(taken, count=1)
    result = gl.warp_specialize(
        [(consumer, (memory, ready, taken, out, rounds)), (producer, (memory, ready, taken, x, rounds))], [2], [24]
    )
    gl.nvidia.hopper.mbarrier.invalidate(ready)
    gl.store(out + rounds * 4, result[0])


def test_partitions_hand_data_through_mbarriers():
    rounds = 5
    x, out = torch.arange(rounds * 4, dtype=torch.int32), torch.zeros(rounds * 4 + 1, dtype=torch.int32)
    pipeline[(1,)](x, out, rounds, num_warps=8)
    assert out.tolist() == [*(x * 2 + 8).tolist(), rounds]


@gluon.jit
def ping(words, flag, out, rounds):
    for i in range(rounds):
        words.store(gl.full((4,), i + 1, gl.int32, LAYOUT))
        flag.store(gl.full((1,), 2 * i + 1, gl.int32, LAYOUT))
        while gl.sum(flag.load(LAYOUT)) != 2 * i + 2:
            pass
        gl.store(out + i, gl.sum(words.load(LAYOUT)))


@gluon.jit
def pong(words, flag, out, rounds):
    for i in range(rounds):
        while gl.sum(flag.load(LAYOUT)) != 2 * i + 1:
            pass
        words.store(words.load(LAYOUT) * 10)
        flag.store(gl.full((1,), 2 * i + 2, gl.int32, LAYOUT))
    gl.store(out + rounds, gl.num_warps())


@gluon.jit
def ping_pong(out, rounds):
    words = gl.allocate_shared_memory(gl.int32, [4], SHARED_1D)
    flag = gl.allocate_shared_memory(gl.int32, [1], SHARED_1D)
    base = out + gl.program_id(0) * (rounds + 1)
    gl.warp_specialize([(ping, (words, flag, base, rounds)), (pong, (words, flag, base, rounds))], [2], [24])


def test_partitions_that_poll_shared_memory_finish_in_every_program():
    programs, rounds = 3, 4
    out = torch.zeros(programs, rounds + 1, dtype=torch.int32)
    ping_pong[(programs,)](out, rounds)
    assert out.tolist() == [[40, 80, 120, 160, 2]] * programs


@gluon.jit
def unsupported(x):
    barrier = gl.allocate_shared_memory(gl.int64, [1], gl.nvidia.hopper.mbarrier.MBarrierLayout())
    gl.nvidia.blackwell.tcgen05_commit(barrier)


@gluon.jit
def im2col(x):
    gl.nvidia.hopper.tma.async_load_im2col(x, [0, 0, 0, 0], [0, 0], x, x)


@triton.jit
def assembly(x):
    triton.language.inline_asm_elementwise("nop;", "=r,r", [0], dtype=triton.language.int32, is_pure=True, pack=1)


UNSUPPORTED = [(unsupported, "tcgen05_commit"), (assembly, "inline assembly")]
if hasattr(gl.nvidia.hopper.tma, "async_load_im2col"):  # Triton 3.6 has no im2col
    UNSUPPORTED.append((im2col, "async_load_im2col"))


@pytest.mark.parametrize("kernel, name", UNSUPPORTED)
def test_what_is_not_there_is_named(kernel, name):
    with pytest.raises(NotInSimulatorError, match=f"^{name} .*iris.simulator.ACTIVE"):
        kernel[(1,)](torch.zeros(1))


@gluon.jit
def one(x):
    gl.store(x, gl.num_ctas())


def test_a_kernel_is_one_cta():
    x = torch.zeros(1)
    one[(1,)](x, num_ctas=1)
    assert x.item() == 1
    with pytest.raises(NotInSimulatorError, match="num_ctas=2 of a Gluon kernel"):
        one[(1,)](x, num_ctas=2)
