"""Rails by NCCL (RCCL on AMD), which torch brings: those of GPUs.

A transfer is enqueued on a stream of NCCL's own, after what the current stream has so far; who waits for it enqueues
that, too. So the host never waits, and a CUDA graph can capture it all. The communicator is made with the rail, and
every kind of transfer is done once then: the first one of each connects, which a capture must not do.

One communicator carries out its transfers one after the other, in the order in which the host called them, also from
several streams and graphs (NCCL User Guide, "Using multiple NCCL communicators concurrently" and "Using NCCL with CUDA
Graphs"). So all ranks of a rail make their calls in one order, whatever the streams, and replay graphs in one order.

Nobody compares calls before they begin, but with ``IRIS_DEBUG=1``, and then only outside of captures. Without it a
thread compares them where a rail stands still (`iris.world.rail_calls`).
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

# Bytes of all ranks together in the first transfers: NCCL has other ways for small messages than for large ones.
FIRST_BYTES = (32, 128 << 10, 8 << 20)
# How long a rank that closes a broken rail waits for the others to do so, and how often it looks, in seconds. It is
# less than what a process that does not close has until it ends (`iris.failures.process_end.GRACE_S`).
CLOSING_LIMIT_S, CLOSING_INTERVAL_S = 5.0, 0.001

# Those that are not closed yet; and of these, whose transfers are in graphs: graphs outlive a context that is dropped.
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
        # What a barrier sends and receives. What is in them does not matter, so graphs may use them, too.
        self._tokens = keep(lambda: torch.zeros(1 + len(ranks), dtype=torch.uint8, device=device), device)
        _open.add(self)
        # What a trace shows is the program's.
        with outside_captures(device), timed_by(group, None):
            self._connect(len(ranks), device)
        if switched_on("IRIS_DEBUG"):
            # Groups are matched by their order on all ranks of a group, of which the others know nothing of a pair.
            of_pair = len(route.ranks) == 2 and route != rail_of(hosts)
            self._compared = Pair(group, route) if of_pair else Group(group.process_group, part=route.ranks)
        else:
            watch(self._calls)

    def barrier(self) -> None:
        mine, everyone = self._tokens[:1], self._tokens[1:]
        start = functools.partial(c10d.all_gather, self._engine, everyone, mine)
        self._transfer(start, mine.nbytes, "device_barrier()", sent=[mine], received=[everyone])()

    def refuse(self, what: str) -> None:
        """Says so at once in debug mode alone. Else others that have not refused it wait until it is noticed."""
        what = f"{what}, which was refused,"
        if not is_current_stream_capturing():
            self._calls.note(what, 0)
        self._check_alike(0, what)

    def close(self) -> None:
        self._let_go(self._deliver_or_abort)

    def abandon(self) -> None:
        """Let go without regard to the others, whatever is under way. Does not wait for them."""
        self._let_go(self._engine.abort)

    def _let_go(self, end: Callable[[], None]) -> None:
        self._calls.close()
        _open.discard(self)
        captured = self in _captured
        _captured.discard(self)
        if captured and a_graph_lives():
            # From version 2.26 on NCCL waits until no graph is left that it was captured in, here and in torch's
            # destructor. So it ends with the process: nobody lets go of this reference.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._engine))
        else:
            end()
        del self._engine

    def _deliver_or_abort(self) -> None:
        """End the communicator: where the rail is whole, when what this rank has sent is with the others.

        A kernel of NCCL ends when its data are in the host's buffers, and abort() drops what is there.
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
        """Wait until the other ranks close this rail too, so that all abort at once; not for long.

        Of a broken rail transfers may be under way that never end. Where one rank aborts, those of the others fail, and
        of a communicator that is not aborted by then torch ends the process a minute later (ProcessGroupNCCL.cpp,
        `Watchdog::runLoop`, which sees no failures any more once `abort` has begun).
        """
        limit = time.monotonic() + CLOSING_LIMIT_S
        keys = [f"closing/{self._route}/{place}" for place in range(len(self._ranks))]
        with contextlib.suppress(dist.DistError):  # without a store nobody can be waited for
            put(self._group.store, keys[self._place], b"")
            while not self._group.store.check(keys) and time.monotonic() < limit:
                time.sleep(CLOSING_INTERVAL_S)

    def _connect(self, hosts: int, device: torch.device) -> None:
        """Every kind of transfer once. Blocks the host until they are over."""
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
            if len(self._ranks) == self._group.size:  # else it never adds
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
            # The current stream waits; until then torch keeps the tensors for NCCL's stream. There is no work where the
            # transfer is on the current stream itself.
            if work is not None:
                work.wait()

        return wait

    def _check_alike(self, nbytes: int, what: str) -> None:
        """In debug mode: raise on all ranks unless they make the same call. Blocks the host."""
        if self._compared is not None:
            call = f"{what} of {nbytes} bytes"
            self._compare(self._compared.all_gather(call, "the comparison of what hosts call", orders=False))

    def _failed(self, error: Exception, what: str) -> Exception:
        """What to raise where NCCL has refused a call with this error."""
        why = self._group.why(error, what)
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
    """When the program ends: torch's destructor would wait for graphs that were not destroyed."""
    for rail in {*_captured, *_open}:
        rail.abandon()


atexit.register(_close_all)
