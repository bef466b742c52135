"""What the ranks of a tensor-parallel decoder exchange, by torch.distributed, by Iris' fused operations, or not at all.

All have the methods of `Communication`. Calls are enqueued on the current stream, every rank makes the same ones in the
same order, and they can be captured in a CUDA graph after a first call.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.functional import rms_norm

from iris.bench.model.dimensions import Dimensions
from iris.bench.model.experts import Experts
from iris.ccl.functional import name_of
from iris.compat import functional_collectives
from iris.context import Iris
from iris.experts import ExpertParallel, ExpertsConfig
from iris.experts import functional as experts_functional
from iris.ops import functional


class Communication(Protocol):
    """Among W ranks: H is the width of a row, N that of a rank's part of a product. Products have gradients."""

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        """All ranks' tensors, reduced in place."""

    def all_reduce_rms_norm(self, part: Tensor, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum of all ranks' ``part [M, H]`` and ``residual``: normalised, and as it is. Both arguments are lost."""

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks: ``[M, H]`` → ``[W * M, H]``."""

    def all_gather_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The rows of all ranks, times this rank's columns of a weight: ``[M, H]``, ``[H, N]`` → ``[W * M, N]``."""

    def matmul_reduce_scatter(self, rows: Tensor, weight: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' products: ``[W * M, N]``, ``[N, H]`` → ``[M, H]``."""

    def mixture(self, rows: Tensor, experts: Experts) -> Tensor:
        """What a token's experts, which are on all ranks, make of it: ``[M, H]`` → ``[M, H]``. With gradients."""

    def mixture_of_replicas(self, rows: Tensor, experts: Experts) -> Tensor:
        """The same of rows that all ranks have, as parts whose sum over the ranks it is. Without gradients."""

    def prepare(self, dimensions: Dimensions, tokens: int, dtype: torch.dtype) -> None:
        """Set memory aside for mixtures of so many tokens a rank, in the place of what was. Collective."""


class Unfused(ABC):
    """Products and norms by torch, beside collectives that a subclass has: what ranks have that fuse nothing.

    Each rank gets the tokens of all, and computes what its own experts make of them: so the host needs no count, and
    graphs can be captured.
    """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        """The sum of all ranks' tensors, or what ``op`` makes of them."""

    @abstractmethod
    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks: ``[M, H]`` → ``[W * M, H]``."""

    @abstractmethod
    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """This rank's part of the sum of all ranks' rows: ``[W * M, H]`` → ``[M, H]``."""

    def all_reduce_rms_norm(self, part: Tensor, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual += self.all_reduce(part)
        return rms_norm(residual, gain.shape, gain, eps), residual

    def gathered(self, rows: Tensor) -> Tensor:
        """`all_gather` with gradients."""
        return _Gathered.apply(rows, self)

    def scattered(self, rows: Tensor) -> Tensor:
        """`reduce_scatter` with gradients."""
        return _Scattered.apply(rows, self)

    def all_gather_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self.gathered(rows) @ weight

    def matmul_reduce_scatter(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self.scattered(rows @ weight)

    def mixture(self, rows: Tensor, experts: Experts) -> Tensor:
        return self.scattered(self.mixture_of_replicas(self.gathered(rows), experts))

    def mixture_of_replicas(self, rows: Tensor, experts: Experts) -> Tensor:
        return experts.of_local_experts(rows, *experts.route(rows, 0))

    def prepare(self, dimensions: Dimensions, tokens: int, dtype: torch.dtype) -> None:
        """Torch sets memory aside as it needs it."""
        return


class _Gathered(torch.autograd.Function):
    """The rows of all ranks, whose gradients are sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, by: Unfused) -> Tensor:
        ctx.by = by
        return by.all_gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.by.reduce_scatter(gradient.contiguous()), None


class _Scattered(torch.autograd.Function):
    """This rank's rows of a sum, which all ranks have a part in."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, by: Unfused) -> Tensor:
        ctx.by = by
        return by.reduce_scatter(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.by.all_gather(gradient.contiguous()), None


class ByTorch(Unfused):
    """The collectives of a process group: of NCCL, Gloo, or the backend of Iris; compiled, functional ones."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.num_ranks = group, group.size()

    def close(self) -> None:
        """Give back a group that was made for this. Collective, after a barrier."""
        if self.group is not dist.group.WORLD:
            dist.destroy_process_group(self.group)

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def all_gather(self, rows: Tensor) -> Tensor:
        whole = rows.new_empty(self.num_ranks * rows.shape[0], rows.shape[1])
        dist.all_gather_into_tensor(whole, rows, group=self.group)
        return whole

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        mine = rows.new_empty(rows.shape[0] // self.num_ranks, rows.shape[1])
        dist.reduce_scatter_tensor(mine, rows, group=self.group)
        return mine

    def gathered(self, rows: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return functional_collectives.all_gather(rows, 0, self.group)
        return super().gathered(rows)

    def scattered(self, rows: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return functional_collectives.reduce_scatter(rows, "sum", 0, self.group)
        return super().scattered(rows)


class Fused:
    """Iris' fused operations, each in the place of a product or a norm and its collective."""

    def __init__(self, ctx: Iris) -> None:
        self.ctx, self.ranks = ctx, name_of(ctx)
        self._memory: ExpertParallel | None = None

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        self.ctx.ccl.all_reduce(tensor, tensor, op=op)
        return tensor

    def all_reduce_rms_norm(self, part: Tensor, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        # In place: a row is read before it is written.
        self.ctx.ops.all_reduce_rms_norm(part, part, gain, eps, residual=residual)
        return part, residual

    def all_gather(self, rows: Tensor) -> Tensor:
        whole = rows.new_empty(self.ctx.num_ranks * rows.shape[0], rows.shape[1])
        self.ctx.ccl.all_gather(whole, rows)
        return whole

    # The operators of torch.library, since these have gradients.

    def all_gather_matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        return functional.all_gather_matmul(rows, weight, None, self.ranks)

    def matmul_reduce_scatter(self, rows: Tensor, weight: Tensor) -> Tensor:
        return functional.matmul_reduce_scatter(rows, weight, None, self.ranks)

    def mixture(self, rows: Tensor, experts: Experts) -> Tensor:
        return self._mixture(rows, experts, *experts.route(rows, self.ctx.cur_rank * len(rows)))

    def mixture_of_replicas(self, rows: Tensor, experts: Experts) -> Tensor:
        # Each rank sends its share of the tokens to their experts, and has zeros of the others.
        ids, gates = experts.route(rows, 0)
        return self._mixture(rows, experts, ids.masked_fill(self._of_others[: len(rows)], -1), gates)

    def _mixture(self, rows: Tensor, experts: Experts, ids: Tensor, gates: Tensor) -> Tensor:
        return functional.experts_mlp(rows, ids, gates, experts.experts_up, experts.experts_down, self._named)

    def prepare(self, dimensions: Dimensions, tokens: int, dtype: torch.dtype) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if not dimensions.experts:
            return
        self._memory = self.ctx.experts(
            num_experts=dimensions.experts,
            hidden=dimensions.hidden,
            max_tokens=tokens,
            top_k=dimensions.top_k,
            dtype=dtype,
            config=ExpertsConfig(in_flight=1, layouts=("compact",), alignment=1),
        )
        self._named = experts_functional.name_of(self._memory)
        of_ranks = torch.arange(tokens, device=self.ctx.device) % self.ctx.num_ranks
        self._of_others = (of_ranks != self.ctx.cur_rank)[:, None]


class FusedOperators(Fused):
    """The same for compiled layers: a graph breaks at a method of a context, but not at an operator.

    `all_reduce` and `all_gather`, which are methods still, are called outside of layers.
    """

    def all_reduce_rms_norm(self, part: Tensor, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return functional.all_reduce_rms_norm(part, gain, residual, eps, self.ranks)


class Alone(Unfused):
    """No communication. Of one rank it is all there is; of more, results are wrong, and times are the floor of others.

    What peers would send is a copy of a call's own rows, which the first call of a shape makes: products of zeros would
    take less power, and so less time.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self._gathered: dict[torch.Size, Tensor] = {}

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        return tensor

    def all_gather(self, rows: Tensor) -> Tensor:
        if self.num_ranks == 1:
            return rows
        if rows.shape not in self._gathered:
            self._gathered[rows.shape] = rows.repeat(self.num_ranks, 1)
        return self._gathered[rows.shape]

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        return rows[: rows.shape[0] // self.num_ranks]
