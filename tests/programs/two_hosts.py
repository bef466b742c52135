"""Ranks of two hosts that multiply and reduce: all that moves is the library's."""

import torch

import iris

with iris.iris(1 << 22) as ctx:
    n = 16 * ctx.num_ranks
    a, b = ctx.ones(16, 32), ctx.ones(32, 16)
    product = ctx.empty(n, 16)
    ctx.ops.all_gather_matmul(product, a, b)
    total = ctx.zeros(n, dtype=torch.int32) + ctx.cur_rank
    ctx.ccl.all_reduce(total, total)
    assert product.eq(32).all() and total.tolist() == [sum(range(ctx.num_ranks))] * n
