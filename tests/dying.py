"""A program of which one rank ends on the way: what `test_deaths` starts, and what shows the same on GPUs.

    python tests/dying.py HOW WHERE VICTIM FOLDER      # as each rank, or under torchrun

The others report in the folder what they were told, after how many seconds, and what they still held.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import triton

import iris
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
HEAP_SIZE = 1 << 20


@triton.jit
def wait_for(flags, context_tensor):
    ctx = iris.DeviceContext.initialize(context_tensor)
    ctx.wait(flags, 1)


def do(ctx, where):
    """What the others do while one rank does not."""
    if where == "allocation":
        kept = [ctx.zeros(1 << 16, dtype=torch.uint8) for _ in range(HEAP_SIZE >> 16)]
        del kept[0]
        while True:  # until the heap is full, and the ranks meet
            kept.append(ctx.zeros(1 << 15, dtype=torch.uint8))
    elif where == "kernel":
        wait_for[(2,)](ctx.zeros(4, dtype=torch.int32), ctx.get_device_context())
    elif where == "collective":
        ctx.ccl.all_reduce(ctx.zeros(1024), ctx.ones(1024))
    elif where == "close":
        ctx.close()
    if where != "close":
        ctx.barrier()


def main(how, where, victim, folder):
    rank, victim, folder = int(os.environ["RANK"]), int(victim), Path(folder)
    on_gpu = not iris.simulator.ACTIVE
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")

    def end(*_):
        (folder / "end").write_text(str(time.time()))
        HOWS[how]()

    dies = rank == victim
    try:
        dist.barrier()  # all have come out of torch's own part
        if dies and where == "init":
            end()
        if dies and where == "set-up":
            mapping.round_up = end
        ctx = iris.iris(HEAP_SIZE)
        ctx.ccl.all_reduce(ctx.zeros(1024), ctx.ones(1024))
        ctx.barrier()
        if dies:
            # Late, so that the others wait; or before they begin to.
            time.sleep(0.0 if where == "between" else 0.3)
            end()
        time.sleep(0.6 if where == "between" else 0.0)
        do(ctx, where)
    except BaseException as error:
        if not dies:
            after_s = time.time() - float((folder / "end").read_text())
            told = {"after_s": after_s, "error": f"{type(error).__name__}: {error}"}
            if where == "set-up":
                error.__traceback__ = None
                gc.collect()
                told["held"] = Path("/proc/self/maps").read_text().count("iris-heap")
            (folder / str(rank)).write_text(json.dumps(told))
        raise
    (folder / str(rank)).write_text(json.dumps({"error": "nobody told this rank anything"}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
