"""A program that starts ranks several times: each launch is a world of its own."""

import pytest
from covering import thorough

pytest_plugins = ["iris.sanitizer.fixture"]

# Each rank stores to the next, which reads after a barrier, or where a launch is "bad" without one. Where it "hangs",
# rank 1 waits for what nobody does. "outside": the ranks meet in a file, and not at torchrun's address.
PROGRAM = """
import contextlib, os, sys, tempfile
import torch, triton, triton.language as tl
import torch.distributed as dist
import iris
from iris.spawn import launch

@triton.jit
def store_to_next(context_tensor, x, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor)
    offsets = tl.arange(0, BLOCK)
    ctx.store(x + offsets, offsets + ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks)

@triton.jit
def wait_for_nobody(context_tensor, flag):
    iris.DeviceContext.initialize(context_tensor).wait(flag, 1)

def worker(how):
    ctx = iris.iris(heap_size=1 << 20)
    x = ctx.zeros(64, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if how == "hangs" and ctx.get_rank() == 1:
        wait_for_nobody[(1,)](ctx.get_device_context(), flag)
    store_to_next[(1,)](ctx.get_device_context(), x, BLOCK=64)
    if how != "bad":
        ctx.barrier()
    x.sum()
    ctx.barrier()

def outside(rank, size, how, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    worker(how)
    dist.destroy_process_group()

if __name__ == "__main__":
    for launched in sys.argv[1:]:
        size, how = launched.split(":")
        if how == "outside":
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(outside, (int(size), how, folder), int(size))
        else:
            with contextlib.suppress(SystemExit):
                launch(worker, int(size), how)
"""


@pytest.mark.parametrize("launched, found", [
    ("2:right 3:right 2:outside", []),
    thorough("2:right 3:bad 2:bad", [("race", [0, 1, 2])]),
    ("2:hangs 3:right", [("deadlock", [0, 1])]),
])  # fmt: skip
def test_launches(tmp_path, iris_check, launched, found):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert [(finding.kind, finding.ranks) for finding in iris_check(program, *launched.split())] == found
