"""Two real hosts as far as Linux can tell them apart, `torchrun --nnodes 2` on each, and Gloo between them.

They are namespaces of this machine (`namespaces.py`). Nothing says which rank is on which host (no IRIS_HOST).
"""

import json
import re
import time

import pytest
from conftest import TESTS, UNDER_TORCHRUN, import_path
from covering import EVERYTHING, thorough
from namespaces import Network, missing
from preloaded import LIMIT_S
from test_docs import DOCS, ROOT, programs_of

import iris

PROGRAMS = TESTS / "programs"
RANKS_EACH = 2
# A second is enough, where the other host's system closes its connections, and twenty where nobody answers.
TOLD_S, TOLD_WITHOUT_ANSWER_S = 15.0, 60.0

pytestmark = [
    pytest.mark.skipif(UNDER_TORCHRUN or not iris.simulator.ACTIVE, reason="starts simulated ranks of its own"),
    pytest.mark.skipif(missing() is not None, reason=f"two hosts on this machine: {missing()}"),
]


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    network = Network(tmp_path_factory.mktemp("network"))
    yield network
    network.close()


def start(network, *program, **environment):
    settings = {"PYTHONPATH": import_path(TESTS), "IRIS_SIMULATOR": "1", "OMP_NUM_THREADS": "1", "IRIS_SANITIZE": "0"}
    settings["GLOO_SOCKET_IFNAME"] = "eth0"  # by its name the first host is that of loopback
    network.torchrun(RANKS_EACH, *program, **settings, **environment)


def printed(network, status):
    """What the ranks of each host have printed, once torchrun has ended there with this status."""
    results = [host.result() for host in network.hosts]
    assert [result[0] for result in results] == [status] * 2, "\n".join(result[1] for result in results)
    return [result[1] for result in results]


def quick_starts(folder):
    """The programs of the documentation that name no rank of another host: in files, without IRIS_HOST."""
    wanted = {"two_hosts.py": DOCS / "several-hosts.md"}
    if EVERYTHING:
        wanted |= {"quick_start_collectives.py": ROOT / "README.md", "collectives.py": DOCS / "collectives.md"}
    for name, page in wanted.items():
        (program,) = (program for program in programs_of(page) if program.name == name)
        lines = "".join(block.text for block in program.blocks).splitlines(keepends=True)
        (folder / name).write_text("".join(line for line in lines if "IRIS_HOST" not in line))
        yield folder / name


def test_quick_starts_collectives_and_operations(network, tmp_path):
    start(network, PROGRAMS / "over_hosts.py", *quick_starts(tmp_path))
    for host, text in enumerate(printed(network, 0)):
        for rank in range(host * RANKS_EACH, (host + 1) * RANKS_EACH):
            assert f"rank {rank} of 4 on host {host} of 2: ok" in text
        assert ("host 0 of 2, ranks (0, 1): [1, 2, 0, 0], in all [2, 4, 6, 8]" in text) == (host == 0)


@pytest.mark.thorough  # the same trains over hosts in `test_process_group_over_hosts`
def test_data_parallel_and_fully_sharded_training(network):
    start(network, PROGRAMS / "train_on_a_mesh.py")
    for text in printed(network, 0):
        assert text.count("data parallel: as by one process") == RANKS_EACH
        assert text.count("fully sharded: as by one process") == RANKS_EACH


CLAIMS = r"""
import os, socket, iris
from iris.errors import IrisError

rank, own = int(os.environ["RANK"]), socket.gethostname()
for claim in "one", {1: "host1"}.get(rank, own), {1: "host1", 3: "host0"}.get(rank, own):
    os.environ["IRIS_HOST"] = claim
    try:
        iris.iris(1 << 20)
    except IrisError as error:
        os.write(1, f"rank {rank}: {type(error).__name__}: {error}\n".encode())  # at once, beside that of others
"""


def test_ranks_that_lie_about_their_host_are_told(network, tmp_path):
    """All say that they are on one; one says that it is on the other; two change places."""
    (tmp_path / "claims.py").write_text(CLAIMS)
    start(network, tmp_path / "claims.py")
    for host, text in enumerate(printed(network, 0)):
        for rank in range(host * RANKS_EACH, (host + 1) * RANKS_EACH):
            lines = [line for line in text.splitlines() if line.startswith(f"rank {rank}: ")]
            assert len(lines) == 3, text
            assert "these differ: 1 on host0, 3 on host1 (rank 0 on host0; ranks 1, 2 and 3 on host1)" in lines[1]
            for line in lines[0], lines[2]:
                assert re.search(r"MappingError: The heap of rank \d .*cannot be mapped.*share the PID name", line)


