"""Who finds nothing to do leaves with the lock still taken: the next one waits for it for ever."""

import torch
from program import command
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
from iris.gluon import IrisDeviceCtx

KIND = "deadlock"


@gluon.jit
def take_job(context_tensor, jobs, lock, job, BROKEN: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    while ctx.atomic_cas(lock, 0, 1, 0, sem="acquire") != 0:  # first
        pass
    left = ctx.load(jobs, 0)
    if left > 0:
        ctx.store(jobs, left - 1, 0)
        gl.store(job, left)
        if BROKEN:
            ctx.atomic_xchg(lock, 0, 0, sem="release")
    if not BROKEN:
        ctx.atomic_xchg(lock, 0, 0, sem="release")


def main(ctx: iris.Iris, broken: bool) -> None:
    jobs, lock, job = (ctx.zeros(1, dtype=torch.int32) for _ in range(3))  # no jobs: whoever comes first finds none
    ctx.barrier()
    take_job[(1,)](ctx.get_device_context(), jobs, lock, job, broken)
    ctx.barrier()
    if not broken:
        assert job.item() == 0


if __name__ == "__main__":
    command(main)
