"""The end of a process that this system does not know, seen by a connection to it. On two hosts: `test_two_hosts`."""

import contextlib
import os
import socket
import subprocess
from ipaddress import ip_address

import pytest
import torch.distributed as dist
from conftest import UNDER_TORCHRUN, import_path
from preloaded import LIMIT_S, python

from iris.world import remote_peers
from iris.world.members import Members, wait_until
from iris.world.peers import Identity, Peer

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="starts processes of its own; run it without torchrun")

# It forks, as loaders of data do, while others connect; the forks outlive it.
PROGRAM = """
import os, sys
import torch.distributed as dist
from iris.world import remote_peers

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(*remote_peers.listen(store), flush=True)
remote_peers.watch([])
sys.stdin.readline()
for _ in range(40):
    if os.fork() == 0:
        break
else:
    os.write(1, b"forked\\n")
os.read(0, 1)
"""


def stranger():
    return Peer(Identity("another host", "its namespace", 77, "a while ago"))


def test_the_end_of_a_process_is_known_at_once_though_forks_of_it_live_on():
    process = subprocess.Popen(
        [*python(), "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": import_path(), "IRIS_SIMULATOR": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    address, port = process.stdout.readline().split()
    strangers = [stranger() for _ in range(100)]
    process.stdin.write("\n")
    process.stdin.flush()
    remote_peers.watch([(each, (address, int(port)), "far") for each in strangers])
    assert process.stdout.readline() == "forked\n"
    assert not any(each.ended for each in strangers)
    process.kill()
    assert wait_until(lambda: all(each.ended for each in strangers), LIMIT_S)
    assert {str(each) for each in strangers} == {"its process (77) on far has ended"}
    assert not any(each.unreachable for each in strangers)
    process.stdin.close()  # and the forks end
    process.stdout.close()
    process.wait()


def test_a_host_that_is_lost_takes_its_ranks_along_but_for_those_that_have_ended_well():
    # On the lost host: a rank that has ended well, one that has not, one that is lost, and one that goes on.
    store, ranks = dist.HashStore(), (0, 2, 4, 6, 8, 10)
    members = Members(store, ranks, 0)
    members.processes[1:] = [stranger() for _ in ranks[1:5]] + [Peer(Identity("a third", "its own", 78, "later"))]
    for rank, (ended, status) in enumerate([(True, "0"), (True, "1"), (True, ""), (False, "")], start=1):
        members.processes[rank].ended = ended
        if ended:
            store.set(f"ended/{rank}", status)
    assert members.whole_hosts([3]) == [2, 3]
    assert [members.processes[rank].status for rank in range(1, 6)] == [0, 1, None, None, None]


def test_who_cannot_be_reached_is_named_and_goes_unwatched(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    peer = stranger()
    remote_peers.watch([(peer, address, "far"), (stranger(), None, "farther")])
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        f"far (127.0.0.1:{address[1]}) cannot be reached"
    ]
    assert not peer.ended


def descriptors(connection):
    """Those of this process that are this connection."""
    file = os.fstat(connection.fileno())
    found = []
    for each in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # of the folder itself, or closed by another thread
            if os.path.samestat(os.fstat(each), file):
                found.append(each)
    return found


def test_connections_to_a_host_that_is_gone_are_cut_and_nothing_is_left_open():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.2", 0)) as other:
        gone, kept = (socket.create_connection(each.getsockname(), timeout=LIMIT_S) for each in (server, other))
        with gone, kept:
            remote_peers._cut(ip_address("127.0.0.1"))
            assert [descriptors(each) for each in (gone, kept)] == [[gone.fileno()], [kept.fileno()]]
            assert gone.recv(1) == b""
            kept.setblocking(False)
            with pytest.raises(BlockingIOError):
                kept.recv(1)
