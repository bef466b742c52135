"""Rails of GPUs, by torch's NCCL backend (RCCL on AMD).

A transfer is enqueued on a stream of NCCL's own, after what the current stream has so far. Waiting for it is enqueued,
too. So the host never waits, and a CUDA graph can capture all of it. The rail makes its communicator at once and does
every kind of transfer once, as the first one of each kind connects, which is not possible in a capture.

A communicator runs its transfers one after the other, in the order in which the host called them, also from several
streams and graphs (NCCL User Guide, "Using multiple NCCL communicators concurrently" and "Using NCCL with CUDA
Graphs"). So all ranks of a rail make their calls in one order, whatever the streams, and replay graphs in one order.

With ``IRIS_DEBUG=1`` calls are compared before they begin, outside of captures. Without it a thread compares them later
where a rail makes no progress (`iris.world.rail_calls`).
"""

import atexit
import contextlib
import ctypes
import functools
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from iris.compat import c10d
from iris.compat.cuda import is_current_stream_capturing
from iris.cuda_graphs.capture import a_graph_lives, outside_captures
from iris.cuda_graphs.kept import keep
from iris.errors import GroupAbortedError, PeerLostError
from iris.switches import switched_on
from iris.world.group import Group
from iris.world.hosts import Hosts
from iris.world.pair import Pair
from iris.world.rail import Rail, Route, rail_of, timed_by
from iris.world.rail_calls import RailCalls, watch
from iris.world.store import put

# Bytes of all ranks together in the first transfers. NCCL sends small messages in other ways than large ones, and each
# way connects at its first use.
FIRST_BYTES = (32, 128 << 10, 8 << 20)
# How long a rank that closes a broken rail waits for the others to do so, and how often it looks, in seconds. It is
# less than what a process that does not close has until it ends (`iris.failures.process_end.GRACE_S`).
CLOSING_LIMIT_S, CLOSING_INTERVAL_S = 5.0, 0.001

# The rails that are not closed yet. `_captured` has those of which a graph has captured transfers, and keeps them
# alive: the graph may outlive the context.
_open: "weakref.WeakSet[NcclRail]" = weakref.WeakSet()
_captured: "set[NcclRail]" = set()


