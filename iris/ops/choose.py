"""How a fused operation is carried out where the caller does not say: by what each way should take.

The times are of a model with few figures, which `iris.machine.figures` has: what a tile takes for each k, what the link
carries beside a product, what the vendor's GEMM and a collective take one after the other. All that is here are its
formulas, and rules that do not depend on the machine. Elsewhere than on Hopper the vendor's GEMM and a collective are
used.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from triton.testing import get_dram_gbps

from iris import simulator
from iris.ccl.protocols import CollectivesContext
from iris.machine.figures import TILE_COLUMNS, Figures
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
# Bytes of each row of a tile of A: what TMA's layout of shared memory keeps together.
DEPTH = 128
# What a way has to be faster by than the vendor's, and tiles with splits than without: predictions are no better.
MARGIN = 1.03
# Into how many splits a tile is cut at most.
MOST_SPLITS = 8
# Tiles that each program has to have for the Triton kernel of columns of A.
MANY_TILES = 3


class Case(NamedTuple):
    """A call among ``size`` ranks, each with so many programs, on GPUs of which these figures are."""

    call: Call
    size: int
    programs: int
    gpu: Figures


def figures_for(context: CollectivesContext) -> Figures | None:
    """What was measured of the GPUs; None where ranks that choose by it, each for its own, do not choose alike."""
    communicator = context.ccl.communicator()
    return communicator.figures if communicator.alike else None


def choose(call: Call, size: int, programs: int, gpu: Figures | None, by_vendor: bool) -> FusedConfig:
    """The configuration of least time.

    ``gpu``: what was measured of the GPUs, if ranks have GPUs of one kind. None: they may not go by time, since each
    would come to another choice. ``by_vendor``: whether the vendor's GEMM can do the call.
    """
    # Products of float32 in the precision that torch's are in.
    otherwise = VENDOR if by_vendor else replace(by_triton(call.a.itemsize, gpu is not None), allow_tf32=allows_tf32())
    if gpu is None or not call.out.numel() or not call.a.numel() or size == 1 and by_vendor:
        return otherwise
    case = Case(call, size, programs, gpu)
    if call.name == GATHERS_COLUMNS:
        # On 2 H100 the kernel, in Triton, took 0.77 to 0.91 of the time of the vendor's GEMM and the collective where
        # each program had four tiles and more, 1.18 where each had two of a long K, and 1.06 where few had one.
        kernel = by_triton(call.a.itemsize, True)
        fills = tiles_of(case, kernel) >= MANY_TILES * programs
        return kernel if fills and call.a.itemsize == 2 and hopper.is_hopper() else otherwise
    ways = {}
    for columns in TILE_COLUMNS.get(call.a.itemsize, ()):
        depth = DEPTH // call.a.itemsize
        config = FusedConfig(use_gluon=True, block_size_m=128, block_size_n=columns, block_size_k=depth)
        if hopper.problem(call, config) is None:
            ways[config] = fused_us(case, config, plan(call, size, programs, config, gpu)) + kept_us(case)
    if by_vendor and hopper.is_hopper() and call.a.itemsize == 1 and call.name in COPIED:
        ways[COPIES] = copies_us(case)
    if not ways:
        return otherwise
    best = min(ways, key=ways.__getitem__)
    return otherwise if by_vendor and MARGIN * ways[best] >= vendor_us(case) else best


def by_triton(itemsize: int, on_gpu: bool) -> FusedConfig:
    """The Triton kernel, with the tiles that are known to be good ones for elements of so many bytes."""
    known = TRITON if on_gpu and not torch.version.hip else {}
    return known.get(itemsize, FusedConfig())


def allows_tf32() -> bool:
    """Whether torch's products of float32 may be rounded to TF32."""
    matmul = torch.backends.cuda.matmul
    # From torch 2.9 on. ``allow_tf32`` raises there once a program has set this one, which follows the other.
    precision = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if precision is None else precision == "tf32"


