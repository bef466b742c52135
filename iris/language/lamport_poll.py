"""The polling of Lamport-style messages (`iris.language.lamport`): by the whole block, or on NVIDIA by each warp.

A loop in Triton is one for the whole block: a reduction over all threads decides whether it goes on. The last of these
reductions begins when the last element has come, and takes as long as all that is left to do. But no warp needs another
warp's elements. So on NVIDIA the loop is in PTX: each thread polls the vectors of 16 bytes that it has of each part,
and a warp goes on as soon as its own threads have theirs.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from iris.language.flat import flat_vectors
from iris.language.jit import jit
from iris.language.ordering import load_relaxed
from iris.language.target import on_nvidia

BYTES = 16  # of a vector: the most that a thread reads in one access
VECTORS = 16  # that a thread awaits in one loop, of all parts together


@triton.constexpr_function
def polls_by_warp(element):
    """Whether each warp waits by itself. Not for elements of 8 bytes, which are rare."""
    return on_nvidia() and element.primitive_bitwidth <= 32


@triton.constexpr_function
def vectors_at_once(NUMBER, THREADS, PARTS):
    """How many vectors of each part a thread awaits in one loop: all that it has, or as many as its registers hold.

    A power of two that divides the number that it has.
    """
    return max(1, min(NUMBER // THREADS, VECTORS >> (PARTS - 1).bit_length()))


@triton.constexpr_function
def wait_in_ptx(PARTS, STRIDE, LOWEST, POLLS, TOGETHER):
    """PTX that waits for ``TOGETHER`` vectors of 4 words of each part. Parts are ``STRIDE`` bytes apart.

    The loads of all vectors are under way at once. Operands, each for all vectors: the words of all parts (results);
    then the address in part 0, the number of the part not to wait for, and for each of the 4 words the bits of the
    elements that are awaited. ``LOWEST``: `iris.language.lamport.lowest_bits`. ``POLLS``: after how many rounds the
    loop ends in any case; 0: never.
    """
    operand = [[f"${number * TOGETHER + vector}" for vector in range(TOGETHER)] for number in range(4 * PARTS + 6)]
    address, own = 4 * PARTS, 4 * PARTS + 1
    bits = [4 * PARTS + 2 + word for word in range(4)]
    each = [(part, vector) for vector in range(TOGETHER) for part in range(PARTS)]
    reads = ", ".join(f"reads{part}_{vector}" for part, vector in each)
    lines = [f".reg .pred again, wanted, {reads};", ".reg .b32 late, zero, rounds;", f"mov.b32 rounds, {POLLS};"]
    for vector in range(TOGETHER):
        # Nothing is read of a part of which nothing is wanted: there may be no memory.
        lines += [
            f"or.b32 late, {operand[bits[0]][vector]}, {operand[bits[1]][vector]};",
            f"or.b32 zero, {operand[bits[2]][vector]}, {operand[bits[3]][vector]};",
            "or.b32 late, late, zero;",
            "setp.ne.s32 wanted, late, 0;",
        ]
        for part in range(PARTS):
            lines += [f"setp.ne.and.s32 reads{part}_{vector}, {operand[own][vector]}, {part}, wanted;"]
            # What is not read is never missing.
            lines += [f"mov.b32 {operand[4 * part + word][vector]}, -1;" for word in range(4)]
    lines += ["POLL:"]
    for part, vector in each:
        words = ", ".join(operand[4 * part + word][vector] for word in range(4))
        place = f"[{operand[address][vector]} + {part * STRIDE}]"
        # In no order with anything else, as `iris.language.ordering.load_relaxed`: the words are their own flags.
        lines += [f"@reads{part}_{vector} ld.relaxed.sys.global.v4.b32 {{{words}}}, {place};"]
    lines += ["mov.b32 late, 0;"]
    for part, vector in each:
        for word in range(4):
            place = operand[4 * part + word][vector]
            # As `iris.language.lamport.missing_elements`; 0x20 is a & ~b & c (PTX ISA, "lop3").
            lines += [f"sub.s32 zero, {place}, {LOWEST};"]
            lines += [f"lop3.b32 zero, zero, {place}, {operand[bits[word]][vector]}, 0x20;", "or.b32 late, late, zero;"]
    # Threads of a warp leave together. Where each left by itself, a sum with a norm took up to 0.8 us more (2 x H200).
    lines += ["setp.ne.s32 again, late, 0;", "vote.sync.any.pred again, again, 0xffffffff;"]
    if POLLS:
        lines += ["sub.s32 rounds, rounds, 1;", "setp.ne.and.s32 again, rounds, 0, again;"]
    return "{\n" + "\n".join(lines) + "\n@again bra POLL;\n}"


@triton.constexpr_function
def operands(PARTS, TOGETHER):
    return ",".join(["=&r"] * (4 * PARTS * TOGETHER) + ["l"] * TOGETHER + ["r"] * (5 * TOGETHER) + ["~{memory}"])


@triton.constexpr_function
def words_of(PARTS):
    return (tl.int32,) * (4 * PARTS)


@jit
def wait_by_warp(
    begins, own, bits, PARTS: tl.constexpr, STRIDE: tl.constexpr, LOWEST: tl.constexpr, POLLS: tl.constexpr
):
    """Wait until the awaited elements have come. Returns a tuple: the words of each part.

    Part p is at ``begins + p * STRIDE``. ``bits``: four blocks, with the bits of the awaited elements of word 0, 1, 2
    and 3 of each vector of 16 bytes.
    """
    NUMBER: tl.constexpr = bits[0].shape[0]
    TOGETHER: tl.constexpr = vectors_at_once(NUMBER, cuda.num_threads(), PARTS)
    v = flat_vectors(NUMBER)
    found = tl.inline_asm_elementwise(
        wait_in_ptx(PARTS, STRIDE=4 * STRIDE, LOWEST=LOWEST, POLLS=POLLS, TOGETHER=TOGETHER),
        operands(PARTS, TOGETHER),
        [tl.cast(begins + 4 * v, tl.int64), own + 0 * v, bits[0], bits[1], bits[2], bits[3]],
        dtype=words_of(PARTS),
        is_pure=False,
        pack=TOGETHER,
    )
    words = ()
    for part in tl.static_range(PARTS):
        even, odd = tl.join(found[4 * part], found[4 * part + 2]), tl.join(found[4 * part + 1], found[4 * part + 3])
        words += (tl.join(even, odd).reshape([4 * NUMBER]),)
    return words


@jit
def poll_once(begins, own, k, mask, PARTS: tl.constexpr, STRIDE: tl.constexpr):
    """The words of each part as they are now, by their numbers ``k``. All loads are under way together."""
    words = ()
    for part in tl.static_range(PARTS):
        words += (load_relaxed(begins + (part * STRIDE + k), mask & (own != part)),)
    return words
