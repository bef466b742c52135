"""Launches that begin while the one before them on the stream ends: programmatic dependent launch."""

import triton.language as tl

from iris.language.fences import cta_sync
from iris.language.jit import jit
from iris.language.target import launches_early


@jit
def gdc_wait():
    """First of all in kernels that `iris.runtime.launch.prepare` launches; in others it does nothing.

    Only what no launch ever writes may be read before: a device context, and where the heaps of the peers begin.

    Such a kernel may begin while the launch before it on the stream ends, and waits here until that is over and its
    memory operations have been performed; what follows is in order as after any launch, and the time that a launch
    takes is hidden. The next one waits for this kernel alone, so no program of it may skip this. (PTX ISA,
    "griddepcontrol"; CUDA C++ Programming Guide, "Programmatic Dependent Launch".)
    """
    if launches_early():
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def gdc_wait_after(addresses):
    """The same, once the kernel has computed a tuple of ``addresses``, none of them null, that it needs next.

    The instruction has no operands. So the assembler puts it before what computes them, wherever that is in the
    program, and each launch takes longer. Here it depends on them: it is left out if all are null.
    """
    if launches_early():
        bits = tl.cast(addresses[0], tl.int64)
        for k in tl.static_range(1, len(addresses)):
            bits |= tl.cast(addresses[k], tl.int64)
        tl.inline_asm_elementwise(
            "{ .reg .pred known; setp.ne.s64 known, $1, 0; @known griddepcontrol.wait; mov.b32 $0, 0; }",
            "=r,l,~{memory}",
            [bits],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def gdc_launch_dependents():
    """Let the next launch on the stream begin, if it may begin early, once all programs have come here.

    After `gdc_wait`, so that at most one kernel of a stream is resident before its turn. For small kernels: the next
    launch has room beside them while they wait for peers (`iris.ccl.kernel_launch`).
    """
    if launches_early():
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
            "=r,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def gdc_launch_dependents_after_waits():
    """The same in larger kernels, where no thread of the program waits for peers any more.

    All threads of a program meet first, since the first of them to issue the instruction speaks for its program.
    """
    if launches_early():
        cta_sync()
        gdc_launch_dependents()
