"""`ll_recv` for words that several threads need, as all of them go on by their values."""

import triton
import triton.language as tl

from iris.language.failures import WAIT_LIMIT_NS
from iris.language.fences import cta_sync
from iris.language.jit import jit
from iris.language.ll import ll_recv
from iris.language.ordering import load_relaxed
from iris.language.target import on_nvidia

# The most threads that a block has, on any GPU.
MOST_THREADS = tl.constexpr(1024)


@triton.constexpr_function
def wait_in_ptx(NUMBER):
    """PTX that waits until ``NUMBER`` words carry the stamp, and returns their data.

    Operands: the data; then the stamp, the words' addresses, and for each word whether it is awaited at all.
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
    """``block`` repeated until it has at least one element for each thread of any block."""
    N: tl.constexpr = block.shape[0]
    COPIES: tl.constexpr = max(1, MOST_THREADS // N)
    return tl.reshape(tl.broadcast_to(block[None, :], (COPIES, N)), (COPIES * N,))


@jit
def ll_recv_shared(ptrs, stamp, masks, sources, record):
    """`ll_recv` for blocks with fewer words than threads, too: all threads get the words.

    ``ptrs``, ``masks`` and ``sources`` are tuples of blocks of one shape, which are awaited together. Returns a tuple
    of the words.

    On NVIDIA without a time limit, each thread polls its own words in a PTX loop and leaves it by itself, so the block
    decides nothing together (`iris.language.lamport_poll`).

    Elsewhere two threads may have polled the same word: the load of one has shown the stamp, that of the other came
    before it. So after a barrier all threads load once more. A later load of a word finds what an earlier one has
    found, or newer (PTX ISA, "Memory Consistency Model": coherence). Reading the clock has barriers in it, so with a
    time limit the block leaves the loop together. Then there is a word for each thread: words are repeated.
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
