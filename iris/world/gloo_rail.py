"""Rails of the simulator, by torch's Gloo backend over TCP. The host waits for each transfer."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from iris.compat.dispatch import hidden_from_modes
from iris.errors import GroupAbortedError, IrisTimeoutError, PeerLostError, names
from iris.world import late_rails
from iris.world.broken import break_if_others_have
from iris.world.group import Group
from iris.world.hosts import Hosts
from iris.world.members import INTERVAL_S, NOTICE_S, wait_until
from iris.world.rail import Rail, Route
from iris.world.store import LONGEST_PAUSE_S, NO_PAUSE_S, SHARE

# Bytes of the text that describes a call in a comparison. What is longer is cut off.
MOST_TEXT = 96
# In Gloo's message of a call that exceeded its time limit.
TIMED_OUT = "Timed out"


class GlooRail(Rail):
    """A rail that compares its ranks' calls before each transfer: all of them raise if the calls differ."""

    def __init__(self, group: Group, hosts: Hosts, route: Route, store: dist.Store) -> None:
        store = dist.PrefixStore(route.name, store)
        # It connects to all other ranks at once, and not at the first call.
        limit = timedelta(seconds=group.timeout)
        engine = dist.ProcessGroupGloo(store, route.place, len(route.ranks), limit)
        super().__init__(group, hosts, engine, "Gloo", route)
        # `late_rails` delays transfers, but no comparisons: a rank would wait in one for another to begin a transfer.
        # Gloo matches the calls of one engine by their order, so comparisons have an engine of their own then.
        self._delays, self._comparing = None, self._engine
        if late_rails.chance is not None:
            self._delays = late_rails.DelayQueue(late_rails.chance)
            apart = dist.PrefixStore("comparisons", store)
            self._comparing = dist.ProcessGroupGloo(apart, route.place, len(route.ranks), limit)

    def barrier(self) -> None:
        self._transfer(_nothing, 0, "device_barrier()", sent=[], received=[], receivers=len(self._ranks))()

    def refuse(self, what: str) -> None:
        self._begin(_nothing, 0, f"{what}, which was refused,")()

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str, what: str) -> None:
        # Not Gloo's own reduce_scatter, whose work is completed only by a wait in it, and nothing interrupts that.
        whole = input.clone()
        self.all_reduce(whole, op, what)
        output.view(-1).copy_(whole.view(len(self._ranks), -1)[self._place])

    def _reduce_op(self, op: str) -> tuple[Any, int | None]:
        # Gloo has no AVG.
        return (dist.ReduceOp.SUM, len(self._ranks)) if op == "AVG" else super()._reduce_op(op)

    def close(self) -> None:
        if self._delays is not None:
            self._delays.close()
        del self._engine, self._comparing

    def _begin(self, start: Callable[[], Any], nbytes: int, what: str) -> Callable[[], None]:
        with self._in_step(what):
            self._check_alike(nbytes, what)
            if not nbytes:
                work = None
            elif self._delays is None:
                work = self._started(start, what)
            else:
                work = self._delays.submit(lambda: self._started(start, what))

        def wait() -> None:
            with self._in_step(what):
                if work is not None:
                    self._wait(work, what)

        return wait

    def _check_alike(self, nbytes: int, what: str) -> None:
        """Raise on all ranks unless they make the same call: Gloo ends a process that receives more than it expects."""
        text = f"{what} of {nbytes} bytes".encode()[:MOST_TEXT]
        mine = torch.zeros(MOST_TEXT, dtype=torch.uint8)
        mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        everyone = torch.zeros(len(self._ranks), MOST_TEXT, dtype=torch.uint8)
        self._wait(self._started(lambda: self._comparing.allgather([list(everyone)], [mine]), what), what)
        self._compare([bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in everyone])

    def _started(self, start: Callable[[], Any], what: str) -> Any:
        try:
            # Gloo's threads call torch in the dispatch modes of the thread that starts them. One of these is the
            # sanitizer's. It knows from `_transfer` what is read and written, and must not see it twice.
            with hidden_from_modes():
                return start()
        except RuntimeError as error:
            raise self._failed(error, what) from error

    def _wait(self, work: Any, what: str) -> None:
        """Wait for a transfer. Signals interrupt the wait, and so does the loss of a rank on any host."""
        start, next_look, lost = time.monotonic(), INTERVAL_S, False
        while not (lost or work.is_completed()):
            waited = time.monotonic() - start
            if waited > NO_PAUSE_S:
                lost = any(peer.status or peer.unreachable for peer in self._group.members.ended().values())
                self._check_whole(what)
                if waited > next_look:
                    next_look = waited + INTERVAL_S
                    self._check_others(what)
                time.sleep(min(waited * SHARE, LONGEST_PAUSE_S))
        if lost and not work.is_completed():
            raise self._failed(RuntimeError("a rank was lost"), what)
        try:
            work.wait()
        except RuntimeError as error:
            if TIMED_OUT not in str(error):
                # A rank may have broken the group. Its connections close a moment before it can be read in the store.
                wait_until(lambda: self._ended(what), NOTICE_S)
            raise self._failed(error, what) from error

    def _check_whole(self, what: str) -> None:
        """Raise if the group is broken: `PeerLostError` if a rank's end is the cause."""
        try:
            self._group.check()
        except GroupAbortedError as error:
            # Another rank of this host may have found first that a rank is lost, and broken the group.
            why = self._group.cause_of(error, what)
            raise (error if why is error else self._failed(why, what)) from error

    def _check_others(self, what: str) -> None:
        """As `_check_whole`, also of a break on another host."""
        break_if_others_have(self._group)
        self._check_whole(what)

    def _ended(self, what: str) -> bool:
        """Whether a rank's process has ended. Raises if the group has been broken."""
        self._check_others(what)
        return bool(self._group.members.ended())

    def _failed(self, error: Exception, what: str) -> Exception:
        """What to raise for an error that Gloo has raised in a call."""
        ranks = "; ".join(f"rank {self._in_world(rank)} is on {self._hosts.name_of(rank)}" for rank in self._ranks)
        if TIMED_OUT in str(error):
            others = [self._in_world(rank) for rank in self._ranks if rank != self._group.rank]
            return IrisTimeoutError(
                f"Rank {self._group.ranks[self._group.rank]} waited {self._group.timeout:g} s in {what} for "
                f"{names(others)} ({ranks}). Does every rank make this call? The limit is the time-out of the process "
                "group."
            )
        why = error if isinstance(error, PeerLostError) else self._group.cause_of(error, what)
        if not isinstance(why, PeerLostError):
            this, first_line = self._group.ranks[self._group.rank], str(error).partition("\n")[0].partition(". ")[0]
            why = PeerLostError(f"Rank {this} lost its connection to other hosts in {what}: {first_line}.")
        return PeerLostError(f"{why} Of the ranks that exchange data here, {ranks}.")


def _nothing() -> None:
    """Begins the transfer of no bytes."""
