"""An all-reduce of a few numbers among the programs of a cluster, through distributed shared memory.

A cluster is programs with consecutive numbers. NVIDIA's GPUs from compute capability 9.0 on run them at the same time,
on multiprocessors that access each other's shared memory (PTX ISA, "Cluster of Cooperative Thread Arrays").
`iris.runtime.launch.prepare` launches them. The simulator does the same in `iris.simulator.cluster`; AMD has no
clusters.

A kernel calls `open_meeting`, `enter` and `cluster_all_reduce`, in this order. Most of the time goes to the trip to
another multiprocessor. So a program does not synchronise its warps first: each warp adds up its own values and sends
the result to all programs, and each thread adds up what arrives.

Each program has an mbarrier in its shared memory, and after it a slot for the numbers of each warp of each program. Why
that is in order:

1. A program initialises its mbarrier before it arrives at the cluster's barrier, and a fence shows that to the cluster
   (PTX ISA, "membar / fence": mbarrier_init). Warps write to other programs only after that barrier.
2. Numbers are written by asynchronous stores. When one is there, it counts its bytes on the receiver's mbarrier, a
   release at cluster scope. A thread that waits for all bytes acquires at that scope (PTX ISA, "st.async",
   "mbarrier.try_wait").
3. No thread ends before it has the numbers of all programs. So nobody writes to a program that has ended.
4. A launch does this once, so no slot is used twice.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from iris.language.address import in_simulator

# The instructions that combine two sums, and two peaks (largest values).
OPERATIONS = tl.constexpr(("add.f32", "max.NaN.f32"))


@triton.constexpr_function
def simulated(values, peaks, programs):
    # Imported here: Triton follows the global names of a constexpr_function.
    from iris.simulator import cluster

    return cluster.all_reduce(values, peaks, programs)


@triton.constexpr_function
def opening(numbers):
    """PTX of `open_meeting`: makes an mbarrier that awaits so many ``numbers``. Their slots begin 16 bytes after it."""
    return f"""{{
    .reg .pred first;
    .reg .b32 thread;
    .shared .align 16 .b8 meeting[{16 + 4 * numbers}];
    mov.u32 $0, meeting;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [meeting], 1;
    @first fence.mbarrier_init.release.cluster;
    @first mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [meeting], {4 * numbers};
    barrier.cluster.arrive.relaxed.aligned;
    }}"""


@triton.constexpr_function
def entering(programs, warps, kinds):
    """PTX of `enter`. Thread k of a warp writes to program k, and gets two addresses there: of the mbarrier, or 0 if
    there is no program k, and of the slot for the numbers of its warp.
    """
    return f"""{{
    .reg .pred sends;
    .reg .b32 thread, warp, number;
    mov.u32 thread, %tid.x;
    shr.u32 warp, thread, 5;
    and.b32 thread, thread, 31;
    setp.lt.u32 sends, thread, {programs};
    mov.u32 $0, 0;
    @sends mapa.shared::cluster.u32 $0, $2, thread;
    mov.u32 number, %cluster_ctarank;
    mad.lo.u32 number, number, {warps}, warp;
    mad.lo.u32 $1, number, {4 * kinds}, $0;
    add.u32 $1, $1, 16;
    barrier.cluster.wait.acquire.aligned;
    }}"""


@triton.constexpr_function
def combined(operation, names):
    """PTX that combines all registers into the first, as a tree, so that few additions wait for each other."""
    code, apart = "", 1
    while apart < len(names):
        for one, other in zip(names[:: 2 * apart], names[apart :: 2 * apart], strict=False):
            code += f"{operation} {one}, {one}, {other};\n"
        apart *= 2
    return code


@triton.constexpr_function
def sending(share, kinds):
    """PTX by which a warp combines its values and sends the result to all programs.

    ``share``: how many values a thread has; ``kinds``: 1 for sums, 2 for sums and peaks. Operands, each ``share``
    times: an unused result, the mbarrier and the slot of `entering`, the values, and the peaks.
    """
    names = [[f"own{kind}_{k}" for k in range(share)] for kind in range(kinds)]
    code = ""
    for kind, own in enumerate(names):
        code += "".join(f".reg .b32 {x};\nmov.b32 {x}, ${(3 + kind) * share + k};\n" for k, x in enumerate(own))
        code += combined(OPERATIONS[kind], own)
    for apart in (16, 8, 4, 2, 1):
        for kind in range(kinds):
            own = names[kind][0]
            code += f"shfl.sync.bfly.b32 other, {own}, {apart}, 31, -1;\n{OPERATIONS[kind]} {own}, {own}, other;\n"
    vector, sums = (".v2", "{own0_0, own1_0}") if kinds == 2 else ("", "own0_0")
    return f"""{{
    .reg .pred sends;
    .reg .b32 other;
    {code}
    setp.ne.u32 sends, ${share}, 0;
    @sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [${2 * share}], {sums}, [${share}];
    {"".join(f"mov.b32 ${k}, 0;" for k in range(share))}
    }}"""


@triton.constexpr_function
def receiving(numbers, kinds):
    """PTX by which each thread waits for all numbers and combines them, all threads in the same order."""
    names, wide = [f"received{k}" for k in range(numbers)], min(4, numbers)
    code = "".join(
        f"ld.shared::cta.v{wide}.b32 {{{', '.join(names[k : k + wide])}}}, [${kinds} + {16 + 4 * k}];\n"
        for k in range(0, numbers, wide)
    )
    for kind in range(kinds):
        code += combined(OPERATIONS[kind], names[kind::kinds]) + f"mov.b32 ${kind}, {names[kind]};\n"
    return f"""{{
    .reg .pred complete;
    .reg .b32 {", ".join(names)};
    await:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [${kinds}], 0;
    @!complete bra await;
    {code}
    }}"""


@triton.constexpr_function
def operands(outputs, inputs):
    """The constraints of inline assembly with so many registers."""
    return ",".join(["=&r"] * outputs + ["r"] * inputs + ["~{memory}"])


@triton.jit
def open_meeting(PROGRAMS: tl.constexpr, PEAKS: tl.constexpr):
    """Initialise this program's mbarrier. Returns its address. All ``PROGRAMS`` of the cluster call this.

    ``PROGRAMS`` is 2, 4, 8 or 16. ``PEAKS``: whether a largest value is looked for, too.
    """
    tl.static_assert(PROGRAMS == 2 or PROGRAMS == 4 or PROGRAMS == 8 or PROGRAMS == 16, "2, 4, 8 or 16 programs meet")
    if in_simulator():
        return 0
    else:
        code: tl.constexpr = opening(PROGRAMS * cuda.num_warps() * (1 + PEAKS))
        return tl.inline_asm_elementwise(code, operands(1, 0), [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def enter(meeting, PROGRAMS: tl.constexpr, PEAKS: tl.constexpr):
    """Wait until all programs have called `open_meeting`. Returns what `cluster_all_reduce` takes, another in each
    thread.
    """
    if in_simulator():
        return 0, 0
    else:
        code: tl.constexpr = entering(PROGRAMS, cuda.num_warps(), 1 + PEAKS)
        return tl.inline_asm_elementwise(
            code, operands(2, 1), [meeting], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )


@triton.jit
def cluster_all_reduce(meeting, entered, values, peaks, PROGRAMS: tl.constexpr, PEAKS: tl.constexpr):
    """The sum of all programs' float32 ``values`` and, with ``PEAKS``, the largest of their ``peaks``, NaN if one is.

    All programs get the same bits. ``values`` and ``peaks`` are blocks of one dimension with at least one element for
    each thread. Each warp sends 4 or 8 bytes to each program, in one step.
    """
    if in_simulator():
        return simulated(values, peaks if PEAKS else tl.zeros_like(values), PROGRAMS)
    else:
        # `pack`: the assembly gets all elements that a thread has as operands at once. Each element is in one thread,
        # in whatever layout.
        share: tl.constexpr = values.shape[0] // cuda.num_threads()
        tl.static_assert(share > 0, "there must be a value for each thread")
        numbers: tl.constexpr = PROGRAMS * cuda.num_warps() * (1 + PEAKS)
        if PEAKS:
            tl.inline_asm_elementwise(
                sending(share, 2),
                operands(share, 4 * share),
                [entered[0], entered[1], values, peaks],
                dtype=tl.int32,
                is_pure=False,
                pack=share,
            )
            return tl.inline_asm_elementwise(
                receiving(numbers, 2), operands(2, 1), [meeting], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
            )
        else:
            tl.inline_asm_elementwise(
                sending(share, 1),
                operands(share, 3 * share),
                [entered[0], entered[1], values],
                dtype=tl.int32,
                is_pure=False,
                pack=share,
            )
            total = tl.inline_asm_elementwise(
                receiving(numbers, 1), operands(1, 1), [meeting], dtype=tl.float32, is_pure=False, pack=1
            )
            return total, 0.0
