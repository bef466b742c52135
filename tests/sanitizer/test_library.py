"""What the sanitizer has found in the library stays mended: accesses that raced, though nobody used what they read.

And a program that is right, which it took for wrong.
"""

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import iris
from iris.ccl import Config
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
    """What a tile has behind a rank's last row is not what another rank sends."""
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


def barrier_behind_messages(ctx):
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


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "worker", [broadcast_in_place, scale_of_a_row, rows_that_fill_no_tile, barrier_behind_messages]
)
def test_nothing_races(ranks, worker):
    _, findings = ranks.run_sanitized(worker)
    assert findings == []
