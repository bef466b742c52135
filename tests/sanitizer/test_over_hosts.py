"""What rails do to memory is checked, as what kernels and the host do."""

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from ccl.test_process_group import make_group
from covering import EVERYTHING, thorough
from rank_pool import Hosts

import iris

N = 64


@triton.jit
def read(context_tensor, x, out, rank, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    i = tl.arange(0, BLOCK)
    tl.store(out + i, ctx.load(x + i, rank))


def read_before_a_rail_writes(ctx, broken):
    """On the other hosts, what rank 0 broadcasts is written by the rail to the first rank, whose neighbour reads it."""
    x = ctx.zeros(N, dtype=torch.int32)
    ctx.barrier()
    if ctx.cur_rank == 0:
        x += torch.arange(N, dtype=torch.int32)
    out = torch.zeros_like(x)
    if ctx.host > 0 and ctx.local_rank == 1:
        read[(1,)](ctx.get_device_context(), x, out, ctx.local_ranks[0], N)
    if not broken:
        ctx.device_barrier()
    ctx.ccl.broadcast(x, 0)
    ctx.barrier()
    return x.tolist() == list(range(N)) and (broken or not out.any())


@pytest.mark.ranks(Hosts(2, 2, dealt=True), *((Hosts(2, 2), Hosts(3, 2)) if EVERYTHING else ()))
def test_races_with_rails_are_found(ranks):
    assert ranks.run_sanitized(read_before_a_rail_writes, False) == ([True] * ranks.num_ranks, [])
    results, findings = ranks.run_sanitized(read_before_a_rail_writes, True)
    assert all(results) and {finding.kind for finding in findings} == {"race"}
    for finding in findings:
        assert "in read_before_a_rail_writes" in str(finding) and "in read\n" in f"{finding}\n", finding


def read_before_a_call_is_over(ctx, collective, broken):
    """Of the backend "iris", with ``async_op=True``: DDP's and FSDP2's own calls."""
    group, size = make_group(ctx), ctx.num_ranks
    x = torch.arange(N, dtype=torch.float32) + ctx.cur_rank
    output = {
        "all_reduce": lambda: x,
        "all_gather_into_tensor": lambda: torch.zeros(size * N),
        "reduce_scatter_tensor": lambda: torch.zeros(N // size),
        "broadcast": lambda: x,
    }[collective]()
    given = {"all_reduce": (x,), "broadcast": (x, 0)}.get(collective, (output, x))
    work = getattr(dist, collective)(*given, group=group, async_op=True)
    if broken:
        output.sum().item()
    assert work.wait()
    total = output.sum().item()
    dist.destroy_process_group(group)
    ctx.barrier()
    return total


COLLECTIVES = [*map(thorough, ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"]), "broadcast"]


@pytest.mark.ranks(Hosts(2, 2, dealt=True), *([Hosts(2, 2)] if EVERYTHING else []))
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_missing_wait_is_found(ranks, collective):
    assert ranks.run_sanitized(read_before_a_call_is_over, collective, False)[1] == []
    _, findings = ranks.run_sanitized(read_before_a_call_is_over, collective, True)
    assert {finding.kind for finding in findings} == {"race"}
    for finding in findings:
        assert "in read_before_a_call_is_over" in str(finding), finding
