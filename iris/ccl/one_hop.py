"""Small pieces from every rank to every rank: each word has its own flag (LL protocol).

all_gather (the same piece to all), all_to_all (another piece to each) and broadcast (the root's piece, and two words of
every other rank, so that all receive from all). A piece is cut into blocks; program (block b, distance i) sends its
block to rank r + i and receives one from rank r - i, so nothing is done one after the other. Over the link: twice
the bytes of each piece, in one step.

Words are LL messages (`iris.language.ll`). Their flag is the block's epoch, which its programs count in device memory,
each on its own. Two slots take turns. Why that is enough: this rank writes slot e % 2 in its call e, and has received
from every rank in its call e - 1, which is over. A rank that sent in e - 1 had left e - 2 behind (kernels of a stream
run in order), where it last read this slot. Calls of other sizes leave a block's epoch, and its slots, as they are.
"""

import torch
import triton.language as tl

from iris.ccl.call import Algorithm, Call
from iris.ccl.communicator import Communicator, Launch
from iris.ccl.kernel_arguments import LLChannel
from iris.ccl.kernel_launch import INTEGERS, fitting, kernel_launch
from iris.ccl.pieces import pieces_of
from iris.language.address import translate
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_launch_dependents, gdc_wait
from iris.language.flat import flat
from iris.language.jit import jit
from iris.language.ll import ll_recv, ll_send
from iris.language.ordering import store_after_sync
from iris.language.target import threads_per_warp

WORD_BYTES = tl.constexpr(4)
LARGEST_PIECE = 256 << 10
# Words of a block, with 4 bytes of data each. Small blocks, of which a thread has two words, while there is a program
# for every one of them and every peer; larger ones do more at a time.
SMALL_BLOCK, LARGE_BLOCK = 256, 1024

RANKS = tl.constexpr(32)
# Words that a rank without a piece sends, so that all receive from all: two, which leaves accesses 16 bytes wide.
REPLY = tl.constexpr(2)


