"""Fences, and the barrier among the threads of a block, of which every acquire and release is made."""

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
    """All threads of the block meet (``__syncthreads``). On AMD stores may still be under way: see `cta_sync`."""
    tl.debug_barrier()


gluon_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton < 3.7


@gluon_version_of(block_barrier)
def _gluon_block_barrier():
    gluon_barrier()


@jit
def cta_sync():
    """`block_barrier` that orders all that the threads of the block did before what any of them does next.

    On AMD a barrier does not wait for stores of other waves, so each wave first waits for its own.
    """
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

    It does not order an earlier store before a later load of other memory: that takes a sequentially consistent fence
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
    """Order everything that the block did before everything that it will do, for observers anywhere.

    An earlier store and a later load of other memory are an exception: see `system_fence`.
    """
    # A release is a fence and a later write of the *same* thread (PTX ISA, "Release and acquire patterns"), an acquire
    # is a read and a later fence. So there is a barrier before the fence, by which each thread's fence also covers what
    # the others did. A barrier after it is for what one thread has read before it and others act on after it.
    cta_sync()
    if in_simulator():
        note("fenced")
    system_fence()
    block_barrier()


@jit
def order_bulk_copies():
    """Order what the block has acquired before the copies by TMA that its threads issue from here on.

    TMA accesses memory through another proxy than loads and stores do (PTX ISA, "Async proxy").
    """
    if in_simulator():
        note("proxy_fenced")
    if on_nvidia():
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def await_bulk_stores():
    """Wait until all TMA stores that the block's threads have issued are in memory. A later release then covers them.

    Before Triton 3.7 Gluon's own wait is only for the stores to have read their source. (PTX ISA,
    "cp.async.bulk.wait_group": without .read the writes are visible to the thread that issued them. That thread meets
    the others in the barrier before the release.)
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
