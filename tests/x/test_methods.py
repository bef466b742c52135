"""The operations of `iris.x` as methods of the device context do what the functions do."""

import pytest
import torch
from patterns import assert_same_bits, pattern

from iris.x.methods import METHODS
from x.method_kernels import operate

B = 16


def operated(ctx, operation):
    results = []
    for method in (False, True):
        values = pattern((B, B), torch.int8, ctx.cur_rank).to(torch.float32).to(ctx.device)
        src, dst = ctx.zeros(B, B), ctx.zeros(ctx.num_ranks * B, B)
        wide, locks = ctx.zeros(B, ctx.num_ranks * B), ctx.zeros(1, dtype=torch.int32)
        if operation == "gather":
            src.copy_(values)
        ctx.barrier()
        operate[(1,)](ctx.get_device_context(), values, src, dst, locks, wide, operation, method, B, ctx.num_ranks)
        ctx.barrier()
        results.append(torch.cat([dst.flatten(), wide.flatten()]))
    assert results[0].any()
    assert_same_bits(*results)


@pytest.mark.parametrize("operation", METHODS)
def test_a_method_does_what_its_function_does(ranks, operation):
    ranks.run(operated, operation)
