"""Fences, and the barrier among the threads of a block: what every acquire and release is made of."""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from iris.language.address import in_simulator
from iris.language.jit import gluon_version_of, jit
from iris.language.note import note
from iris.language.target import on_amd, on_nvidia


@triton.jit
def block_barrier():
    tl.debug_barrier()


gluon_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton < 3.7


@gluon_version_of(block_barrier)
def _gluon_block_barrier():
    gluon_barrier()


@jit
def cta_sync():
    """Everything that the block's threads did comes before what any of them does next."""
    if on_amd():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n\tv_mov_b32 $0, 0",
            "=v,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    block_barrier()


@jit
def system_fence():
    """Each thread orders its own earlier accesses before its later ones, for observers anywhere in the system.

    But not an earlier store before a later load of other memory, which takes a fence that is sequentially consistent
    (PTX ISA, "membar / fence": acq_rel).
    """
    if on_nvidia():
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )
    if on_amd():
        # Write back the L2, wait for it, and drop stale lines: LLVM's AMDGPU memory model for gfx942, fence
        # acq_rel.
        tl.inline_asm_elementwise(
            "buffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt(0)\n\tbuffer_inv sc0 sc1\n\tv_mov_b32 $0, 0",
            "=v,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def fence():
    """Everything that the block did comes before everything that it will do, for observers anywhere."""
    # A release is a fence and a later write of the *same* thread (PTX ISA, "Release and acquire patterns"), an
    # acquire a read and a later fence. So: a barrier before, that each thread's fence be cumulative over what the
    # others did; then the fence; and a barrier after it, for what one thread has read and others go on from.
    cta_sync()
    if in_simulator():
        note("fenced")
    system_fence()
    block_barrier()


@jit
def order_bulk_copies():
    """What the block has acquired comes before the copies by TMA that its threads issue from here on.

    They access memory through another proxy than loads and stores do (PTX ISA, "Async proxy").
    """
    if in_simulator():
        note("proxy_fenced")
    if on_nvidia():
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def await_bulk_stores():
    """Until all copies by TMA that the block's threads have issued are in memory: a release is then of them too.

    Gluon's own wait is, before Triton 3.7, only for the reading of their source. (PTX ISA,
    "cp.async.bulk.wait_group": without .read the writes have been made visible to the thread that issued them; it
    meets the others in a barrier before the release.)
    """
    if in_simulator():
        tma.store_wait(0, read_only=False)
    else:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.b32 $0, 0;",
            "=r,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
