"""Memory ordering: acquires, releases and waits for one flag. Those for flags of many ranks: `iris.language.barrier`.

Data that are their own flags need none of this: `iris.language.ll` and `iris.language.lamport`.

Both files keep these rules for the *whole block* (all threads of a program), on every Triton version and vendor:

* A **release** operation comes after everything that the block did before it. The release itself is issued by one
  thread, and a release only orders what that thread did or has observed (PTX ISA, Memory Consistency Model, "Release
  and acquire patterns"; causality order is transitive through barriers). So a block barrier stands before it. Triton
  inserts that barrier from 3.9 on; until then nothing would order the other threads' stores.
* An **acquire** operation comes before everything that the block does after it: a block barrier follows it, also
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

from iris.compat.language import signed_int
from iris.language.address import in_simulator
from iris.language.failures import (
    MEMBER,
    SECTION,
    STATE,
    WAIT_LIMIT_NS,
    WORDS,
    exceeded,
    kind_code,
    untimed,
    write_record,
)
from iris.language.fences import block_barrier, cta_sync, system_fence
from iris.language.jit import jit
from iris.language.note import note
from iris.language.target import cas_ignores_its_order, on_amd

ACQ_REL = tl.constexpr("acq_rel")
RELAXED = tl.constexpr("relaxed")
SYS = tl.constexpr("sys")
SET = tl.constexpr("set")

# What a lock holds while somebody has it: "HELD" in ASCII, which nobody stores there by mistake.
HELD = tl.constexpr(0x48454C44)


@triton.constexpr_function
def bits_of(element):
    """The integer type as which elements of this dtype are compared and swapped: their own, if it is one."""
    return element if element.is_int() else signed_int(element.primitive_bitwidth)


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
    """Whether the argument ``name`` takes this value."""
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
def is_tensor(value):
    return isinstance(value, tl.tensor)


@triton.constexpr_function
def check_value(call, value, element, use, name="value"):
    """Raise unless an integer of this type can hold ``value``: a constant or, in the simulator, any number.

    ``use``: of a flag "set" or "add", of any other element "swap". What is added may be negative for an unsigned flag,
    too, which counts down. What is compared and swapped is bits: of a number with a sign, or of one without.
    """
    # Imported here: Triton follows the global names of a constexpr_function, and does not know these.
    from iris.errors import InvalidArgumentError, InvalidValueError

    word = f"an element of {element}" if use == "swap" else f"a flag of {element}"
    kind = value.dtype.scalar if isinstance(value, tl.tensor) else None
    if not (isinstance(value, int) if kind is None else kind.is_int()):
        given = f"{name}={value!r}" if kind is None else f"a {name} of {kind}"
        raise InvalidArgumentError(f"{call}() got {given}, and {word} takes a whole number.")
    if kind is None:
        numbers = [value]
    else:
        numbers = value.handle.data.ravel().tolist() if in_simulator() else []
    most, least = element.get_int_max_value(), element.get_int_min_value()
    if use == "add":
        least = min(least, -most)
    elif use == "swap":
        least, most = -(1 << element.primitive_bitwidth - 1), (1 << element.primitive_bitwidth) - 1
    for number in numbers:
        if not least <= number <= most:
            raise InvalidValueError(
                f"{call}() got {name}={number}, which does not fit {word}: that takes {least} to {most}. "
                "Pass such a number, or a pointer to a dtype that holds this one."
            )


@triton.constexpr_function
def signed_type(element):
    """The signed integer as wide as ``element``."""
    return {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64}[element.primitive_bitwidth]


@jit
def give_up(record, flag_ptr, wanted, seen, kind: tl.constexpr, first, num_ranks):
    """Record that a wait has failed (`iris.language.failures`). If the record is a group's, also break the group.

    Breaking it writes to host memory (`iris.runtime.abort`). On each rank only the program that claims the record
    writes: first the rank's section, then the state, with a fence between these stores of one thread. Hosts read the
    state first, and then the section. Several ranks may write the state; each value says that the group is broken.
    """
    if write_record(record, flag_ptr, wanted=wanted, seen=seen, kind=kind, first=first, num_ranks=num_ranks):
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
def store_after_sync(ptrs, values, mask=None):
    """Store new values of counts that this block has loaded before. No other block uses them.

    Each warp loads a scalar or a small block for itself, and one warp stores it. So all warps meet in between: one that
    is late must not load what another has already stored.
    """
    cta_sync()
    tl.store(ptrs, values, mask=mask)


@jit
def atomic(op: tl.constexpr, ptr, val, mask, sem: tl.constexpr, scope: tl.constexpr):
    """The read-modify-write ``op``, with ``sem`` kept for the whole block; returns the old value.

    ``val`` is cast to the element's type, as ``tl.atomic_add`` and the others cast it (and ``tl.store``).
    """
    tl.static_assert(possible("sem", sem), refusal("sem", sem))
    tl.static_assert(possible("scope", scope), refusal("scope", scope))
    # Gluon's atomics take no scalar value for a block of pointers. The cast comes first: a plain number would be int32.
    ptr, val = tl.broadcast(ptr, tl.cast(val, ptr.dtype.scalar.element_ty))
    if mask is not None and is_block(ptr.type):
        # Nor do they take a scalar mask for one in Triton 3.6.
        ptr, mask = tl.broadcast(ptr, mask if is_tensor(mask) else tl.cast(mask, tl.int1))
    if one_of(op, "and", "or", "xor"):
        tl.static_assert(val.dtype.is_int(), "atomic_and, atomic_or and atomic_xor are for integers")
    if releases(sem):
        cta_sync()
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
    """Compare-and-swap, with ``sem`` kept for the whole block; returns the old value."""
    tl.static_assert(possible("sem", sem), refusal("sem", sem))
    tl.static_assert(possible("scope", scope), refusal("scope", scope))
    # Plain numbers become int32 in Triton; the swap needs the element's own width.
    element: tl.constexpr = ptr.dtype.scalar.element_ty
    fenced: tl.constexpr = cas_ignores_its_order() and scope == "sys"
    # Triton's own takes that type alone. A number that is cut would compare equal to another one.
    if element.is_int():
        check_value("atomic_cas", cmp, element, use="swap", name="cmp")
        check_value("atomic_cas", val, element, use="swap", name="val")
    ptr, cmp = tl.broadcast(ptr, tl.cast(cmp, element))
    ptr, val = tl.broadcast(ptr, tl.cast(val, element))
    if releases(sem):
        cta_sync()
        if fenced:
            system_fence()
    # As integers: Triton 3.6 for AMD cannot compile a compare-and-swap of floats.
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

    With ``scope`` "gpu" it is for programs of this GPU alone, and does not wait for stores that are on their way to
    peers. Returns what the flag holds after it.
    """
    tl.static_assert(possible("op", op), refusal("op", op))
    tl.static_assert(is_flag(flag_ptr.type), no_flag(flag_ptr.type))
    check_value("signal", value, flag_ptr.dtype.element_ty, use=op)
    # An exchange and not a compare-and-swap, whose order AMD's compiler ignores before Triton 3.7; an exchange and
    # not a store, which has no release in Triton before 3.9.
    value = tl.cast(value, flag_ptr.dtype.element_ty)
    tl.static_assert(not is_block(value.type), "a flag is set to one value, and not to a block of them")
    if op == "set":
        atomic("xchg", flag_ptr, value, None, sem="release", scope=scope)
        return value
    else:
        return atomic("add", flag_ptr, value, None, sem="release", scope=scope) + value


