"""Dispatches and combines over several hosts: rails carry tokens from host to host, and kernels within each host.

A rail has the ranks with one local rank, one on each host (`iris.world.rail`). M `max_tokens`, on H hosts:

| call | steps |
| --- | --- |
| dispatch | the rail gathers the tokens of its ranks, H M of them; a dispatch of these to the experts of this host |
| combine | a combine of these, which makes a sum of each; the rail returns the sums; they are added up |

So a token crosses the network once for each other host, whatever experts it has there, and then goes once to each of
their ranks. A token without experts on a host is none of the choices there. Numbers of tokens are not known on the
host, so a rail always carries M of each rank. Rows that are to be quantized are so before they travel.

Sums are formed within a host as on one alone, and rounded; then over hosts in the order of these, in float32, and
rounded once more. They are the same from run to run.

What is between the steps is torch's memory. In a graph it is of the graph's pool.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from iris import simulator
from iris.ccl.config import ReduceOp
from iris.ccl.enqueue import to_read
from iris.ccl.host_order import HostOrder
from iris.ccl.host_sums import add_up
from iris.ccl.protocols import CollectivesContext
from iris.cuda_graphs.kept import keep
from iris.errors import TooManyInFlightError
from iris.experts import checks
from iris.experts.calls import DEBUGGING, Calls, room_for
from iris.experts.config import ExpertsConfig
from iris.experts.kernel_arguments import Extents, FewTokens, Form
from iris.experts.memory import Memory
from iris.experts.received import Received
from iris.experts.rows import BY_ROW, GROUP, NOT, SMALLEST
from iris.operators.version_counter import bump_version
from iris.world import World
from iris.world.hosts import notify_other_hosts
from iris.world.rail import as_bytes


class Gathered(NamedTuple):
    """Of the tokens of a rail, by host, M of each: choices by their numbers on this host, -1 for none here."""

    rows: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None


class CallsOverHosts(Calls):
    """`Calls` of a group over several hosts: those of this host's ranks, between what the rail moves.

    ``extents``, as that has them, are those within this host: of its ranks, its experts, and the tokens of the rail.
    """

    def __init__(
        self,
        context: CollectivesContext,
        group: dist.ProcessGroup | None,
        part: World,
        memory: Memory,
        extents: Extents | FewTokens,
        dtype: torch.dtype,
        config: ExpertsConfig,
    ) -> None:
        """``part``: the ranks of the group."""
        assert part.rail
        self._rail, self._hosts, self._order = part.rail, part.hosts, HostOrder(part.hosts, part.device)
        super().__init__(context, group, part.group, memory, extents, dtype, config)
        self.limits = self.limits._replace(
            max_tokens=extents.M // len(part.hosts), num_experts=extents.LOCAL * part.size
        )
        self._local_numbers = keep(lambda: _local_numbers(part, extents.LOCAL), part.device)
        # Slots of dispatches that nobody has waited for: they take one then.
        self._promised = 0

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        x_scales: torch.Tensor | None = None,
        quantize: str | None = None,
        layout: str = "compact",
        num_tokens: torch.Tensor | None = None,
        async_op: bool = False,
        rows: torch.Tensor | None = None,
    ) -> Any:
        self.enter()
        layout = checks.check_layout(layout, self.config)
        form = checks.check_dispatch(self.limits, x, topk_ids, topk_weights, x_scales, quantize, num_tokens)
        self._check_numbers(topk_ids, num_tokens)
        if DEBUGGING and not self._capturing():
            how = f"layout={layout!r}, {checks.in_words(x.dtype, form)}, async_op={async_op}"
            self.compare(f"dispatch() over hosts, {how}")
        # Not before: a call that is refused takes no slot.
        self._promise_slot()
        used = [each for each in (x, topk_ids, topk_weights, x_scales, num_tokens) if each is not None]

        def receive() -> Received:
            with self._in_step("dispatch"), torch.no_grad():
                found = wait()
                self._promised -= 1
                assert found.rows is not None
                received: Received = super(CallsOverHosts, self).dispatch(
                    found.rows, found.ids, found.weights, found.scales, layout=layout, rows=rows
                )
                return self._of_rank(received, len(x), counted)

        with self._in_step("dispatch"), torch.no_grad():
            # The combine leaves rows after these alone, and the program may have written another number by then.
            counted = None if num_tokens is None else num_tokens.clone()
            wait, moved = self._gather(*quantized(to_read(x), x_scales, form), topk_ids, topk_weights, counted)
        if not async_op:
            return receive()
        used += moved if counted is None else [*moved, counted]
        return self._pend("dispatch() over hosts", used, receive)

    def route(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None, layout: str) -> Received:
        self.enter()
        layout = checks.check_layout(layout, self.config)
        checks.check_number(topk_ids, self.limits.max_tokens)
        checks.check_choices(self.limits, len(topk_ids), topk_ids, topk_weights)
        self._check_numbers(topk_ids, None)
        self._promise_slot()
        with self._in_step("dispatch"), torch.no_grad():
            wait, _ = self._gather(None, None, topk_ids, topk_weights, None)
            found = wait()
            self._promised -= 1
            return self._of_rank(super().route(found.ids, found.weights, layout), len(topk_ids), None)

    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        async_op: bool = False,
    ) -> Any:
        self.enter()
        checks.check_received(received, self)
        tokens, hidden, hosts = received.num_tokens, self.limits.hidden, len(self._hosts)
        result = room_for(tokens, hidden, self.dtype, self._device) if out is None else out
        biases = () if bias is None else checks.biases_of(bias)
        checks.check_combine(self.limits, tokens, y, received.rows.shape, topk_weights, result, biases)
        checks.check_out(result)
        if DEBUGGING and not self._capturing():
            how = "not given" if topk_weights is None else "given"
            self.compare(f"combine() over hosts, weights {how}, async_op={async_op}")
        counted = received._num_tokens_there

        def receive() -> torch.Tensor:
            with self._in_step("combine"), torch.no_grad():
                wait()
                exact = tokens == self.limits.max_tokens and counted is None
                total = result.view(-1) if exact else torch.empty_like(parts[0])
                add_up(total, parts, ReduceOp.SUM, self._stream())
                if not exact:
                    sums = total.view(-1, hidden)[:tokens]
                    result.copy_(sums if counted is None else torch.where(_before(counted, sums), sums, result))
                bump_version(result)
                return result

        with self._in_step("combine"), torch.no_grad():
            weights = None if topk_weights is None else self._gather_weights(topk_weights)
            sums = y.new_empty(self.extents.M, hidden)
            super().combine(y, received, weights, sums)
            parts = sums.new_empty(hosts + len(biases), sums.numel() // hosts)
            wait = self._rail.all_to_all(parts[:hosts], sums.view(hosts, -1), f"combine() of {self.dtype}")
            for place, each in enumerate(biases, hosts):
                parts[place, : each.numel()].view_as(each).copy_(each)
        if not async_op:
            return receive()
        used = [each for each in (sums, parts, result, counted) if each is not None]
        return self._pend("combine() over hosts", used, receive)

    def choices(self, received: Received) -> tuple[torch.Tensor, torch.Tensor]:
        local, tokens = len(self._hosts.local_ranks), (len(self._hosts), self.limits.max_tokens, self.limits.top_k)
        found = []
        for each in super().choices(received):
            by_host = each.view(local, *tokens).transpose(0, 1).flatten(0, 1)
            by_rank = torch.empty_like(by_host)
            self._order.write(by_rank, by_host)
            found.append(by_rank)
        return found[0], found[1]

    @property
    def choices_shape(self) -> tuple[int, int, int]:
        return self._members.size, self.limits.max_tokens, self.limits.top_k

    # ------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _prepare_all(self) -> None:
        super()._prepare_all()
        # The sum over hosts is compiled for its length.
        parts = torch.zeros(len(self._hosts), self.extents.M // len(self._hosts), self.extents.H, device=self._device)
        parts = parts.to(self.dtype).flatten(1)
        add_up(torch.empty_like(parts[0]), parts, ReduceOp.SUM, self._stream())

    @contextlib.contextmanager
    def _in_step(self, name: str) -> Iterator[None]:
        """Whoever leaves a call between its steps breaks the group: the others wait for the next one."""
        try:
            yield
        except BaseException as error:
            self.broken_by(name, error)
            raise

    def broken_by(self, call: str, error: BaseException) -> None:
        super().broken_by(call, error)
        notify_other_hosts(self._members)

    def _tokens_of(self, received: Received) -> int:
        """Of the rail."""
        return self.extents.M

    def _of_rank(self, received: Received, tokens: int, counted: torch.Tensor | None) -> Received:
        received.num_tokens, received._num_tokens_there = tokens, counted
        return received

    def _promise_slot(self) -> None:
        if self._in_use.count(False) <= self._promised:
            raise TooManyInFlightError(self.config.in_flight, [*self.pending.values()])
        self._promised += 1

    def _check_numbers(self, topk_ids: torch.Tensor, num_tokens: torch.Tensor | None) -> None:
        if (DEBUGGING or simulator.ACTIVE) and not self._capturing():
            there = topk_ids if num_tokens is None else topk_ids[: max(int(num_tokens), 0)]
            checks.check_numbers(there, self.limits.num_experts)

    def _gather(
        self,
        rows: torch.Tensor | None,
        scales: torch.Tensor | None,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        counted: torch.Tensor | None,
    ) -> tuple[Callable[[], Gathered], list[torch.Tensor]]:
        """Begin to gather what the ranks of the rail dispatch.

        Returns what waits for it, and all tensors that the rail reads and writes. Whoever waits on another stream says
        so of each of them: when the rail lets go of their memory, the stream that it is of may use it at once.
        """
        hosts, limits = len(self._hosts), self.limits
        valid = (topk_ids >= 0) & (topk_ids < limits.num_experts)
        if counted is not None:
            valid &= _before(counted, topk_ids)
        # Beside the rows, in one transfer: choices, weights and factors, all of 4 bytes.
        pairs = [torch.where(valid, topk_ids, -1).to(torch.int32)]
        pairs += [each.view(torch.int32) for each in map(_dense, (topk_weights, scales)) if each is not None]
        widths = [each.shape[1] for each in pairs]
        # Tokens that this rank has not got have no experts.
        sent = pairs[0].new_full((limits.max_tokens, sum(widths)), -1)
        torch.cat(pairs, dim=1, out=sent[: len(topk_ids)])
        arrived = sent.new_empty(hosts, *sent.shape)
        moved = [sent, arrived]
        what = f"dispatch() of {'choices alone' if rows is None else rows.dtype}"
        wait_for_pairs = self._rail.all_gather(arrived, sent, f"{what}, their choices")
        if rows is not None:
            of_rank = rows
            if len(rows) < limits.max_tokens:
                of_rank = rows.new_empty(limits.max_tokens, limits.hidden)
                as_bytes(of_rank)[: rows.nbytes] = as_bytes(rows)
            of_rail = rows.new_empty(hosts * limits.max_tokens, limits.hidden)
            wait_for_rows = self._rail.all_gather(of_rail, of_rank, what)
            moved += [of_rank, of_rail]

        def wait() -> Gathered:
            wait_for_pairs()
            ids, *others = arrived.flatten(0, 1).split(widths, dim=1)
            floats = [each.contiguous().view(torch.float32) for each in others]
            weights = floats.pop(0) if topk_weights is not None else None
            if rows is not None:
                wait_for_rows()
            # -1 is the last one, which is none.
            here = self._local_numbers[ids]
            return Gathered(None if rows is None else of_rail, here, weights, floats[0] if floats else None)

        return wait, moved

    def _gather_weights(self, topk_weights: torch.Tensor) -> torch.Tensor:
        sent = topk_weights.new_zeros(self.limits.max_tokens, self.limits.top_k)
        sent[: len(topk_weights)] = topk_weights
        arrived = sent.new_empty(len(self._hosts) * len(sent), sent.shape[1])
        self._rail.all_gather(arrived, sent, "combine(), its weights")()
        return arrived


def quantized(x: torch.Tensor, x_scales: torch.Tensor | None, form: Form) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as they travel, and their factors: those of `iris.experts.rows`, where rows are to be quantized."""
    if form.QUANTIZE == NOT.value:
        return x, x_scales
    hidden = x.shape[1]
    width = hidden if form.QUANTIZE == BY_ROW.value else GROUP
    blocks = torch.nn.functional.pad(x.float(), (0, -hidden % width)).unflatten(1, (-1, width))
    factors = (blocks.abs().amax(dim=-1) / form.LARGEST).clamp(min=SMALLEST.value)
    narrow = (blocks / factors[:, :, None]).flatten(1)[:, :hidden].to(checks.quantized_dtype())
    return narrow.contiguous(), factors


def _before(counted: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Whether each of the rows is among so many first ones, ``(n, 1)``."""
    return (torch.arange(len(rows), device=rows.device) < counted)[:, None]


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else to_read(tensor)


def _local_numbers(part: World, each: int) -> torch.Tensor:
    """The number of each expert among those of this host, -1 for those of others; and -1 at the end, for none."""
    numbers = torch.full((part.size * each + 1,), -1, dtype=torch.int32)
    for place, rank in enumerate(part.hosts.local_ranks):
        numbers[rank * each : (rank + 1) * each] = place * each + torch.arange(each, dtype=torch.int32)
    return numbers.to(part.device)
