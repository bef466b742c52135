"""Every rank sends a piece to some ranks and receives one from some: one kernel for all that only moves data.

| collective | sends to | piece d begins at | receives from | piece s goes to |
| --- | --- | --- | --- | --- |
| all_gather | all | 0 | all | s pieces |
| all_to_all | all | d pieces (or columns) | all | s pieces (or columns) |
| broadcast, small | the root: all | 0 | others: the root | 0 |
| gather | the root | 0 | the root: all | s pieces |
| scatter | the root: all | d pieces | others: the root | 0 |
| send, recv | the receiver | 0 | the sender | 0 |

Over the link: each piece once, in one step, through the queues of `iris.ccl.queue` or, where the receiver's result lies
on the symmetric heap, straight to its place. A piece has M rows of N elements, and rows may be apart; it is cut into
blocks of BLOCK_M x BLOCK_N, one after the other through a 1-D layout (rows and columns by division), so a row length
that is no multiple of anything wastes nothing. Ranks start with different receivers, and so do the programs of a rank,
so that none is hit by all at once. Elements are integers of the widest type that fits: what they mean does not matter
here.
"""

import triton.language as tl

from iris import simulator
from iris.ccl.call import Algorithm, Call
from iris.ccl.communicator import Launch, power_of_two
from iris.ccl.kernel_arguments import ExchangeForm, PieceTiling
from iris.ccl.kernel_launch import INTEGERS, kernel_launch
from iris.ccl.pieces import Pieces, pieces_of
from iris.ccl.queue import (
    AHEAD,
    COUNTS,
    DONE,
    HEAD,
    LONGEST_QUEUED,
    MESSAGES_FROM,
    MESSAGES_TO,
    SIZES,
    TAIL,
    WORDS,
    WRITTEN,
    advertise,
    among,
    blocks_of,
    finish,
    lane_value,
    load_counters,
    next_slot,
    pointer_at,
    publish_counters,
    queue_address,
    resolve_output,
    slot_of,
    store_to_peer,
    wait_blocks,
    wait_credits,
)
from iris.ccl.sizes import (
    ask,
    count_messages,
    find_target,
    record_unequal,
    recv_message_words,
    refuse,
    send_message_word,
)
from iris.errors import InvalidConfigError
from iris.language.address import bytes_of
from iris.language.barrier import lanes
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.flat import flat
from iris.language.jit import jit
from iris.language.ordering import store_after_sync

# From so many programs that send between two ranks, with so many blocks each, others copy.
SENDERS = tl.constexpr(2 if simulator.ACTIVE else 8)
BLOCKS_EACH = tl.constexpr(8)


@jit
def cell(block, blocks_n, index, rows, row, TILING: tl.constexpr):
    """Row and column of each element of a block, and whether the piece has it: none after the last block."""
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_N: tl.constexpr = TILING.BLOCK_N
    block = tl.cast(block, tl.int64)
    k = block * (BLOCK_M * BLOCK_N) + index
    if TILING.ROWS == "one":
        return k * 0, k, k < row
    if TILING.ROWS == "together":
        return k // row, k % row, k < tl.cast(rows, tl.int64) * row
    r = block // blocks_n * BLOCK_M + index // BLOCK_N
    c = block % blocks_n * BLOCK_N + index % BLOCK_N
    return r, c, (r < rows) & (c < row)


