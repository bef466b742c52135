"""python -m iris trace on two nodes, which share no files: the first one has the trace of both."""

import json
import subprocess
from collections import Counter

import pytest
from conftest import TESTS, UNDER_TORCHRUN, import_path
from preloaded import LIMIT_S, python

from iris import simulator
from iris.spawn import reserved_port
from tracing.test_command import check_format

PROGRAM = TESTS / "programs" / "two_hosts.py"

pytestmark = [
    pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun"),
    pytest.mark.skipif(not simulator.ACTIVE, reason="its nodes share this machine's GPUs"),
]


def launch(node, folder, port, program):
    (folder / f"tmp{node}").mkdir()
    environment = {
        **{"PYTHONPATH": import_path(), "PATH": "/usr/bin:/bin", "IRIS_SIMULATOR": "1", "OMP_NUM_THREADS": "1"},
        **{"IRIS_HOST": f"host{node}", "TMPDIR": str(folder / f"tmp{node}"), "RES_OPTIONS": "timeout:1 attempts:1"},
    }
    nodes = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"]
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    traced = ["-m", "iris", "trace", "--out", str(folder / f"{node}.json"), str(program)]
    return subprocess.Popen(
        [*python(), "-m", "torch.distributed.run", *nodes, *where, *traced],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_on_two_nodes(folder, program):
    """What the first node prints."""
    with reserved_port() as port:
        processes = [launch(node, folder, port, program) for node in range(2)]
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert not (folder / "1.json").exists()
    assert not [path for node in range(2) for path in (folder / f"tmp{node}").glob("iris-*")]
    return [process.returncode for process in processes], outputs


@pytest.mark.thorough
def test_the_first_node_shows_all_ranks(tmp_path):
    statuses, (first, second) = run_on_two_nodes(tmp_path, PROGRAM)
    assert statuses == [0, 0], first + second
    assert "of 4 ranks" in first and "Clocks agree within" in first and "Nothing has come" not in first
    trace = json.loads((tmp_path / "0.json").read_text())
    check_format(trace)
    assert {(each["name"], *each["ranks"]) for each in trace["otherData"]["hosts"]} == {
        ("host0", 0, 1),
        ("host1", 2, 3),
    }
    rails = {(e["pid"], e["args"]["part of"].split("(")[0]) for e in trace["traceEvents"] if e.get("cat") == "rail"}
    assert rails == {(rank, call) for rank in range(4) for call in ("all_gather_matmul", "all_reduce")}
    assert {e["pid"] for e in trace["traceEvents"] if e.get("cat") == "wait"} == {0, 1, 2, 3}


# The first contexts are of the ranks of a node; the others of all ranks. Each barrier is an event on each rank of it.
CONTEXTS = """
import torch.distributed as dist
import iris
dist.init_process_group("gloo")
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
with iris.iris(1 << 20, process_group=groups[dist.get_rank() // 2]) as own:
    own.device_barrier()
    for barriers in (2, 4) if ALL_RANKS else ():
        with iris.iris(1 << 20) as ctx:
            for _ in range(barriers):
                ctx.device_barrier()
            ctx.ccl.all_gather(ctx.empty(200), ctx.ones(100), group=groups[ctx.host])
    own.device_barrier()
"""


# Groups and contexts of some ranks are in `test_over_hosts`, too.
@pytest.mark.thorough
@pytest.mark.parametrize("all_ranks", [True, False])
def test_recordings_of_all_contexts_come_whatever_ranks_these_have(all_ranks, tmp_path):
    program = tmp_path / "contexts.py"
    program.write_text(CONTEXTS.replace("ALL_RANKS", str(all_ranks)))
    statuses, (first, second) = run_on_two_nodes(tmp_path, program)
    assert statuses == [0, 0], first + second
    assert "of 4 ranks" in first and "Nothing has come" not in first
    trace = json.loads((tmp_path / "0.json").read_text())
    assert [(each["name"], each["ranks"]) for each in trace["otherData"]["hosts"]] == [
        ("host0", [0, 1]),
        ("host1", [2, 3]),
    ]
    # Ranks are the world's, also in a context or group of ranks 2 and 3.
    moves = {(e["pid"], e["args"]["target"]) for e in trace["traceEvents"] if e.get("cat") == "move"}
    assert {(rank, to) for rank, to in moves if to != f"rank {rank}"} == {
        (rank, f"rank {rank ^ 1}") for rank in range(4) if all_ranks
    }
    kernels, rails = Counter(), Counter()
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["name"] == "barrier":
            (rails if event["cat"] == "rail" else kernels)[event["pid"]] += 1
    assert kernels == Counter({rank: 2 + 6 * all_ranks for rank in range(4)})
    assert rails == Counter({rank: 6 * all_ranks for rank in range(4)})
    # Where no context has ranks of both nodes, nobody has compared their clocks.
    assert ("Nobody has compared the clocks of ranks 2 and 3 with that of rank 0" in first) == (not all_ranks)
    assert (trace["otherData"]["clock_error_us"]["3"] is None) == (not all_ranks)


# Every rank leaves its context by an error, and so they do not meet there. Of each node one ends after the other has
# failed.
FAILS = """
import time
import iris
try:
    with iris.iris(1 << 20) as ctx:
        x = ctx.ones(ctx.num_ranks)
        ctx.ccl.all_reduce(x, x)
        raise KeyError
except KeyError:
    time.sleep(2 if ctx.cur_rank % 2 == 0 else 0)
    raise SystemExit(3)
"""


@pytest.mark.thorough
def test_where_the_program_fails_the_first_node_shows_what_there_is(tmp_path):
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    statuses, (first, _) = run_on_two_nodes(tmp_path, program)
    assert all(statuses) and "has failed, with exit status 3." in first, first
    assert "of 4 ranks" in first and "Nothing has come" not in first
    trace = json.loads((tmp_path / "0.json").read_text())
    assert {e["pid"] for e in trace["traceEvents"] if e.get("cat") == "rail"} == {0, 1, 2, 3}