def plan(call: Call, size: int, programs: int, config: FusedConfig, gpu: Figures) -> Plan:
    """The plan of least time, of a call of the Gluon kernel for Hopper."""
    # Of few rows B takes longest to read, which splits do not change.
    if "reduce" in call.name or size == 1 or len(call.a) < config.block_size_m or not call.out.numel():
        return Plan()
    case, whole = Case(call, size, programs, gpu), [Plan()]
    if call.name == "all_gather_matmul":
        # The first is taken if they take as long: it has fewer copies.
        whole = [Plan(together=chunks) for chunks in (hopper.MOST_CHUNKS, 2)]
    split = [plan for each in whole for plan in with_splits(case, config, each)]
    whole, split = ([each._replace(paced=is_paced(case, config, each)) for each in plans] for plans in (whole, split))

    def time(plan: Plan) -> float:
        return fused_us(case, config, plan)

    best, best_split = min(whole, key=time), min(split, key=time, default=None)
    return best_split if best_split and MARGIN * time(best_split) < time(best) else best


def with_splits(case: Case, config: FusedConfig, plan: Plan) -> list[Plan]:
    """The plan with each number of splits that may pay."""
    tiles, programs = tiles_of(case, config), case.programs
    if (MARGIN - 1) * tiles > programs:
        # Splits save less than a round, which of so many does not matter.
        return []
    if case.call.name == "all_gather_matmul":
        counts = splittable(case, config, plan)
    else:
        counts = [tiles % programs or min(tiles, programs)]
    plans = []
    for last in counts:
        # Three rounds of splits at most: more are not faster, and their products take memory.
        most = min(MOST_SPLITS, -(-case.call.a.shape[1] // config.block_size_k), 3 * programs // last)
        plans += [plan._replace(splits=splits, last=last) for splits in range(2, most + 1)]
    return plans


def chunks_of(case: Case, config: FusedConfig, plan: Plan) -> list[tuple[int, float]]:
    """What all_gather_matmul multiplies, in its order: how many tiles, and microseconds until their rows are there."""
    call, gpu = case.call, case.gpu
    rows, depth = call.a.shape
    step, columns = hopper.chunk_rows(call.a, config), -(-call.b.shape[1] // config.block_size_n)
    chunks, there = [], 0.0
    for rank in range(case.size):
        chunk = step * (plan.together if rank < case.size - 1 else 1)
        for first in range(0, rows, chunk):
            height = min(chunk, rows - first)
            there += gpu.copy_us + height * depth * call.a.itemsize / 1e3 / gpu.copy_engine_GBps if rank else 0
            chunks.append((-(-height // config.block_size_m) * columns, there))
    return chunks


def splittable(case: Case, config: FusedConfig, plan: Plan) -> list[int]:
    """Of all_gather_matmul: how many of the last tiles splitting may pay for."""
    tiles = tiles_of(case, config)
    if tiles <= 2 * case.programs:
        # In which own rows are all that there is to do at first.
        return [tiles]
    chunks, whole = chunks_of(case, config, plan), tile_us(case, config)
    last, end = chunks[-1]
    if end + whole < product_us(case, config, plan):
        # Whatever comes last, it comes in time.
        return []
    # Those of the last chunk, or of all that come so late that a whole tile would be done after it.
    return sorted({last, sum(count for count, there in chunks if there > max(0, end - whole))})


def is_paced(case: Case, config: FusedConfig, plan: Plan) -> bool:
    """Whether stores leave the link time to rest: not where it takes longer than the product."""
    if case.call.name != "matmul_all_gather":
        return False
    return sent_bytes(case) / 1e3 / case.gpu.stores_GBps < product_us(case, config, plan)


def reading_GBps(gpu: Figures) -> float:
    """What a GPU reads B at. The driver says the rate of its memory; in the simulator the table does."""
    return gpu.memory_read_fraction * (gpu.memory_GBps if simulator.ACTIVE else get_dram_gbps())


def read_us(case: Case, config: FusedConfig, plan: Plan) -> float:
    """Microseconds in which a fused kernel reads B, as often as it needs it, from memory."""
    call, size, _, gpu = case
    parts = size if "reduce" in call.name else 1
    rows, narrow, times = len(call.a) // parts, config.block_size_n < 256, 1.0
    # Tiles that follow each other along the rows share what they read, if they keep pace. The last do not where they
    # are narrow and not full: 192 rows took longer than 256.
    behind = narrow and rows > config.block_size_m and rows % config.block_size_m > 0
    if call.b.nbytes > gpu.l2_kept_bytes and call.name == "all_gather_matmul":
        times = len(chunks_of(case, config, plan)) + size * behind
    elif call.b.nbytes > gpu.l2_kept_bytes:
        times = (gpu.reads_by_turns if parts > 1 else 1) * (1 + behind)
    return times * call.b.nbytes / 1e3 / reading_GBps(gpu) / (gpu.narrow_tiles_read_fraction if narrow else 1)


def sent_bytes(case: Case) -> float:
    """That each rank sends in one step."""
    call, size, *_ = case
    (rows, depth), columns = call.a.shape, call.b.shape[1]
    if call.name == "all_gather_matmul":
        return (size - 1) * rows * depth * call.a.itemsize
    if call.name == "matmul_all_gather":
        return (size - 1) * rows * columns * call.out.itemsize
    return (size - 1) / size * rows * columns * call.out.itemsize


def tiles_of(case: Case, config: FusedConfig) -> int:
    """Of a rank, in all."""
    call, size, *_ = case
    rows = len(call.a)
    # Parts of rows, each of which is cut into tiles for itself.
    gathering = {"all_gather_matmul": (size, rows), "all_gather_matmul_k": (1, rows), "matmul_all_gather": (1, rows)}
    parts, share = gathering.get(call.name, (size, -(-rows // size)))
    return parts * -(-share // config.block_size_m) * -(-call.b.shape[1] // config.block_size_n)


def tile_us(case: Case, config: FusedConfig) -> float:
    """Microseconds of a whole tile."""
    return case.gpu.tile_ns_per_k[case.call.a.itemsize][config.block_size_n] * case.call.a.shape[1] / 1e3


def split_us(case: Case, config: FusedConfig, plan: Plan) -> float:
    """Microseconds of a split tile."""
    unit = tile_us(case, config) / plan.splits
    return unit + (plan.splits - 1) * handing_over_us(case, config) * min(1, case.gpu.short_split_us / unit)


def handing_over_us(case: Case, config: FusedConfig) -> float:
    """Microseconds of one split, at most."""
    return case.gpu.split_us * config.block_size_n / 256


def round_us(case: Case, units: int, each: float | np.ndarray, read: float) -> float | np.ndarray:
    """Microseconds of a round of units of so many ``each``, or of what all of them ``read``, if that takes longer."""
    return np.maximum(each, read * (case.programs / units) ** case.gpu.few_readers_exponent)


def rounds_us(case: Case, units: int, each: float, read: float) -> float:
    """Microseconds of units of so many ``each``, in rounds, of which one takes so many to ``read`` what it needs."""
    programs = case.programs
    full, rest = divmod(units, programs)
    last = round_us(case, rest, each, rest * read) if rest else 0
    return float(full * round_us(case, programs, each, programs * read) + last)


def product_us(case: Case, config: FusedConfig, plan: Plan) -> float:
    """Microseconds of all tiles: of rounds of whole ones, and of splits."""
    tiles, units, programs = tiles_of(case, config), plan.last * plan.splits, case.programs
    each, part = tile_us(case, config), split_us(case, config, plan)
    read = read_us(case, config, plan) / tiles
    # While splits are handed over nothing is read, which takes longer where it is reading that takes the time.
    further = max(0, -(-units // programs) - 1) if programs * read / plan.splits > part else 0
    splits = rounds_us(case, units, part, read / plan.splits) + further * handing_over_us(case, config)
    return rounds_us(case, tiles - plan.last, each, read) + splits


def fused_us(case: Case, config: FusedConfig, plan: Plan) -> float:
    """Microseconds of the Gluon kernel of that configuration."""
    call, size, programs, gpu = case
    if call.name == "all_gather_matmul":
        return gpu.meeting_us + scheduled_us(case, config, plan)
    tiles = tiles_of(case, config)
    product = product_us(case, config, plan)
    sent = sent_bytes(case) / 1e3
    if call.name == "matmul_all_gather":
        # What the tiles of the last round are sent in comes last. The link has nothing to do until the first is done.
        units = tiles + plan.last * (plan.splits - 1)
        last = min(1, ((units - 1) % programs + 1) / plan.splits / tiles) * sent
        whole = plan if plan.last == tiles else Plan()
        first = product_us(case, config, whole) / -(-tiles * whole.splits // programs)
        if plan.paced:
            rate, loss = gpu.paced_stores_GBps, gpu.paced_stores_loss[call.a.itemsize][config.block_size_n]
            slowed = product + loss * (sent - last) / gpu.stores_GBps
        else:
            rate, beside = gpu.stores_GBps, gpu.product_speed_beside_stores[call.a.itemsize]
            slowed = min(product / beside, product + (1 - beside) * (sent - last) / gpu.stores_beside_product_GBps)
        return gpu.meeting_us + max(slowed, first + (sent - last) / rate) + last / gpu.stores_GBps
    steps = 2 if call.name == "matmul_all_reduce" else 1
    last = min(tile_us(case, config) / 3, gpu.last_sum_us * (size - 1) * config.block_size_n / 256)
    return gpu.meeting_us + together_us(case, product, steps * sent) + last


def scheduled_us(case: Case, config: FusedConfig, plan: Plan) -> float:
    """Microseconds of all_gather_matmul, whose programs begin a unit when they have done the last, and its rows are
    there."""
    counts, times = zip(*chunks_of(case, config, plan), strict=True)
    there, whole = np.repeat(times, counts), sum(counts) - plan.last
    there = np.concatenate([there[:whole], np.repeat(there[whole:], plan.splits)])
    takes = np.full(len(there), split_us(case, config, plan))
    takes[:whole] = tile_us(case, config)
    read = np.full(len(there), read_us(case, config, plan) / sum(counts))
    read[whole:] /= plan.splits
    done = np.zeros(case.programs)
    for begin in range(0, len(there), case.programs):
        units = slice(begin, begin + case.programs)
        busy = done[: len(there[units])]
        np.maximum(busy, there[units], out=busy)
        busy += round_us(case, len(busy), takes[units], read[units].sum())
    return float(done.max())


def kept_us(case: Case) -> float:
    """Microseconds in which a gathered A that the caller keeps is copied after the kernel: read once, written once.

    The vendor's GEMM and the copy engines have it where the caller keeps it.
    """
    kept = 0 if case.call.gathered is None else case.call.gathered.nbytes
    return 2 * kept / reading_GBps(case.gpu) / 1e3


def together_us(case: Case, product: float, sent: float) -> float:
    """Microseconds of a product that takes so many alone, and of so many kilobytes that programs store beside it."""
    gpu = case.gpu
    beside = gpu.product_speed_beside_stores[case.call.a.itemsize]
    both = min(product / beside, sent / gpu.stores_beside_product_GBps)
    return both + (product - both * beside) + (sent - both * gpu.stores_beside_product_GBps) / gpu.stores_GBps


def copies_us(case: Case) -> float:
    """Microseconds of the vendor's GEMM of fp8 by chunks, beside copies."""
    call, size, programs, gpu = case
    depth, columns = call.b.shape
    pieces = chunks(call.rows // size, columns, programs)
    rounds = [max(1, tiles(rows.stop - rows.start, columns) / programs) for rows in pieces]
    beside = 1 + gpu.fp8_loss_beside_copies * (size - 1)
    engine = gpu.copy_engine_GBps if size == 2 else gpu.copy_engine_beside_products_GBps
    each = gpu.fp8_round_us + gpu.fp8_round_ns_per_k * depth / 1e3
    times = [gpu.fp8_next_launch_us + beside * number * each for number in rounds]
    moved = sent_bytes(case) / 1e3 / engine + (size - 1) * len(pieces) * gpu.copy_us
    # Sums of what has come are formed last.
    added = call.out.nbytes * (size + 1) / reading_GBps(gpu) / 1e3 if call.name == "matmul_reduce_scatter" else 0
    return gpu.meeting_us + max(size * sum(times), moved + times[-1]) + added


def vendor_us(case: Case) -> float:
    """Microseconds of the vendor's GEMM and a collective, one after the other."""
    call, size, _, gpu = case
    (rows, depth), columns = call.a.shape, call.b.shape[1]
    multiplied = size * rows if call.name == "all_gather_matmul" else rows
    rate, read = gpu.gemm_TFLOPS[call.a.itemsize], depth * columns * call.b.itemsize
    product = max(2 * multiplied * depth * columns / rate / 1e6, read / reading_GBps(gpu) / 1e3)
    steps = 2 if call.name == "matmul_all_reduce" else 1
    rate = gpu.staged_collective_GBps if call.name == "all_gather_matmul" else gpu.collective_GBps
    return gpu.gemm_launch_us + product + gpu.small_collective_us + steps * sent_bytes(case) / rate / 1e3