# One binary for all ranks and both ends of a message.
@jit(do_not_specialize=["to_first", "to_last", "from_first", "from_last"])
def exchange(
    queues,
    input,
    output,
    rows,
    layout,
    length,
    to_first,
    to_last,
    from_first,
    from_last,
    W: tl.constexpr,
    TILING: tl.constexpr,
    FORM: tl.constexpr,
):
    """``rows``: of a piece. ``length``: bytes of the output.

    ``to_first`` to before ``to_last``: the ranks that get a piece; ``from_first`` to ``from_last``: that send one.
    """
    gdc_wait()
    ctx = DeviceContext.initialize(queues.context, num_ranks=W)
    rank = ctx.cur_rank
    p = tl.program_id(0)
    BLOCK: tl.constexpr = TILING.BLOCK_M * TILING.BLOCK_N
    SLOT: tl.constexpr = TILING.SLOT
    SIZED: tl.constexpr = FORM.PROGRAMS > 0
    row, own_words = queues.counts + p * COUNTS, queues.words + p * WORDS
    slots = queues.slots
    first, stride = p, tl.num_programs(0)
    if FORM.PARTITIONED:
        to_first = (rank + p % W) % W
        from_first = (rank + W - p % W) % W
        to_last, from_last = to_first + 1, from_first + 1
        first, stride = p // W, tl.num_programs(0) // W
    to = among(to_first, to_last, rank)
    sources = among(from_first, from_last, rank)
    # Both counts of each peer, since they are posted together. A message to another rank, or from it, may be
    # under way on another stream, and change that one's.
    peers = to | sources
    sent, got = load_counters(row, peers)
    address = queue_address(ctx, slots, W, SLOT, to=to)
    receivers = to
    if SIZED:
        piece = tl.cast(rows, tl.int64) * layout.row * bytes_of(input.dtype.element_ty)
        pieces = piece + tl.cast(lanes() * 0, tl.int64)
        messages_to = tl.load(row + MESSAGES_TO + lanes(), mask=receivers, other=0) + 1
        messages_from = tl.load(row + MESSAGES_FROM + lanes(), mask=sources, other=0) + 1
        send_message_word(ctx, own_words, piece, messages_to, peers=receivers, ROW=SIZES)
    queued = to
    direct_here = False
    if FORM.DIRECT:
        if SIZED:
            direct_here = ask(
                ctx,
                queues,
                own_words,
                output,
                length=length,
                nbytes=piece,
                messages=messages_from,
                sources=sources,
                W=W,
            )
            to, place = find_target(ctx, queues, own_words, pieces, messages=messages_to, receivers=receivers, W=W)
        else:
            calls_from, direct_here = advertise(
                ctx, queues, row, own_words, output=output, length=length, W=W, sources=sources
            )
            calls_to, place = resolve_output(ctx, queues, row, own_words, to=to, W=W)
        queued = to & (place == 0)
        address = tl.where(queued, address, place)
    takes = (direct_here == 0) & (from_first < from_last)
    if SIZED:
        theirs = recv_message_words(ctx, own_words, messages_from, sources, ROW=SIZES)
        wrong = sources & (theirs != pieces)
        unequal = tl.max(tl.cast(wrong, tl.int32), axis=0) > 0
        if unequal:
            block_bytes = TILING.BLOCK_N * bytes_of(input.dtype.element_ty)
            puts = (theirs <= LONGEST_QUEUED) | ((wrong == 0) & (direct_here == 0))
            refuse(
                ctx,
                queues,
                theirs,
                pieces,
                messages=messages_from,
                puts=puts,
                sources=sources,
                block_bytes=block_bytes,
                FORM=FORM,
            )
            record_unequal(ctx, own_words, theirs, pieces, wrong=wrong)
        # Nothing is taken from anyone then, nor written by anyone whose size differs.
        takes = takes & (unequal == 0)
        writers = sources & (wrong == 0)
    else:
        writers = sources
    sends = to_first < to_last
    any_queued = tl.max(tl.cast(queued, tl.int32), axis=0) > 0

    own = output + tl.cast(rank, tl.int64) * layout.recv_step
    own_input = input + tl.cast(rank, tl.int64) * layout.send_step
    in_place = tl.cast(own, tl.int64) == tl.cast(own_input, tl.int64)
    copies = (rank >= to_first) & (rank < to_last) & (in_place == 0)
    index = flat(BLOCK, input.dtype.element_ty)
    blocks_n = blocks_of(layout.row, TILING.BLOCK_N)
    blocks = blocks_of(rows, TILING.BLOCK_M) * blocks_n
    if TILING.ROWS == "together":
        blocks = blocks_of(tl.cast(rows, tl.int64) * layout.row, BLOCK)
    if SIZED:
        # An empty message has an empty block: what goes ahead of the receiver is limited by its room for blocks.
        blocks = tl.maximum(blocks, 1)
    # Of each other rank: whether it gets anything, where that begins, and its place there if it needs no queue.
    gets, begins, places = (), (), ()
    for i in tl.static_range(W - 1):
        d = (rank + 1 + (p + i) % (W - 1)) % W
        if FORM.DIRECT and SIZED:
            gets += (lane_value(tl.cast(to, tl.int32), d) > 0,)
        else:
            gets += ((d >= to_first) & (d < to_last),)
        begins += (input + tl.cast(d, tl.int64) * layout.send_step,)
        places += (pointer_at(slots, lane_value(address, d)) + tl.cast(rank, tl.int64) * layout.recv_step,)

    if any_queued | takes:
        steps = (blocks - first + stride - 1) // stride
        for step in range(0, steps + AHEAD):
            if (step < steps) & sends:
                if any_queued:
                    wait_credits(ctx, own_words, sent, queued, W=W)
                r, c, mask = cell(first + step * stride, blocks_n, index, rows, row=layout.row, TILING=TILING)
                for i in tl.static_range(W - 1):
                    if gets[i]:
                        d = (rank + 1 + (p + i) % (W - 1)) % W
                        data = tl.load(begins[i] + (r * layout.in_pitch + c), mask=mask)
                        if lane_value(tl.cast(queued, tl.int32), d) > 0:
                            slot = next_slot(pointer_at(slots, lane_value(address, d)), sent, d, SLOT)
                            store_to_peer(ctx, slot + index, data, d, mask=mask)
                        else:
                            store_to_peer(ctx, places[i] + (r * layout.out_pitch + c), data, d, mask=mask)
                data = tl.load(own_input + (r * layout.in_pitch + c), mask=mask & copies)
                tl.store(own + (r * layout.out_pitch + c), data, mask=mask & copies)
                if any_queued:
                    sent = tl.where(queued, sent + 1, sent)
            if (step >= AHEAD) & takes:
                wait_blocks(ctx, own_words, got, sources, W=W)
                block = first + (step - AHEAD) * stride
                r, c, mask = cell(block, blocks_n, index, rows, row=layout.row, TILING=TILING)
                at_output = r * layout.out_pitch + c
                for distance in range(1, W):
                    s = (rank + distance) % W
                    if (s >= from_first) & (s < from_last):
                        data = tl.load(slots + slot_of(p, s, got, W) * SLOT + index, mask=mask)
                        tl.store(output + tl.cast(s, tl.int64) * layout.recv_step + at_output, data, mask=mask)
                got = tl.where(sources, got + 1, got)
            publish_counters(ctx, own_words, sent, got, peers=queued | (sources & takes))
    else:
        # Straight to its place: nothing to wait for.
        if W == 2:
            # The copy is as much work as the sending here. In one program it holds up the stores over the link, so
            # where there are enough of both, half of the programs send and the others copy.
            half = tl.num_programs(0) // 2
            split = gets[0] & copies & (half >= SENDERS) & (blocks >= half * BLOCKS_EACH)
            sender = p < half
            gets = (gets[0] & (sender | (split == 0)),)
            copies = copies & ((sender == 0) | (split == 0))
            first = tl.where(split & (sender == 0), p - half, first)
            stride = tl.where(split, tl.where(sender, half, tl.num_programs(0) - half), stride)
        # All loads before all stores, which the compiler cannot know to be of other memory.
        for block in range(first, tl.where(sends, blocks, 0), stride):
            r, c, mask = cell(block, blocks_n, index, rows, row=layout.row, TILING=TILING)
            data = (tl.load(own_input + (r * layout.in_pitch + c), mask=mask & (FORM.SAME | copies)),)
            for i in tl.static_range(W - 1):
                if FORM.SAME:
                    data += (data[0],)
                else:
                    data += (tl.load(begins[i] + (r * layout.in_pitch + c), mask=mask & gets[i]),)
            for i in tl.static_range(W - 1):
                d = (rank + 1 + (p + i) % (W - 1)) % W
                store_to_peer(
                    ctx, places[i] + (r * layout.out_pitch + c), data[i + 1], d, mask=mask & gets[i], asked=gets[i]
                )
            tl.store(own + (r * layout.out_pitch + c), data[0], mask=mask & copies)
    # Only what this call has changed: another message may be under way on another stream, to or from another rank.
    store_after_sync(row + TAIL + lanes(), sent, queued)
    store_after_sync(row + HEAD + lanes(), got, sources & takes)
    written, writing = to & (queued == 0), writers & (direct_here != 0)
    if SIZED:
        if FORM.DIRECT:
            finish(ctx, row + WRITTEN, messages_to, written, calls_from=messages_from, sources=writing, W=W)
        count_messages(queues.counts, messages_to, receivers, messages_from, sources=sources, QUEUES=FORM.QUEUES)
    elif FORM.DIRECT:
        finish(ctx, row + DONE, calls_to, written, calls_from=calls_from, sources=writing, W=W)


