"""A training step of FSDP2 on this backend and on NCCL: with staging, and with memory that the group hands out.

    torchrun --nproc-per-node 2 benchmarks/fsdp.py --with nccl --with iris --with iris-allocated

Blocks of two linear layers, in bf16 with gradients summed in float32, as many tokens on each rank. ``iris-allocated``
is with `set_allocate_memory_from_process_group_for_comm(True)`, and ``nccl-allocated`` is the same of NCCL. ``alone``
has no communication, the floor: each rank has the whole model. Times are medians of steps, and the slowest rank counts.
NCCL wants a GPU for each rank; ranks that share one (``--share-gpu``) compare ways of Iris. In the simulator the times
mean nothing.
"""

import os
import statistics
import time

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import iris
import iris.distributed

WAYS = ("alone", "nccl", "nccl-allocated", "iris", "iris-allocated")


class Block(torch.nn.Module):
    """A residual layer of two products, as a transformer's feed-forward layer has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(width)
        self.up, self.down = (
            torch.nn.Linear(width, 4 * width, bias=False),
            torch.nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def network(way: str, width: int, layers: int, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    with device:
        model = torch.nn.Sequential(*(Block(width) for _ in range(layers)))
    if way == "alone":
        return model.bfloat16()
    backend = way.partition("-")[0]
    group = dist.new_group(backend=f"{device.type}:{backend}" if backend == "iris" else backend)
    mesh = DeviceMesh.from_group(group, device.type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*model, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule) and way.endswith("allocated"):
            module.set_allocate_memory_from_process_group_for_comm(True)
    return model


def milliseconds(model: torch.nn.Module, x: torch.Tensor, steps: int) -> tuple[list[float], float]:
    """Of each step, on this rank; and the last loss, averaged over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    spent = []
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize()
        spent.append(1e3 * (time.perf_counter() - begin))
    loss = loss.detach()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return spent, loss.item()


@click.command(help=__doc__)
@click.option("--with", "ways", type=click.Choice(WAYS), multiple=True, default=("alone", "iris", "iris-allocated"))
@click.option("--width", default=4096, help="of the residual stream")
@click.option("--layers", default=16)
@click.option("--tokens", default=4096, help="of each rank")
@click.option("--steps", default=20, help="measured, after as many that are not")
@click.option("--share-gpu", is_flag=True, help="all ranks on GPU 0")
def main(ways: tuple[str, ...], width: int, layers: int, tokens: int, steps: int, share_gpu: bool) -> None:
    on_gpu = not iris.simulator.ACTIVE
    device = torch.device("cuda", 0 if share_gpu else int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cuda:iris")
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    table = Table("way", "ms a step", "fastest", "slowest", "GiB at most", "loss")
    for way in ways:
        model = network(way, width, layers, device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        milliseconds(model, x, steps)
        spent, loss = milliseconds(model, x, steps)
        # The ranks begin each step together, so the slowest rank's time is the step's.
        times = torch.tensor(spent, device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        each = times.tolist()
        used = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        row = (statistics.median(each), min(each), max(each), used, loss)
        table.add_row(way, *(f"{value:.2f}" for value in row[:4]), f"{loss:.4f}")
        del model
    if dist.get_rank() == 0:
        Console().print(table)
    dist.destroy_process_group()


main()
