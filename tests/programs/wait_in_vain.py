"""Rank 0 waits for what rank 1 never sends: a flag, then a barrier. Needs IRIS_WAIT_TIMEOUT_S."""

import time

import torch
import triton
import triton.language as tl
from acceptance._launch import launch

import iris
from iris.errors import IrisTimeoutError


@triton.jit
def wait_kernel(context_tensor, flags, value):
    ctx = iris.DeviceContext.initialize(context_tensor)
    ctx.wait(flags + tl.program_id(0), value, cmp="ge")


@triton.jit
def send_kernel(context_tensor, flags, value):
    iris.DeviceContext.initialize(context_tensor).signal(flags, value, 0)


def expect_timeout(ctx, enqueue, *texts):
    try:
        enqueue()
        ctx.barrier()
    except IrisTimeoutError as error:
        missing = [text for text in texts if text not in str(error)]
        print(f"{'FAILED, no ' + repr(missing) if missing else 'found'}: {error}", flush=True)
    else:
        print("FAILED: nothing was raised", flush=True)


def worker(rank, world_size):
    ctx = iris.iris(1 << 20)
    flags = ctx.full((4,), 3, dtype=torch.int32)
    flags[2:] = 9
    ctx.device_barrier()
    ctx.barrier()
    if rank == 0:
        # Programs 2 and 3 go through, 0 and 1 do not.
        expect_timeout(
            ctx, lambda: wait_kernel[(4,)](ctx.get_device_context(), flags, 7), "ank 0", "int32[4]", ">= 7", "3"
        )
        expect_timeout(ctx, ctx.device_barrier, "ank 0", "in a barrier")
        # A time-out is said once, and the context goes on.
        flags.fill_(8)
        wait_kernel[(4,)](ctx.get_device_context(), flags, 7)
    ctx.barrier()
    if rank == 1:
        ctx.device_barrier()  # what rank 0 waited for in vain: it has long arrived
    # A wait within the limit is no time-out, neither at first nor after a pause that is longer than the limit.
    for turn in range(3):
        ctx.barrier()
        time.sleep(1.5 * (turn == 1))
        ctx.barrier()
        if rank == 0:
            wait_kernel[(1,)](ctx.get_device_context(), flags, 20 + turn)
        else:
            time.sleep(0.4)
            send_kernel[(1,)](ctx.get_device_context(), flags, 20 + turn)
    ctx.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    launch(worker)
