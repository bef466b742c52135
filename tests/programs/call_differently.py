"""Two ranks, each a host of its own, of which one makes another call than the other; or one ends.

    call_differently.py wait|close|lose    # as each rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT

``wait``: the program waits for the GPU, for ever. ``close``: it closes the rail when it finds the group broken.
``lose``: rank 1 kills itself, and the other waits. In the simulator there is no NCCL, and no GPU that a process could
wait for: parts of both are played, and all times are shorter.
"""

import os
import signal
import sys
import time
from types import SimpleNamespace

import torch

import iris
from iris.errors import GroupAbortedError
from iris.failures import differing_calls, peer_loss
from iris.world import rail_calls

LONG_S = 600
ON_GPU = torch.cuda.is_available()


def hurry():
    rail_calls.INTERVAL_S, rail_calls.STILL_S = 0.05, 0.3
    differing_calls.GRACE_S = peer_loss.GRACE_S = 2.0
    # Of the loss of a peer kernels of the simulator raise an error. Those of a GPU do not end.
    peer_loss.mode = SimpleNamespace(ACTIVE=False)
    torch.cuda.synchronize = lambda device=None: time.sleep(LONG_S)


def differ_on_gpu(ctx):
    x, gathered = torch.ones(1000, device=ctx.device), torch.empty(2000, device=ctx.device)
    ctx.ccl.all_reduce(x, x)
    ctx.ccl.all_gather(gathered, x)
    ctx.barrier()
    if ctx.cur_rank:
        ctx.ccl.all_reduce(x, x)
    else:
        ctx.ccl.all_gather(gathered, x)
    return ctx._rail


def differ_in_simulator(ctx):
    from test_nccl_rail import played

    from iris.world import Group
    from iris.world.nccl_rail import NcclRail
    from iris.world.rail import rail_of
    from iris.world.store import own_client

    group, hosts = Group(ctx._world.group.process_group), ctx._world.hosts
    with played():
        rail = NcclRail(group, hosts, rail_of(hosts), own_client(group.store), ctx.device)
        rail.barrier()
        # Of NCCL neither would end. Gloo, which plays it, would end the process.
        rail._begin(lambda: None, 4000, "all_reduce()" if ctx.cur_rank else "all_gather()")
    return rail


def close_when_broken(rail):
    while True:
        try:
            rail._group.check()
        except GroupAbortedError as error:
            print(error, flush=True)
            rail.close()
            # For longer than the grace.
            time.sleep(1.5 * differing_calls.GRACE_S)
            return
        time.sleep(0.1)


def main(how):
    rank = int(os.environ["RANK"])
    os.environ.update(IRIS_HOST="host" if how == "lose" else f"host{rank}", NCCL_HOSTID=f"host{rank}")
    if ON_GPU:
        torch.cuda.set_device(rank)
    else:
        hurry()
    ctx = iris.iris(1 << 20)
    ctx.barrier()
    if how == "lose":
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        rail = differ_on_gpu(ctx) if ON_GPU else differ_in_simulator(ctx)
        if how == "close":
            close_when_broken(rail)
            os._exit(0)  # contexts that are broken are closed elsewhere
    torch.cuda.synchronize()
    time.sleep(LONG_S)  # where the GPU had nothing to wait for


if __name__ == "__main__":
    main(*sys.argv[1:])
