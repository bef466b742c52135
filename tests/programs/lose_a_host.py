"""Ranks of one host go on where those of the other stop coming, and report what they were told, and when.

    lose_a_host.py CALL LOST FOLDER    # under torchrun; LOST: the host whose ranks do not come

Each rank of a host that stays makes the CALL, and writes to the FOLDER what became of it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import iris
from iris.errors import PeerLostError

CALLS = {
    "all_reduce": lambda ctx, x: ctx.ccl.all_reduce(x, x),
    "barrier": lambda ctx, x: ctx.barrier(),
    "device_barrier": lambda ctx, x: ctx.device_barrier(),
}


def main(call, lost, folder):
    folder = Path(folder)
    ctx = iris.iris(1 << 20)
    x = torch.ones(1000)
    ctx.ccl.all_reduce(x, x)
    ctx.barrier()
    (folder / f"ready{ctx.cur_rank}").touch()
    if ctx.host == int(lost):
        time.sleep(600)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from torchrun, where its store is gone
    try:
        CALLS[call](ctx, x)
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}", "when": time.time()}
        part = folder / f"part{ctx.cur_rank}"
        part.write_text(json.dumps(report))
        part.rename(folder / f"rank{ctx.cur_rank}")
        if not isinstance(error, PeerLostError):
            raise
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