def block_words(piece: int, size: int, programs: int) -> int:
    """Words of a block for pieces of so many bytes, between ``size`` ranks with at most ``programs``."""
    return SMALL_BLOCK if -(-piece // (4 * SMALL_BLOCK)) * size <= programs else LARGE_BLOCK


def channel_bytes(size: int, block: int) -> tuple[int, int]:
    """Bytes of the epochs, ``[blocks, 32]``, and of two slots with a block from each of ``size`` ranks."""
    blocks = LARGEST_PIECE // (4 * block)
    return blocks * RANKS.value * 4, 2 * blocks * size * block * 8


@jit
def position(k, row, pitch, FLAT: tl.constexpr):
    """The place of a piece's element k: rows of ``row`` elements begin ``pitch`` apart."""
    if FLAT:
        return k
    else:
        return tl.cast(k // row, tl.int64) * pitch + k % row


@jit
def one_hop(
    channel,
    input,
    output,
    n,
    layout,
    root,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    FLAT: tl.constexpr,
    ROOTED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``n``: elements of a piece. ``BLOCKS``: that a slot has room for. ``FLAT``: a piece is one row.

    ``ROOTED``: only ``root`` has a piece to send. ``EARLY``: there is room for the next launch beside this one.
    """
    ctx = DeviceContext.initialize(channel.context, num_ranks=W)
    rank = ctx.cur_rank
    gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    epochs, slots = channel.epochs, channel.slots
    # Elements of a word: the data may lie at any multiple of their size.
    PACKED: tl.constexpr = WORD_BYTES // (input.dtype.element_ty.primitive_bitwidth // 8)
    BITS: tl.constexpr = input.dtype.element_ty.primitive_bitwidth
    i = flat(BLOCK, tl.int64)
    units = (n + BLOCK * PACKED - 1) // (BLOCK * PACKED) * W
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        b = unit // W
        to = (rank + unit % W) % W
        # With the other loads, and not after them.
        base = tl.load(ctx.table + to)
        epoch = tl.load(epochs + b * RANKS + unit % W) + 1
        word = tl.zeros_like(i)
        for j in tl.static_range(PACKED):
            k = (b * BLOCK + i) * PACKED + j
            at = tl.cast(to, tl.int64) * layout.send_step + position(k, layout.row, layout.in_pitch, FLAT)
            here = k < n
            if ROOTED:
                # Elsewhere the input may be the output, which other programs are storing to.
                here = here & (rank == root)
            part = tl.cast(tl.load(input + at, mask=here, other=0), tl.int32)
            if not ROOTED:
                if to == rank:
                    begin = output + tl.cast(rank, tl.int64) * layout.recv_step
                    # What is there already, as FSDP2's is, other programs may be reading.
                    apart = tl.cast(begin, tl.int64) != tl.cast(input + rank * layout.send_step, tl.int64)
                    own = begin + position(k, layout.row, layout.out_pitch, FLAT)
                    tl.store(own, tl.cast(part, input.dtype.element_ty), mask=(k < n) & apart)
            if PACKED > 1:
                part = (part & ((1 << BITS) - 1)) << (j * BITS)
            word = word | part
        if to != rank:
            slot = slots + (((epoch & 1) * BLOCKS + b) * W + rank) * BLOCK
            needed = (b * BLOCK + i) * PACKED < n
            if ROOTED:
                needed = needed & ((rank == root) | (i < REPLY))
            event = ctx.tracing.begin_move("store", slot + i, to, needed)
            ll_send(translate(slot, ctx.base, base) + i, word, epoch, needed | ((epoch & 0xFFFF) < 2))
            ctx.tracing.record_event_end(event)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        b = unit // W
        source = (rank + W - unit % W) % W
        epoch = tl.load(epochs + b * RANKS + unit % W) + 1
        if source != rank:
            slot = slots + (((epoch & 1) * BLOCKS + b) * W + source) * BLOCK
            there = (b * BLOCK + i) * PACKED < n
            wanted = there
            if ROOTED:
                there = there & ((source == root) | (i < REPLY))
                wanted = there & (source == root)
            event = ctx.tracing.begin_wait_for_data(slot, rank)
            ptrs = slot + i
            word = ll_recv(ptrs, epoch, there, source, record=ctx._record())
            ctx.tracing.record_event_end(event)
            for j in tl.static_range(PACKED):
                k = (b * BLOCK + i) * PACKED + j
                at = tl.cast(source, tl.int64) * layout.recv_step + position(k, layout.row, layout.out_pitch, FLAT)
                tl.store(output + at, tl.cast(word >> (j * BITS), input.dtype.element_ty), mask=wanted & (k < n))
        store_after_sync(epochs + b * RANKS + unit % W, epoch)


def launch(call: Call, max_programs: int | None) -> Launch:
    """A launch of all_gather, all_to_all or broadcast, of at most ``max_programs`` programs."""
    comm, config, pieces = call.comm, call.config, pieces_of(call)
    max_programs = max_programs or comm.num_sms
    word = min(WORD_BYTES.value, pieces.word_bytes(call))
    block = block_words(pieces.nbytes, comm.size, max_programs)
    epochs_bytes, slots_bytes = channel_bytes(comm.size, block)
    channel = comm.workspace.channel(
        f"one hop of {block} words of all_gather, all_to_all or broadcast",
        call.line,
        epochs_bytes + slots_bytes,
        slice(0, epochs_bytes),
    )
    # No more warps than there are words for: see `ll_recv`.
    warps = min(config.num_warps or 4, block // threads_per_warp())
    units = -(-pieces.nbytes // (WORD_BYTES.value * block)) * comm.size
    return kernel_launch(
        call,
        one_hop,
        programs=fitting(comm, max(1, min(units, max_programs)), warps),
        num_warps=warps,
        dtype=INTEGERS[word],
        channel=LLChannel(
            context=channel.context_tensor,
            epochs=channel.memory[:epochs_bytes].view(torch.int32),
            slots=channel.memory[epochs_bytes:].view(torch.int64),
        ),
        n=pieces.nbytes // word,
        layout=pieces.layout(word),
        root=call.root,
        W=comm.size,
        BLOCK=block,
        BLOCKS=LARGEST_PIECE // (WORD_BYTES.value * block),
        FLAT=pieces.rows == 1,
        ROOTED=call.collective == "broadcast",
    )


def fits(comm: Communicator, collective: str, nbytes: int) -> bool:
    return nbytes <= LARGEST_PIECE


ALGORITHMS = (
    Algorithm(
        "one_hop",
        ("all_gather", "all_to_all"),
        launch,
        fits=fits,
        # It has blocks of its own.
        unless=("all_gather_variant", "block_size_m", "block_size_n"),
    ),
    Algorithm("one_hop", ("broadcast",), launch, fits=fits),
)
