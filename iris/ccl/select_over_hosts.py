"""Over several hosts: the steps of `iris.ccl.over_hosts`, or the vendor's own collective among all ranks.

By the rows that ``python -m iris tune`` has measured over as many hosts, if there are any; else by the arithmetic of
`iris.ccl.predict_over_hosts`. That does not favour Iris: where nobody has measured the vendor, it takes no longer than
its algorithm must.
"""

import os
from typing import Any, NamedTuple

import torch

from iris import simulator
from iris.ccl.cluster import Cluster, HostFigures, ProductFigures
from iris.ccl.config import ReduceOp
from iris.ccl.predict_over_hosts import steps, vendor
from iris.ccl.select import Choice, Table, load_table
from iris.errors import InvalidSettingError
from iris.machine import figures

IRIS, VENDOR = "iris", "vendor"

# The collectives of `Vendor`.
OF_VENDOR = ("all_gather", "all_to_all", "broadcast", "reduce", "reduce_scatter", "all_reduce")
# What NCCL, RCCL and Gloo all add up, or compare.
DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}

# An assumption: a card of 400 Gb/s for each GPU.
NETWORK_GBPS = 50.0
# The least that a call of NCCL takes: H20 on 2 x 8 (NVIDIA/nccl#1244). How long a transfer along a rail takes nobody
# has measured, and it is one.
TRANSFER_US = 46.0
# By how much Iris has to be faster: figures vary, and the vendor's sums are what programs had before.
MARGIN = 1.05


class HostChoice(NamedTuple):
    """By what is chosen; the same on all ranks.

    ``cluster``, ``host``, ``product``: what the arithmetic knows. ``asked``: by IRIS_OVER_HOSTS, or "". ``table``: what
    was measured over so many hosts; there may be nothing.
    """

    cluster: Cluster
    host: HostFigures
    asked: str
    simulated: bool
    table: Table
    product: ProductFigures

    def of(self, collective: str, nbytes: int) -> str:
        """`IRIS` or `VENDOR`, for a whole of so many bytes."""
        if self.asked:
            return self.asked
        if self.simulated:
            # Times there say nothing, and Gloo's sums are in an order of their own.
            return IRIS
        for row in self.table.get(collective, ()):
            if row.limit is None or nbytes <= row.limit:
                return row.variant
        ours, theirs = self.predicted_us(collective, nbytes)
        return IRIS if ours * MARGIN < theirs else VENDOR

    def predicted_us(self, collective: str, nbytes: int) -> tuple[float, float]:
        """What Iris takes, and what the vendor does: of all_reduce alone others have measured it."""
        known = vendor(collective, nbytes, self.cluster, self.host)
        taken = known.measured if collective == "all_reduce" else known.at_best
        return steps(collective, nbytes, self.cluster, self.host).total, taken


def as_found(num_hosts: int, num_local_ranks: int, kind: str) -> HostChoice:
    """By what this rank, whose GPU is of this ``kind``, would choose.

    Raises `InvalidSettingError` and `InvalidTableError`.
    """
    found = figures.find(kind).figures
    table = load_table(kind, num_local_ranks, num_hosts)
    rate, asked = _network_GBps(), os.environ.get("IRIS_OVER_HOSTS", "")
    if asked not in ("", IRIS, VENDOR):
        raise InvalidSettingError("IRIS_OVER_HOSTS", asked, f"{IRIS} or {VENDOR}, or nothing: whichever is faster")
    sends = found.collective_GBps
    host = HostFigures(sends, sends, found.copy_engine_GBps, found.memory_GBps, found.small_collective_us, TRANSFER_US)
    product = ProductFigures(
        {nbytes: found.gemm_TFLOPS[nbytes] for nbytes in (1, 2)},
        {nbytes: found.product_speed_beside_stores[nbytes] for nbytes in (1, 2)},
        found.stores_beside_product_GBps,
    )
    return HostChoice(Cluster(num_hosts, num_local_ranks, rate), host, asked, simulator.ACTIVE, table, product)


def as_sent(choice: HostChoice) -> tuple:
    """A choice in words that ranks can send each other."""
    table = {name: [tuple(row) for row in rows] for name, rows in choice.table.items()}
    rates, speeds, stores_GBps = choice.product
    product = sorted(rates.items()), sorted(speeds.items()), stores_GBps
    return tuple(choice.cluster), tuple(choice.host), choice.asked, choice.simulated, table, product


def as_received(sent: tuple) -> HostChoice:
    """What was sent so."""
    cluster, host, asked, simulated, rows, (rates, speeds, stores_GBps) = sent
    table = {name: [Choice(*row) for row in each] for name, each in rows.items()}
    product = ProductFigures(dict(rates), dict(speeds), stores_GBps)
    return HostChoice(Cluster(*cluster), HostFigures(*host), asked, simulated, table, product)


def vendor_carries(collective: str, dtype: torch.dtype, op: Any) -> bool:
    """Whether the vendor has it. What moves, moves as bytes, of any dtype."""
    if op is None:
        return collective in OF_VENDOR
    return collective in OF_VENDOR and dtype in DTYPES and isinstance(op, ReduceOp)


def _network_GBps() -> float:
    text = os.environ.get("IRIS_NETWORK_GBPS", "")
    try:
        rate = float(text or NETWORK_GBPS)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e6:
        raise InvalidSettingError("IRIS_NETWORK_GBPS", text, "what a GPU sends to other hosts, in GB/s: 50")
    return rate
