"""How a fused operation is carried out where the caller does not say: by what each way should take.

The times are of a model with few numbers, all measured on 2 and 4 H200 (docs/performance-lessons.md, "The choice"):
what a tile takes for each k, what the link carries beside a product, what the vendor's GEMM and a collective take one
behind the other. Elsewhere than on Hopper the vendor's GEMM and a collective are used.

For products of fp8 it has what their tiles, and the vendor's chunks, take on one H200, on 2 and on 4.
"""

from dataclasses import replace

import numpy as np
import torch
from triton.testing import get_dram_gbps

from iris import simulator
from iris.ops.call import GATHERS_COLUMNS, Call
from iris.ops.config import FusedConfig
from iris.ops.copies import COPIED, chunks, tiles
from iris.ops.hopper import arguments as hopper
from iris.ops.hopper.arguments import Plan

VENDOR, COPIES = FusedConfig(variant="vendor"), FusedConfig(variant="copies")
# The fastest tiles of the Triton kernels on Hopper, of elements of so many bytes.
TRITON = {
    2: FusedConfig(block_size_m=128, block_size_n=256),
    1: FusedConfig(block_size_m=128, block_size_n=128, block_size_k=128),
}
# Nanoseconds for each k of a tile of 128 rows and so many columns, of elements of so many bytes.
TILE_NS = {2: {256: 11.4, 128: 6.1, 64: 5.1}, 1: {128: 3.6, 64: 2.6}}
# Bytes of each row of a tile of A: what TMA's layout of shared memory keeps together.
DEPTH = 128
# GB/s over the link: stores alone, paced, and beside a product, which is slowed down to so much of its speed meanwhile,
# of elements of so many bytes; collectives alone, with a result on the heap and elsewhere, where a gathered A is.
STORES, PACED_STORES, STORES_BESIDE, PRODUCT_BESIDE = 350, 320, 320, {1: 0.9, 2: 0.79}
COLLECTIVE, STAGED = 290, 170
# The copy engine's, which slows a product down little; and where products by chunks go on beside it, to several peers.
# Microseconds that each copy takes besides, with the word behind it.
ENGINE, ENGINE_BESIDE, COPY = 388, 330, 6
# By how much of the time that paced stores take the product beside them takes longer, by tiles as above.
PACED_LOSS = {2: {256: 0.08, 128: 0.06, 64: 0.08}, 1: {128: 0.07, 64: 0.07}}
# Microseconds at most in which a peer's part of a tile of 128 x 256 is added behind all products: of the last round.
LAST_SUMS = 5
# Microseconds that one more split of 128 x 256 costs where its product takes no longer than so many, and less where it
# does; and into how many splits a tile is cut.
SPLITTING, SHORT, MOST_SPLITS = 20, 40, 8
# The vendor's GEMM: 10^12 operations a second, of elements of so many bytes.
OPERATIONS = {1: 1250, 2: 700}
# The part of a memory's rate that B is read at, and the part of that by tiles of fewer than 256 columns. Bytes of a B
# that the L2 cache keeps for tiles of other rows; how often a larger one is read where all ranks' tiles come by turns.
READING, NARROW, CACHED, READ_BY_TURNS = 0.82, 0.9, 50e6, 1.5
# Of P programs n read at (n / P) to this power of that rate.
FEW_READERS = 0.3
# Of a small one of fp8, nanoseconds for each k of as many tiles of 128 x 128 as there are multiprocessors; microseconds
# besides, of such a round and of a launch; and by how much longer it takes beside copies to each peer.
ROUND_NS, ROUND, NEXT_LAUNCH, BESIDE_COPIES = 3.0, 1.9, 2, 0.06
# Microseconds: of a fused kernel's meetings, of a GEMM's launch and of a collective, however small.
MEETING, LAUNCH, SMALL = 12, 5, 12
# What a way has to be faster by than the vendor's, and tiles with splits than without.
MARGIN = 1.03
# Tiles that each program has to have for the Triton kernel of columns of A.
MANY_TILES = 3


