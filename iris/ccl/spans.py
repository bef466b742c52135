"""Whose a call of ``ctx.ccl`` is, where there are several hosts: that of ranks of several, or of ranks of one.

`over_hosts` makes a collective of the steps that `iris.ccl.over_hosts` has for ranks of several hosts. Those of one
host have the collective of `Collectives`.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from iris.ccl import checks
from iris.ccl.collectives import Collectives
from iris.ccl.communicator import Communicator, gpu_name
from iris.ccl.config import DEFAULT, Config
from iris.ccl.enqueue import FOR_THE_HOST
from iris.ccl.reduction import reduction
from iris.ccl.select_over_hosts import (
    IRIS,
    OF_VENDOR,
    VENDOR,
    HostChoice,
    as_found,
    as_received,
    as_sent,
    vendor_carries,
)
from iris.ccl.span import Span
from iris.ccl.vendor import Vendor
from iris.ccl.within_host import WithinHost
from iris.ccl.work import Work
from iris.cuda_graphs.capture import refuse_in_capture
from iris.errors import InvalidConfigError, SeveralHostsError, UnsupportedReductionError
from iris.operators.graph_break import methods_break_graph
from iris.runtime.process_groups import none_if_all
from iris.runtime.workspace import RankContext
from iris.world import World, check_process_group
from iris.world.hosts import hosts_of, notify_other_hosts

# Collectives that add up.
ADD = ("all_reduce", "reduce_scatter", "reduce")


def over_hosts(steps: Callable[..., None]) -> Any:
    """A collective made of ``steps``, for ranks on several hosts; for a group within one, that of `Collectives`."""
    name = steps.__name__

    @functools.wraps(getattr(Collectives, name))
    def call(
        self: "Spans",
        *args: Any,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
        **named: Any,
    ) -> Work | None:
        span = self._find(name, group)
        if span is None:
            return getattr(self.within, name)(*args, group=group, async_op=async_op, config=config, **named)
        comm, used = self._begin(name, span, config)
        try:
            with torch.no_grad():
                steps(self, span, used, *args, **named)
        except BaseException as error:
            comm.abort_flag.interrupted(name, error)
            notify_other_hosts(span.whole)
            raise
        return Work(self._on_gpu) if async_op else None

    return call


def within_a_host(name: str) -> Any:
    """The collective of that name for groups within a host; `SeveralHostsError` for ranks on several."""

    @functools.wraps(getattr(Collectives, name))
    def call(self: "Spans", *args: Any, group: dist.ProcessGroup | None = None, **named: Any) -> Work | None:
        if self._spans_hosts(group):
            raise SeveralHostsError(f"ctx.ccl.{name}()", "Use a group of ranks that are on one host.")
        return getattr(self.within, name)(*args, group=group, **named)

    return call


@methods_break_graph(FOR_THE_HOST)
class Spans(Collectives):
    """The groups of a context with several hosts.

    Attributes
    ----------
    within : WithinHost
        Those of this host's ranks, and of groups within the host. Of a group over several hosts, they are those of its
        members on this one.
    """

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.within = WithinHost(context)
        # One set of groups, which this object lets go of.
        self.within._communicators = self._communicators
        # By group, those that were used; None for one within a host.
        self._spans: dict[dist.ProcessGroup | None, Span | None] = {}
        self._spans[None] = self._span(context._world, None)

    @property
    def choice(self) -> HostChoice:
        """By what calls of all ranks are chosen."""
        everyone = self._spans[None]
        assert everyone is not None
        return everyone.choice

    def forget(self, group: dist.ProcessGroup) -> None:
        super().forget(group)
        self._spans.pop(group, None)

    def close(self) -> None:
        super().close()
        self._spans.clear()

    def _find(self, name: str, group: dist.ProcessGroup | None) -> Span | None:
        """The ranks of a collective, if they are on several hosts. Collective, and blocks the host, for a new group.

        Raises `FirstUseInCaptureError` if the first use of a group is in a capture.
        """
        group = self._named(group)
        if group not in self._spans:
            refuse_in_capture(f"{name}()")
            self.communicator(group)
            part = self._context._spanning.get(group)
            self._spans[group] = None if part is None else self._span(part, group)
        return self._spans[group]

    def _span(self, part: World, group: dist.ProcessGroup | None) -> Span:
        """Collective over the part; blocks the host."""
        assert part.rail and part.links
        device, hosts = part.device, part.hosts

        def find() -> tuple:
            return as_sent(as_found(len(hosts), len(hosts.local_ranks), gpu_name(device)))

        # Nothing that a choice depends on may differ between ranks: the first one's is everybody's.
        choice = as_received(part.group.agree(find, "find out by what collectives over hosts are chosen")[0])
        return Span(part, part.rail, part.links, self.within, group, self._context.num_ranks, self._index, choice)

    def _spans_hosts(self, group: dist.ProcessGroup | None) -> bool:
        """Whether its ranks are on several hosts. Local: messages meet no others."""
        group = self._named(group)
        if group not in self._spans:
            assert group is not None
            world = self._context._world
            return len(set(hosts_of(dist.get_process_group_ranks(group), world.group, world.hosts))) > 1
        return self._spans[group] is not None

    def _named(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The group, or None, which stands for all ranks."""
        self._context.heap.check_open()
        group = none_if_all(group, self._context.num_ranks)
        if group is not None:
            check_process_group(group)
        return group

    def _begin(self, name: str, span: Span, config: Config | None) -> tuple[Communicator, Config]:
        """The communicator of this host's ranks, which they meet to make; and the configuration, checked."""
        used = self._check(name, span, config)
        return self.communicator(span.group), used

    def _check(self, name: str, span: Span, config: Config | None) -> Config:
        """That the group is whole, and that the configuration has what can be asked for over hosts."""
        span.whole.check()
        used = checks.check_config(config)
        if replace(used, fp32_partials=False, over_hosts=None) != DEFAULT:
            raise SeveralHostsError(
                f"{used!r} for ctx.ccl.{name}()",
                "Call it without, or with over_hosts and fp32_partials alone: each step is chosen.",
            )
        if used.fp32_partials and name not in ADD:
            raise InvalidConfigError(
                f"Config(fp32_partials=True) has no meaning for {name}(), which adds nothing up. Call it without."
            )
        if used.over_hosts == VENDOR and (name not in OF_VENDOR or used.fp32_partials):
            raise InvalidConfigError(
                f"{used!r} cannot work for {name}(): "
                + ("the vendor rounds sums as it does." if name in OF_VENDOR else "the vendor's is not used there.")
                + " Leave over_hosts out."
            )
        return used

    def _vendor(
        self, span: Span, config: Config, name: str, nbytes: int, dtype: torch.dtype, op: Any = None
    ) -> Vendor | None:
        """The vendor's collective, if it is asked for, or faster for a whole of so many bytes. See `HostChoice`."""
        kind = None if op is None else reduction(op)[0]
        if config.over_hosts == VENDOR and not vendor_carries(name, dtype, kind):
            raise UnsupportedReductionError(
                f"{config!r} cannot work for {name}() of {dtype}, {kind}: the vendor has no such sum. Leave over_hosts "
                "out."
            )
        if config.over_hosts == IRIS or config.fp32_partials or not vendor_carries(name, dtype, kind):
            return None
        if config.over_hosts is None and span.choice.of(name, nbytes) == IRIS:
            return None
        if not span.links.everyone_connected:
            refuse_in_capture(f"{name}() by the vendor's communicator")
        return Vendor(span.links.everyone())
