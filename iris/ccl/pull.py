"""Large sums of inputs on the symmetric heap: each rank reads its part of every input where it lies, and adds it up.

all_reduce: over the link 2 (W - 1) / W times the bytes, half of them loaded and half stored, in one step of each.
reduce_scatter: (W - 1) / W times the bytes, loaded. A block has nothing to wait for, so there is no queue and no fence
between blocks: programs meet their peers once before, to learn where inputs and outputs are, and once after.

A program claims a block, or half of one, and the next when it is done with that. The link serves some multiprocessors
later than others. If all had the same number of blocks, it would be partly idle at the end, while the last ones load.

Only a rank itself reads and writes its part of all inputs and outputs, and it writes after what it has read, so the
output may be the input. Sums are formed in the order of ranks, as in `iris.ccl.two_shot`, with the same bits.

If any rank's input or output is elsewhere, all know it from the places that they exchanged, and take the queues.
"""

import triton.language as tl

from iris.ccl.call import Algorithm, Call, extent
from iris.ccl.combine import accumulate, accumulator, finalize
from iris.ccl.communicator import Launch
from iris.ccl.kernel_launch import kernel_launch
from iris.ccl.queue import (
    COUNTS,
    EXITS,
    INPUTS,
    OUTPUTS,
    WORDS,
    advertise_input,
    among,
    blocks_of,
    claim_block,
    exit_barrier,
    lane_value,
    permit,
    pointer_at,
    resolve_places,
    store_to_peer,
)
from iris.ccl.two_shot import reduce_blocks, shared_arguments
from iris.language.barrier import lanes
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.flat import flat
from iris.language.jit import jit

# Bytes that keep a link busy if all programs together load as many at a time: its rate times a round trip, 450 GB/s
# (NVLink 4) times 2 us. Where half of all programs' blocks are as many, these are faster: less is left at the end.
IN_FLIGHT = 1 << 20


@jit
def pull(
    queues,
    input,
    output,
    factors,
    layout,
    in_length,
    length,
    W: tl.constexpr,
    TILING: tl.constexpr,
    OP: tl.constexpr,
    ALL_REDUCE: tl.constexpr,
    HALVES: tl.constexpr,
):
    """``in_length`` and ``length``: bytes of input and output. ``HALVES``: 2 if programs claim half a block, else 1."""
    gdc_wait()
    ctx = DeviceContext.initialize(queues.context, num_ranks=W)
    rank = ctx.cur_rank
    p = tl.program_id(0)
    row = queues.counts + p * COUNTS
    own_words = queues.words + p * WORDS
    others = among(0, W, rank)
    calls = tl.load(row + EXITS + rank) + 1
    here = True
    if ALL_REDUCE:
        place, each = own_words + OUTPUTS, calls + lanes() * 0
        here = permit(ctx, queues, place, output, length=length, calls=each, ranks=others, W=W)
    place = own_words + INPUTS
    here = here & advertise_input(ctx, queues, place, input, length=in_length, calls=calls, others=others, W=W)
    # With acquire: the inputs are there. And a peer had said where its output is before it said where its input is, so
    # what is read of that below is of this call, and not of one 65536 calls ago with the same stamp.
    inputs = resolve_places(ctx, queues, place, calls, others=others, W=W, ACQUIRES=True)
    missing = others & (inputs == 0)
    outputs = inputs
    if ALL_REDUCE:
        place = own_words + OUTPUTS
        outputs = resolve_places(ctx, queues, place, calls, others=others, W=W, ACQUIRES=False)
        missing = missing | (others & (outputs == 0))
    if here & (tl.max(tl.cast(missing, tl.int32), axis=0) == 0):
        element: tl.constexpr = input.dtype.element_ty
        ACC: tl.constexpr = accumulator(element)
        inputs = tl.where(lanes() == rank, tl.cast(input, tl.int64), inputs)
        CLAIM: tl.constexpr = TILING.BLOCK // HALVES
        i = flat(CLAIM, element)
        # This rank's part, of each rank's input and of the others' outputs.
        sources, places = (), ()
        for s in tl.static_range(W):
            sources += (pointer_at(input, lane_value(inputs, s)) + tl.cast(rank, tl.int64) * layout.part_step,)
        if ALL_REDUCE:
            for distance in tl.static_range(1, W):
                to = (rank + distance) % W
                places += (pointer_at(output, lane_value(outputs, to)) + rank * layout.out_part_step,)
        claims = HALVES * blocks_of(layout.n, layout.block_step)
        following = claim_block(ctx, queues, claims)
        while following < claims:
            claim = following
            # Before the loads, so that it is known when they are done.
            following = claim_block(ctx, queues, claims)
            k = tl.cast(claim // HALVES, tl.int64) * layout.block_step + claim % HALVES * CLAIM + i
            mask = rank * layout.limit_step + k < layout.n
            # All loads before their first use, so that they are under way together.
            parts = ()
            for s in tl.static_range(W):
                event = ctx.tracing.begin_move("load", input + i, s, mask)
                parts += (tl.load(sources[s] + k, mask=mask),)
                ctx.tracing.end_load(event, parts[s])
            total = tl.cast(parts[0], ACC)
            for s in tl.static_range(W):
                total = accumulate(total, parts[s], factors, s, OP=OP)
            result = finalize(total, element, W, OP)
            tl.store(output + rank * layout.out_part_step + k, result, mask=mask)
            if ALL_REDUCE:
                for distance in tl.static_range(1, W):
                    store_to_peer(ctx, places[distance - 1] + k, result, (rank + distance) % W, mask=mask)
    else:
        reduce_blocks(
            ctx,
            queues,
            input,
            output,
            factors=factors,
            layout=layout,
            length=length,
            to_first=0,
            to_last=W,
            W=W,
            TILING=TILING,
            OP=OP,
            ALL_REDUCE=ALL_REDUCE,
            DIRECT=ALL_REDUCE,
        )
    exit_barrier(ctx, row, calls, others, W=W)


def launch(call: Call, max_programs: int | None) -> Launch:
    """A launch of all_reduce or reduce_scatter, of at most ``max_programs`` programs."""
    shared = shared_arguments(call, max_programs)
    block, dtype = shared["TILING"].BLOCK, shared["dtype"]
    halves = 2 if block > 1 and shared["programs"] * block * dtype.itemsize >= 2 * IN_FLIGHT else 1
    if call.config.num_warps is None:
        shared["num_warps"] = max(1, shared["num_warps"] // halves)
    return kernel_launch(call, pull, **shared, in_length=extent(call.input), length=call.output.nbytes, HALVES=halves)


ALGORITHMS = (Algorithm("pull", ("all_reduce", "reduce_scatter"), launch),)
