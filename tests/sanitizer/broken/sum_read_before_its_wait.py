"""The host reads a sum that it has asked for with ``async_op=True``, and waits for it afterwards.

In the twin it hears of the end by the future of the call, to which it has given a callback, as data parallel hooks do.
"""

import torch
import torch.distributed as dist
from program import command

import iris

KIND = "race"
N = 64


def main(ctx: iris.Iris, broken: bool) -> None:
    x = torch.arange(N, dtype=torch.float32) * (1 + ctx.get_rank())
    other = torch.ones(N)
    work = dist.all_reduce(x, async_op=True)  # first
    other.mul_(2)
    if broken:
        mean = x.sum().item() / 2  # second
        work.wait()
    else:
        halves = work.get_future().then(lambda future: future.value()[0] / 2)
        mean = halves.wait().sum().item()
    assert broken or mean == 1.5 * sum(range(N))
    ctx.barrier()


if __name__ == "__main__":
    command(main)