def reports(folder, ranks):
    """What these ranks were told, once all were."""
    files = [folder / f"rank{rank}" for rank in ranks]
    wait_for(files)
    return [json.loads(file.read_text()) for file in files]


def wait_for(files):
    deadline = time.monotonic() + LIMIT_S
    while missing := [file.name for file in files if not file.exists()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.02)


def lose(network, host, call, folder, how):
    """Lose a host while the ranks of the other one wait for it. What they were told, and after how many seconds."""
    start(network, PROGRAMS / "lose_a_host.py", call, host, folder)
    wait_for([folder / f"ready{rank}" for rank in range(2 * RANKS_EACH)])
    time.sleep(0.5)  # so that they wait
    lost = time.time()
    how(network.hosts[host])
    there = 1 - host
    found = reports(folder, range(there * RANKS_EACH, (there + 1) * RANKS_EACH))
    network.hosts[there].stop()  # torchrun waits for the other host's for minutes
    network.hosts[there].result()
    return [(report["error"], report["when"] - lost) for report in found]


# torchrun's store is on the first host.
@pytest.mark.parametrize(("host", "call"), [thorough(1, "barrier"), (0, "all_reduce")])
def test_a_host_that_is_killed_is_named_with_its_ranks(network, host, call, tmp_path):
    for error, after_s in lose(network, host, call, tmp_path, lambda lost: lost.end()):
        assert error.startswith("PeerLostError: "), error
        for rank in range(host * RANKS_EACH, (host + 1) * RANKS_EACH):
            assert f"rank {rank} will not come: its process (" in error and f" on host{host} has ended" in error
        assert after_s < TOLD_S
    network.replace(host)


@pytest.mark.thorough
@pytest.mark.parametrize(("host", "call"), [(1, "barrier"), (0, "all_reduce"), (1, "device_barrier"), (0, "barrier")])
def test_a_host_that_cannot_be_reached_any_more_is_named(network, host, call, tmp_path):
    def unplug(lost):
        lost.configure("link", "set", "eth0", "down")

    for error, after_s in lose(network, host, call, tmp_path, unplug):
        assert error.startswith("PeerLostError: "), error
        assert f"host{host} does not answer any more" in error
        assert after_s < TOLD_WITHOUT_ANSWER_S
    network.hosts[host].end()
    network.replace(host)


TIME_LIMIT_S = 5
CUT_OFF = r"""
import datetime, json, os, pathlib, sys, time
import torch.distributed as dist
import iris
from iris.errors import IrisError

folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(sys.argv[2])))
dist.barrier()
(folder / f"ready{rank}").touch()
while not (folder / "cut").exists():
    time.sleep(0.02)
start = time.time()
try:
    iris.iris(1 << 20)
except IrisError as error:
    report = json.dumps({"error": f"{type(error).__name__}: {error}", "after_s": time.time() - start})
    (folder / f"part{rank}").write_text(report)
    (folder / f"part{rank}").rename(folder / f"rank{rank}")
os._exit(0)
"""


@pytest.mark.thorough
def test_hosts_that_cannot_reach_each_other_at_the_start_are_told(network, tmp_path):
    (tmp_path / "cut_off.py").write_text(CUT_OFF)
    start(network, tmp_path / "cut_off.py", tmp_path, TIME_LIMIT_S)
    ranks = range(2 * RANKS_EACH)
    wait_for([tmp_path / f"ready{rank}" for rank in ranks])
    network.hosts[1].configure("link", "set", "eth0", "down")
    (tmp_path / "cut").touch()
    first, second = (reports(tmp_path, ranks[host * RANKS_EACH :][:RANKS_EACH]) for host in range(2))
    for report in first:  # the store is there
        assert "ranks 2 and 3 have not come" in report["error"]
    for report in second:
        assert "PeerLostError" in report["error"] and "on another host, which cannot be reached" in report["error"]
    assert all(report["after_s"] < TIME_LIMIT_S + TOLD_S for report in first + second)
    network.hosts[0].stop()
    network.hosts[0].result()
    network.hosts[1].end()
    network.replace(1)
