"""The wait for LL messages of which several threads want the same words, as each goes on by them."""

import triton
import triton.language as tl

from iris.language.failures import WAIT_LIMIT_NS
from iris.language.fences import cta_sync
from iris.language.jit import jit
from iris.language.ll import ll_recv
from iris.language.ordering import load_relaxed
from iris.language.target import on_nvidia

# Of a block, on any GPU.
MOST_THREADS = tl.constexpr(1024)


@triton.constexpr_function
def wait_in_ptx(NUMBER):
    """Assembly that waits until so many words have a stamp, and gives their data.

    Operands: the data; then the stamp, the words' addresses, and for each whether it is wanted at all.
    """
    names = range(NUMBER)
    lines = [
        f".reg .pred again, {', '.join(f'wanted{i}' for i in names)};",
        f".reg .b32 {', '.join(f'stamp{i}' for i in names)};",
        f".reg .b64 {', '.join(f'word{i}' for i in names)};",
    ]
    for i in names:
        lines += [f"setp.ne.s32 wanted{i}, ${2 * NUMBER + 1 + i}, 0;", f"mov.b64 word{i}, 0;"]
    lines += ["POLL:"]
    # One access of 8 bytes each, in no order with anything else: the words are their own flags.
    lines += [f"@wanted{i} ld.relaxed.sys.global.b64 word{i}, [${NUMBER + 1 + i}];" for i in names]
    lines += ["setp.ne.s32 again, 0, 0;"]
    for i in names:
        lines += [
            f"mov.b64 {{${i}, stamp{i}}}, word{i};",
            f"@wanted{i} setp.ne.or.s32 again, stamp{i}, ${NUMBER}, again;",
        ]
    return "{\n" + "\n".join(lines) + "\n@again bra POLL;\n}"


@triton.constexpr_function
def operands(NUMBER):
    return ",".join(["=&r"] * NUMBER + ["r"] + ["l"] * NUMBER + ["r"] * NUMBER + ["~{memory}"])


@triton.constexpr_function
def words_of(NUMBER):
    return (tl.int32,) * NUMBER


@jit
def repeated(block):
    """The same again and again, up to an element for each thread of any block at least."""
    N: tl.constexpr = block.shape[0]
    COPIES: tl.constexpr = max(1, MOST_THREADS // N)
    return tl.reshape(tl.broadcast_to(block[None, :], (COPIES, N)), (COPIES * N,))


@jit
def ll_recv_shared(ptrs, stamp, masks, sources, record):
    """`ll_recv` for blocks of any size, also of fewer words than threads: all of these get the words.

    ``ptrs``, ``masks`` and ``sources`` are tuples of blocks of one shape, which are awaited together; a tuple comes
    back. On NVIDIA each thread waits for its own words, so nothing in the block is decided together: see
    `iris.language.lamport_poll`. Elsewhere, and where waits have a limit, one thread's load may have shown the stamp
    and another's have come earlier. After a barrier all load once more: a later load of a word finds what an earlier
    one has found, or newer (PTX ISA, "Memory Consistency Model": coherence).

    Who polls the same words without a limit may leave the loop when its own loads have shown the stamps. A look at the
    clock has barriers in it, so with a limit the block leaves together: each thread gets a word, some the same.
    """
    NUMBER: tl.constexpr = len(ptrs)
    words = ()
    if on_nvidia() and WAIT_LIMIT_NS == 0:
        addresses, wanted = (), ()
        for i in tl.static_range(NUMBER):
            addresses += (tl.cast(ptrs[i], tl.int64),)
            wanted += (tl.cast(masks[i], tl.int32),)
        found = tl.inline_asm_elementwise(
            wait_in_ptx(NUMBER),
            operands(NUMBER),
            (stamp,) + addresses + wanted,
            dtype=words_of(NUMBER),
            is_pure=False,
            pack=1,
        )
        words += found
    else:
        for i in tl.static_range(NUMBER):
            if WAIT_LIMIT_NS > 0:
                # As integers: not every compiler gives others another shape.
                at, wanted = repeated(tl.cast(ptrs[i], tl.int64)), repeated(tl.cast(masks[i], tl.int32)) != 0
                word = tl.cast(at, ptrs[i].dtype)
                ll_recv(word, stamp, wanted, source=repeated(sources[i]), record=record)
            else:
                ll_recv(ptrs[i], stamp, masks[i], source=sources[i], record=record)
        cta_sync()
        for i in tl.static_range(NUMBER):
            words += (tl.cast(load_relaxed(ptrs[i], masks[i]), tl.int32),)
    return words
