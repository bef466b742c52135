"""The end of a process that this system does not know, seen by a connection to it. On two hosts: `test_two_hosts`."""

import os
import socket
import subprocess
from ipaddress import ip_address

import pytest
from conftest import UNDER_TORCHRUN, import_path
from preloaded import LIMIT_S, python

from iris.world import remote_peers
from iris.world.members import await_
from iris.world.peers import Identity, Peer

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="starts processes of its own; run it without torchrun")

# It forks, as loaders of data do, and the fork outlives it.
PROGRAM = """
import os, sys
import torch.distributed as dist
from iris.world import remote_peers

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(*remote_peers.listen(store), flush=True)
remote_peers.watch([])
sys.stdin.readline()
os.fork()
os.write(1, b"forked\\n")
sys.stdin.read()
"""


def stranger():
    return Peer(Identity("another host", "its namespace", 77, "a while ago"))


def test_the_end_of_a_process_is_known_at_once_though_a_fork_of_it_lives_on():
    process = subprocess.Popen(
        [*python(), "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": import_path(), "IRIS_SIMULATOR": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    address, port = process.stdout.readline().split()
    peer = stranger()
    remote_peers.watch([(peer, (address, int(port)), "far")])
    process.stdin.write("\n")
    process.stdin.flush()
    assert [process.stdout.readline() for _ in range(2)] == ["forked\n"] * 2
    assert not peer.ended
    process.kill()
    assert await_(lambda: peer.ended, LIMIT_S)
    assert str(peer) == "its process (77) on far has ended" and not peer.unreachable
    process.stdin.close()  # and the fork ends
    process.stdout.close()
    process.wait()


def test_who_cannot_be_reached_is_named_and_goes_unwatched(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    peer = stranger()
    remote_peers.watch([(peer, address, "far"), (stranger(), None, "farther")])
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        f"far (127.0.0.1:{address[1]}) cannot be reached"
    ]
    assert not peer.ended


def test_connections_to_a_host_that_is_gone_are_cut_and_nothing_is_left_open():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.2", 0)) as other:
        gone, kept = (socket.create_connection(each.getsockname(), timeout=LIMIT_S) for each in (server, other))
        with gone, kept, open(os.devnull):
            before = sorted(os.listdir("/proc/self/fd"))
            for _ in range(3):
                remote_peers._cut(ip_address("127.0.0.1"))
            assert sorted(os.listdir("/proc/self/fd")) == before
            assert gone.recv(1) == b""
            kept.setblocking(False)
            with pytest.raises(BlockingIOError):
                kept.recv(1)
