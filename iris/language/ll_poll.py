"""The wait for LL messages of which several threads want the same words, as each goes on by them."""

import triton
import triton.language as tl

from iris.language.failures import WAIT_LIMIT_NS
from iris.language.fences import cta_sync
from iris.language.jit import jit
from iris.language.ll import ll_recv
from iris.language.ordering import load_relaxed
from iris.language.target import on_nvidia


@triton.constexpr_function
def wait_in_ptx():
    """Assembly that waits until the word at $2 has the stamp $3, and gives its data.

    $1 is the word as it was at first, $4 whether it is wanted at all.
    """
    return """{
.reg .pred again, wanted;
.reg .b32 stamp;
.reg .b64 word;
setp.ne.s32 wanted, $4, 0;
mov.b64 word, $1;
TEST:
mov.b64 {$0, stamp}, word;
setp.ne.and.s32 again, stamp, $3, wanted;
@!again bra DONE;
ld.relaxed.sys.global.b64 word, [$2];
bra TEST;
DONE:
}"""


@jit
def ll_recv_shared(ptrs, stamp, mask, source, record):
    """`ll_recv` for blocks of any size, also of fewer words than threads: all of these get the words.

    On NVIDIA each thread waits for its own words, so nothing in the block is decided together: see
    `iris.language.lamport_poll`. Elsewhere, and where waits have a limit, one thread's load may have shown the stamp
    and another's have come earlier. Behind a barrier all load once more: a later load of a word finds what an earlier
    one has found, or newer (PTX ISA, "Memory Consistency Model": coherence).
    """
    if on_nvidia() and WAIT_LIMIT_NS == 0:
        # All of them under way together.
        first = load_relaxed(ptrs, mask)
        return tl.inline_asm_elementwise(
            wait_in_ptx(),
            "=&r,l,l,r,r,~{memory}",
            [first, tl.cast(ptrs, tl.int64), stamp, tl.cast(mask, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        ll_recv(ptrs, stamp, mask, source, record)
        cta_sync()
        return tl.cast(load_relaxed(ptrs, mask), tl.int32)
