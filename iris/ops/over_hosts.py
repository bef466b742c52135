"""Fused operations over several hosts: one loop over hosts around those within a host, while rails move the rest.

| operation | steps |
| --- | --- |
| all_gather_matmul | the rail gathers A; the rows of the own host are multiplied, then those of each other host |
| matmul_reduce_scatter | what is for other hosts is multiplied, then what is for the own; the rail exchanges; a sum |
| all_reduce_rms_norm | an all_reduce over hosts, and a kernel that normalises |
| the others | the vendor's GEMM and a collective over hosts, one behind the other |

In each step a host's ranks do what they would do if there were no other: an `Operations` among these. A row of a
product has the same bits as on one host. Sums are rounded within a host, and over hosts once more, as in
`iris.ccl.over_hosts`.

In the simulator the rail works while the own host's part is multiplied. On a GPU it comes first, or behind: programs of
a fused kernel wait for each other and for those of the host's other ranks, NCCL's wait for other hosts, and where
neither has left room for all of the other, both would wait for ever.
"""

from collections.abc import Callable, Sequence
from typing import NoReturn, cast

import torch

from iris.ccl.checks import compare_calls
from iris.ccl.collectives import Collectives
from iris.ccl.config import ReduceOp
from iris.ccl.enqueue import to_read
from iris.ccl.host_order import HostOrder
from iris.ccl.host_sums import add_up
from iris.ccl.over_hosts import CollectivesOverHosts
from iris.ccl.protocols import CollectivesContext
from iris.ccl.work import Work
from iris.compat.cuda import current_raw_stream
from iris.errors import SeveralHostsError
from iris.language.context_tensor import context_tensor
from iris.operators.graph_break import methods_break_graph
from iris.operators.version_counter import bump_version
from iris.ops import vendor
from iris.ops.buffers import Buffers
from iris.ops.call import Call, described
from iris.ops.config import FusedConfig
from iris.ops.operations import DEBUGGING, Operations
from iris.runtime.workspace import Workspace
from iris.world import World
from iris.world.rail import Rail

# What the loop over hosts carries; the vendor carries the others.
LOOPS = ("all_gather_matmul", "matmul_reduce_scatter")


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

    def _workspace(self, process_group: torch.distributed.ProcessGroup | None) -> Workspace:
        return self._whole._workspace(process_group)


@methods_break_graph("ctx.ops is for the host; iris.ops.functional has the same as operators for graphs")
class OperationsOverHosts(Operations):
    """``ctx.ops`` where there are several hosts. ``within``: the operations of this host's ranks."""

    def __init__(self, context: CollectivesContext, rail: Rail) -> None:
        super().__init__(context)
        self.within = Operations(HostContext(context))
        self._hosts, self._rail = context._world.hosts, rail
        self._order = HostOrder(self._hosts, context.device)

    def close(self) -> None:
        super().close()
        self.within.close()

    @torch.no_grad()
    def _run(self, call: Call, config: FusedConfig | None, async_op: bool, workspace: Buffers | None) -> Work | None:
        self._context.heap.check_open()
        self._context._world.group.check()
        if workspace is not None:
            self._refuse(call, "(workspace=…)", "Call it without a workspace.")
        if config is not None and call.name not in LOOPS:
            self._refuse(call, "(config=…)", "Call it without a config.")
        call.check(self._context.device, self._context.num_ranks, config)
        if DEBUGGING and not (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            compare_calls(self._context._world.group, f"{call.title} with {described(call.given())}, {config}")
        try:
            if call.name in LOOPS:
                loop = self._all_gather_matmul if call.name == LOOPS[0] else self._matmul_reduce_scatter
                loop(call, config)
            else:
                self._by_vendor(call)
        except BaseException as error:
            self._abort_flag.interrupted(call.name, error)
            raise
        bump_version(call.out)
        return Work(self._on_gpu) if async_op else None

    def _prepare(self, call: Call, config: FusedConfig | None) -> NoReturn:
        self._refuse(call, "_preamble", "Call the operation without a workspace.")

    def _by_vendor(self, call: Call) -> None:
        why = vendor.problem(call)
        if why is not None:
            self._refuse(call, f" of what the vendor's GEMM does not take ({why})", "Multiply, then use ctx.ccl.")
        self._algorithms["vendor"].enqueue(call, FusedConfig(variant="vendor"), None, None)

    def _refuse(self, call: Call, what: str, instead: str) -> NoReturn:
        raise SeveralHostsError(f"ctx.ops.{call.name}{what}", instead)

    def _all_gather_matmul(self, call: Call, config: FusedConfig | None) -> None:
        shard, hosts = to_read(call.a), self._hosts
        arrived = shard.new_empty(len(hosts), *shard.shape)
        wait = self._apart(self._rail.all_gather(arrived, shard, f"{call.title} of {shard.dtype}"))
        rows = _of_ranks(call.out, self._context.num_ranks)
        for host in self._own_first():
            if host != hosts.number:
                wait()
                wait = _nothing
            out = self._order.of_host(rows, host)
            part = call._replace(
                out=out.flatten(0, 1),
                a=shard if host == hosts.number else arrived[host],
                scale_a=self._scales_of(call, host),
            )
            self.within._run(part, config, False, None)
            if self._order.view_of_host(rows, host) is None:
                self._order.write_of_host(rows, host, out)

    def _matmul_reduce_scatter(self, call: Call, config: FusedConfig | None) -> None:
        hosts, summands = self._hosts, _of_ranks(call.a, self._context.num_ranks)
        sums = call.out.new_empty(len(hosts), *call.out.shape)
        # Added once, and before the host's sums are rounded.
        bias = call.bias if hosts.number == 0 else None

        def multiply(host: int, out: torch.Tensor) -> None:
            a = self._order.of_host(summands, host).flatten(0, 1)
            part = call._replace(out=out, a=a, bias=bias, scale_a=self._scales_of(call, host))
            self.within._run(part, config, False, None)

        own, *others = self._own_first()
        for host in others:
            multiply(host, sums[host])
        arrived, mine = torch.empty_like(sums), torch.empty_like(sums[own])
        wait = self._apart(self._rail.all_to_all(arrived, sums, f"{call.title} of {sums.dtype}"))
        multiply(own, mine)
        wait()
        arrived[own] = mine
        total = call.out if call.out.is_contiguous() else torch.empty_like(mine)
        stream = current_raw_stream(self._context.gpu_id) if self._on_gpu else None
        add_up(total, arrived, ReduceOp.SUM, stream)
        if total is not call.out:
            call.out.copy_(total)

    def _apart(self, wait: Callable[[], None]) -> Callable[[], None]:
        """What waits for the rail: on a GPU, this has already."""
        if not self._on_gpu:
            return wait
        wait()
        return _nothing

    def _own_first(self) -> Sequence[int]:
        """The hosts."""
        number = self._hosts.number
        return [number, *(host for host in range(len(self._hosts)) if host != number)]

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


def _nothing() -> None:
    """Waits for what has been waited for."""
