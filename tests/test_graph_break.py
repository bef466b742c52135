"""The host's calls inside a function for torch.compile: the graph breaks there, and results are as without."""

import pytest
import torch
from covering import thorough
from torch._dynamo.exc import Unsupported

from iris.operators.graph_break import breaks_graph
from iris.ops import FusedConfig, grouped_mm


def reduced(ctx, x):
    ctx.ccl.all_reduce(result := torch.empty_like(x), x)
    return result


def waited_for(ctx, x):
    workspace = ctx.ccl.all_reduce_preamble(result := torch.empty_like(x), x)
    ctx.ccl.all_reduce(result, x, async_op=True, workspace=workspace).wait()
    return result


def multiplied(ctx, x):
    config = FusedConfig(block_size_m=16, block_size_n=16, block_size_k=16)
    ctx.ops.matmul_all_reduce(result := torch.empty(4, 5, device=ctx.device), x, x.new_ones(6, 5), config=config)
    return result


def multiplied_by_groups(ctx, x):
    return grouped_mm(x[None], x.new_ones(1, 6, 5))[0]


def normalised(ctx, x):
    ctx.ops.all_reduce_rms_norm(result := torch.empty_like(x), x, x.new_ones(6))
    return result


def copied(ctx, x):
    on_heap = ctx.zeros(4, 6).copy_(x)
    ctx.barrier()
    return ctx.peer(on_heap, 0) + int(ctx.is_symmetric(on_heap))


def met(ctx, x):
    ctx.device_barrier()
    return x


CALLS = {
    reduced: "ctx.ccl is for the host; iris.ccl.functional",
    waited_for: "ctx.ccl is for the host; iris.ccl.functional",
    multiplied: "ctx.ops is for the host; iris.ops.functional",
    multiplied_by_groups: "iris.ops.grouped_mm is for the host",
    normalised: "ctx.ops is for the host; iris.ops.functional",
    copied: "the symmetric heap",
    met: "a barrier",
}


def compiled(ctx, call, why):
    torch.compiler.reset()
    x = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)).to(ctx.device)

    def function(x):
        return 2 * call(ctx, torch.sin(x))

    for rows in (x, x + 1):
        torch.testing.assert_close(torch.compile(function, backend="aot_eager")(rows), function(rows))
    torch.compiler.reset()  # what has broken once runs as it is
    with pytest.raises(Unsupported, match=why):
        torch.compile(function, backend="aot_eager", fullgraph=True)(x)


# One of each reason: others are marked in the same way.
SAMPLE = (reduced, multiplied_by_groups, copied, met)


@pytest.mark.parametrize(
    "call",
    [call if call in SAMPLE else thorough(call) for call in CALLS],
    ids=[call.__name__ for call in CALLS],
)
def test_a_graph_breaks_at_calls_of_the_host(ranks, call):
    ranks.run(compiled, call, CALLS[call])


@pytest.mark.parametrize("has_marks", [True, False])
def test_a_torch_without_marks_for_functions(has_marks, monkeypatch):
    if not has_marks:
        monkeypatch.setattr("iris.compat.dynamo._HAS_MARKS", False)
    torch.compiler.reset()

    @breaks_graph("of the reason")
    def outside(x):
        return x + float(x.sum())

    def function(x):
        return 2 * outside(x)

    assert torch.compile(function, backend="eager")(torch.ones(3)).tolist() == [8, 8, 8]
    torch.compiler.reset()
    with pytest.raises(Unsupported, match="of the reason"):
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(3))