def choose(call: Call, size: int, programs: int, by_time: bool, by_vendor: bool) -> FusedConfig:
    """The configuration of least time, where ranks may go ``by_time``: on GPUs, of one kind.

    ``by_vendor``: whether the vendor's GEMM can do the call.
    """
    # Products of float32 in the precision that torch's are in.
    otherwise = VENDOR if by_vendor else replace(by_triton(call.a.itemsize, by_time), allow_tf32=allows_tf32())
    if not by_time or not call.out.numel() or not call.a.numel() or size == 1 and by_vendor:
        return otherwise
    if call.name == GATHERS_COLUMNS:
        # On 2 H100 the kernel, in Triton, took 0.77 to 0.91 of the time of the vendor's GEMM and the collective where
        # each program had four tiles and more, 1.18 where each had two of a long K, and 1.06 where few had one.
        kernel = by_triton(call.a.itemsize, by_time)
        fills = tiles_of(call, size, kernel) >= MANY_TILES * programs
        return kernel if fills and call.a.itemsize == 2 and hopper.is_hopper() else otherwise
    ways = {}
    for columns in TILE_NS.get(call.a.itemsize, ()):
        depth = DEPTH // call.a.itemsize
        config = FusedConfig(use_gluon=True, block_size_m=128, block_size_n=columns, block_size_k=depth)
        if hopper.problem(call, config, size) is None:
            ways[config] = fused_us(call, size, programs, config, plan(call, size, programs, config))
    if by_vendor and hopper.is_hopper() and call.a.itemsize == 1 and call.name in COPIED:
        ways[COPIES] = copies_us(call, size, programs)
    if not ways:
        return otherwise
    best = min(ways, key=ways.__getitem__)
    return otherwise if by_vendor and MARGIN * ways[best] >= vendor_us(call, size) else best


def by_triton(itemsize: int, on_gpu: bool) -> FusedConfig:
    """The Triton kernel, with the tiles that are known to be good ones for elements of so many bytes."""
    known = TRITON if on_gpu and not torch.version.hip else {}
    return known.get(itemsize, FusedConfig())


def allows_tf32() -> bool:
    """Whether torch's products of float32 may be rounded to TF32."""
    return torch.backends.cuda.matmul.allow_tf32


def plan(call: Call, size: int, programs: int, config: FusedConfig) -> Plan:
    """The plan of least time, of a call of the Gluon kernel for Hopper."""
    # Of few rows B takes longest to read, which splits do not change.
    if "reduce" in call.name or size == 1 or len(call.a) < config.block_size_m or not call.out.numel():
        return Plan()
    whole = [Plan()]
    if call.name == "all_gather_matmul":
        # The first is taken if they take as long: it has fewer copies.
        whole = [Plan(together=chunks) for chunks in (hopper.MOST_CHUNKS, 2)]
    split = [plan for each in whole for plan in with_splits(call, size, programs, config, each)]
    whole, split = (
        [each._replace(paced=is_paced(call, size, programs, config, each)) for each in plans]
        for plans in (whole, split)
    )

    def time(plan: Plan) -> float:
        return fused_us(call, size, programs, config, plan)

    best, best_split = min(whole, key=time), min(split, key=time, default=None)
    return best_split if best_split and MARGIN * time(best_split) < time(best) else best


