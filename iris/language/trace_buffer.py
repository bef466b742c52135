"""The trace buffer: where a traced kernel writes its events, a row each, in memory of its own GPU.

A row is `WORDS` int64, after a header of `HEADER` words; nothing goes over the link. Rows are handed out by an atomic
counter, so they are roughly in the order in which events began. Events that do not fit are counted and lost. Times are
those of the GPU's own clock; `iris.tracing.clock` compares the clocks of all GPUs.
"""

import triton
import triton.language as tl

from iris.failures import device_record
from iris.language.clock import clock
from iris.language.failures import linear_program_id
from iris.language.fences import block_barrier
from iris.language.jit import jit
from iris.language.ordering import atomic

TRACE = tl.constexpr(device_record.TRACE)

# The words of the header, int64.
#
#   ASKED        how many rows were asked for
#   ROOM         how many rows there are
#   CONTEXTS     how many contexts were initialised
#   LAST_LOOKS   from here on, if there are rows: a word for each context, or for each program without one. It holds the
#                row of the last look, plus 1, if later looks may extend that row, else 0.
#
# Partitions of a program share that last word and run concurrently. So a look first takes the row out of the word, and
# any other event clears the word: only one partition has a row.
ASKED, ROOM, CONTEXTS, LAST_LOOKS = map(tl.constexpr, (0, 1, 2, 16))

NUM_LAST_LOOKS = tl.constexpr(4096)

HEADER = tl.constexpr(LAST_LOOKS.value + NUM_LAST_LOOKS.value)

# The words of a row, int64.
#
#   BEGAN, ENDED     nanoseconds of the GPU's clock
#   NAME, FORM       indices into NAMES and FORMS
#   PROGRAM          the program's number; in the upper 32 bits that of the context, which tells launches apart, or 0
#   TARGET           the rank that is accessed
#   ADDRESS          in the caller's heap; for a block of pointers, where the heap begins
#   BYTES            what is moved
#   VALUE            what a flag is set to, or what is awaited
#   SEEN, AFTER      what the operation found in the flag, and what it left there
#   PID_M, PID_N     two numbers that the kernel gives the event, or the program's ids
#   LOOKS            how many looks share the row
BEGAN, ENDED, NAME, FORM, PROGRAM, TARGET, ADDRESS = map(tl.constexpr, range(7))
BYTES, VALUE, SEEN, AFTER, PID_M, PID_N, LOOKS = map(tl.constexpr, range(7, 14))

WORDS = tl.constexpr(14)

NAMES = (
    *("load", "store", "get", "put", "copy"),
    *("atomic_add", "atomic_sub", "atomic_cas", "atomic_xchg"),
    *("atomic_xor", "atomic_and", "atomic_or", "atomic_min", "atomic_max"),
    *("signal", "wait", "barrier", "compute"),
)

# "named": an event that the kernel has named itself. "move": a move of data. "flag": an operation on one flag, for its
# exact value. "whole", "high", "low": a wait for the count in a flag, or in one half of it. "meeting": a barrier.
# "data": a wait for data that are their own flag.
FORMS = ("named", "move", "flag", "whole", "high", "low", "meeting", "data")

# Atomic operations that change nothing with an operand of 0.
LOOKING = ("add", "sub", "or", "xor")


@triton.constexpr_function
def number_of(name):
    return list(NAMES).index(name)


@triton.constexpr_function
def form_of(name):
    return list(FORMS).index(name)


@jit
def least(x):
    if x.type.is_block():
        return least(tl.min(x, axis=len(x.shape) - 1))
    else:
        return x


@jit
def most(x):
    if x.type.is_block():
        return most(tl.max(x, axis=len(x.shape) - 1))
    else:
        return x


@jit
def total(x):
    if x.type.is_block():
        return total(tl.sum(x, axis=len(x.shape) - 1))
    else:
        return x


@jit
def write(buffer, row, word, value, here):
    at = tl.cast(row, tl.int64) * WORDS
    tl.store(buffer + HEADER + at + word, tl.cast(value, tl.int64) + at * 0, mask=here)


@jit
def read(buffer, row, word, here):
    return tl.load(buffer + HEADER + row * WORDS + word, mask=here, other=0)


@jit
def last_look(buffer, context):
    """The address of the header's word for this program's last look."""
    number = tl.cast(context, tl.int64)
    return buffer + LAST_LOOKS + tl.where(number == 0, linear_program_id(), number) % NUM_LAST_LOOKS


@jit
def begin(
    buffer,
    context,
    name,
    form: tl.constexpr,
    target,
    address,
    moved,
    pid_m,
    pid_n,
    value=0,
    lanes=None,
    asked=None,
    look=None,
):
    """Begin an event, or one for each of ``lanes``; returns its row, -1 if it has none.

    ``asked``: a mask, or whether the event is recorded at all; None: it is. ``look``: whether the event is a look,
    which may extend the row of the last one; None: it cannot be one.
    """
    one = tl.cast(1, tl.int64)
    room = tl.load(buffer + ROOM)
    program = linear_program_id() + (tl.cast(context, tl.int64) << 32)
    last = last_look(buffer, context)
    nothing, before, again = tl.cast(0, tl.int64), tl.cast(-1, tl.int64), room < 0
    if lanes is not None:
        row = tl.atomic_add(buffer + ASKED + lanes * 0, one + lanes * 0, mask=asked, sem="relaxed", scope="gpu")
        here = asked & (row < room)
    elif asked is not None:
        row = tl.atomic_add(buffer + ASKED, one, mask=asked, sem="relaxed", scope="gpu")
        here = asked & (row < room)
    elif look is None:
        row = tl.atomic_add(buffer + ASKED, one, sem="relaxed", scope="gpu")
        here = row < room
    else:
        # An acquire: what the last look, which may be of another partition, has written into its row is seen then.
        before = atomic("xchg", last, nothing, room > 0, sem="acquire", scope="gpu") - 1
        again = look & (room > 0) & (before >= 0)
        again = again & (read(buffer, before, PROGRAM, again) == program)
        again = again & (read(buffer, before, NAME, again) == name)
        again = again & (read(buffer, before, TARGET, again) == target)
        again = again & (read(buffer, before, ADDRESS, again) == address)
        again = again & (read(buffer, before, VALUE, again) == tl.cast(value, tl.int64))
        row = tl.atomic_add(buffer + ASKED, one, mask=again == 0, sem="relaxed", scope="gpu")
        here = (again == 0) & (row < room)
    if look is None:
        tl.atomic_xchg(last, nothing, mask=room > 0, sem="relaxed", scope="gpu")
    write(buffer, row, NAME, name, here=here)
    write(buffer, row, FORM, form_of(form), here=here)
    write(buffer, row, PROGRAM, program, here=here)
    write(buffer, row, TARGET, target, here=here)
    write(buffer, row, ADDRESS, address, here=here)
    write(buffer, row, BYTES, moved, here=here)
    write(buffer, row, VALUE, value, here=here)
    write(buffer, row, PID_M, pid_m, here=here)
    write(buffer, row, PID_N, pid_n, here=here)
    # Last, so that the writes before are not part of the event.
    write(buffer, row, BEGAN, clock(), here=here)
    # int32, as the constant is that stands for a row where nothing is traced: so both branches of an `if` agree.
    return tl.cast(tl.where(here, row, tl.where(again, before, -1)), tl.int32)


@jit
def end(buffer, row):
    block_barrier()
    write(buffer, row, ENDED, value=clock(), here=row >= 0)
