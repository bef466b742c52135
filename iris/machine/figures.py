"""What a GPU and its links were measured to do: the figures by which `iris.ops.choose` predicts times.

``operations.json`` has them, by the GPU's name. Those that no single call shows were fitted, so that the predictions
come near to the times that were measured (docs/performance-lessons.md, "The choice").
"""

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from iris.errors import InvalidTableError, short_repr
from iris.machine import tables

# Columns of a tile of 128 rows, widest first, by bytes of an element: those of the kernels for Hopper.
TILE_COLUMNS = {2: (256, 128, 64), 1: (128, 64)}
# The entry of a GPU that has none of its own, and of the simulator.
ANY_OTHER = "any other GPU"

ByBytes = dict[int, float]
"""By bytes of an element: 2 for bf16 and fp16, 1 for fp8."""
ByTile = dict[int, dict[int, float]]
"""By bytes of an element, and by `TILE_COLUMNS`."""


@dataclass(frozen=True)
class Figures:
    """Of one kind of GPU. The end of a name is its unit: us is a microsecond, GBps is 10^9 bytes a second.

    Attributes
    ----------
    tile_ns_per_k : ByTile
        Nanoseconds that a program of a fused kernel multiplies a tile of 128 rows, for each element of its depth.
    gemm_TFLOPS : ByBytes
        The vendor's GEMM: 10^12 operations a second, two for each product.
    gemm_launch_us, small_collective_us, meeting_us : float
        What a GEMM takes besides, what a collective takes however small it is, and what the ranks' meetings of a fused
        kernel take.
    collective_GBps, staged_collective_GBps : float
        What each rank sends in a collective, alone: with a result on the heap, and with one elsewhere.
    stores_GBps, paced_stores_GBps, stores_beside_product_GBps : float
        What a rank's programs store to peers: alone, spread over time, and beside a product.
    product_speed_beside_stores : ByBytes
        The part of its speed that a product has meanwhile.
    paced_stores_loss : ByTile
        By which part of the time of paced stores the product beside them takes longer.
    copy_engine_GBps, copy_engine_beside_products_GBps : float
        Copies to one peer, and to several where chunks of a product go on beside them.
    copy_us : float
        What each copy takes besides, with the word after it that says so.
    split_us, short_split_us : float
        What one more split of a tile of 128 x 256 costs where its own product takes ``short_split_us`` or less. Where
        it takes longer, it costs less in proportion.
    last_sum_us : float
        At most, to add a peer's part of a tile of 128 x 256 after the last round of products.
    memory_GBps : float
        Of the GPU's memory, as the driver says. Where there is a driver it is asked: this is for the simulator.
    memory_read_fraction, narrow_tiles_read_fraction : float
        The part of that which B is read at; and the part of that by tiles of fewer than 256 columns.
    few_readers_exponent : float
        Of P programs, n read at (n / P) to this power of the rate of all.
    l2_kept_bytes : float
        A B of up to so many bytes is read from memory once, and stays in the L2 cache for tiles of other rows.
    reads_by_turns : float
        How often a larger one is read where tiles of all ranks come by turns.
    fp8_round_ns_per_k, fp8_round_us, fp8_next_launch_us : float
        Of the vendor's GEMM of fp8, by chunks: what as many tiles of 128 x 128 as there are multiprocessors take for
        each element of their depth, and besides; and what each further launch takes.
    fp8_loss_beside_copies : float
        By which part of its time it takes longer beside copies, for each peer.
    """

    tile_ns_per_k: ByTile
    gemm_TFLOPS: ByBytes
    gemm_launch_us: float
    small_collective_us: float
    meeting_us: float
    collective_GBps: float
    staged_collective_GBps: float
    stores_GBps: float
    paced_stores_GBps: float
    stores_beside_product_GBps: float
    product_speed_beside_stores: ByBytes
    paced_stores_loss: ByTile
    copy_engine_GBps: float
    copy_engine_beside_products_GBps: float
    copy_us: float
    split_us: float
    short_split_us: float
    last_sum_us: float
    memory_GBps: float
    memory_read_fraction: float
    narrow_tiles_read_fraction: float
    few_readers_exponent: float
    l2_kept_bytes: float
    reads_by_turns: float
    fp8_round_ns_per_k: float
    fp8_round_us: float
    fp8_next_launch_us: float
    fp8_loss_beside_copies: float


class Found(NamedTuple):
    """Figures, and in words where they stand."""

    figures: Figures
    source: str


def find(device: str) -> Found:
    """The figures of GPUs of this name: a user's own, else those that Iris ships for it, else those of `ANY_OTHER`.

    Raises `InvalidTableError` for a file that is missing or cannot be used.
    """

    def take(entries: dict[str, Any]) -> tuple[str, Figures] | None:
        name = device if device in entries else ANY_OTHER
        if name not in entries:
            return None
        other = entries[name].get("same_as")
        if other is None:
            return name, parse(entries[name])
        if other not in entries:
            raise ValueError(f"there is no entry {other!r}")
        own = entries[name].get("figures", {})
        found = parse({"figures": {**entries[other].get("figures", {}), **own}})
        return f"{other}, but {' and '.join(own)} of {name}" if own else other, found

    found = [(file, *taken) for file, taken in tables.read(tables.OPERATIONS, take) if taken]
    if not found:
        raise InvalidTableError(f"{tables.SHIPPED / tables.OPERATIONS} has no entry {ANY_OTHER!r}. Install Iris anew.")
    file, name, figures = found[-1]
    return Found(figures, f"{name}, as shipped" if file.parent == tables.SHIPPED else f"{name} in {file}")


def parse(entry: dict[str, Any]) -> Figures:
    """The figures of an entry. Raises `ValueError` with what is wrong in words."""
    given = entry.get("figures", {})
    unknown = set(given) - {field.name for field in fields(Figures)}
    if unknown:
        raise ValueError(f"there is no figure {', '.join(sorted(unknown))}")
    return Figures(**{field.name: _parsed(field.name, field.type, given.get(field.name)) for field in fields(Figures)})


def _parsed(name: str, kind: Any, given: Any) -> Any:
    """A figure, of which JSON has numbers as the keys of objects in words."""
    if kind is float:
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
            raise ValueError(f"{name} is {short_repr(given)}, and it takes a number above 0")
        return given
    if not isinstance(given, dict):
        raise ValueError(f"{name} is {short_repr(given)}, and it takes an object by bytes of an element")
    if kind == ByBytes:
        return {nbytes: _parsed(f"{name} {nbytes}", float, given.get(str(nbytes))) for nbytes in TILE_COLUMNS}
    found: ByTile = {}
    for nbytes, tiles in TILE_COLUMNS.items():
        row = given.get(str(nbytes), {})
        found[nbytes] = {each: _parsed(f"{name} {nbytes} {each}", float, row.get(str(each))) for each in tiles}
    return found
