"""Kernels that reach a peer by way of another context's tensor, or of none. On GPUs it needs IRIS_DEBUG=1."""

import torch
import triton
from acceptance._launch import launch
from language import meeting_kernels, move_kernels

import iris
from iris.errors import NotSymmetricError

FORMS = ["triton_context", "triton_functional", "gluon_context", "gluon_functional"]


def expect(ctx, what, enqueue, text):
    try:
        enqueue()
        ctx.barrier()
    except NotSymmetricError as error:
        print(f"{'found' if text in str(error) else f'FAILED, no {text!r}'}: {what}: {error}", flush=True)
    else:
        print(f"FAILED: {what} was not noticed", flush=True)


def worker(rank, world_size):
    with iris.iris(1 << 20) as ctx, iris.iris(1 << 20) as other:
        source, target, foreign = ctx.ones(100), ctx.zeros(100), other.zeros(100)
        flag, seen = torch.ones(1, dtype=torch.int64, device=ctx.device), ctx.zeros(1, dtype=torch.int64)
        tile = other.zeros(64, 64)

        def put(form, to, n=100):
            args = ctx.get_device_context(), ctx.get_heap_bases(), source, to, n, rank, rank, "put", 128
            return lambda: getattr(move_kernels, form)[(triton.cdiv(n, 128),)](*args)

        for form in FORMS:
            expect(ctx, f"{form}, of another context", put(form, foreign), "float32[100]")
        args = ctx.get_device_context(), source, tile, 16, 16, 16, rank, 16, 16
        expect(ctx, "a tile", lambda: move_kernels.triton_tile[(1, 1)](*args), "float32[64, 64]")
        args = ctx.get_device_context(), flag, 1, seen, "eq"
        expect(ctx, "a flag", lambda: meeting_kernels.triton_compare[(1,)](*args), "not in any heap")
        # What is right is not reported, nor what a mask leaves out at the heap's end.
        last = ctx.empty(ctx.heap.stats().largest_free_block // 4)
        for form in FORMS:
            put(form, target)()
            put(form, last[-50:], 50)()
        ctx.device_barrier()
        ctx.barrier()
        assert target.tolist() == [1] * 100 and last[-50:].tolist() == [1] * 50
    print("done", flush=True)


if __name__ == "__main__":
    launch(worker)
