"""The ranks of a collective over several hosts, and the steps that `iris.ccl.over_hosts` composes it of.

In each step either the ranks of a host move data, by a collective of `Collectives` among these, or those of a rail do.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from iris.ccl import checks
from iris.ccl.chunks import (
    LEAST_BYTES,
    chunks_of_exchange,
    chunks_of_part,
    chunks_of_whole,
    one_ahead,
    programs_beside_rails,
    two_buffers,
)
from iris.ccl.config import Config, ReduceOp
from iris.ccl.host_order import HostOrder
from iris.ccl.host_sums import add_up, partial_dtype
from iris.ccl.reduction import reduction
from iris.ccl.select_over_hosts import OF_VENDOR, VENDOR, HostChoice
from iris.ccl.within_host import WithinHost
from iris.compat.cuda import current_raw_stream
from iris.errors import IrisError
from iris.world import Links, Rail, World
from iris.world.rail import as_bytes


class Root(NamedTuple):
    """The root of a collective.

    ``rank``: its rank in the group; ``here``: this rank is it; ``host``: its host; ``on_rail``: this rank has its local
    rank; ``in_this_host``: which rank of this host has its local rank, by its rank in the world.
    """

    rank: int
    here: bool
    host: int
    on_rail: bool
    in_this_host: int


class Partials(NamedTuple):
    """What hosts send of a sum: in which dtype, and combined by which operation.

    ``summands``: what AVG divides by after that; None if hosts have divided already.
    """

    dtype: torch.dtype
    op: Any
    summands: int | None


class Span:
    """All ranks of a context, or the members of a group of it. Hosts and local ranks are counted among these.

    Attributes
    ----------
    size : int
        How many ranks there are.
    ranks : tuple of int
        Their ranks in the world.
    device : torch.device
        What this rank's tensors are on.
    rank : int
        This rank, among them.
    whole : Group
        Where they meet on the host.
    hosts, rail, links, order
        Which ranks are on which host; how this one reaches those of other hosts, all at once, and one by one; the order
        of rows by host.
    group : ProcessGroup or None
        By which ``within`` knows those of this host; None for all ranks.
    within : WithinHost
        The collectives among these.
    choice : HostChoice
        By what Iris' steps or the vendor's collective are chosen.
    """

    def __init__(
        self,
        part: World,
        rail: Rail,
        links: Links,
        within: WithinHost,
        group: dist.ProcessGroup | None,
        num_ranks: int,
        index: int,
        choice: HostChoice,
    ) -> None:
        """Local. ``num_ranks``: of the context; ``index``: of this rank's GPU."""
        self.size, self.ranks, self.device = part.size, part.group.ranks, part.device
        self.rank, self.whole, self.hosts = part.rank, part.group, part.hosts
        self.rail, self.links = rail, links
        self.order = HostOrder(part.hosts, part.device)
        self.group, self.within = group, within
        self.choice = choice
        self._num_ranks, self._index = num_ranks, index

    def stream(self) -> int | None:
        """The handle of the current stream; None in the simulator."""
        return current_raw_stream(self._index) if self.device.type == "cuda" else None

    def root(self, role: str, rank: int) -> Root:
        """Where ``rank`` (in the world), which has this role, is. Raises if there is none."""
        number = checks.rank_in_group(self, role, rank, self._num_ranks)
        host = self.hosts.host_of(number)
        local = self.hosts.ranks[host].index(number)
        in_this_host = self.ranks[self.hosts.local_ranks[local]]
        return Root(number, number == self.rank, host, self.hosts.local_rank == local, in_this_host)

    @contextlib.contextmanager
    def all_give(self, name: str, root: Root, config: Config) -> Iterator[None]:
        """Around checks of what all ranks give to a collective that has this root.

        All may refuse it, and then go on. If this one alone does, it says so where the others come for the data.
        """
        try:
            yield
        except IrisError:
            with contextlib.suppress(IrisError):
                if name in OF_VENDOR and (config.over_hosts or self.choice.asked) == VENDOR:
                    self.links.everyone().refuse(f"{name}()")
                elif root.on_rail:
                    self.rail.refuse(f"{name}()")
            raise

    @contextlib.contextmanager
    def root_alone(self, name: str) -> Iterator[None]:
        """Around checks of what the root alone gives: the others would wait for it, so it breaks the group."""
        try:
            yield
        except IrisError as error:
            this, why = self.ranks[self.rank], str(error).rstrip(".")
            self.whole.break_off(f"rank {this} is the root of {name}(), and refused it: {why}")
            raise

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, call: str) -> None:
        """Both are contiguous; ``call``: what this is a step of, in words, the same on all ranks."""
        chunks = chunks_of_part(self.choice.cluster, self.choice.host, input.nbytes)
        for _ in one_ahead(chunks, self._gathering(output, input, call, chunks)):
            pass

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: Any, call: str, sent: Partials) -> None:
        """Both are contiguous; ``call`` is as for `all_gather`; ``sent``: in which form hosts send their sums."""
        chunks = chunks_of_part(self.choice.cluster, self.choice.host, output.nbytes)
        for _ in one_ahead(chunks, self._reducing(output, input, op, call, sent, chunks)):
            pass

    def all_reduce(self, output: torch.Tensor, input: torch.Tensor, op: Any, call: str, sent: Partials) -> None:
        """As `reduce_scatter`, of a number of elements that the ranks divide; ``output`` may be ``input``.

        What a chunk is summed up to is gathered while the next ones are summed up. It is written where this chunk of
        the input was, which all ranks have read.
        """
        part = input.new_empty(input.numel() // self.size)
        chunks = chunks_of_part(self.choice.cluster, self.choice.host, part.nbytes)
        sums = one_ahead(chunks, self._reducing(part, input, op, call, sent, chunks))
        for _ in one_ahead(sums, self._gathering(output, part, call, chunks)):
            pass

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, call: str) -> None:
        """``(rows, W, n)`` bytes → as many, contiguous: what is for rank r, or from it, has the number r in each row.

        A chunk is some of the rows, or of the bytes of the only one. What is between its steps torch frees, and takes
        for the next chunk but one.
        """
        (number, local), (rows, _, columns) = (len(self.hosts), len(self.hosts.local_ranks)), input.shape
        pieces = chunks_of_exchange(self.choice.cluster, self.choice.host, rows, columns)
        beside = self.beside_rails(pieces)

        def begin(piece: slice) -> Callable[[], None]:
            place = (slice(None), slice(None), piece) if rows == 1 else (piece,)
            sent = self.order.by_host(input[place], 1).transpose(0, 1).contiguous()
            arrived = torch.empty_like(sent)
            wait = self.rail.all_to_all(arrived, sent, call)

            def finish() -> None:
                wait()
                # From this rail, what is for each rank of this host.
                ours = arrived.view(number, local, -1).transpose(0, 1).contiguous()
                theirs = torch.empty_like(ours)
                self.within.all_to_all(theirs.view(-1), ours.view(-1), group=self.group, config=beside)
                by_host = theirs.view(local, number, *sent.shape[1:]).permute(2, 1, 0, 3)
                self.order.write(output[place], by_host.flatten(1, 2), 1)

            return finish

        for _ in one_ahead(pieces, begin):
            pass

    def broadcast(self, tensor: torch.Tensor, root: "Root", call: str) -> None:
        """``tensor`` is contiguous, and of one size on all ranks."""
        data = as_bytes(tensor)
        chunks = chunks_of_whole(self.choice.cluster, self.choice.host, len(data))
        beside = self.beside_rails(chunks)

        def begin(chunk: slice) -> Callable[[], None]:
            wait = self.rail.broadcast(data[chunk], root.host, call) if root.on_rail else None

            def finish() -> None:
                if wait is not None:
                    wait()
                self.within.broadcast(data[chunk], root.in_this_host, group=self.group, config=beside)

            return finish

        for _ in one_ahead(chunks, begin):
            pass

    def _gathering(
        self, output: torch.Tensor, part: torch.Tensor, call: str, chunks: list[slice]
    ) -> Callable[[slice], Callable[[], None]]:
        """What begins to gather a chunk, which is in ``part`` by then: bytes of every rank's part."""
        hosts, own = self.hosts, self.hosts.number
        mine, everyone = as_bytes(part), as_bytes(output).view(self.size, part.nbytes)
        room, beside = two_buffers(mine, len(hosts), chunks), self.beside_rails(chunks, part.nbytes)

        def begin(chunk: slice) -> Callable[[], None]:
            arrived, sent, rows = next(room)(chunk), mine[chunk], everyone[:, chunk]
            wait = self.rail.all_gather(arrived, sent, call)
            self._spread(rows, sent, own, beside)

            def finish() -> None:
                wait()
                for host in range(len(hosts)):
                    if host != own:
                        self._spread(rows, arrived[host], host, beside)

            return finish

        return begin

    def _spread(self, everyone: torch.Tensor, part: torch.Tensor, host: int, config: Config | None) -> None:
        """Gather the rows of a host's ranks: local rank l brings that of its l-th rank as ``part``. All are bytes."""
        rows = self.order.view_of_host(everyone, host)
        if rows is not None:
            self.within.all_gather_rows(rows, part, self.group, config)
            return
        rows = part.new_empty(len(self.hosts.local_ranks), len(part))
        self.within.all_gather_rows(rows, part, self.group, config)
        self.order.write_of_host(everyone, host, rows)

    def _reducing(
        self, part: torch.Tensor, input: torch.Tensor, op: Any, call: str, sent: Partials, chunks: list[slice]
    ) -> Callable[[slice], Callable[[], None]]:
        """What begins to sum up a chunk of ``part``; when it is finished, the sum is there."""
        hosts, own, size = self.hosts, self.hosts.number, input.itemsize
        total, everyone, beside = part.view(-1), input.view(self.size, -1), self.beside_rails(chunks, part.nbytes)
        to_send, to_receive = (two_buffers(input, len(hosts), chunks, sent.dtype) for _ in range(2))
        for_own = two_buffers(input, 1, chunks, sent.dtype)

        def begin(chunk: slice) -> Callable[[], None]:
            sums, arrived, (mine,) = (next(room)(chunk) for room in (to_send, to_receive, for_own))
            elements = slice(chunk.start // size, chunk.stop // size)

            def sum_up(host: int, result: torch.Tensor) -> None:
                summands = self.order.of_host(everyone[:, elements], host).to(sent.dtype)
                self.within.reduce_scatter_rows(result, summands, sent.op, self.group, beside)

            for host in range(len(hosts)):
                if host != own:
                    sum_up(host, sums[host])
            wait = self.rail.all_to_all(arrived, sums, call)
            sum_up(own, mine)

            def finish() -> None:
                wait()
                # The rail has brought what was in the row of the own host, which is nothing.
                arrived[own] = mine
                add_up(total[elements], arrived, reduction(op)[0], self.stream(), sent.summands)

            return finish

        return begin

    def beside_rails(self, chunks: list[slice], nbytes: int = 0) -> Config | None:
        """How steps within the host leave room for NCCL's kernel, where they are to run beside it.

        That is where there are chunks, or the own host has a part of so many bytes, unless both are over in no time.
        """
        return self._leaving_room if len(chunks) > 1 or nbytes >= LEAST_BYTES else None

    @functools.cached_property
    def _leaving_room(self) -> Config:
        """One object, by which launches are found again."""
        return Config(comm_sms=programs_beside_rails(self.within.communicator(self.group).num_sms))

    def partials(self, dtype: torch.dtype, op: Any) -> Partials:
        """The form of `Config.fp32_partials`."""
        kind = reduction(op)[0]
        wide = partial_dtype(dtype, kind)
        if wide is dtype:
            return Partials(dtype, op, None)
        return Partials(wide, ReduceOp.SUM if kind is ReduceOp.AVG else op, self.size)
