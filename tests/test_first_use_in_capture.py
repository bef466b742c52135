"""The first use of anything may be in a capture by mistake: the error says so, and the next capture is as any other."""

import functools

import pytest
import torch
import torch.distributed as dist

import iris
import iris.distributed  # noqa: F401 (registers the backend)
from iris.ccl import functional as collectives
from iris.errors import FirstUseInCaptureError
from iris.ops import functional

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no captures without a GPU"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def through_torch(ctx, x, square):
    """Each with a group of its own, which is made before."""
    whole = x.new_empty(x.numel() * ctx.num_ranks)
    calls = [
        lambda group: dist.all_reduce(x, group=group),
        lambda group: dist.all_reduce(x, group=group, async_op=True).wait(),
        lambda group: dist.all_gather_into_tensor(whole, x, group=group),
        lambda group: dist.broadcast(x, 0, group=group),
        lambda group: dist.barrier(group=group),
    ]
    return [functools.partial(call, dist.new_group(backend="cuda:iris")) for call in calls]


def of_a_context(ctx, x, square):
    out, name = torch.empty_like(square), collectives.name_of(ctx)
    return [
        lambda: ctx.device_barrier(),
        lambda: ctx.ccl.all_reduce(x, x),
        lambda: ctx.ccl.communicator(),
        lambda: ctx.ccl.all_reduce_preamble(x, x),
        lambda: ctx.ops.matmul_all_reduce(out, square, square),
        lambda: ctx.ops.matmul_all_reduce_preamble(out, square, square, config=iris.ops.FusedConfig()),
        lambda: ctx.ops.all_reduce_rms_norm(out, square, square[0]),
        lambda: collectives.all_reduce(x, name),
        lambda: functional.matmul_all_reduce(square, square, None, name),
        lambda: iris.iris(1 << 20),
    ]


def capture(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def refused(ctx, calls):
    x = torch.ones(512, device=ctx.device)
    square = torch.ones(64, 64, device=ctx.device, dtype=torch.bfloat16)
    with iris.iris(1 << 20) as fresh:
        for call in calls(fresh, x, square):
            with pytest.raises(FirstUseInCaptureError, match="before the capture"):
                capture(call)
            assert not torch.cuda.is_current_stream_capturing()
            y = torch.zeros(4, device=ctx.device)
            clean = capture(lambda y=y: y.add_(1))
            clean.replay()
            assert y.tolist() == [1.0] * 4
        # In the end they are used as they should be: once, and then in a capture.
        fresh.ccl.all_reduce(x, x)
        graph = capture(lambda: fresh.ccl.all_reduce(x, x))
        graph.replay()
        fresh.barrier()
        assert x.tolist() == [float(ctx.num_ranks**2)] * 512


@pytest.mark.ranks(2)
@pytest.mark.parametrize("calls", [through_torch, of_a_context], ids=lambda calls: calls.__name__)
def test_a_first_use_in_a_capture_is_refused(ranks, calls):
    ranks.run(refused, calls)