class NcclRail(Rail):
    """A rail whose transfers are enqueued like kernels."""

    def __init__(self, group: Group, hosts: Hosts, route: Route, store: dist.Store, device: torch.device) -> None:
        store = dist.PrefixStore(route.name, store)
        ranks = [group.ranks[rank] for rank in route.ranks]
        engine = c10d.make_nccl(store, route.name, route.place, ranks, timedelta(seconds=group.timeout))
        name = f"{'RCCL' if torch.version.hip else 'NCCL'} {'.'.join(map(str, torch.cuda.nccl.version()))}"
        super().__init__(group, hosts, engine, name, route)
        self._compared: Group | Pair | None = None
        self._calls = RailCalls(group, route.name, route.place, [self._who(rank) for rank in route.ranks])
        # The bytes that a barrier sends and receives. Their values do not matter, so graphs may share them.
        self._tokens = keep(lambda: torch.zeros(1 + len(ranks), dtype=torch.uint8, device=device), device)
        _open.add(self)
        # No timer: a trace shows the transfers of the program, and not these first ones.
        with outside_captures(device), timed_by(group, None):
            self._connect(len(ranks), device)
        if switched_on("IRIS_DEBUG"):
            # Making a part of a group takes all ranks of the group, in the same order. Of a link only two ranks know,
            # and these meet as a `Pair`.
            of_pair = len(route.ranks) == 2 and route != rail_of(hosts)
            self._compared = Pair(group, route) if of_pair else Group(group.process_group, part=route.ranks)
        else:
            watch(self._calls)

    def barrier(self) -> None:
        mine, everyone = self._tokens[:1], self._tokens[1:]
        start = functools.partial(c10d.all_gather, self._engine, everyone, mine)
        self._transfer(start, mine.nbytes, "device_barrier()", sent=[mine], received=[everyone])()

    def refuse(self, what: str) -> None:
        """See `Rail.refuse`. In debug mode other ranks raise at once; else they wait until `rail_calls` notices."""
        what = f"{what}, which was refused,"
        if not is_current_stream_capturing():
            self._calls.note(what, 0)
        self._check_alike(0, what)

    def close(self) -> None:
        self._let_go(self._deliver_or_abort)

    def abandon(self) -> None:
        """Abort at once, whatever is under way, without waiting for other ranks."""
        self._let_go(self._engine.abort)

    def _let_go(self, end: Callable[[], None]) -> None:
        self._calls.close()
        _open.discard(self)
        captured = self in _captured
        _captured.discard(self)
        if captured and a_graph_lives():
            # From version 2.26 on NCCL waits, here and in torch's destructor, until all graphs are gone that have
            # captured the communicator. So it is left to end with the process: this reference is never dropped.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._engine))
        else:
            end()
        del self._engine

    def _deliver_or_abort(self) -> None:
        """End the communicator. If no rank is lost, only when the others have what this rank has sent.

        A kernel of NCCL may end while its data are still in host buffers, and abort() would drop these.
        """
        whole = not any(rank in self._group.members.ended() for rank in self._ranks)
        try:
            self._group.check()
        except GroupAbortedError:
            if whole:
                self._await_closing()
            whole = False
        if whole:
            try:
                self._engine.shutdown()
                return
            except RuntimeError:
                pass  # a rank was lost meanwhile
        self._engine.abort()

    def _await_closing(self) -> None:
        """Wait a little until the other ranks close this broken rail too, so that all abort at the same time.

        On a broken rail transfers may be under way that never end. When one rank aborts, those of the others fail.
        A minute later torch ends the processes that had not begun to abort by then (ProcessGroupNCCL.cpp,
        `Watchdog::runLoop`, which ignores failures once `abort` has begun).
        """
        limit = time.monotonic() + CLOSING_LIMIT_S
        keys = [f"closing/{self._route}/{place}" for place in range(len(self._ranks))]
        with contextlib.suppress(dist.DistError):  # the store is gone, so there is no way to wait for the others
            put(self._group.store, keys[self._place], b"")
            while not self._group.store.check(keys) and time.monotonic() < limit:
                time.sleep(CLOSING_INTERVAL_S)

    def _connect(self, hosts: int, device: torch.device) -> None:
        """Do every kind of transfer once, so that NCCL connects. Blocks the host until they are over."""
        for whole in FIRST_BYTES:
            nbytes = max(1, whole // hosts)
            mine = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            everyone = torch.zeros(hosts, nbytes, dtype=torch.uint8, device=device)
            arrived = torch.empty_like(everyone)
            self.all_gather(arrived, mine, "a first transfer")()
            self.all_to_all(arrived, everyone, "a first transfer")()
            for host in range(hosts):
                here = host == self._place
                self.broadcast(mine, host, "a first transfer")()
                self.gather(arrived if here else None, mine, host, "a first transfer")()
                self.scatter(mine, everyone if here else None, host, "a first transfer")()
            if len(self._ranks) == self._group.size:  # only a route of all ranks is asked for reductions
                self.all_reduce(mine, "SUM", "a first sum")
                self.reduce_scatter(mine, everyone, "SUM", "a first sum")
                self.reduce(mine, 0, "SUM", "a first sum")
        self.barrier()
        torch.cuda.current_stream(device).synchronize()

    def _begin(self, start: Callable[[], Any], nbytes: int, what: str) -> Callable[[], None]:
        with self._in_step(what):
            if is_current_stream_capturing():
                _captured.add(self)
            else:
                self._calls.note(what, nbytes)
                self._check_alike(nbytes, what)
            if not nbytes:
                return _nothing
            try:
                work = start()
            except RuntimeError as error:
                raise self._failed(error, what) from error

        def wait() -> None:
            # The current stream waits. Until then torch keeps the tensors' memory for NCCL's stream. torch returns no
            # work for a transfer that runs on the current stream itself.
            if work is not None:
                work.wait()

        return wait

    def _check_alike(self, nbytes: int, what: str) -> None:
        """In debug mode: raise on all ranks unless they make the same call. Then it blocks the host."""
        if self._compared is not None:
            call = f"{what} of {nbytes} bytes"
            self._compare(self._compared.all_gather(call, "the comparison of what hosts call", orders=False))

    def _failed(self, error: Exception, what: str) -> Exception:
        """What to raise for an error that NCCL has raised in a call."""
        why = self._group.cause_of(error, what)
        if why is not error:
            return why
        this, first_line = self._group.ranks[self._group.rank], str(error).partition("\n")[0].rstrip(".")
        ranks = "; ".join(f"rank {self._in_world(rank)} is on {self._hosts.name_of(rank)}" for rank in self._ranks)
        return PeerLostError(
            f"Rank {this} could not send data to other hosts in {what}: {first_line}. Of the ranks that exchange data "
            f"here, {ranks}. NCCL_DEBUG=WARN has NCCL say more."
        )


def _nothing() -> None:
    """Waits for the transfer of no bytes."""


def _close_all() -> None:
    """At the end of the program: torch's destructor would wait for graphs that have not been destroyed."""
    for rail in {*_captured, *_open}:
        rail.abandon()


atexit.register(_close_all)
