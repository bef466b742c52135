"""Inductor's own micro-pipelining of tensor parallelism calls torch's fused operators, which run on Iris."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._inductor import config
from torch.distributed import _symmetric_memory

from inductor.searched import compiled
from iris.inductor import symm_mem

K, N = 32, 64
# Along a dimension that is not the first, the backward pass has slices, put together again, where the forward one has
# splits. Inductor's pass (torch/_inductor/fx_passes/micro_pipeline_tp.py) knows these from torch 2.13 on.
FINDS_CATS_OF_SLICES = torch.__version__ >= (2, 13)
# Once in a process.
put_in_place = functools.cache(symm_mem.put_in_place)


def pipelined(ctx, dim):
    """Forward and backward, of which Inductor pipelines the gathers and the scatters with their products."""
    put_in_place()
    group, W, me = dist.group.WORLD, ctx.num_ranks, ctx.cur_rank

    def mlp(x, up, down):
        rows = funcol.all_gather_tensor_autograd(x, dim, group)
        return funcol.reduce_scatter_tensor(torch.relu(rows @ up) @ down, "sum", dim, group)

    generator = torch.Generator().manual_seed(3)
    shapes = (2, 8, K), (K, N), (N, K), (2, 8, K)
    x, up, down, factor = (torch.randn(W, *each, generator=generator).to(ctx.device) for each in shapes)
    given = [each[me].clone().requires_grad_() for each in (x, up, down)]
    with (
        # On a machine without NCCL Inductor pipelines nothing; and torch has to be told that the group can be used so.
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(_symmetric_memory, "is_symm_mem_enabled_for_group", return_value=True),
        mock.patch.object(symm_mem, "context_of", wraps=symm_mem.context_of) as contexts,
        mock.patch.object(symm_mem, "by_torch", side_effect=AssertionError("torch was asked")),
        config.patch(_micro_pipeline_tp=True),
    ):
        result = compiled(mlp)(*given)
        forward = contexts.call_count
        (result * factor[me]).sum().backward()
    # The same by one process, whose loss is the sum of all ranks'.
    exact = [each.double().requires_grad_() for each in (x, up, down)]
    rows = torch.cat(list(exact[0]), dim)
    total = sum(torch.relu(rows @ a) @ b for a, b in zip(*exact[1:], strict=True))
    (total * torch.cat(list(factor), dim)).sum().backward()
    torch.testing.assert_close(result.double(), total.chunk(W, dim)[me], rtol=1e-4, atol=1e-3)
    for mine, of_all in zip(given, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), of_all.grad[me], rtol=1e-4, atol=1e-3)
    # A gather and a scatter in each direction that Inductor has found, all of them on Iris.
    backward = 0 if dim and not FINDS_CATS_OF_SLICES else 2
    assert (forward, contexts.call_count) == (2, 2 + backward)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_inductor_pipelines_on_iris(ranks, dim):
    ranks.run(pipelined, dim)
