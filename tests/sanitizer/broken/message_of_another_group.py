"""Two groups of the same ranks: the receiver waits for the message of one, and reads what comes before the other's."""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
N = 64


@triton.jit
def put(context_tensor, data, N: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, N)
    ctx.store(data + offsets, 3 * offsets, 1)  # first


def main(ctx: iris.Iris, broken: bool) -> None:
    early, late = (dist.new_group([0, 1]) for _ in range(2))
    data, message, other = ctx.zeros(N, dtype=torch.int32), torch.ones(1), torch.ones(1)
    ctx.barrier()
    if ctx.get_rank() == 0:
        sent = dist.isend(message, 1, group=early)
        put[(1,)](ctx.get_device_context(), data, N)
        dist.send(other, 1, group=late)
        sent.wait()
    else:
        calls = {late: dist.irecv(other, 0, group=late), early: dist.irecv(message, 0, group=early)}
        calls.pop(early if broken else late).wait()
        read = data.tolist()  # second
        assert broken or read == [3 * i for i in range(N)]
        calls.popitem()[1].wait()
    ctx.barrier()


if __name__ == "__main__":
    command(main)