def launch(call: Call, max_programs: int | None) -> Launch:
    """A launch of any collective that moves pieces of one length, of at most ``max_programs`` programs."""
    comm, config, pieces = call.comm, call.config, pieces_of(call)
    word = pieces.word_bytes(call)
    is_message = call.collective in ("send", "recv")
    few_sms = config.few_sms and not is_message
    if is_message:
        programs = comm.programs(min(max_programs or comm.p2p_programs, comm.p2p_programs))
        slot_bytes = comm.p2p_slot_bytes
    else:
        # Where sizes are compared, ranks may disagree on them. So calls of all sizes share the same queues, and have no
        # more programs than a message.
        wanted = max_programs or (comm.p2p_programs if pieces.matched else None)
        programs = comm.programs(wanted, config.block_bytes(call.input.itemsize), few_sms)
    partitioned = call.collective == "all_gather" and config.all_gather_variant == "partitioned"
    if partitioned:
        if programs < comm.size:
            raise InvalidConfigError(
                f"Config(all_gather_variant='partitioned') needs a program for each of {comm.size} ranks; there may "
                f"be {programs}: raise comm_sms, choose smaller blocks, or use 'persistent'."
            )
        programs = programs // comm.size * comm.size
    if not is_message:
        slot_bytes = comm.slot_bytes(programs, few_sms)
    rows, word, block_m, block_n = _divide(call, pieces, word, slot_bytes)
    blocks = -(-pieces.rows // block_m) * -(-(pieces.row // word) // block_n)
    if rows == "together":
        blocks = -(-pieces.nbytes // (block_n * word))
    largest = programs
    if partitioned:
        programs = max(1, min(programs // comm.size, blocks)) * comm.size
    else:
        programs = max(1, min(programs, blocks))
    if is_message:
        queues = comm.point_to_point(call.root, call.collective == "send", call.line)
    else:
        # Where sizes are compared, the queues must not depend on the size.
        queues = comm.queues(call.line, largest if pieces.matched else programs, few_sms)
    direct = pieces.nbytes > LONGEST_QUEUED.value
    # CUDA may hold up the loading of a kernel until those that run have ended (CUDA C++ Programming Guide, "Lazy
    # Loading"). Two ranks that send to each other and then receive must not wait for that, so a message of any length
    # loads what those of other lengths need, and both ends of a message are the same kernel.
    launches = {
        either: kernel_launch(
            call,
            exchange,
            programs=programs,
            num_warps=config.warps(block_m * block_n, word),
            dtype=INTEGERS[word],
            queues=queues.memory(INTEGERS[word], comm),
            rows=pieces.rows,
            layout=pieces.layout(word),
            length=pieces.length,
            to_first=pieces.to.start,
            to_last=pieces.to.stop,
            from_first=pieces.sources.start,
            from_last=pieces.sources.stop,
            W=comm.size,
            TILING=PieceTiling(block_m, block_n, queues.slot_bytes // word, rows),
            FORM=ExchangeForm(
                SAME=pieces.send_step == 0,
                PARTITIONED=partitioned,
                DIRECT=either,
                PROGRAMS=largest if pieces.matched else 0,
                QUEUES=queues.counts.numel() // COUNTS.value if pieces.matched else 0,
            ),
        )
        for either in ({True, False} if is_message else {direct})
    }
    return launches[direct]


def _divide(call: Call, pieces: Pieces, word: int, slot_bytes: int) -> tuple[str, int, int, int]:
    """The kernel's ``ROWS``, the bytes of an element, and rows and columns of a block, where a slot has so many bytes.

    Rows that are apart on this rank need not be on others, so their blocks are those of a piece in one row.
    """
    config, itemsize = call.config, call.input.itemsize
    if config.block_shape is not None:
        block_m, block_n = config.block_that_fits(itemsize, slot_bytes)
        # A block is so many elements on all ranks, also where they lie in a way that takes narrower words.
        word = min(word, block_n * itemsize)
        return "apart", word, block_m, block_n * itemsize // word
    elements = slot_bytes // word
    if pieces.rows == 1:
        return "one", word, 1, elements
    if pieces.send_step == 0:
        return "together", word, 1, elements
    block_n = min(elements, power_of_two(pieces.row // word))
    return "apart", word, elements // block_n, block_n


ALGORITHMS = (
    Algorithm("exchange", ("all_gather", "all_to_all", "broadcast", "gather", "scatter", "send", "recv"), launch),
)
