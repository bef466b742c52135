"""Over several hosts: the steps of `iris.ccl.over_hosts`, or the vendor's own collective among all ranks.

By the rows that ``python -m iris tune`` has measured over as many hosts, if there are any; else by arithmetic. That
never favours Iris: where nobody has measured the vendor, it takes no longer than its algorithm must. Times are in
microseconds, rates in GB/s, which are 10^3 bytes a microsecond.

    S     bytes of the whole: input of a sum or all_to_all, output of all_gather, tensor of broadcast
    H, L  hosts, and ranks on each;  W = H * L
    N     what a rank sends to other hosts: `NETWORK_GBPS`, or IRIS_NETWORK_GBPS
    V     what it sends within its host: `Figures.collective_GBps`
    B     what the vendor's rings carry within a host at most: `TREE_OF_HOST` * V
    F     `VENDOR_US`, the least that a call of the vendor takes; each transfer along a rail is one
    c     `Figures.small_collective_us`, the least that a collective within a host takes

| collective | Iris | the vendor |
| --- | --- | --- |
| all_gather | max(rail, spread) + (H - 1) spread; rail = F + (H - 1) / W * S / N, spread = c + (L - 1) / W * S / V | F + (W - 1) / W * S / min(L N, B): a ring of all ranks |
| reduce_scatter | H spread + rail + c | the same |
| all_reduce | both | F + 2 (W - 1) / W * S / bus; see `_vendor_all_reduce_us` |
| all_to_all | F + (H - 1) / H * S / N + c + (L - 1) / L * S / V | F + max((H - 1) / H * S / N, (L - 1) / W * S / V) |
| broadcast, reduce | F + S / N + c + S / V, times H - 1 where the root receives from all hosts | F + S / min(L N, B) |
"""  # noqa: E501 (a table)

import os
from typing import Any, NamedTuple

import torch

from iris import simulator
from iris.ccl.config import ReduceOp
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
# H20 on 2 x 8 (NVIDIA/nccl#1244). How long a transfer along a rail takes nobody has measured.
VENDOR_US = 46.0
# Bus bandwidth of all_reduce on 2 x 8 H100 with 400 Gb/s for each: 430 GB/s over 2 hosts by trees that NVSwitch adds up
# in, and 320 over 4 or more (NVIDIA/nccl#1221). As parts of V, which is 290 there; and of what all cards carry, 400.
TREE_OF_HOST, RING_OF_HOST, RING_OF_NETWORK = 430 / 290, 320 / 290, 320 / 400
# By how much Iris has to be faster: figures vary, and the vendor's sums are what programs had before.
MARGIN = 1.05


class HostChoice(NamedTuple):
    """By what is chosen; the same on all ranks.

    ``asked``: by IRIS_OVER_HOSTS, or "". ``table``: what was measured over so many hosts; there may be nothing.
    """

    num_hosts: int
    num_local_ranks: int
    host_GBps: float
    small_us: float
    network_GBps: float
    asked: str
    simulated: bool
    table: Table

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
        iris, vendor = self.predicted_us(collective, nbytes)
        return IRIS if iris * MARGIN < vendor else VENDOR

    def predicted_us(self, collective: str, nbytes: int) -> tuple[float, float]:
        """What Iris takes, and what the vendor does."""
        H, L = self.num_hosts, self.num_local_ranks
        N, V = 1e3 * self.network_GBps, 1e3 * self.host_GBps
        W, small = H * L, self.small_us if L > 1 else 0.0
        rail = VENDOR_US + (H - 1) / W * nbytes / N
        spread = small + (L - 1) / W * nbytes / V
        ring = VENDOR_US + (W - 1) / W * nbytes / min(L * N, TREE_OF_HOST * V)
        gather, reduce = max(rail, spread) + (H - 1) * spread, H * spread + rail + self.small_us
        if collective == "all_gather":
            return gather, ring
        if collective == "reduce_scatter":
            return reduce, ring
        if collective == "all_reduce":
            return reduce + gather, self._vendor_all_reduce_us(nbytes)
        away, here = (H - 1) / H * nbytes / N, (L - 1) / W * nbytes / V
        if collective == "all_to_all":
            return VENDOR_US + away + small + H * here, VENDOR_US + max(away, here)
        hops = H - 1 if collective == "reduce" else 1
        return VENDOR_US + hops * nbytes / N + small + nbytes / V, VENDOR_US + nbytes / min(L * N, TREE_OF_HOST * V)

    def _vendor_all_reduce_us(self, nbytes: int) -> float:
        """Up to 3 hosts by trees, which send no more than must cross between hosts; else by rings of all ranks."""
        H, L = self.num_hosts, self.num_local_ranks
        N, V, W = 1e3 * self.network_GBps, 1e3 * self.host_GBps, H * L
        moved = 2 * (W - 1) / W * nbytes
        if H <= 3:
            return VENDOR_US + max(2 * (H - 1) / H * nbytes / (L * N), moved / (TREE_OF_HOST * V))
        return VENDOR_US + moved / min(RING_OF_NETWORK * L * N, RING_OF_HOST * V)


def as_found(num_hosts: int, num_local_ranks: int, kind: str) -> HostChoice:
    """By what this rank, whose GPU is of this ``kind``, would choose.

    Raises `InvalidSettingError` and `InvalidTableError`.
    """
    found = figures.find(kind).figures
    table = load_table(kind, num_local_ranks, num_hosts)
    rate, asked = _network_GBps(), os.environ.get("IRIS_OVER_HOSTS", "")
    if asked not in ("", IRIS, VENDOR):
        raise InvalidSettingError("IRIS_OVER_HOSTS", asked, f"{IRIS} or {VENDOR}, or nothing: whichever is faster")
    numbers = found.collective_GBps, found.small_collective_us
    return HostChoice(num_hosts, num_local_ranks, *numbers, rate, asked, simulator.ACTIVE, table)


def as_sent(choice: HostChoice) -> tuple:
    """A choice in words that ranks can send each other."""
    return *choice[:-1], {name: [tuple(row) for row in rows] for name, rows in choice.table.items()}


def as_received(sent: tuple) -> HostChoice:
    """What was sent so."""
    choice = HostChoice(*sent)
    return choice._replace(table={name: [Choice(*row) for row in rows] for name, rows in choice.table.items()})


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