@jit
def poll(flag_ptrs, mask):
    """Load flags, once, with acquire at system scope."""
    # An addition of zero: of a scalar it compiles to a load with acquire on NVIDIA (ld.acquire.sys) and CDNA
    # (global_load sc0 sc1, buffer_inv), and cannot be removed or hoisted as a plain load can.
    flag_ptrs, nothing = tl.broadcast(flag_ptrs, tl.cast(0, flag_ptrs.dtype.scalar.element_ty))
    return tl.atomic_add(flag_ptrs, nothing, mask=mask, sem="acquire", scope="sys")


@jit
def load_relaxed(ptrs, mask):
    """Load what is in memory now, relaxed: in no order with anything else. For data that are their own flag.

    Each element is loaded in one access (PTX ISA, "Vector Data-types": a vector access is one for each element).
    """
    if in_simulator():
        note("message")
    if on_amd():
        # Triton drops `volatile` there, so the address depends on an instruction that cannot be removed; the
        # modifier bypasses the caches that a peer's store does not reach.
        nothing = tl.inline_asm_elementwise("v_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1)
        return tl.load(ptrs + nothing * 16, mask=mask, cache_modifier=".cv")
    else:
        return tl.load(ptrs, mask=mask, volatile=True)


@jit
def load_relaxed_uniform(ptrs, mask):
    """As `load_relaxed`, for a few words that decide how the block goes on: all warps get what one has read."""
    ptrs, nothing = tl.broadcast(ptrs, tl.cast(0, ptrs.dtype.scalar.element_ty))
    if in_simulator():
        note("message")
    return tl.atomic_add(ptrs, nothing, mask=mask, sem="relaxed", scope="sys")


@jit
def unmet(seen, wanted, cmp: tl.constexpr, stop: tl.constexpr):
    """Whether a wait goes on that has found ``seen`` in the flag. ``cmp`` and ``stop``: as for `wait`."""
    if stop != 0:
        return unmet(seen, wanted, cmp, 0) & ((seen & stop) == 0)
    elif cmp == "reached":
        # A difference that wraps, so that a count that overflows is still past the one before. As a signed number also
        # for unsigned counts, whose difference would never be below 0.
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
    check_value("wait", value, flag_ptr.dtype.element_ty, use="set")
    wanted = tl.cast(value, flag_ptr.dtype.element_ty)
    tl.static_assert(not is_block(wanted.type), "a flag is compared to one value, and not to a block of them")
    if in_simulator():
        note("waits_for", wanted, cmp)
    seen = poll(flag_ptr, None)
    if WAIT_LIMIT_NS == 0:
        while unmet(seen, wanted, cmp, stop):
            seen = poll(flag_ptr, None)
    else:
        since = untimed()
        waiting = unmet(seen, wanted, cmp, stop)
        while waiting:
            seen = poll(flag_ptr, None)
            waiting = unmet(seen, wanted, cmp, stop)
            if waiting:
                over, since = exceeded(record, since)
                if over:
                    give_up(record, flag_ptr, wanted=wanted, seen=seen, kind=kind_code(cmp), first=0, num_ranks=0)
                    waiting = waiting & False
    if in_simulator():
        note("waited")
    block_barrier()
    return seen


@jit
def lock(lock_ptr, record):
    """Take a lock, which is 0 while it is free. What its last holder did is visible then.

    Returns 0. If the word is neither 0 nor `HELD` it is no lock of ours: then it is not taken, and its value is
    returned.
    """
    taken = atomic_cas(lock_ptr, 0, HELD, sem="acquire", scope="sys")
    if WAIT_LIMIT_NS == 0:
        while taken == HELD:
            taken = atomic_cas(lock_ptr, 0, HELD, sem="acquire", scope="sys")
    else:
        since = untimed()
        while taken == HELD:
            taken = atomic_cas(lock_ptr, 0, HELD, sem="acquire", scope="sys")
            if taken == HELD:
                over, since = exceeded(record, since)
                if over:
                    give_up(record, lock_ptr, wanted=0, seen=taken, kind=kind_code("lock"), first=0, num_ranks=0)
                    taken = taken * 0
    return taken


@jit
def unlock(lock_ptr):
    """Give a lock back, after everything that the block did."""
    signal(lock_ptr, 0, "set")
