"""Programs of a cluster tell each other numbers through shared memory, which is nearer than the L2 cache.

A cluster is programs whose numbers follow each other. NVIDIA's GPUs from compute capability 9.0 on run them at the same
time, on multiprocessors that reach each other's shared memory (PTX ISA, "Cluster of Cooperative Thread Arrays");
`iris.launch.prepare` launches them. The simulator has what is here in `iris.simulator.cluster`; AMD has no clusters.

Each program has an mbarrier, and a place for the numbers of each. Why that is in order: a program comes to the
cluster's barrier with its mbarrier initialised, and its fence shows that to the cluster (PTX ISA, "membar / fence":
mbarrier_init); it writes to the others behind that barrier. Numbers are written by asynchronous stores, which count
their bytes on the receiver's mbarrier when they are there, a release at the cluster's scope; who awaits the bytes
acquires at that scope (PTX ISA, "st.async", "mbarrier.try_wait"). No program ends without the numbers of all, so nobody
writes to one that is gone. A launch has one meeting, so nothing is used twice.
"""

import triton
import triton.language as tl

from iris.language.address import in_simulator


@triton.constexpr_function
def simulated(value, peak, programs):
    # Imported here: Triton follows the global names of a constexpr_function.
    from iris.simulator import cluster

    return cluster.meet(value, peak, programs)


@triton.constexpr_function
def opening(programs):
    """An mbarrier that awaits 8 bytes from each program; 16 bytes behind it begin the places."""
    return f"""{{
    .reg .pred first;
    .reg .b32 thread;
    .shared .align 16 .b8 meeting[{16 + 8 * programs}];
    mov.u32 $0, meeting;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [meeting], 1;
    @first fence.mbarrier_init.release.cluster;
    @first mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [meeting], {8 * programs};
    barrier.cluster.arrive.relaxed.aligned;
    }}"""


@triton.constexpr_function
def exchange(programs):
    """Thread k sends to program k. All threads wait, and combine what came in the order of programs."""
    combined = "".join(
        f"""
    ld.shared::cta.v2.f32 {{a, b}}, [$2 + {16 + 8 * program}];
    add.f32 sum, sum, a;
    max.NaN.f32 largest, largest, b;"""
        for program in range(1, programs)
    )
    return f"""{{
    .reg .pred sends, complete;
    .reg .b32 thread, place, meeting;
    .reg .f32 sum, largest, a, b;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 thread, %tid.x;
    setp.lt.u32 sends, thread, {programs};
    mov.u32 place, %cluster_ctarank;
    mad.lo.u32 place, place, 8, $2;
    @sends mapa.shared::cluster.u32 place, place, thread;
    @sends mapa.shared::cluster.u32 meeting, $2, thread;
    @sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [place + 16], {{$3, $4}}, [meeting];
    await:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [$2], 0;
    @!complete bra await;
    ld.shared::cta.v2.f32 {{sum, largest}}, [$2 + 16];{combined}
    mov.f32 $0, sum;
    mov.f32 $1, largest;
    }}"""


@triton.jit
def open_meeting(PROGRAMS: tl.constexpr):
    """Where the memory of a meeting is. All `PROGRAMS` of the cluster call this, once, before `meet`."""
    if in_simulator():
        return 0
    else:
        return tl.inline_asm_elementwise(opening(PROGRAMS), "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def meet(meeting, value, peak, PROGRAMS: tl.constexpr):
    """The sum of all programs' float32 ``value`` and the largest ``peak``, NaN if one is: the same bits in all of them.

    All of the cluster call this, or none. 8 bytes from each to each, in one step.
    """
    if in_simulator():
        return simulated(value, peak, PROGRAMS)
    else:
        return tl.inline_asm_elementwise(
            exchange(PROGRAMS), "=f,=f,r,f,f,~{memory}", [meeting, value, peak], dtype=(tl.float32, tl.float32),
            is_pure=False, pack=1,
        )  # fmt: skip
