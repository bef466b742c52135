"""Processes that cannot raise an error, as they wait for a GPU: they say what is wrong, and end by it.

On two GPUs each process has one. Elsewhere the simulator plays them (tests/programs/call_differently.py).
"""

import os
import re
import subprocess
import time

import pytest
import torch
from conftest import TESTS, UNDER_TORCHRUN, import_path
from covering import thorough
from preloaded import LIMIT_S, python

import iris
from iris.spawn import reserved_port

pytestmark = [
    pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own"),
    pytest.mark.skipif(not iris.simulator.ACTIVE and torch.cuda.device_count() < 2, reason="wants two GPUs"),
]

PROGRAM = TESTS / "programs" / "call_differently.py"
TEXT = (
    r"The hosts do not make the same call: rank 0 on host0 calls all_gather\(\).* of \d+ bytes; "
    r"rank 1 on host1 calls all_reduce\(\).* of \d+ bytes"
)
# From the call on: ten seconds until a rail stands still, ten of grace, and the start of two processes.
OVER_S = 90.0


def run(how, **settings):
    """The exit status and the standard output and error of each rank, and the seconds that it took."""
    begin = time.monotonic()
    with reserved_port() as port:
        ranks = []
        for rank in range(2):
            environment = {
                **os.environ,
                **dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"),
                **dict(MASTER_PORT=str(port), PYTHONPATH=import_path(TESTS), IRIS_OVER_HOSTS="iris"),
                **dict(NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo", IRIS_SANITIZE="0", IRIS_DEBUG="0"),
                **settings,
            }
            ranks.append(
                subprocess.Popen(
                    [*python(), str(PROGRAM), how],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            results = [(*rank.communicate(timeout=LIMIT_S), rank.returncode) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return [(status, out, error) for out, error, status in results], time.monotonic() - begin


def test_each_rank_says_at_once_which_calls_differ_and_ends_with_the_error():
    results, seconds = run("wait")
    ends = []
    for status, _, error in results:
        said, _, ended = error.partition("The main thread is here:")
        assert re.search(rf"\[Iris\] MismatchedCollectiveError: {TEXT}\. This rank is at {PROGRAM}:\d+ in ", said), (
            error
        )
        assert "This process ends in" in said and "IRIS_DEBUG=1" in said
        assert status != 0
        ends.append(status == 1 and re.search(rf"\niris\.errors\.MismatchedCollectiveError: {TEXT}\.\n", ended))
    # NCCL may end the other a moment before its own time is over.
    assert all(ends) if iris.simulator.ACTIVE else any(ends), results
    assert seconds < OVER_S


@pytest.mark.parametrize("choice", ["abort", thorough("report")])
def test_a_process_goes_on_that_closes_the_rail_or_wants_to(choice):
    results, _ = run("close", IRIS_PEER_LOST=choice)
    for status, out, error in results:
        assert status == 0, error
        assert re.search(f"is broken, as an aborted communicator is.*The cause: {TEXT}", out), (out, error)
        assert "This process goes on" in error if choice == "report" else "This process ends in" in error
        assert "The main thread is here" not in error


@pytest.mark.thorough
def test_the_loss_of_a_peer_is_said_at_once_and_ends_the_process():
    ((status, _, error), (lost, _, _)), _ = run("lose")
    assert lost == -9
    assert status == 1, error
    said, _, ended = error.partition("The main thread is here:")
    assert re.search(r"\[Iris\] rank 1 is gone: its process \(\d+\) was killed by SIGKILL\. Rank 0 is at ", said), error
    assert re.search(r"\niris\.errors\.PeerLostError: rank 1 is gone: .* this rank ends", ended), error
