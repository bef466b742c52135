"""The device's side of errors in kernels: time limits of waits, checks of pointers, and the record that both write.

Waits have a time limit when ``IRIS_WAIT_TIMEOUT_S`` is set (`iris.wait_limit`). A wait that exceeds it writes who
waited for what into the device record (`iris.failures.device_record`) and returns. Without a limit none of that is in
the generated code.

A wait loop starts with ``since = untimed()``. After each poll in vain it calls ``over, since = exceeded(record,
since)``.
"""

import triton
import triton.language as tl

from iris import simulator, wait_limit
from iris.failures import device_record
from iris.language.clock import clock
from iris.language.jit import jit

KINDS = device_record.KINDS
WAIT_LIMIT_NS = tl.constexpr(0 if simulator.ACTIVE else wait_limit.NANOSECONDS)
CHECKS_POINTERS = tl.constexpr(device_record.CHECKS_POINTERS and not simulator.ACTIVE)

# A wait polls so often before it reads the clock for the first time. Reading it takes two atomics of every program on
# one word (`nanoseconds`), which run one after the other where hundreds of programs wait. A wait that ends soon should
# not pay for that. The limit is late by the time of these polls.
POLLS_WITHOUT_CLOCK = tl.constexpr(1000)

# The record, in int64 words; `iris.failures.device_record` reads it.
CLAIMED = tl.constexpr(device_record.CLAIMED)
CLOCK = tl.constexpr(device_record.CLOCK)
PROGRAM = tl.constexpr(device_record.PROGRAM)
FLAG = tl.constexpr(device_record.FLAG)
WANTED = tl.constexpr(device_record.WANTED)
SEEN = tl.constexpr(device_record.SEEN)
KIND = tl.constexpr(device_record.KIND)
FIRST = tl.constexpr(device_record.FIRST)
RANKS = tl.constexpr(device_record.RANKS)
PROGRAMS = tl.constexpr(device_record.PROGRAMS)
WORDS = tl.constexpr(device_record.WORDS)
SECTION = tl.constexpr(device_record.SECTION)
STATE = tl.constexpr(device_record.STATE)
MEMBER = tl.constexpr(device_record.MEMBER)
NOWHERE = tl.constexpr(device_record.NOWHERE)
GAVE_UP = tl.constexpr(device_record.GAVE_UP)


@triton.constexpr_function
def kind_code(kind):
    return list(KINDS).index(kind)


@triton.constexpr_function
def claim_of(code):
    """The value of `CLAIMED` in a record of the kind with this code."""
    return device_record.NOTED if KINDS[code] in device_record.NOTED_KINDS else device_record.GAVE_UP


@jit
def linear_program_id():
    row = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    return row * tl.num_programs(0) + tl.program_id(0)


@jit
def nanoseconds(record):
    """The GPU's clock, the same for all threads of the block."""
    now = clock()
    # Threads read the clock at different moments, but all of them must leave the loop at once. A scalar atomic is done
    # by one thread, and all get its result: the latest time that any program has posted. The second atomic reads it:
    # what the maximum returns is the value before it, which is old if no wait ran lately.
    tl.atomic_max(record + CLOCK, now, sem="relaxed", scope="gpu")
    return tl.atomic_add(record + CLOCK, tl.cast(0, tl.int64), sem="relaxed", scope="gpu")


@jit
def expired(record, since):
    """Whether a wait that began at ``since`` has exceeded its limit, or another one of the launch has."""
    # Once one wait has given up, all others with this record do: the results are lost, and the kernels should end soon.
    claimed = tl.atomic_add(record + CLAIMED, tl.cast(0, tl.int64), sem="relaxed", scope="gpu")
    return (claimed == GAVE_UP) | (nanoseconds(record) - since > WAIT_LIMIT_NS)


@jit
def untimed(polls: tl.constexpr = POLLS_WITHOUT_CLOCK):
    """The first ``since`` for `exceeded`: minus the number of polls until it reads the clock."""
    return tl.cast(-polls, tl.int64)


@jit
def exceeded(record, since):
    """Count a poll in vain. Returns whether the wait has exceeded its limit, and ``since`` for the next poll."""
    over = since < -POLLS_WITHOUT_CLOCK
    if since < 0:
        since += 1
        if since == 0:
            since = nanoseconds(record)
    else:
        over = expired(record, since)
    return over, since


@jit
def write_record(record, flag_ptr, wanted, seen, kind: tl.constexpr, first, num_ranks):
    """Claim the record, and fill it in if this program is the first to do so. The host reads it after the kernel.

    Returns whether this program was the first.
    """
    claim = tl.cast(claim_of(kind), tl.int64)
    # A maximum, so that a wait that gives up makes the others give up, also if an error was only noted before.
    before = tl.atomic_max(record + CLAIMED, claim, sem="relaxed", scope="gpu")
    if before == 0:
        tl.store(record + PROGRAM, tl.cast(linear_program_id(), tl.int64))
        tl.store(record + FLAG, tl.cast(flag_ptr, tl.int64))
        tl.store(record + WANTED, tl.cast(wanted, tl.int64))
        tl.store(record + SEEN, tl.cast(seen, tl.int64))
        tl.store(record + KIND, tl.cast(kind, tl.int64))
        tl.store(record + FIRST, tl.cast(first, tl.int64))
        tl.store(record + RANKS, tl.cast(num_ranks, tl.int64))
        programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        tl.store(record + PROGRAMS, tl.cast(programs, tl.int64))
    return before == 0


@jit
def largest(values):
    """The largest element of a block of up to three dimensions; of a scalar itself."""
    if values.type.is_block():
        if len(values.shape) == 3:
            values = tl.max(values, axis=2)
        if len(values.shape) == 2:
            values = tl.max(values, axis=1)
        values = tl.max(values, axis=0)
    return values


@jit
def check_pointer(ptr, mask, base, size, record):
    """Record an error if a pointer, under ``mask``, is outside the heap of ``size`` bytes at ``base``."""
    address = tl.cast(ptr, tl.int64)
    outside = (address < base) | (address >= base + size)
    if mask is not None:
        outside = outside & mask
    wrong = largest(tl.where(outside, address, 0))
    if wrong != 0:
        write_record(record, wrong, wanted=base, seen=0, kind=kind_code("pointer"), first=0, num_ranks=0)
