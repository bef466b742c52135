"""What the sanitizer has found in the library stays mended: accesses that raced, though nobody used what they read.

And programs that are right, which it took for wrong.
"""

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.distributed import _functional_collectives
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
import iris.distributed  # noqa: F401 (registers the backend)
from iris.ccl import Config
from iris.gluon import IrisDeviceCtx
from iris.language.trace_buffer import BEGAN, ENDED, LOOKS, NAME
from iris.ops import FusedConfig

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def broadcast_in_place(ctx):
    """Ranks other than the root do not read the tensor that others store to."""
    for call in range(3):
        x = torch.full((4000,), 10.0 * ctx.cur_rank + call, dtype=BF16)
        # By several programs, of which each reads what another one stores.
        ctx.ccl.broadcast(x, call % ctx.num_ranks, config=Config(comm_sms=4))
        assert x.unique().tolist() == [10.0 * (call % ctx.num_ranks) + call]


def scale_of_a_row(ctx):
    """It is stored once, although several programs have a piece of the row."""
    x = torch.ones(2, 3000, dtype=BF16) * (1 + ctx.cur_rank)
    out, scales = torch.empty(2, 3000, dtype=E4M3), torch.empty(2)
    ctx.ops.all_reduce_rms_norm(out, x, torch.ones(3000, dtype=BF16), 1e-5, row_scales=scales)
    torch.testing.assert_close(out.float() * scales[:, None], torch.ones(2, 3000), rtol=1e-3, atol=0)


def rows_that_fill_no_tile(ctx):
    """What a tile has after a rank's last row is not what another rank sends."""
    rows, depth, columns = 40, 64, 72
    parts = [torch.randn(rows, depth, generator=torch.Generator().manual_seed(r)).to(BF16) for r in range(3)]
    b = torch.randn(depth, columns, generator=torch.Generator().manual_seed(9)).to(BF16)
    out = torch.empty(3 * rows, columns, dtype=BF16)
    config = FusedConfig(use_gluon=True, block_size_m=128, block_size_n=64, block_size_k=64)
    ctx.ops.all_gather_matmul(out, parts[ctx.cur_rank], b, config=config)
    torch.testing.assert_close(out.float(), torch.cat(parts).float() @ b.float(), rtol=2e-2, atol=2e-2)


