"""A thread that runs only torch's wait knows that a sum is there, and the main thread reads it; or joins first."""

import threading
import time

import torch
import torch.distributed as dist
from program import command

import iris

KIND = "race"
N = 64


def main(ctx: iris.Iris, broken: bool) -> None:
    x = torch.full((N,), 1.0 + ctx.get_rank())
    ctx.barrier()
    work = dist.all_reduce(x, async_op=True)  # first
    thread = threading.Thread(target=work.wait)
    thread.start()
    time.sleep(0.2)
    if not broken:
        thread.join()
    total = x.sum().item()  # second
    thread.join()
    assert broken or total == 3.0 * N
    ctx.barrier()


if __name__ == "__main__":
    command(main)
