"""Fused operations over several hosts: one loop over hosts around those within a host, while rails move the rest.

| operation | steps |
| --- | --- |
| all_gather_matmul | the rows of the own host are multiplied, then those of one other host after the other |
| matmul_reduce_scatter | what is for one other host after the other is multiplied, then what is for the own; a sum |
| matmul_all_reduce | the same, of which each rank has a part then, and an all_gather over hosts |
| all_reduce_rms_norm | an all_reduce over hosts, and a kernel that normalises |
| the same with a sharded residual | a reduce_scatter over hosts, that kernel, and an all_gather over hosts |
| the others | the vendor's GEMM and a collective over hosts, one after the other |

The first three are the vendor's GEMM and a collective, too, where arithmetic says that this is faster: the times are
those of `iris.ops.beside_rails` and `iris.ccl.predict_over_hosts`, and the same on all ranks.

In each step a host's ranks do what they would do if there were no other: an `Operations` among these. A row of a
product has the same bits as on one host. Sums are rounded within a host, and over hosts once more, as in
`iris.ccl.over_hosts`.

Hosts are in a ring. In each step the rail takes a part to the host that is so many places after this one, and brings
that of the host as many places before it: `Rail.shift`. It works while other parts are multiplied: all_gather_matmul
gets two parts ahead, into two buffers by turns; matmul_reduce_scatter sends from two. So, where a part of the product
takes p and a transfer r, H hosts take about

    max(H p, (H - 1) r + p)

On a GPU that is where the product is worth leaving the rail room for (`iris.ops.beside_rails`). Elsewhere each transfer
comes before, or after, what is multiplied.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import NoReturn, cast

import torch

from iris.ccl.checks import compare_calls
from iris.ccl.collectives import Collectives
from iris.ccl.config import ReduceOp
from iris.ccl.enqueue import to_read
from iris.ccl.host_order import HostOrder
from iris.ccl.host_sums import add_up
from iris.ccl.over_hosts import CollectivesOverHosts
from iris.ccl.predict_over_hosts import add_up_us
from iris.ccl.protocols import CollectivesContext
from iris.ccl.select_over_hosts import IRIS, MARGIN, HostChoice
from iris.ccl.work import Work
from iris.compat.cuda import current_raw_stream
from iris.errors import SeveralHostsError
from iris.language.context_tensor import context_tensor
from iris.operators.graph_break import methods_break_graph
from iris.operators.version_counter import bump_version
from iris.ops import vendor
from iris.ops.beside_rails import Loop, leaving_room, loop
from iris.ops.buffers import Buffers
from iris.ops.call import Call, described
from iris.ops.config import FusedConfig
from iris.ops.kernel import most_programs
from iris.ops.operations import Operations
from iris.ops.products import DEBUGGING
from iris.runtime.workspace import Workspace
from iris.world import World
from iris.world.hosts import notify_other_hosts
from iris.world.rail import Rail

# What the loop over hosts carries, and the collective that goes with one GEMM, which carries the others.
LOOPS = {
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_reduce": "all_reduce",
}
# Of these, those that take a configuration, which is that of each part.
CONFIGURED = ("all_gather_matmul", "matmul_reduce_scatter")


class HostContext(CollectivesContext):
    """The context of all ranks as those of this host would have it without the others: with local ranks."""

    def __init__(self, context: CollectivesContext) -> None:
        hosts, self._whole = context._world.hosts, context
        self.cur_rank, self.num_ranks, self.num_hosts = hosts.local_rank, len(hosts.local_ranks), 1
        self.device, self.gpu_id, self.heap, self.ccl = context.device, context.gpu_id, context.heap, _of_host(context)
        self._world = World(hosts.group, context.device, hosts, None)
        self._workspaces, self._spanning = context._workspaces, {}
        bases, size = context.heap.mapping.bases, context.heap.mapped_size
        record = context._workspaces[None].abort_flag.record
        self._device_context = context_tensor(self.cur_rank, bases, size, record, context.device)

    def get_cu_count(self) -> int:
        return self._whole.get_cu_count()

    def get_device_context(self) -> torch.Tensor:
        return self._device_context

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        return self._whole.is_symmetric(tensor)

    def device_barrier(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        # That of all hosts, which is more.
        self._whole.device_barrier(group)

    def _named(self, process_group: torch.distributed.ProcessGroup | None) -> torch.distributed.ProcessGroup | None:
        return self._whole._named(process_group)

    def _workspace(self, process_group: torch.distributed.ProcessGroup | None) -> Workspace:
        return self._whole._workspace(process_group)


@methods_break_graph("ctx.ops is for the host; iris.ops.functional has the same as operators for graphs")
class OperationsOverHosts(Operations):
    """``ctx.ops`` where there are several hosts.

    Attributes
    ----------
    within : Operations
        The operations of this host's ranks.
    beside_rails : bool or None
        Whether products run beside rails; None: where it pays, which in the simulator is everywhere. The same on all
        ranks of a host. To measure one against the other.
    """

    beside_rails: bool | None = None

    def __init__(self, context: CollectivesContext, rail: Rail) -> None:
        super().__init__(context)
        self.within = Operations(HostContext(context))
        self._hosts, self._rail = context._world.hosts, rail
        self._order = HostOrder(self._hosts, context.device)

    def close(self) -> None:
        super().close()
        self.within.close()

    @torch.no_grad()
    def _run(
        self,
        call: Call,
        config: FusedConfig | None,
        async_op: bool,
        workspace: Buffers | None,
        apart: bool = False,
    ) -> Work | None:
        self._context.heap.check_open()
        self._context._world.group.check()
        if workspace is not None:
            self._refuse(call, "(workspace=…)", "Call it without a workspace.")
        if config is not None and call.name not in CONFIGURED:
            self._refuse(call, "(config=…)", "Call it without a config.")
        call.check(self._context.device, self._context.num_ranks, config)
        if DEBUGGING and not (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            compare_calls(self._context._world.group, f"{call.title} with {described(call.given())}, {config}")
        try:
            if config is None and self._is_the_vendors(call):
                self._by_vendor(call)
            else:
                {
                    "all_gather_matmul": self._all_gather_matmul,
                    "matmul_reduce_scatter": self._matmul_reduce_scatter,
                    "matmul_all_reduce": self._matmul_all_reduce,
                }[call.name](call, config)
        except BaseException as error:
            self._interrupted(call.method, error)
            raise
        bump_version(call.out)
        return Work(self._on_gpu) if async_op else None

    def _interrupted(self, name: str, error: BaseException) -> None:
        super()._interrupted(name, error)
        notify_other_hosts(self._context._world.group)

    def _prepare(self, call: Call, config: FusedConfig | None) -> NoReturn:
        self._refuse(call, "_preamble", "Call the operation without a workspace.")

    def _is_the_vendors(self, call: Call) -> bool:
        """Whether one GEMM and a collective over hosts carry a call; else the loop does. The same on all ranks."""
        choice, after_us = self._choice, 0.0
        size = choice.cluster.num_ranks
        whole = LOOPS.get(call.name)
        if whole is None or call.name == "matmul_all_reduce" and len(call.a) % size:
            return True
        why = vendor.problem(call)
        if why is not None or not call.out.numel():
            return call.name == "matmul_all_reduce"
        if choice.asked or choice.simulated:
            return choice.asked not in ("", IRIS)
        nbytes = call.a.nbytes if call.name == "all_gather_matmul" else call.out.nbytes
        if call.name == "matmul_all_reduce":
            nbytes //= size
            after_us = min(choice.predicted_us("all_gather", size * nbytes))
        if call.name != "all_gather_matmul":
            after_us += add_up_us(nbytes, choice.cluster, choice.host)
        ours = self._loop(call, call.rows, nbytes)
        theirs = ours.product_us + min(choice.predicted_us(whole, size * nbytes))
        return MARGIN * theirs < ours.us(choice.cluster, choice.host) + after_us

    def _matmul_all_reduce(self, call: Call, config: FusedConfig | None) -> None:
        """The loop of matmul_reduce_scatter, and an all_gather."""
        part = call.out.new_empty(len(call.out) // self._context.num_ranks, call.out.shape[1])
        self._matmul_reduce_scatter(call._replace(name="matmul_reduce_scatter", out=part), config)
        self._context.ccl.all_gather(call.out, part)

    def _by_vendor(self, call: Call) -> None:
        why = vendor.problem(call)
        if why is not None:
            self._refuse(call, f" of what the vendor's GEMM does not take ({why})", "Multiply, then use ctx.ccl.")
        self._algorithms["vendor"].enqueue(call, FusedConfig(variant="vendor"), None, None)

    def _refuse(self, call: Call, what: str, instead: str) -> NoReturn:
        raise SeveralHostsError(f"ctx.ops.{call.method}{what}", instead)

    def _all_gather_matmul(self, call: Call, config: FusedConfig | None) -> None:
        shard, number, own = to_read(call.a), len(self._hosts), self._hosts.number
        rows, room = _of_ranks(call.out, self._context.num_ranks), _two_buffers(shard, number)
        gathered = call.gathered_by_rank(self._context.num_ranks)
        beside = self._runs_beside(call, call.rows, shard.nbytes)
        waits: deque[Callable[[], None]] = deque()

        def bring(distance: int) -> None:
            transfer = self._rail.shift(room[distance % len(room)], shard, distance, f"{call.title} of {shard.dtype}")
            waits.append(_waited_for(transfer, beside))

        def multiply(host: int, a: torch.Tensor) -> None:
            out = self._order.of_host(rows, host)
            theirs = None if gathered is None else self._order.of_host(gathered, host)
            part = call._replace(
                out=out.flatten(0, 1),
                a=a,
                scale_a=self._scales_of(call, host),
                gathered=None if theirs is None else theirs.flatten(0, 1),
            )
            self._multiply(part, config, beside and bool(waits))
            if self._order.view_of_host(rows, host) is None:
                self._order.write_of_host(rows, host, out)
                if gathered is not None and theirs is not None:
                    self._order.write_of_host(gathered, host, theirs)

        for distance in range(1, 1 + len(room)):
            bring(distance)
        multiply(own, shard)
        for distance in range(1, number):
            waits.popleft()()
            multiply((own - distance) % number, room[distance % len(room)])
            if distance + len(room) < number:
                bring(distance + len(room))

    def _matmul_reduce_scatter(self, call: Call, config: FusedConfig | None) -> None:
        number, own = len(self._hosts), self._hosts.number
        summands = _of_ranks(call.a, self._context.num_ranks)
        sums = torch.empty_like(call.out, memory_format=torch.contiguous_format)
        arrived, room = sums.new_empty(number, *sums.shape), _two_buffers(sums, number)
        # Added once, and before the host's sums are rounded.
        bias = call.bias if own == 0 else None
        beside = self._runs_beside(call, len(call.a), sums.nbytes)
        waits: deque[Callable[[], None]] = deque()

        def multiply(host: int, out: torch.Tensor) -> None:
            a = self._order.of_host(summands, host).flatten(0, 1)
            part = call._replace(out=out, a=a, bias=bias, scale_a=self._scales_of(call, host))
            self._multiply(part, config, beside and bool(waits))

        for distance in range(1, number):
            mine, place = room[distance % len(room)], arrived[(own - distance) % number]
            if len(waits) == len(room):
                waits.popleft()()
            multiply((own + distance) % number, mine)
            transfer = self._rail.shift(place, mine, distance, f"{call.title} of {mine.dtype}")
            waits.append(_waited_for(transfer, beside))
        multiply(own, arrived[own])
        for wait in waits:
            wait()
        total = call.out if call.out.is_contiguous() else sums
        stream = current_raw_stream(self._context.gpu_id) if self._on_gpu else None
        add_up(total, arrived, ReduceOp.SUM, stream)
        if total is not call.out:
            call.out.copy_(total)

    def _multiply(self, part: Call, config: FusedConfig | None, beside: bool) -> None:
        """One host's part; ``beside``: a rail, for which it leaves room."""
        if beside:
            _, config = self.within._check(part, config)
            config = leaving_room(config, self._programs)
        self.within._run(part, config, False, None)

    def _runs_beside(self, call: Call, rows: int, nbytes: int) -> bool:
        """Whether products run beside rails; ``rows``: of all of them, ``nbytes``: of a transfer."""
        if self.beside_rails is not None or not self._on_gpu:
            return self.beside_rails is not False
        return self._loop(call, rows, nbytes).pays(self._choice.cluster, self._choice.host)

    def _loop(self, call: Call, rows: int, nbytes: int) -> Loop:
        """What its time depends on; as `_runs_beside`."""
        return loop(self._choice, nbytes, 2.0 * rows * call.b.numel(), call.a.itemsize)

    @property
    def _choice(self) -> HostChoice:
        return cast(CollectivesOverHosts, self._context.ccl).choice

    @functools.cached_property
    def _programs(self) -> int:
        """Of a launch within the host, where nobody says."""
        return most_programs(self.within._context)

    def _scales_of(self, call: Call, host: int) -> torch.Tensor | None:
        """The factors of the rows that a host's ranks have, or the one of all rows."""
        if call.scale_a is None or call.scale_a.numel() == 1:
            return call.scale_a
        by_rank = call.scale_a.reshape(self._context.num_ranks, -1)
        return self._order.of_host(by_rank, host).flatten()


def _of_host(context: CollectivesContext) -> Collectives:
    """The collectives of this host's ranks."""
    return cast(CollectivesOverHosts, context.ccl).within


def _of_ranks(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """The rows of each rank: ``(W m, n)`` → ``(W, m, n)``, a view."""
    return matrix.unflatten(0, (size, len(matrix) // size))


def _two_buffers(like: torch.Tensor, hosts: int) -> torch.Tensor:
    """Room for what travels to or from two hosts at a time, or to the only other one."""
    return like.new_empty(min(2, hosts - 1), *like.shape)


def _waited_for(transfer: Callable[[], None], beside: bool) -> Callable[[], None]:
    """What waits for the transfer: where nothing runs beside it, this has already."""
    if beside:
        return transfer
    transfer()
    return _nothing


def _nothing() -> None:
    """Waits for what has been waited for."""
