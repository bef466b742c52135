"""The pair of functions around a tensor-parallel layer, called f and g in the paper on Megatron-LM (arXiv 1909.08053).

Written with functional collectives, whose own gradients differ between releases of torch.
"""

import torch
import torch.distributed._functional_collectives as funcol


class SumOfGradients(torch.autograd.Function):
    """f: what all ranks are given; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return funcol.all_reduce(gradient, "sum", ctx.group), None


class Sum(torch.autograd.Function):
    """g: the sum of all ranks' parts, each of which has its gradient."""

    @staticmethod
    def forward(ctx, x, group):
        return funcol.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None
