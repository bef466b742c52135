"""all_reduce_rms_norm finds room beside kernels that hold most of each multiprocessor, and that wait, too.

On another rank they may be what comes next: whoever waited for the other to end would wait for ever.
"""

import time

import pytest
import torch
import triton
import triton.language as tl

from iris.ccl.kernel_launch import MOST_REGISTERS
from iris.language.cluster import cluster_all_reduce, enter, open_meeting
from iris.language.target import largest_cluster
from iris.runtime.launch import addresses, prepare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the simulator has room for all")
# Programs on each multiprocessor, and their threads. Elements that each of these holds.
PROGRAMS, THREADS, ELEMENTS = 4, 128, 80
# Reads of the host's memory, of about 2 us, after which a kernel gives up.
PATIENCE = 2_000_000


@triton.jit
def hold(flag, began, memory, THREADS: tl.constexpr, SHARED: tl.constexpr, PATIENCE: tl.constexpr):
    """Keep 80 elements a thread, and as much shared memory as to sort ``SHARED`` elements takes, until ``flag``."""
    i, j = tl.arange(0, 64 * THREADS), tl.arange(0, 16 * THREADS)
    x, y = tl.load(memory + i), tl.load(memory + j + 64 * THREADS)
    if SHARED > 0:
        s = tl.arange(0, SHARED)
        tl.store(memory + s + 80 * THREADS, tl.sort(tl.load(memory + s + 80 * THREADS)))
    tl.atomic_add(began, 1)
    turns = 0
    while (tl.load(flag, volatile=True) == 0) & (turns < PATIENCE):
        turns += 1
    tl.store(memory + i, x + turns)
    tl.store(memory + j + 64 * THREADS, y + turns)


def until(condition, seconds):
    """Whether the condition came true in so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
    return condition()


@triton.jit
def meet_once(out, N: tl.constexpr):
    """A cluster whose programs take so few registers that a multiprocessor could run as many as it ever does."""
    meeting = open_meeting(N, False)
    entered = enter(meeting, N, False)
    total, _ = cluster_all_reduce(meeting, entered, tl.arange(0, 32) + tl.program_id(0).to(tl.float32), 0.0, N, False)
    tl.store(out + tl.program_id(0), total)


def begins_beside(ctx, enqueue, out, shared):
    """``enqueue`` what writes ``out`` while other kernels hold all they may, and wait."""
    flag, began = torch.ones(1, dtype=torch.int32).pin_memory(), torch.zeros(1, dtype=torch.int32, device=ctx.device)
    memory = torch.zeros(ELEMENTS * THREADS + shared, device=ctx.device)
    holding, calling, asking = (torch.cuda.Stream() for _ in range(3))
    programs = PROGRAMS * ctx.get_cu_count()

    def start():
        with torch.cuda.stream(holding):
            return hold[(programs,)](
                flag, began, memory, THREADS, shared, PATIENCE, num_warps=THREADS // 32, maxnreg=MOST_REGISTERS // 512
            )

    def call():
        with torch.cuda.stream(calling):
            enqueue()
            return calling.record_event()

    def all_hold():
        with torch.cuda.stream(asking):
            return began.item() == programs

    try:
        # All are loaded before one of them waits.
        kernel, _ = start(), call()
        assert -(-kernel.n_regs // 8) * 8 * THREADS * PROGRAMS == MOST_REGISTERS
        torch.cuda.synchronize()
        flag.zero_(), began.zero_(), out.zero_()
        ctx.barrier()
        start()
        held = until(all_hold, 2)
        done = until(call().query, 2)
        waited = not holding.query()
    finally:
        flag.fill_(1)
        torch.cuda.synchronize()
    assert held and waited, "the other kernel did not hold what it should"
    assert done, "the call waited until the other kernel had ended"


def norm_beside(ctx, rows, columns, cluster, shared):
    comm = ctx.ccl.communicator()
    largest = comm.largest_cluster
    comm.largest_cluster = min(cluster, largest)
    ctx.ops._all_reduce_rms_norm._launches.clear()
    x = torch.ones(rows, columns, dtype=torch.bfloat16, device=ctx.device)
    out, weight = torch.zeros_like(x), torch.ones_like(x[0])

    try:
        begins_beside(ctx, lambda: ctx.ops.all_reduce_rms_norm(out, x, weight), out, shared)
    finally:
        comm.largest_cluster = largest
        ctx.ops._all_reduce_rms_norm._launches.clear()
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("shared", [0, 4096])
@pytest.mark.parametrize("cluster", [1, 8, 16])
@pytest.mark.parametrize("rows, columns", [(1, 4096), (16, 8192)])
def test_it_begins_beside_kernels_that_wait(ranks, rows, columns, cluster, shared):
    ranks.run(norm_beside, rows, columns, cluster, shared)


def cluster_beside(ctx, cluster, shared):
    out = torch.zeros(cluster, device=ctx.device)
    launch = prepare(meet_once, (cluster, 1, 1), out, cluster, cluster=cluster, early=False, num_warps=1)

    def meeting():
        launch(torch.cuda.current_stream().cuda_stream, addresses((out, cluster)))

    begins_beside(ctx, meeting, out, shared)
    # The numbers of 32 threads, and what each program adds to all of its own.
    assert (out == cluster * 496 + 16 * cluster * (cluster - 1)).all()


@pytest.mark.parametrize("shared", [0, 4096])
@pytest.mark.parametrize("cluster", [2, 8, 16])
def test_so_do_programs_of_a_cluster_that_are_small(ranks, cluster, shared):
    if cluster > largest_cluster():
        pytest.skip(f"this GPU has clusters of {largest_cluster()} programs at most")
    ranks.run(cluster_beside, cluster, shared)


def crossing(ctx, collective, rows, columns):
    """Every second rank has begun the norms when it comes to the collective, and the others the other way round.

    While the first norm, of one row, waits, the second one is resident already.
    """
    rank, size, n = ctx.cur_rank, ctx.num_ranks, 32 << 20
    gathers = collective == "all_gather"
    mine = torch.empty(n, dtype=torch.bfloat16, device=ctx.device)
    moved = torch.empty(size * n if gathers else n, dtype=torch.bfloat16, device=ctx.device)
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=ctx.device)
    out, weight = torch.zeros_like(x), torch.ones_like(x[0])
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def move():
        with torch.cuda.stream(streams[0]):
            getattr(ctx.ccl, collective)(moved, mine)

    def norm():
        with torch.cuda.stream(streams[1]):
            for few in (1, rows):
                ctx.ops.all_reduce_rms_norm(out[:few], x[:few], weight, 0.0)

    move(), norm()
    for round in range(6):
        ctx.barrier()
        mine.fill_(rank + 8 * round), x.fill_(rank + 1 - 4 * (round % 2))
        torch.cuda.synchronize()
        ctx.barrier()
        first, second = (move, norm) if (rank + round) % 2 else (norm, move)
        first()
        time.sleep(0.05)
        second()
        assert until(lambda: all(stream.query() for stream in streams), 10), "each waits for the other"
        wanted = torch.arange(size, device=ctx.device) + 8 * round
        assert ((moved.view(size, n) == wanted[:, None]) if gathers else (moved == wanted.sum())).all()
        total = sum(range(1, size + 1)) - 4 * size * (round % 2)
        torch.testing.assert_close(out, torch.full_like(out, (total > 0) - (total < 0)))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("rows, columns", [(1, 4096), (16, 8192), (128, 7168)])
def test_neither_waits_for_what_another_rank_has_begun(ranks, collective, rows, columns):
    ranks.run(crossing, collective, rows, columns)
