"""A call of tensors like those of an earlier one has torch make its results, and no more: a view costs microseconds."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experts.layers import K, Layer, M, both_forms, done_with, experts
from iris import simulator
from iris.experts import calls, checks


class Operators(TorchDispatchMode):
    """Those that torch runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def operators(ctx, low_latency, layout, quantize):
    layer = Layer(1, torch.bfloat16, ctx.device, hidden=256)
    # Kernels of the simulator are made of torch's operators.
    with mock.patch.object(calls, "prepare", lambda *_, **__: lambda stream, args: None):
        ep = experts(ctx, layer, low_latency=low_latency)
        x = torch.ones(M, layer.hidden, device=ctx.device, dtype=layer.dtype)
        ids = torch.zeros(M, K, device=ctx.device, dtype=torch.int64)
        weights, out = torch.ones(M, K, device=ctx.device), torch.empty_like(x)
        given = {"layout": layout}
        if quantize == "given":
            x, given["x_scales"] = x.to(torch.float8_e4m3fn), torch.ones(M, 2, device=ctx.device)
        else:
            given["quantize"] = quantize
        results = ["aten::detach"] * (1 if quantize is None else 2)
        # Rows of fp8 are moved as bytes; on GPUs an address says nothing of it.
        moved = ["aten::view.dtype", "aten::detach"] if quantize == "given" and simulator.ACTIVE else []
        y = None
        for number in range(3):
            # They are looked at in the simulator and with IRIS_DEBUG=1.
            with mock.patch.object(checks, "check_numbers"), Operators() as found:
                received = ep.dispatch(x, ids, weights, **given)
            y = torch.zeros(received.rows.shape, device=ctx.device, dtype=out.dtype) if y is None else y
            with Operators() as added:
                ep.combine(y, received, out=out)
            if number:
                assert (found.names, added.names) == (moved + results, [])
    done_with(ctx, ep)


@pytest.mark.ranks(1, exactly=True)
@pytest.mark.parametrize("layout", ["expanded", "compact"])
@pytest.mark.parametrize("quantize", [None, "fp8_block128", "given"])
@both_forms
def test_a_later_call_runs_no_operators(ranks, low_latency, layout, quantize):
    ranks.run(operators, low_latency, layout, quantize)
