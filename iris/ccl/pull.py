"""Large sums of inputs on the symmetric heap: each rank reads its part of every input where it lies, and adds it up.

all_reduce: over the link 2 (W - 1) / W times the bytes, half of them loaded and half stored, in one step of each.
reduce_scatter: (W - 1) / W times the bytes, loaded. A block has nothing to wait for, so there is no queue and no fence
between blocks: programs meet their peers once in front, to learn where inputs and outputs are, and once behind.

Only a rank itself reads and writes its part of all inputs and outputs, and it writes behind what it has read, so the
output may be the input. Sums are formed in the order of ranks, as in `iris.ccl.two_shot`, with the same bits.

If any rank's input or output is elsewhere, all know it from the places that they were told, and take the queues.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.ccl.combine import accumulator, gluon_combine, triton_combine
from iris.ccl.queue import COUNTS, INPUTS, MET, OUTPUTS, WORDS, gluon_queue, triton_queue
from iris.ccl.two_shot import gluon_add_up, triton_add_up
from iris.language.context import DeviceContext, IrisDeviceCtx


def make_pull(
    jit: Callable, lang: ModuleType, queue: SimpleNamespace, combining: SimpleNamespace, add_up: Callable, Context: type
):
    """The kernel in the language that ``(jit, lang)`` stand for."""
    pick, among, flat, lanes = queue.pick, queue.among, queue.flat, queue.lanes
    follow_predecessor = queue.follow_predecessor
    pointer_at, blocks_of = queue.pointer_at, queue.blocks_of
    permit, tell, hear, meet = queue.permit, queue.tell, queue.hear, queue.meet
    scaled, combine, conclude = combining.scaled, combining.combine, combining.conclude

    @jit
    def pull(
        context_tensor,
        counts,
        words,
        slots,
        heap_table,
        input,
        output,
        factors,
        n,
        part_step,
        block_step,
        limit_step,
        out_part_step,
        in_length,
        length,
        W: tl.constexpr,
        BLOCK: tl.constexpr,
        SLOT: tl.constexpr,
        OP: tl.constexpr,
        SPREADS: tl.constexpr,
    ):
        """Parts and steps as in `two_shot`; ``in_length`` and ``length``: bytes of input and output."""
        follow_predecessor()
        ctx = Context.initialize(context_tensor, num_ranks=W)
        rank = ctx.cur_rank
        p = lang.program_id(0)
        row = counts + p * COUNTS
        own_words = words + p * WORDS
        others = among(0, W, rank)
        calls = lang.load(row + MET + rank) + 1
        here = True
        if SPREADS:
            here = permit(ctx, own_words + OUTPUTS, heap_table, output, length, calls + lanes() * 0, others, W)
        here = here & tell(ctx, own_words + INPUTS, heap_table, input, in_length, calls, others, W)
        inputs = hear(ctx, own_words + INPUTS, heap_table, calls, others)
        # The peers' words are read without an order. Behind them lie their inputs, and where their outputs are: said
        # before, so it is not of a call so long ago that its stamp has come round.
        ctx.fence()
        missing = others & (inputs == 0)
        outputs = inputs
        if SPREADS:
            outputs = hear(ctx, own_words + OUTPUTS, heap_table, calls, others)
            missing = missing | (others & (outputs == 0))
        if here & (lang.max(lang.cast(missing, lang.int32), axis=0) == 0):
            element: tl.constexpr = input.dtype.element_ty
            ACC: tl.constexpr = accumulator(element)
            inputs = lang.where(lanes() == rank, lang.cast(input, lang.int64), inputs)
            i = flat(BLOCK, element)
            # This rank's part, of each rank's input and of the others' outputs.
            sources, places = (), ()
            for s in lang.static_range(W):
                sources += (pointer_at(input, pick(inputs, s)) + lang.cast(rank, lang.int64) * part_step,)
            if SPREADS:
                for distance in lang.static_range(1, W):
                    to = (rank + distance) % W
                    places += (pointer_at(output, pick(outputs, to)) + rank * out_part_step,)
            for block in range(p, blocks_of(n, block_step), lang.num_programs(0)):
                k = lang.cast(block, lang.int64) * block_step + i
                mask = rank * limit_step + k < n
                # All loads before their first use, so that they are under way together.
                parts = ()
                for s in lang.static_range(W):
                    event = ctx.tracing.begin_move("load", input + i, s, mask)
                    parts += (lang.load(sources[s] + k, mask=mask),)
                    ctx.tracing.end_load(event, parts[s])
                total = scaled(lang.cast(parts[0], ACC), factors, 0, OP)
                for s in lang.static_range(1, W):
                    total = combine(total, scaled(lang.cast(parts[s], ACC), factors, s, OP), OP)
                result = conclude(total, element, W, OP)
                lang.store(output + rank * out_part_step + k, result, mask=mask)
                if SPREADS:
                    for distance in lang.static_range(1, W):
                        event = ctx.tracing.begin_move("store", output + i, (rank + distance) % W, mask)
                        lang.store(places[distance - 1] + k, result, mask=mask)
                        ctx.tracing.record_event_end(event)
        else:
            add_up(
                ctx, row, own_words, slots, heap_table, input, output, factors, n, part_step, block_step, limit_step,
                out_part_step, length, 0, W, W, BLOCK, SLOT, OP, SPREADS, SPREADS,
            )  # fmt: skip
        meet(ctx, row, calls, others, W)

    return pull


triton_pull = make_pull(triton.jit, tl, triton_queue, triton_combine, triton_add_up, DeviceContext)
gluon_pull = make_pull(gluon.jit, gl, gluon_queue, gluon_combine, gluon_add_up, IrisDeviceCtx)
