"""How a program finds its world, and how it ends."""

import os
import subprocess

import pytest
from conftest import UNDER_TORCHRUN
from preloaded import LIMIT_S, python

from iris.spawn import reserved_port

PROGRAM = """
import re, sys
import torch.distributed as dist
from iris import world
from iris.errors import PeerLostError
here = world.join()
assert here.size == 2 and here.device.type == "cpu" and dist.get_backend() == "gloo"
for turn in range(3):
    values = here.group.all_gather((here.rank, turn), "a test")
    assert values == [(0, turn), (1, turn)]
leaves, how, text = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if here.rank == leaves and how == "ends":
    sys.exit()  # if it is rank 0, and the store with it, once rank 1 has read the last values
if how == "fails":
    assert here.rank != leaves, "that is the cause"
try:
    here.group.all_gather(None, "a test")
except PeerLostError as error:
    assert re.match(text, str(error)), error
else:
    raise AssertionError("the end of a rank was not noticed")
"""


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
@pytest.mark.parametrize(
    ("leaves", "how", "text"),
    [
        (1, "ends", "Rank 0 waits in a test, and rank 1 will not come: the program has ended there"),
        # Whose store may have gone before rank 1 looks.
        (
            0,
            "ends",
            "Rank 1 (waits in a test, and rank 0 will not come|lost its connection to the other ranks in a test)",
        ),
        (
            1,
            "fails",
            "Rank 0 waits in a test, and rank 1 will not come: the program has failed there with "
            "AssertionError: that is the cause",
        ),
    ],
)
def test_a_world_is_found_in_torchruns_environment_and_an_end_is_noticed(leaves, how, text):
    with reserved_port() as port:
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "IRIS_SIMULATOR": "1"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        processes = [
            subprocess.Popen(
                [*python(), "-c", PROGRAM, str(leaves), how, text],
                env=inherited | variables | {"RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == (rank == leaves and how == "fails"), errors


ENDS = """
import sys, threading
import torch
import torch.distributed as dist
import iris
from iris.world import bootstrap

ctx = iris.iris(1 << 20)
if sys.argv[1] != "ends":
    bootstrap.DESTROY_LIMIT_S = 0.2
    dist.destroy_process_group = threading.Event().wait
if sys.argv[1] == "keeps a graph":
    torch.cuda.CUDAGraph = type("CUDAGraph", (), {})
    graph = torch.cuda.CUDAGraph()
sys.exit(3)
"""


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
@pytest.mark.parametrize("how", ["ends", "cannot destroy", "keeps a graph"])
def test_a_program_ends_though_its_process_group_cannot_be_destroyed(how):
    """Where a CUDA graph lives, in which NCCL may have been captured, it is not tried."""
    with reserved_port() as port:
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [*python(), "-c", ENDS, how]
        done = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert ("rank 0 ends without having destroyed its process groups" in done.stderr) == (how == "cannot destroy")
