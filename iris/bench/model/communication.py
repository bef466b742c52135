"""What the ranks of a tensor-parallel decoder exchange, by torch.distributed, by Iris' fused operations, or not at all.

All have the methods of `Communication`. Calls are enqueued on the current stream, every rank makes the same ones in the
same order, and they can be captured in a CUDA graph after a first call.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import rms_norm

from iris.context import Iris


class Communication(Protocol):
    """Among W ranks: H is the width of a row, N that of a rank's part of a product."""

    def all_reduce_rms_norm(self, part: Tensor, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Add the sum of all ranks' ``part [M, H]`` to ``residual``; returns its rows normalised. ``part`` is lost."""

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks: ``[M, H]`` → ``[W * M, H]``."""

    def all_gather_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The rows of all ranks, times this rank's columns of a weight: ``[M, H]``, ``[H, N]`` → ``[W * M, N]``."""

    def matmul_reduce_scatter(self, rows: Tensor, weight: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' products: ``[W * M, N]``, ``[N, H]`` → ``[M, H]``."""


class ByTorch:
    """The collectives of a process group: of NCCL, Gloo, or the backend of Iris."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.num_ranks = group, group.size()

    def all_reduce_rms_norm(self, part: Tensor, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        dist.all_reduce(part, group=self.group)
        residual += part
        return rms_norm(residual, gain.shape, gain, eps)

    def all_gather(self, rows: Tensor) -> Tensor:
        whole = rows.new_empty(self.num_ranks * rows.shape[0], rows.shape[1])
        dist.all_gather_into_tensor(whole, rows, group=self.group)
        return whole

    def all_gather_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self.all_gather(rows) @ weight

    def matmul_reduce_scatter(self, rows: Tensor, weight: Tensor) -> Tensor:
        products = rows @ weight
        mine = products.new_empty(products.shape[0] // self.num_ranks, products.shape[1])
        dist.reduce_scatter_tensor(mine, products, group=self.group)
        return mine


class Fused:
    """Iris' fused operations, each in the place of a product or a norm and its collective."""

    def __init__(self, ctx: Iris) -> None:
        self.ctx = ctx

    def all_reduce_rms_norm(self, part: Tensor, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        # In place: a row is read before it is written.
        self.ctx.ops.all_reduce_rms_norm(part, part, gain, eps, residual=residual)
        return part

    def all_gather(self, rows: Tensor) -> Tensor:
        whole = rows.new_empty(self.ctx.num_ranks * rows.shape[0], rows.shape[1])
        self.ctx.ccl.all_gather(whole, rows)
        return whole

    def all_gather_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        product = rows.new_empty(self.ctx.num_ranks * rows.shape[0], weight.shape[1])
        self.ctx.ops.all_gather_matmul(product, rows, weight)
        return product

    def matmul_reduce_scatter(self, rows: Tensor, weight: Tensor) -> Tensor:
        mine = rows.new_empty(rows.shape[0] // self.ctx.num_ranks, weight.shape[1])
        self.ctx.ops.matmul_reduce_scatter(mine, rows, weight)
        return mine


class Alone:
    """No communication. Of one rank it is all there is; of more, results are wrong, and times are the floor of others.

    What peers would send is a copy of a call's own rows, which the first call of a shape makes: products of zeros would
    take less power, and so less time.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self._gathered: dict[torch.Size, Tensor] = {}

    def all_reduce_rms_norm(self, part: Tensor, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        residual += part
        return rms_norm(residual, gain.shape, gain, eps)

    def all_gather(self, rows: Tensor) -> Tensor:
        if self.num_ranks == 1:
            return rows
        if rows.shape not in self._gathered:
            self._gathered[rows.shape] = rows.repeat(self.num_ranks, 1)
        return self._gathered[rows.shape]

    def all_gather_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self.all_gather(rows) @ weight

    def matmul_reduce_scatter(self, rows: Tensor, weight: Tensor) -> Tensor:
        return (rows @ weight)[: rows.shape[0] // self.num_ranks]