def with_splits(call: Call, size: int, programs: int, config: FusedConfig, plan: Plan) -> list[Plan]:
    """The plan with each number of splits that may pay."""
    tiles = tiles_of(call, size, config)
    if (MARGIN - 1) * tiles > programs:
        # Splits save less than a round, which of so many does not matter.
        return []
    if call.name == "all_gather_matmul":
        counts = splittable(call, size, programs, config, plan)
    else:
        counts = [tiles % programs or min(tiles, programs)]
    plans = []
    for last in counts:
        # Three rounds of splits at most: more are not faster, and their products take memory.
        most = min(MOST_SPLITS, -(-call.a.shape[1] // config.block_size_k), 3 * programs // last)
        plans += [plan._replace(splits=splits, last=last) for splits in range(2, most + 1)]
    return plans


def chunks_of(call: Call, size: int, config: FusedConfig, plan: Plan) -> list[tuple[int, float]]:
    """What all_gather_matmul multiplies, in its order: how many tiles, and microseconds until their rows are there."""
    rows, depth = call.a.shape
    step, columns = hopper.chunk_rows(call.a, config), -(-call.b.shape[1] // config.block_size_n)
    chunks, there = [], 0.0
    for rank in range(size):
        chunk = step * (plan.together if rank < size - 1 else 1)
        for first in range(0, rows, chunk):
            height = min(chunk, rows - first)
            there += COPY + height * depth * call.a.itemsize / 1e3 / ENGINE if rank else 0
            chunks.append((-(-height // config.block_size_m) * columns, there))
    return chunks


def splittable(call: Call, size: int, programs: int, config: FusedConfig, plan: Plan) -> list[int]:
    """Of all_gather_matmul: how many of the last tiles splitting may pay for."""
    tiles = tiles_of(call, size, config)
    if tiles <= 2 * programs:
        # In which own rows are all that there is to do at first.
        return [tiles]
    chunks, whole = chunks_of(call, size, config, plan), tile_us(call, config)
    last, end = chunks[-1]
    if end + whole < product_us(call, size, programs, config, plan):
        # Whatever comes last, it comes in time.
        return []
    # Those of the last chunk, or of all that come so late that a whole tile would be done behind it.
    return sorted({last, sum(count for count, there in chunks if there > max(0, end - whole))})


def is_paced(call: Call, size: int, programs: int, config: FusedConfig, plan: Plan) -> bool:
    """Whether stores leave the link time to rest: not where it takes longer than the product."""
    if call.name != "matmul_all_gather":
        return False
    return sent_bytes(call, size) / 1e3 / STORES < product_us(call, size, programs, config, plan)


def reading() -> float:
    """GB/s that a GPU reads B at: in the simulator, an H200."""
    return READING * (4917 if simulator.ACTIVE else get_dram_gbps())


def read_us(call: Call, size: int, config: FusedConfig, plan: Plan) -> float:
    """Microseconds in which a fused kernel reads B, as often as it needs it, from memory."""
    parts = size if "reduce" in call.name else 1
    rows, narrow, times = len(call.a) // parts, config.block_size_n < 256, 1.0
    # Tiles that follow each other along the rows share what they read, if they keep pace. The last do not where they
    # are narrow and not full: 192 rows took longer than 256.
    behind = narrow and rows > config.block_size_m and rows % config.block_size_m > 0
    if call.b.nbytes > CACHED and call.name == "all_gather_matmul":
        times = len(chunks_of(call, size, config, plan)) + size * behind
    elif call.b.nbytes > CACHED:
        times = (READ_BY_TURNS if parts > 1 else 1) * (1 + behind)
    return times * call.b.nbytes / 1e3 / reading() / (NARROW if narrow else 1)


def sent_bytes(call: Call, size: int) -> float:
    """That each rank sends in one step."""
    (rows, depth), columns = call.a.shape, call.b.shape[1]
    if call.name == "all_gather_matmul":
        return (size - 1) * rows * depth * call.a.itemsize
    if call.name == "matmul_all_gather":
        return (size - 1) * rows * columns * call.out.itemsize
    return (size - 1) / size * rows * columns * call.out.itemsize


def tiles_of(call: Call, size: int, config: FusedConfig) -> int:
    """Of a rank, in all."""
    rows = len(call.a)
    # Parts of rows, each of which is cut into tiles for itself.
    gathering = {"all_gather_matmul": (size, rows), "all_gather_matmul_k": (1, rows), "matmul_all_gather": (1, rows)}
    parts, share = gathering.get(call.name, (size, -(-rows // size)))
    return parts * -(-share // config.block_size_m) * -(-call.b.shape[1] // config.block_size_n)


def tile_us(call: Call, config: FusedConfig) -> float:
    """Microseconds of a whole tile."""
    return TILE_NS[call.a.itemsize][config.block_size_n] * call.a.shape[1] / 1e3


def split_us(call: Call, config: FusedConfig, plan: Plan) -> float:
    """Microseconds of a split tile."""
    unit = tile_us(call, config) / plan.splits
    return unit + (plan.splits - 1) * handing_over_us(config) * min(1, SHORT / unit)


def handing_over_us(config: FusedConfig) -> float:
    """Microseconds of one split, at most."""
    return SPLITTING * config.block_size_n / 256


def round_us(units: int, programs: int, each: float | np.ndarray, read: float) -> float | np.ndarray:
    """Microseconds of a round of units of so many ``each``, or of what all of them ``read``, if that takes longer."""
    return np.maximum(each, read * (programs / units) ** FEW_READERS)


def rounds_us(units: int, programs: int, each: float, read: float) -> float:
    """Microseconds of units of so many ``each``, in rounds, of which one takes so many to ``read`` what it needs."""
    full, rest = divmod(units, programs)
    last = round_us(rest, programs, each, rest * read) if rest else 0
    return float(full * round_us(programs, programs, each, programs * read) + last)


def product_us(call: Call, size: int, programs: int, config: FusedConfig, plan: Plan) -> float:
    """Microseconds of all tiles: of rounds of whole ones, and of splits."""
    tiles, units = tiles_of(call, size, config), plan.last * plan.splits
    each, part = tile_us(call, config), split_us(call, config, plan)
    read = read_us(call, size, config, plan) / tiles
    # While splits are handed over nothing is read, which takes longer where it is reading that takes the time.
    further = max(0, -(-units // programs) - 1) if programs * read / plan.splits > part else 0
    splits = rounds_us(units, programs, part, read / plan.splits) + further * handing_over_us(config)
    return rounds_us(tiles - plan.last, programs, each, read) + splits


def fused_us(call: Call, size: int, programs: int, config: FusedConfig, plan: Plan) -> float:
    """Microseconds of the Gluon kernel of that configuration."""
    if call.name == "all_gather_matmul":
        return MEETING + scheduled_us(call, size, programs, config, plan)
    tiles = tiles_of(call, size, config)
    product = product_us(call, size, programs, config, plan)
    sent = sent_bytes(call, size) / 1e3
    if call.name == "matmul_all_gather":
        # What the tiles of the last round are sent in comes behind. The link has nothing to do until the first is done.
        units = tiles + plan.last * (plan.splits - 1)
        last = min(1, ((units - 1) % programs + 1) / plan.splits / tiles) * sent
        whole = plan if plan.last == tiles else Plan()
        first = product_us(call, size, programs, config, whole) / -(-tiles * whole.splits // programs)
        if plan.paced:
            rate, loss = PACED_STORES, PACED_LOSS[call.a.itemsize][config.block_size_n]
            slowed = product + loss * (sent - last) / STORES
        else:
            rate, beside = STORES, PRODUCT_BESIDE[call.a.itemsize]
            slowed = min(product / beside, product + (1 - beside) * (sent - last) / STORES_BESIDE)
        return MEETING + max(slowed, first + (sent - last) / rate) + last / STORES
    steps = 2 if call.name == "matmul_all_reduce" else 1
    last = min(tile_us(call, config) / 3, LAST_SUMS * (size - 1) * config.block_size_n / 256)
    return MEETING + together_us(call, product, steps * sent) + last


def scheduled_us(call: Call, size: int, programs: int, config: FusedConfig, plan: Plan) -> float:
    """Microseconds of all_gather_matmul, whose programs begin a unit when they have done the last, and its rows are
    there."""
    counts, times = zip(*chunks_of(call, size, config, plan), strict=True)
    there, whole = np.repeat(times, counts), sum(counts) - plan.last
    there = np.concatenate([there[:whole], np.repeat(there[whole:], plan.splits)])
    takes = np.full(len(there), split_us(call, config, plan))
    takes[:whole] = tile_us(call, config)
    read = np.full(len(there), read_us(call, size, config, plan) / sum(counts))
    read[whole:] /= plan.splits
    done = np.zeros(programs)
    for begin in range(0, len(there), programs):
        units = slice(begin, begin + programs)
        busy = done[: len(there[units])]
        np.maximum(busy, there[units], out=busy)
        busy += round_us(len(busy), programs, takes[units], read[units].sum())
    return float(done.max())


def together_us(call: Call, product: float, sent: float) -> float:
    """Microseconds of a product that takes so many alone, and of so many kilobytes that programs store beside it."""
    beside = PRODUCT_BESIDE[call.a.itemsize]
    both = min(product / beside, sent / STORES_BESIDE)
    return both + (product - both * beside) + (sent - both * STORES_BESIDE) / STORES


def copies_us(call: Call, size: int, programs: int) -> float:
    """Microseconds of the vendor's GEMM of fp8 by chunks, beside copies."""
    depth, columns = call.b.shape
    pieces = chunks(call.rows // size, columns, programs)
    rounds = [max(1, tiles(rows.stop - rows.start, columns) / programs) for rows in pieces]
    beside, engine = 1 + BESIDE_COPIES * (size - 1), ENGINE if size == 2 else ENGINE_BESIDE
    times = [NEXT_LAUNCH + beside * number * (ROUND + ROUND_NS * depth / 1e3) for number in rounds]
    moved = sent_bytes(call, size) / 1e3 / engine + (size - 1) * len(pieces) * COPY
    # Sums of what has come are formed behind all.
    added = call.out.nbytes * (size + 1) / reading() / 1e3 if call.name == "matmul_reduce_scatter" else 0
    return MEETING + max(size * sum(times), moved + times[-1]) + added


def vendor_us(call: Call, size: int) -> float:
    """Microseconds of the vendor's GEMM and a collective, one behind the other."""
    (rows, depth), columns = call.a.shape, call.b.shape[1]
    multiplied = size * rows if call.name == "all_gather_matmul" else rows
    rate, read = OPERATIONS[call.a.itemsize], depth * columns * call.b.itemsize
    product = max(2 * multiplied * depth * columns / rate / 1e6, read / reading() / 1e3)
    steps = 2 if call.name == "matmul_all_reduce" else 1
    rate = STAGED if call.name == "all_gather_matmul" else COLLECTIVE
    return LAUNCH + product + SMALL + steps * sent_bytes(call, size) / rate / 1e3
