"""A program of which ranks end on the way: what `test_deaths` starts, and what shows the same on GPUs.

    python tests/dying.py HOW WHERE VICTIMS FOLDER     # as each rank, or under torchrun; victims as in 1 or 0,3

The others report in the folder what they were told, after how many seconds, and what they still held.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import triton

import iris
import iris.distributed  # noqa: F401 (registers the backend)
from iris.errors import PeerLostError
from iris.heap import mapping


def raise_an_error():
    raise ValueError("the end of this rank")


HOWS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "os._exit": lambda: os._exit(0),
    "exception": raise_an_error,
    "sys.exit": lambda: sys.exit(),
}
WHERES = ("init", "set-up", "allocation", "barrier", "kernel", "collective", "between", "close")
MORE_WHERES = ("thread", "sub-group", "first use of a group")
# With Iris as the backend of torch.distributed.
WHERES_OF_BACKEND = ("making of a group", "first use", "torch barrier", "torch collective", "message")
HEAP_SIZE = 1 << 20


@triton.jit
def wait_for(flags, context_tensor):
    ctx = iris.DeviceContext.initialize(context_tensor)
    ctx.wait(flags, 1)


def do(ctx, where):
    """What the others do while the victims do not."""
    if where == "allocation":
        kept = [ctx.zeros(1 << 16, dtype=torch.uint8) for _ in range(HEAP_SIZE >> 16)]
        del kept[0]
        while True:  # until the heap is full, and the ranks meet
            kept.append(ctx.zeros(1 << 15, dtype=torch.uint8))
    elif where == "kernel":
        wait_for[(2,)](ctx.zeros(4, dtype=torch.int32), ctx.get_device_context())
    elif where == "collective":
        ctx.ccl.all_reduce(ctx.zeros(1024), ctx.ones(1024))
    elif where == "device barrier":
        ctx.device_barrier()
    elif where == "thread":
        in_a_thread(ctx.barrier)
    elif where == "sub-group":
        reduce_in_sub_group(ctx)  # Who is no member waits for those that are.
    elif where == "first use of a group":
        ctx.device_barrier(groups[1])
    elif where == "close":
        ctx.close()
    if where != "close":
        ctx.barrier()


def reduce_in_sub_group(ctx):
    output, x = ctx.zeros(1024), ctx.ones(1024)
    if ctx.cur_rank != ctx.num_ranks - 1:
        ctx.ccl.all_reduce(output, x, group=groups[0])


def do_with_torch(where, device):
    """The same by calls of torch alone."""
    x = torch.ones(1024, device=device)
    if where == "making of a group":
        dist.new_group()
    elif where == "first use":
        dist.all_reduce(x, group=groups[1])
    elif where == "torch barrier":
        dist.barrier()
    elif where == "torch collective":
        dist.all_reduce(x)
    elif where == "message":
        before, after = ((dist.get_rank() + way) % dist.get_world_size() for way in (-1, 1))
        messages = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, x.clone(), before)]
        for message in dist.batch_isend_irecv(messages):
            message.wait()
    dist.barrier()


def in_a_thread(call):
    errors = []

    def run():
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def let_go(ctx):
    """What a program does that goes on without the dead."""
    if ctx is not None:
        with contextlib.suppress(PeerLostError):
            ctx.close()
    else:
        dist.destroy_process_group()


# One of all ranks but the last, which has been used, and one of all, which has not.
groups = []


def main(how, where, victims, folder):
    rank, victims, folder = int(os.environ["RANK"]), {int(each) for each in victims.split(",")}, Path(folder)
    on_gpu = not iris.simulator.ACTIVE
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group("iris" if where in WHERES_OF_BACKEND else backend)

    def end(*_):
        (folder / "end").write_text(str(time.time()))
        HOWS[how]()

    dies, ctx = rank in victims, None
    try:
        if where in WHERES_OF_BACKEND + MORE_WHERES:
            groups.append(dist.new_group(range(dist.get_world_size() - 1)))
            groups.append(dist.new_group())
        dist.barrier()  # all have come out of torch's own part
        if dies and where == "init":
            end()
        if dies and where == "set-up":
            mapping.round_up = end
        if where not in WHERES_OF_BACKEND:
            ctx = iris.iris(HEAP_SIZE)
            ctx.ccl.all_reduce(ctx.zeros(1024), ctx.ones(1024))
            if where == "sub-group":
                reduce_in_sub_group(ctx)
            ctx.barrier()
        if dies:
            # Late, so that the others wait; or before they begin to.
            time.sleep(0.0 if where == "between" else 0.3)
            end()
        time.sleep(0.6 if where == "between" else 0.0)
        if ctx is None:
            do_with_torch(where, "cuda" if on_gpu else "cpu")
        else:
            do(ctx, where)
    except BaseException as error:
        if not dies:
            after_s = time.time() - float((folder / "end").read_text())
            report = {"after_s": after_s, "error": f"{type(error).__name__}: {error}"}
            # With the frames that they hold, and the tensors in these.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            let_go(ctx)
            ctx = None
            gc.collect()
            report["held"] = Path("/proc/self/maps").read_text().count("iris-heap")
            (folder / str(rank)).write_text(json.dumps(report))
        raise
    (folder / str(rank)).write_text(json.dumps({"error": "nobody told this rank anything"}))


if __name__ == "__main__":
    main(*sys.argv[1:])
