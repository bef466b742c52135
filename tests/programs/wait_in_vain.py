"""Rank 0 waits for what rank 1 never sends, in every kind of wait. Needs IRIS_WAIT_TIMEOUT_S.

On GPUs it is told what the kernel's record and the flags say, in the simulator what its scheduler sees.
"""

import os
import time

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from acceptance._launch import launch

import iris
from iris.errors import GroupAbortedError, IrisTimeoutError

LIMIT_S = float(os.environ["IRIS_WAIT_TIMEOUT_S"])


@triton.jit
def wait_kernel(context_tensor, flags, value):
    ctx = iris.DeviceContext.initialize(context_tensor)
    ctx.wait(flags + tl.program_id(0), value, cmp="ge")


@triton.jit
def send_kernel(context_tensor, flags, value):
    iris.DeviceContext.initialize(context_tensor).signal(flags, value, 0)


@triton.jit
def meet_kernel(context_tensor, flags, epoch):
    iris.DeviceContext.initialize(context_tensor).barrier(flags, epoch=epoch)


@triton.jit
def count_kernel(context_tensor, flags):
    iris.DeviceContext.initialize(context_tensor).barrier(flags)


def message(on_gpu, in_simulator):
    return in_simulator if iris.simulator.ACTIVE else on_gpu


def expect_timeout(ctx, enqueue, *texts):
    try:
        enqueue()
        ctx.barrier()
    except IrisTimeoutError as error:
        missing = [text for text in texts if text not in str(error)]
        print(f"{'FAILED, no ' + repr(missing) if missing else 'found'}: {error}", flush=True)
    else:
        print("FAILED: nothing was raised", flush=True)


def expect_aborted(call, *texts):
    """On every rank, since a wait of the group has been given up."""
    try:
        call()
    except GroupAbortedError as error:
        missing = [text for text in texts if text not in str(error)]
        print(f"{'FAILED, no ' + repr(missing) if missing else 'aborted'}: {error}", flush=True)
    else:
        print("FAILED: nothing was raised", flush=True)


def worker(rank, world_size):
    ctx = iris.iris(1 << 20)
    flags = ctx.full((4,), 3, dtype=torch.int32)
    flags[2:] = 9
    ctx.device_barrier()
    ctx.barrier()
    group = dist.new_group()
    ctx.device_barrier(group)
    if rank == 0:
        # Programs 2 and 3 go through, 0 and 1 do not.
        expect_timeout(
            ctx, lambda: wait_kernel[(4,)](ctx.get_device_context(), flags, 7), "ank 0", "int32[4]", ">= 7", "3"
        )
        late = "Rank 0 has arrived. Rank 1 has not arrived: it is at epoch 1, the one before."
        expect_timeout(
            ctx,
            lambda: ctx.device_barrier(group),
            "in a barrier for epoch 2",
            "rank 0's flags of device_barrier() on stream 1",
            message(late, "the ranks are at [2, 1]"),
        )
        # A time-out is said once, and the context goes on, without the group.
        flags.fill_(8)
        wait_kernel[(4,)](ctx.get_device_context(), flags, 7)
    ctx.barrier()
    expect_aborted(lambda: ctx.device_barrier(group), "rank 0")
    # A wait within the limit is no time-out, neither at first nor after a pause that is longer than the limit.
    for turn in range(3):
        ctx.barrier()
        time.sleep(1.5 * LIMIT_S * (turn == 1))
        ctx.barrier()
        if rank == 0:
            wait_kernel[(1,)](ctx.get_device_context(), flags, 20 + turn)
        else:
            time.sleep(0.2)
            send_kernel[(1,)](ctx.get_device_context(), flags, 20 + turn)
    ctx.barrier()
    disagree(ctx)
    leave_alone(ctx)
    print("done", flush=True)


def disagree(ctx):
    """Both ranks come to a barrier, and not to the same."""
    rank, context_tensor = ctx.get_rank(), ctx.get_device_context()
    grid, counted, given = ((4, 2)[rank],), ctx.zeros(4, 2, dtype=torch.int32), ctx.zeros(1, 2, dtype=torch.int64)
    ctx.barrier()
    launches = {
        "Rank 1 has arrived with programs 0 to 1 only, and this rank launched 4: the ranks have launched different": (
            lambda: count_kernel[grid](context_tensor, counted)
        ),
        "Rank 1 is at epoch 3, 4 behind. So the ranks count differently": (
            lambda: meet_kernel[(1,)](context_tensor, given, (7, 3)[rank])
        ),
    }
    seen = ("waits in a barrier for epoch 1, the ranks are at [1, 0]", "for epoch 7, the ranks are at [7, 3]")
    for (text, enqueue), simulated in zip(launches.items(), seen, strict=True):
        if rank == 0:
            expect_timeout(ctx, enqueue, message(text, simulated))
        else:
            enqueue()
        ctx.barrier()


def leave_alone(ctx):
    """Rank 0 calls what the library has, and rank 1 does not."""
    x, small = torch.ones(64, device=ctx.device), {"block_size_m": 64, "block_size_n": 64, "block_size_k": 32}
    a, b = (torch.ones(64, 64, device=ctx.device, dtype=torch.float16) for _ in range(2))
    sums, product = torch.empty_like(x), ctx.zeros(64, 64, dtype=torch.float16)
    large = torch.ones(1 << 20, device=ctx.device)
    queued, tiles = iris.ccl.Config(all_reduce_variant="two_shot"), iris.ops.FusedConfig(**small)
    missing = message("for data from rank 1", "IRIS_DEBUG=1 on all ranks")
    calls = {
        ("of all_reduce or reduce_scatter", missing): lambda group: ctx.ccl.all_reduce(sums, x, group=group),
        ("queues of", missing): lambda group: ctx.ccl.all_reduce(large, large.clone(), config=queued, group=group),
        ("for messages", message("queues of", "each recv() has a send() on the other rank")): (
            lambda group: ctx.ccl.send(x, 0, group=group) if ctx.get_rank() else ctx.ccl.recv(x, 1, group=group)
        ),
        # Of the world, which is broken then.
        ("workspace of matmul_all_reduce(", "calls begun by each rank: [2, 1]"): (
            lambda group: ctx.ops.matmul_all_reduce(product, a, b, config=tiles)
        ),
    }
    for texts, call in calls.items():
        group = dist.new_group()
        call(group)
        ctx.barrier()
        if ctx.get_rank() == 0:
            expect_timeout(ctx, lambda: call(group), *texts)  # noqa: B023
        dist.barrier()
        expect_aborted(lambda: call(group), "rank 0")  # noqa: B023
    expect_aborted(ctx.barrier)
    ctx.close()
    ctx = iris.iris(1 << 20)
    ctx.ccl.all_reduce(sums, torch.ones_like(x))
    ctx.barrier()
    print(f"sums of a new context: {sums.tolist()[:1]}", flush=True)


if __name__ == "__main__":
    launch(worker)
