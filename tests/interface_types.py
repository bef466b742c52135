"""What a type checker knows of Iris' interface: mypy reads this file with the package; nothing runs it."""

from typing import TYPE_CHECKING

import torch

import iris
from iris.ccl.collectives import Collectives
from iris.ccl.work import Work
from iris.experts import ExpertParallel, PendingCall, Received
from iris.ops.operations import Operations
from iris.tracing.recording import Tracing

if TYPE_CHECKING:
    from typing_extensions import assert_type

    with iris.iris(heap_size=1 << 20) as ctx:
        assert_type(ctx, iris.Iris)
        assert_type(ctx.get_rank(), int)
        assert_type(ctx.ccl, Collectives)
        assert_type(ctx.ops, Operations)
        assert_type(ctx.tracing, Tracing)
        x = ctx.zeros(4, 8)
        assert_type(x, torch.Tensor)
        assert_type(ctx.ccl.all_reduce(x, x), Work | None)
        assert_type(ctx.ops.matmul_all_reduce(x, x, x), Work | None)
        assert_type(iris.ops.grouped_mm(x, x, offs=x), torch.Tensor)
        ep = ctx.experts(num_experts=2, hidden=8, max_tokens=4, top_k=2)
        assert_type(ep, ExpertParallel)
        received = ep.dispatch(x, x)
        assert_type(received, Received)
        assert_type(received.to_host().counts, list[int])
        assert_type(ep.combine(received.rows, received), torch.Tensor)
        assert_type(ep.dispatch(x, x, async_op=True), PendingCall[Received])
        assert_type(ep.combine(x, received, async_op=True).wait(), torch.Tensor)
        assert_type(ctx.ops.experts_mlp(x, x, x, None, x, x, experts=ep), Work | None)
        iris.ccl.functional.all_reduce(x, iris.ccl.functional.name_of(ctx))