@triton.jit
def store_to_next(context_tensor, data, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.store(data + offsets, offsets + ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks)


def barrier_after_messages(ctx):
    """Of two ranks' messages by torch the third knows nothing, and meets them in the barrier nevertheless."""
    data, message = ctx.zeros(64, dtype=torch.int32), torch.ones(1)
    ctx.barrier()
    if ctx.cur_rank == 0:
        dist.send(message, 1)
    elif ctx.cur_rank == 1:
        dist.recv(message, 0)
    store_to_next[(1,)](ctx.get_device_context(), data, 64)
    dist.barrier()
    assert data.tolist() == [i + (ctx.cur_rank + 2) % 3 for i in range(64)]
    ctx.barrier()


@gluon.jit
def look_at(ctx, flag, times):
    for _ in range(times):
        work = ctx.tracing.record_event_start(iris.TraceEvent.compute)
        ctx.tracing.record_event_end(work)
        ctx.atomic_add(flag, 0, ctx.cur_rank)
        ctx.atomic_add(flag, 0, ctx.cur_rank)


@gluon.jit
def look_in_partitions(context_tensor, flag):
    ctx = IrisDeviceCtx.initialize(context_tensor, tracing=True)
    gl.warp_specialize([(look_at, (ctx, flag, 9)), (look_at, (ctx, flag, 12))], [4], [24])


def looks_of_partitions(ctx):
    """Partitions of a program look at one flag at one time, and none has another's row of the trace."""
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.tracing.enable()
    look_in_partitions[(1,)](ctx.get_device_context(), flag)
    events = ctx.tracing.recording().events
    assert (events[:, NAME.value] == iris.TraceEvent.compute.value).sum() == 9 + 12
    assert events[:, LOOKS.value].sum() == 2 * (9 + 12)
    assert (events[:, BEGAN.value] <= events[:, ENDED.value]).all()


@triton.jit
def add_up_peers(context_tensor, data, result, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    total = tl.zeros((N,), tl.int32)
    for rank in range(ctx.num_ranks):
        total += ctx.load(data + offsets, rank)
    tl.store(result + offsets, total)


def collectives_of_torch(ctx):
    """They read their inputs, which peers' kernels may read too, and those in functional form are meetings as well."""
    data, result = ctx.full((64,), 2 + ctx.cur_rank, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    parts = [torch.zeros(64, dtype=torch.int32) for _ in range(3)]
    ctx.barrier()
    add_up_peers[(1,)](ctx.get_device_context(), data, result, 64)
    dist.all_gather(parts, data)
    assert result.unique().tolist() == [9] and [part[5].item() for part in parts] == [2, 3, 4]
    store_to_next[(1,)](ctx.get_device_context(), data, 64)
    _functional_collectives.all_reduce(torch.ones(1), "sum", dist.group.WORLD).wait()
    assert data[1:3].tolist() == [1 + (ctx.cur_rank + 2) % 3, 2 + (ctx.cur_rank + 2) % 3]
    # What a root sends, the others need not have written.
    sent = ctx.ones(8) if ctx.cur_rank == 0 else ctx.empty(8)
    dist.broadcast(sent, 0)
    assert sent.sum().item() == 8
    ctx.barrier()


def calls_that_end_on_their_own(ctx):
    """That one of torch's is over, a program may also hear by looking, by a future, or by who sent what it received."""
    data, message = ctx.zeros(64, dtype=torch.int32), torch.ones(1)
    values, before = ctx.get_device_context(), (ctx.cur_rank + 2) % 3

    def looked_for(call):
        while not call.is_completed():
            pass

    for wait in (looked_for, lambda call: call.get_future().wait()):
        data.zero_()
        ctx.barrier()
        store_to_next[(1,)](values, data, 64)
        wait(dist.barrier(async_op=True) if wait is looked_for else dist.all_reduce(message, async_op=True))
        assert data.tolist() == [i + before for i in range(64)]
        ctx.barrier()
    store_to_next[(1,)](values, data, 64) if ctx.cur_rank == 0 else None
    if ctx.cur_rank != 1:
        dist.send(message, 1)
    else:
        for _ in range(2):
            if dist.recv(message) == 0:
                assert data.tolist() == list(range(64))
    ctx.barrier()


@triton.jit
def store_rows(context_tensor, table, N: tl.constexpr):
    """Row r of the next rank's."""
    ctx = iris.DeviceContext.initialize(context_tensor)
    place = ctx.cur_rank * N + tl.arange(0, N)
    ctx.store(table + place, place, (ctx.cur_rank + 1) % ctx.num_ranks)


def rows_of_a_tensor(ctx):
    """The host changes those that it names, and the shape of a view, beside a kernel that stores to another row."""
    table = ctx.empty(3, 16, dtype=torch.int32)
    own = torch.tensor([ctx.cur_rank])
    ctx.barrier()
    store_rows[(1,)](ctx.get_device_context(), table, 16)
    table[own] = 5
    table.index_fill_(0, own, 7)
    table.scatter_(0, own.expand(1, 16), 9)
    assert table[own].unique().tolist() == [9] and table.index_select(0, own).sum().item() == 9 * 16
    view = table[0]
    view.unsqueeze_(0)
    ctx.barrier()
    before = (ctx.cur_rank + 2) % 3
    assert table[before].tolist() == list(range(16 * before, 16 * before + 16))


@triton.jit
def send_parts(context_tensor, parts, count, out, N: tl.constexpr, PARTS: tl.constexpr):
    """From rank 0 to rank 1, which begins to wait when all of them are there."""
    ctx = iris.DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    if ctx.cur_rank == 0:
        for part in range(PARTS):
            ctx.store(parts + part * N + offsets, part * N + offsets, 1)
            ctx.signal(count, 1, 1, op="add")
    elif ctx.cur_rank == 1:
        there = 0
        while there < PARTS:
            there = ctx.atomic_add(count, 0, 1, sem="relaxed")
        for part in range(PARTS):
            ctx.wait(count, part + 1, cmp="ge")
            tl.store(out + part * N + offsets, tl.load(parts + part * N + offsets))


def waits_for_what_is_there(ctx):
    """Each wait for a part counts, although the flag has not changed since the one before."""
    parts, out, count = (ctx.zeros(n, dtype=torch.int32) for n in (64, 64, 1))
    ctx.barrier()
    send_parts[(1,)](ctx.get_device_context(), parts, count, out, 16, 4)
    ctx.barrier()
    assert out.tolist() == (list(range(64)) if ctx.cur_rank == 1 else [0] * 64)


def messages_around(ctx):
    """Each rank sends to the next and receives from the one before, on two streams of one group's memory."""
    group, size = dist.new_group(backend="iris"), ctx.num_ranks
    after, before = (ctx.cur_rank + 1) % size, (ctx.cur_rank - 1) % size
    # Of one block, and of more than a queue holds.
    for order, elements in ((1, 64), (-1, 50_000)):
        sent = torch.arange(elements) + 100_000 * ctx.cur_rank + order
        received = torch.zeros_like(sent)
        calls = [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, received, before, group)]
        for work in dist.batch_isend_irecv(calls[::order]):
            work.wait()
        sent.add_(1)
        assert torch.equal(received, torch.arange(elements) + 100_000 * before + order)
    sums = [torch.ones(4), torch.full((4,), 2.0)]
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as together:
        for each in sums:
            dist.all_reduce(each, group=group)
    together.wait()
    assert [each.sum().item() for each in sums] == [4 * size, 8 * size]
    dist.destroy_process_group(group)


def calls_that_torch_waits_for(ctx):
    """It does so in C++, where nobody sees it."""
    for backend in ("gloo", "iris"):
        group = dist.new_group(backend=backend)
        layer = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.ones_(layer.weight)
        model = torch.nn.parallel.DistributedDataParallel(layer, process_group=group)
        model(torch.full((1, 4), 1.0 + ctx.cur_rank)).sum().backward()
        assert layer.weight.grad.unique().tolist() == [2.0]
        summed = _functional_collectives.all_reduce(layer.weight.grad, "sum", group)
        assert (summed + 1).unique().tolist() == [1 + 2.0 * ctx.num_ranks]
        dist.destroy_process_group(group)


RIGHT = [
    broadcast_in_place,
    scale_of_a_row,
    rows_that_fill_no_tile,
    barrier_after_messages,
    collectives_of_torch,
    calls_that_end_on_their_own,
    rows_of_a_tensor,
    waits_for_what_is_there,
    looks_of_partitions,
    messages_around,
    calls_that_torch_waits_for,
]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("worker", RIGHT)
def test_nothing_races(ranks, worker):
    _, findings = ranks.run_sanitized(worker)
    assert findings == []
