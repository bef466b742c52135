"""Memory ordering: every acquire, every release and every wait of the library.

The rules that this file keeps, for the *whole block* (all threads of a program), on every Triton version and vendor:

* A **release** operation comes after everything that the block did before it. The release itself is issued by one
  thread, and a release only orders what that thread did or has observed (PTX ISA, Memory Consistency Model, "Release
  and acquire patterns"; causality order is transitive through barriers). So a block barrier stands before it. Triton
  inserts that barrier from 3.9 on; until then nothing would order the other threads' stores.
* An **acquire** operation comes before everything that the block does after it: a block barrier stands behind it, also
  when nobody uses its result.
* On AMD CDNA a barrier does not wait for other waves' stores (they are counted per wave by ``vmcnt``), so every wave
  drains its own stores before the barrier.
* Waiting is an acquire at system scope in a loop, never a plain load: the compiler removes a loop over a plain load.

"Block" means the threads that a Triton or Gluon barrier gathers: in a partition of ``gl.warp_specialize`` that is the
partition. What other partitions did, and asynchronous copies (TMA), are for the kernel to wait for beforehand.

Waits may have a time limit: `iris.language.failures`.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from iris import device_record
from iris.language.address import in_simulator, translate
from iris.language.failures import (
    MEMBER,
    SECTION,
    STATE,
    WAIT_LIMIT_NS,
    WORDS,
    expired,
    kind_code,
    linear_program_id,
    nanoseconds,
    write_record,
)
from iris.language.jit import gluon_version_of, jit
from iris.language.target import cas_ignores_its_order, launches_early, on_amd, on_nvidia, threads_per_warp

ACQ_REL = tl.constexpr("acq_rel")
RELAXED = tl.constexpr("relaxed")
SYS = tl.constexpr("sys")
SET = tl.constexpr("set")
WHOLE = tl.constexpr("whole")

# What a lock holds while somebody has it: "HELD" in ASCII, which nobody stores there by mistake.
HELD = tl.constexpr(0x48454C44)

# A barrier's flags are exchanged by so many lanes at once: a warp. All releases of a warp share one system fence;
# a loop over single releases would pay for a fence each.
LANES = tl.constexpr(device_record.BARRIER_LANES)


@triton.constexpr_function
def bits_of(element):
    """The integers whose bits elements of this dtype are swapped by: themselves, if they are integers."""
    return element if element.is_int() else tl.core.get_int_dtype(element.primitive_bitwidth, True)


@triton.constexpr_function
def releases(sem):
    return sem in ("release", "acq_rel")


@triton.constexpr_function
def acquires(sem):
    return sem in ("acquire", "acq_rel")


@triton.constexpr_function
def one_of(value, *choices):
    return value in choices


CHOICES = {
    "sem": ("relaxed", "acquire", "release", "acq_rel"),
    "scope": ("cta", "gpu", "sys"),
    "op": ("set", "add"),
    "cmp": ("eq", "ne", "gt", "ge", "lt", "le", "reached"),
}


@triton.constexpr_function
def possible(name, value):
    return value in CHOICES[name]


@triton.constexpr_function
def refusal(name, value):
    return f"{name}={value!r} is not possible; it takes one of {', '.join(map(repr, CHOICES[name]))}"


@triton.constexpr_function
def is_flag(kind):
    return kind.is_ptr() and kind.element_ty.is_int() and kind.element_ty.primitive_bitwidth in (32, 64)


@triton.constexpr_function
def no_flag(kind):
    return f"a flag is one integer of 32 or 64 bits, given by a scalar pointer to it, and not by {kind}"


@triton.constexpr_function
def is_block(kind):
    return kind.is_block()


@triton.constexpr_function
def signed_type(element):
    """The signed integer as wide as ``element``."""
    return {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64}[element.primitive_bitwidth]


@triton.constexpr_function
def meeting(half):
    """What flags of that form are for, among the kinds of `iris.device_record`."""
    return "barrier" if half == "whole" else "queue"


@triton.constexpr_function
def warp_layout(num_warps):
    """A warp of `LANES` lanes; further warps, and the upper half of an AMD wave, hold copies."""
    return gl.BlockedLayout([1], [threads_per_warp()], [num_warps], [0])


@triton.constexpr_function
def note(event):
    """In the simulator: tell the sanitizer of the event, if one looks on, and partitions of a fence."""
    # Imported here: Triton follows the global names of a constexpr_function.
    from iris.simulator import sanitizer, tasks

    if event == "fenced":
        tasks.fenced()
    if sanitizer.recorder is not None:
        getattr(sanitizer.recorder, event)()


@triton.jit
def lanes():
    return tl.arange(0, LANES)


@gluon_version_of(lanes)
def _gluon_lanes():
    return gl.arange(0, LANES, layout=warp_layout(gl.num_warps()))


@triton.jit
def block_barrier():
    tl.debug_barrier()


gluon_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton < 3.7


@gluon_version_of(block_barrier)
def _gluon_block_barrier():
    gluon_barrier()


@jit
def gather_block():
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
def follow_predecessor():
    """First of all in kernels that `iris.launch.prepare` launches; in others it does nothing.

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
def admit_successor():
    """Let the next launch on the stream begin, if it may begin early, once all programs have come here.

    For small kernels, behind `follow_predecessor`: of a stream, one kernel at a time has places before its turn.
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
def system_fence():
    """Each thread orders its own earlier accesses before its later ones, for observers anywhere in the system."""
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
    # acquire a read and a later fence. So: a barrier in front, that each thread's fence be cumulative over what the
    # others did; then the fence; and a barrier behind it, for what one thread has read and others go on from.
    gather_block()
    if in_simulator():
        note("fenced")
    system_fence()
    block_barrier()


@jit
def give_up(record, flag_ptr, wanted, seen, kind: tl.constexpr, first, num_ranks):
    """Record that a wait has failed (`iris.language.failures`), and break the group, if the record is a group's.

    Who writes and reads the host's memory: one program of a rank, the one that claims the rank's record, writes the
    section of that rank and then the state; hosts of all ranks read the state and then the section. The fence
    between these stores, all of one thread, orders them. Several ranks may write the state; any of them will do.
    """
    if write_record(record, flag_ptr, wanted, seen, kind, first, num_ranks):
        section = tl.load(record + SECTION)
        if section != 0:
            there = tl.cast(section, tl.pointer_type(tl.int64))
            for word in tl.static_range(WORDS):
                tl.store(there + word, tl.load(record + word))
            system_fence()
            state = tl.cast(tl.load(record + STATE), tl.pointer_type(tl.int64))
            tl.store(state, tl.load(record + MEMBER))
            system_fence()


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
    meets the others in a barrier in front of the release.)
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


@jit
def keep(ptrs, values, mask=None):
    """Store counts of the block's own, which it has loaded before, for its next use of them.

    Scalars and small blocks are loaded by each warp for itself, and stored by one of them. A warp that comes late
    to the load must not find what another has already stored.
    """
    gather_block()
    tl.store(ptrs, values, mask=mask)


@jit
def atomic(op: tl.constexpr, ptr, val, mask, sem: tl.constexpr, scope: tl.constexpr):
    """The read-modify-write ``op`` with its order for the whole block; returns the old value."""
    tl.static_assert(possible("sem", sem), refusal("sem", sem))
    tl.static_assert(possible("scope", scope), refusal("scope", scope))
    # Gluon's atomics take no scalar value for a block of pointers; a cast first, lest the broadcast be to int32.
    ptr, val = tl.broadcast(ptr, tl.cast(val, ptr.dtype.scalar.element_ty))
    if one_of(op, "and", "or", "xor"):
        tl.static_assert(val.dtype.is_int(), "atomic_and, atomic_or and atomic_xor are for integers")
    if releases(sem):
        gather_block()
    if op == "add":
        old = tl.atomic_add(ptr, val, mask=mask, sem=sem, scope=scope)
    elif op == "sub":
        old = tl.atomic_add(ptr, -val, mask=mask, sem=sem, scope=scope)
    elif op == "xchg":
        old = tl.atomic_xchg(ptr, val, mask=mask, sem=sem, scope=scope)
    elif op == "and":
        old = tl.atomic_and(ptr, val, mask=mask, sem=sem, scope=scope)
    elif op == "or":
        old = tl.atomic_or(ptr, val, mask=mask, sem=sem, scope=scope)
    elif op == "xor":
        old = tl.atomic_xor(ptr, val, mask=mask, sem=sem, scope=scope)
    elif op == "min":
        old = tl.atomic_min(ptr, val, mask=mask, sem=sem, scope=scope)
    else:
        tl.static_assert(op == "max", "unknown atomic operation")
        old = tl.atomic_max(ptr, val, mask=mask, sem=sem, scope=scope)
    if acquires(sem):
        block_barrier()
    return old


@jit
def atomic_cas(ptr, cmp, val, sem: tl.constexpr, scope: tl.constexpr):
    """Compare-and-swap with its order for the whole block; returns the old value."""
    tl.static_assert(possible("sem", sem), refusal("sem", sem))
    tl.static_assert(possible("scope", scope), refusal("scope", scope))
    # Plain numbers become int32 in Triton; the swap needs the element's own width.
    element: tl.constexpr = ptr.dtype.scalar.element_ty
    fenced: tl.constexpr = cas_ignores_its_order() and scope == "sys"
    ptr, cmp = tl.broadcast(ptr, tl.cast(cmp, element))
    ptr, val = tl.broadcast(ptr, tl.cast(val, element))
    if releases(sem):
        gather_block()
        if fenced:
            system_fence()
    # By bits: Triton 3.6 for AMD cannot compile a swap of floats.
    bits: tl.constexpr = bits_of(element)
    ptr = tl.cast(ptr, tl.pointer_type(bits), bitcast=True)
    cmp, val = tl.cast(cmp, bits, bitcast=True), tl.cast(val, bits, bitcast=True)
    old = tl.cast(tl.atomic_cas(ptr, cmp, val, sem=sem, scope=scope), element, bitcast=True)
    if acquires(sem):
        if fenced:
            system_fence()
        block_barrier()
    return old


@jit
def signal(flag_ptr, value, op: tl.constexpr, scope: tl.constexpr = SYS):
    """Publish everything that the block did so far: a release of ``value`` into a flag.

    At "gpu" ``scope`` for programs of this GPU alone: it does not wait for what is on its way to peers. Returns
    what the flag holds behind it.
    """
    tl.static_assert(possible("op", op), refusal("op", op))
    tl.static_assert(is_flag(flag_ptr.type), no_flag(flag_ptr.type))
    # An exchange and not a compare-and-swap, whose order AMD's compiler ignores before Triton 3.7; an exchange and
    # not a store, which has no release in Triton before 3.9.
    value = tl.cast(value, flag_ptr.dtype.element_ty)
    tl.static_assert(not is_block(value.type), "a flag is set to one value, and not to a block of them")
    if op == "set":
        atomic("xchg", flag_ptr, value, None, "release", scope)
        return value
    else:
        return atomic("add", flag_ptr, value, None, "release", scope) + value


@jit
def poll(flag_ptrs, mask):
    # An addition of zero: of a scalar it compiles to a load with acquire on NVIDIA (ld.acquire.sys) and CDNA
    # (global_load sc0 sc1, buffer_inv), and cannot be removed or hoisted as a plain load can.
    flag_ptrs, nothing = tl.broadcast(flag_ptrs, tl.cast(0, flag_ptrs.dtype.scalar.element_ty))
    return tl.atomic_add(flag_ptrs, nothing, mask=mask, sem="acquire", scope="sys")


@jit
def reread(ptrs, mask):
    """What is in memory now, in no order with anything else: for data that carry their own arrival.

    Relaxed, an element at a time (PTX ISA, "Vector Data-types": a vector access is one for each element).
    """
    if on_amd():
        # Triton drops `volatile` there, so the address depends on an instruction that cannot be removed; the
        # modifier bypasses the caches that a peer's store does not reach.
        nothing = tl.inline_asm_elementwise("v_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1)
        return tl.load(ptrs + nothing * 16, mask=mask, cache_modifier=".cv")
    else:
        return tl.load(ptrs, mask=mask, volatile=True)


@jit
def inspect(ptrs, mask):
    """As `reread`, for a few words on which all of the block goes on: every warp gets what one of them has read."""
    ptrs, nothing = tl.broadcast(ptrs, tl.cast(0, ptrs.dtype.scalar.element_ty))
    return tl.atomic_add(ptrs, nothing, mask=mask, sem="relaxed", scope="sys")


@jit
def unmet(seen, wanted, cmp: tl.constexpr, stop: tl.constexpr):
    if stop != 0:
        return unmet(seen, wanted, cmp, 0) & ((seen & stop) == 0)
    elif cmp == "reached":
        # A wrapping difference: a count that overflows its type is still the next one. Signed, also of counts that
        # are not: theirs is never less than 0.
        return tl.cast(wanted - seen, signed_type(wanted.dtype)) > 0
    elif cmp == "eq":
        return seen != wanted
    elif cmp == "ne":
        return seen == wanted
    elif cmp == "gt":
        return seen <= wanted
    elif cmp == "ge":
        return seen < wanted
    elif cmp == "lt":
        return seen >= wanted
    else:
        return seen > wanted


@jit
def wait(flag_ptr, value, cmp: tl.constexpr, record, stop: tl.constexpr = 0):
    """Return the flag's value once ``flag <cmp> value`` holds; whatever was published before it is then visible.

    ``stop``: bits of the flag, each of which ends the wait as well.
    """
    tl.static_assert(possible("cmp", cmp), refusal("cmp", cmp))
    tl.static_assert(is_flag(flag_ptr.type), no_flag(flag_ptr.type))
    wanted = tl.cast(value, flag_ptr.dtype.element_ty)
    tl.static_assert(not is_block(wanted.type), "a flag is compared to one value, and not to a block of them")
    seen = poll(flag_ptr, None)
    if WAIT_LIMIT_NS == 0:
        while unmet(seen, wanted, cmp, stop):
            seen = poll(flag_ptr, None)
    else:
        since = nanoseconds(record)
        waiting = unmet(seen, wanted, cmp, stop)
        while waiting:
            seen = poll(flag_ptr, None)
            waiting = unmet(seen, wanted, cmp, stop)
            if waiting:
                if expired(record, since):
                    give_up(record, flag_ptr, wanted, seen, kind_code(cmp), 0, 0)
                    waiting = waiting & False
    block_barrier()
    return seen


@jit
def lock(lock_ptr, record):
    """Take a lock, 0 while it is free: what its last holder did is visible then. One program a lock at a time.

    Returns 0; or, if the lock is neither free nor `HELD`, what it holds: then it has not been taken.
    """
    taken = atomic_cas(lock_ptr, 0, HELD, "acquire", "sys")
    if WAIT_LIMIT_NS == 0:
        while taken == HELD:
            taken = atomic_cas(lock_ptr, 0, HELD, "acquire", "sys")
    else:
        since = nanoseconds(record)
        while taken == HELD:
            taken = atomic_cas(lock_ptr, 0, HELD, "acquire", "sys")
            if taken == HELD:
                if expired(record, since):
                    give_up(record, lock_ptr, 0, taken, kind_code("lock"), 0, 0)
                    taken = taken * 0
    return taken


@jit
def unlock(lock_ptr):
    """Give a lock back, behind everything that the block did."""
    signal(lock_ptr, 0, "set")


@jit
def count(flags, here, half: tl.constexpr):
    """The flags, or the "high" or "low" 32 bits of flags that hold two counts."""
    if half == "high":
        return tl.cast(poll(flags, here) >> 32, tl.int32)
    elif half == "low":
        return tl.cast(poll(flags, here), tl.int32)
    else:
        return poll(flags, here)


@jit
def behind(flags, wanted, here, half: tl.constexpr):
    """By how much the slowest of these flags is behind what is ``wanted`` of it; 0 or less: none is."""
    # A wrapping difference: a count that overflows its type is still the next one.
    return tl.max(tl.where(here, wanted - count(flags, here, half), 0), axis=0)


@jit
def arrivals(flags, wanted, here, half: tl.constexpr):
    """A bit for each of `LANES` flags: has it arrived?"""
    there = (here == 0) | (wanted - count(flags, here, half) <= 0)
    return tl.sum(tl.cast(there, tl.int64) << lanes(), axis=0)


@jit
def signal_ranks(flag_ptr, values, peers, here, table, base, op: tl.constexpr = SET):
    """Publish everything that the block did so far: ``values`` into the copies of ``flag_ptr`` of ``peers``.

    ``op``: "set" or "add". ``values``, ``peers`` and the mask ``here`` are blocks of `lanes`: one fence serves all
    of these releases. Returns what the flags hold behind them.
    """
    gather_block()
    flags = translate(flag_ptr, base, tl.load(table + peers, mask=here, other=0))
    if op == "set":
        tl.atomic_xchg(flags, values, mask=here, sem="release", scope="sys")
        return values
    else:
        return tl.atomic_add(flags, values, mask=here, sem="release", scope="sys") + values


@jit
def wait_ranks(flag_ptrs, wanted, here, first, num_ranks, record, half: tl.constexpr = WHOLE):
    """Wait until each of the caller's own flags, where ``here``, has reached ``wanted`` (wrapping, like epochs).

    Blocks of `lanes`, for the ranks from ``first`` on; what was published with the flags is visible afterwards.
    ``half``: "high" or "low", where flags of 64 bits hold two counts.
    """
    missing = behind(flag_ptrs, wanted, here, half)
    if WAIT_LIMIT_NS == 0:
        while missing > 0:
            missing = behind(flag_ptrs, wanted, here, half)
    else:
        since = nanoseconds(record)
        while missing > 0:
            missing = behind(flag_ptrs, wanted, here, half)
            if missing > 0:
                if expired(record, since):
                    there = arrivals(flag_ptrs, wanted, here, half)
                    # The flags of one barrier all await one value; those of a queue may not, so: the largest.
                    most = tl.max(tl.where(here, wanted, 0), axis=0)
                    row = tl.min(tl.cast(flag_ptrs, tl.int64), axis=0)
                    give_up(record, row, most, there, kind_code(meeting(half)), first, num_ranks)
                    missing = missing * 0
    block_barrier()


@jit
def barrier(flags_ptr, epoch, rank, num_ranks, table, base, record):
    """Program p of every rank meets program p of every other; what was written before is visible behind it.

    ``flags_ptr``: int32 or int64, symmetric, ``[programs, num_ranks]``, zeros at first. ``flags[p, r]`` is the last
    epoch in which rank r's program p arrived. Rank r alone writes it, into every rank's copy; each rank reads its
    own copy of the whole row. The column of a rank in its own copy is where it keeps its own epoch.

    Why a flag can be reused in the next epoch: r announces e + 1 only behind the barrier of e, hence after every
    rank announced e, but maybe before a slow rank has *seen* r's e. That rank waits for e *or later*, so it loses
    nothing; and r cannot reach e + 2 before the slow rank has announced e + 1. Flags never need resetting.

    Returns the epoch. Over the link: one flag to each peer, in one step.
    """
    tl.static_assert(one_of(flags_ptr.dtype.element_ty, tl.int32, tl.int64),
                       "the flags of a barrier must be int32 or int64")  # fmt: skip
    row = flags_ptr + tl.cast(linear_program_id(), tl.int64) * num_ranks
    if epoch is None:
        # An atomic: a second barrier in the same kernel must not find the first one's line in the L1.
        reached = tl.atomic_add(row + rank, tl.cast(0, flags_ptr.dtype.element_ty), sem="relaxed", scope="gpu") + 1
    else:
        reached = tl.cast(epoch, flags_ptr.dtype.element_ty)
    for first in range(0, num_ranks, LANES):
        peer = first + lanes()
        # Releases everything that the block did, to peers and to this rank's later epochs alike.
        signal_ranks(row + rank, reached + tl.zeros_like(peer), peer, peer < num_ranks, table, base)
    for first in range(0, num_ranks, LANES):
        peer = first + lanes()
        wait_ranks(row + peer, reached + tl.zeros_like(peer), peer < num_ranks, first, num_ranks, record)
    return reached
