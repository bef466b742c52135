"""Errors of ranks that meet, and of their groups."""

from collections.abc import Iterable, Mapping, Sequence

from iris.errors.base import IrisError
from iris.errors.wording import names, short_repr


class IrisTimeoutError(IrisError, TimeoutError):
    """A wait in a kernel, a meeting of ranks, or an allocation that waits for memory took longer than its limit.

    The message names who waits for what, and who has arrived.
    """


class OutOfStepError(IrisError, RuntimeError):
    """Ranks met at different points of the program: one is in one collective call, another in a different one."""


class MismatchedSettingsError(IrisError, RuntimeError):
    """An environment variable that decides what ranks do together is not the same on all ranks.

    These are ``IRIS_SIMULATOR``, ``IRIS_DEBUG``, ``IRIS_SANITIZE`` and ``IRIS_TRACE``.
    """

    def __init__(self, variable: str, ranks: Mapping[str, Sequence[int]]) -> None:
        found = "; ".join(f"{value} on {names(those)}" for value, those in ranks.items())
        super().__init__(
            f"The ranks differ in {variable}: {found}. Give all ranks the same environment: it decides what they do "
            "together."
        )


class PeerFailedError(IrisError, RuntimeError):
    """A collective step failed on another rank, so it was undone here too. Has the other rank's message."""


class PeerLostError(IrisError, ConnectionError):
    """A rank has died, or its program has ended, while others wait for it on the host.

    In the simulator also while they wait in a kernel. Or the process that holds the process group's store has ended.
    """


class InvalidMessageError(IrisError, RuntimeError):
    """What lies in the process group's store for a rank is no message of this version of Iris.

    Ranks run different versions, or somebody else writes there.
    """


class GroupAbortedError(IrisError, RuntimeError):
    """A broken group was used again: a wait was given up, a call interrupted, or messages were of unequal size."""

    def __init__(self, ranks: Iterable[int], why: str) -> None:
        self.why = why
        super().__init__(
            f"The group of ranks {list(ranks)} is broken, as an aborted communicator is: its ranks are out of step, so "
            f"results would be wrong. The cause: {why}\nOther groups go on. To go on with these ranks, close the "
            "context on all of them and make a new one with iris.iris(); or make a new process group, if this is one."
        )


class RankOutOfRangeError(IrisError, ValueError):
    """A host call, or a kernel in the simulator, named a rank that the group does not have."""

    def __init__(self, rank: object, size: int) -> None:
        super().__init__(
            f"There is no rank {short_repr(rank)}: the group has {size}, so a rank is a whole number from 0 to "
            f"{size - 1}."
        )


class InvalidGroupError(IrisError, ValueError):
    """Something that is no process group, or one that this rank is not a member of, or whose GPUs differ.

    Or hosts that have different numbers of its ranks.
    """


class SeveralHostsError(IrisError, RuntimeError):
    """What was asked for works among the ranks of one host, and not yet over several. Says what to use instead."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what} works among the ranks of one host, and not yet over several. {instead}")


class RemoteRankError(IrisError, ValueError):
    """A kernel, or `peer()`, reaches for the memory of a rank on another host.

    Loads and stores end at the host. In the simulator a kernel ends with this error. On a GPU it goes on without the
    access, and the next ``ctx.barrier()`` raises it.
    """

    def __init__(self, rank: int, host: str, who: str | None = None) -> None:
        tried = f", as {who} tried" if who else ""
        super().__init__(
            f"Rank {rank} is on another host, {host}: no load, store or atomic reaches its memory{tried}. Move data "
            "there with a collective, such as ctx.ccl.all_gather(). "
            "ctx.is_local(rank) tells which ranks are on this host."
        )


class AsymmetricHeapError(IrisError, RuntimeError):
    """The ranks did not make the same allocations in the same order, so offsets no longer agree."""
