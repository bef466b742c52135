"""A tensor-parallel MLP with gradients: see README.md. -m: tokens of all ranks, -n: width inside, -k: width outside."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent.parent))

from workload import Workload, check, command, random, report, share, size_of_sums, trace, validated  # noqa: E402
from wrapper import TensorParallelMLP  # noqa: E402

import iris  # noqa: E402


def torchs_own(ctx: iris.Iris, hidden: int, wide: int, dtype: torch.dtype) -> torch.nn.Sequential:
    """The same layer by torch's own tensor parallelism; its weights are transposed."""
    layer = torch.nn.Sequential(
        torch.nn.Linear(hidden, wide, bias=False, device=ctx.device, dtype=dtype),
        torch.nn.GELU(),
        torch.nn.Linear(wide, hidden, bias=False, device=ctx.device, dtype=dtype),
    )
    mesh = init_device_mesh(ctx.device.type, (ctx.get_num_ranks(),))
    # By rows outside: the input is gathered, and the output's sums are scattered.
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    return parallelize_module(layer, mesh, plan)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """torch lets the stream wait for a collective where its result is first used, and here that is nowhere."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def step(
    layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, weights: tuple[torch.Tensor, ...], dy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Forward and backward: the result, and the gradients of ``x`` and ``weights``."""
    y = layer(x)
    return tuple(map(arrived, (y.detach(), *torch.autograd.grad(y, (x, *weights), dy))))


def main(ctx: iris.Iris, workload: Workload) -> None:
    rank, W = ctx.get_rank(), ctx.get_num_ranks()
    T, F, H, dtype = workload.m, workload.n, workload.k, workload.dtype
    rows, mine = share(T, ctx, "-m"), share(F, ctx, "-n")
    mlp, theirs = TensorParallelMLP(ctx, H, F, dtype), torchs_own(ctx, H, F, dtype)
    weights, their_weights = (mlp.w1, mlp.w2), (theirs[0].weight, theirs[2].weight)
    x = torch.empty(rows, H, device=ctx.device, dtype=dtype, requires_grad=True)
    dy = torch.empty(rows, H, device=ctx.device, dtype=dtype)

    def whole(round: int) -> tuple[torch.Tensor, ...]:
        """X, the gradient of the result, W1 and W2, of all ranks."""
        shapes = ((T, H), (T, H), (H, F), (F, H))
        x, dy, w1, w2 = (random(ctx, 4 * round + i, *shape, dtype=dtype) for i, shape in enumerate(shapes))
        return x, dy, w1 / H**0.5, w2 / F**0.5

    def own(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's part of each."""
        return x[rank * rows :][:rows], w1[:, rank * mine :][:, :mine], w2[rank * mine :][:mine]

    @torch.no_grad()
    def prepare(round: int) -> None:
        all_x, all_dy, *all_weights = whole(round)
        x_here, *weights_here = own(all_x, *all_weights)
        x.copy_(x_here)
        dy.copy_(all_dy[rank * rows :][:rows])
        for weight, their_weight, value in zip(weights, their_weights, weights_here, strict=True):
            weight.copy_(value)
            their_weight.to_local().copy_(value.t())

    def alone(round: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """What this rank should have, from one that does everything."""
        all_x, all_dy, w1, w2 = (tensor.to(dtype) for tensor in whole(round))
        all_x, w1, w2 = (tensor.requires_grad_() for tensor in (all_x, w1, w2))
        y, *gradients = step(lambda x: torch.nn.functional.gelu(x @ w1) @ w2, all_x, (w1, w2), all_dy)
        return y[rank * rows :][:rows], *own(*gradients)

    def sizes_of(round: int) -> tuple[torch.Tensor, ...]:
        """`size_of_sums` of each of these, as if there were no GELU: roundings of its argument pass through it."""
        all_x, all_dy, w1, w2 = whole(round)
        inside, gradient = all_x @ w1, all_dy @ w2.t()
        factors = (inside, w2), (gradient, w1.t()), (all_x.t(), gradient), (inside.t(), all_dy)
        y, *gradients = (size_of_sums(*pair) for pair in factors)
        return y[rank * rows :][:rows], *own(*gradients)

    if workload.validate:
        for round in range(workload.rounds):
            prepare(round)
            results = step(mlp, x, weights, dy)
            torchs = step(theirs, x, their_weights, dy)
            torchs = *torchs[:2], *(gradient.to_local().t() for gradient in torchs[2:])
            exact, single = alone(round, torch.float64), alone(round, dtype)
            names = ("the result", "the gradient of x", "the gradient of W1", "the gradient of W2")
            sizes = sizes_of(round)
            for name, *values in zip(names, results, torchs, exact, single, sizes, strict=True):
                result, of_torch, right, of_one, size = values
                check(of_torch, right, of_one, f"rank {rank} in round {round}, {name} by torch", size)
                check(result, right, of_torch, f"rank {rank} in round {round}, {name}", size)
            del results, torchs, exact, single, sizes
        validated(ctx, "Tensor-parallel MLP, forward and backward", workload)
    if workload.trace:
        prepare(0)
        trace(ctx, workload, lambda: step(mlp, x, weights, dy))
    if workload.benchmark:
        prepare(0)
        gathered = random(ctx, 0, T, H, dtype=dtype)
        inside = random(ctx, 1, T, mine, dtype=dtype)

        def forward(layer: torch.nn.Module) -> torch.Tensor:
            with torch.no_grad():
                return arrived(layer(x))

        def products() -> None:
            torch.mm(gathered, mlp.w1.detach())
            torch.mm(inside, mlp.w2.detach())

        sizes = f"{T} x {H} x {F} among {W} ranks"
        calls = {
            "Iris, forward": lambda: forward(mlp),
            "the vendor's two GEMMs of it alone": products,
            "Iris, forward and backward": lambda: step(mlp, x, weights, dy),
        }
        report(ctx, f"Tensor-parallel MLP, as a graph: {sizes}", calls)
        calls = {"Iris": lambda: forward(mlp), "torch.distributed.tensor.parallel": lambda: forward(theirs)}
        report(ctx, f"Forward, call by call: {sizes}", calls, eager=True)
        calls = {
            "Iris": lambda: step(mlp, x, weights, dy),
            "torch.distributed.tensor.parallel": lambda: step(theirs, x, their_weights, dy),
        }
        report(ctx, f"Forward and backward, call by call: {sizes}", calls, eager=True)


def room(workload: Workload, num_ranks: int) -> int:
    """Nothing: the operations have memory of their own."""
    return 0


if __name__ == "__main__":
    command(main, on_gpus=(8192, 28672, 8192), simulated=(48, 96, 64), room=room)
