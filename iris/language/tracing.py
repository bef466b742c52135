"""What a traced kernel records: when each event began and ended, and what it moved, into memory of its own GPU.

A context that was initialised with ``tracing=True`` has these events of its own operations, and of what the kernel
names itself between ``ctx.tracing.record_event_start`` and ``record_event_end``. With ``IRIS_TRACE=1``, which is what
``python -m iris trace`` sets, every context is traced, and every functional operation. Elsewhere there is nothing of it
in the generated code.

An event takes a row of `WORDS` int64 of the rank's trace buffer, behind its header of `HEADER` words; nothing goes over
the link. Rows are handed out by an atomic counter, so they are in the order in which events began, more or less; those
that do not fit are counted and lost. A look at a flag by an atomic operation that changes nothing is no event of its
own, if nothing came since this program's last look at it that saw the same: the row of that one goes on. So who polls
in a loop of its own does not fill the buffer. Times are those of the GPU's own clock: `iris.tracing.clock` makes them
one clock.

An event begins when the first warp comes to it, and ends when the last one has left it: a block barrier stands in front
of the end. What was loaded is there then; what was stored has been issued, and may be on the link yet.
"""

import triton
import triton.language as tl

from iris import device_record
from iris.language.address import bytes_of
from iris.language.clock import clock
from iris.language.failures import linear_program_id
from iris.language.jit import aggregate, jit
from iris.language.ordering import atomic, block_barrier, signed_type
from iris.switches import switched_on

VARIABLE = "IRIS_TRACE"

TRACES_ALL = tl.constexpr(switched_on(VARIABLE))
"""Whether every kernel is traced, whatever its context says."""

TRACE = tl.constexpr(device_record.TRACE)

# The header: rows that were asked for, rows that there are, and contexts that were initialised; then the last looks,
# where there are rows: 1 more than the row of a look, if that may go on, else 0. By context, each of which is of one
# program; or by program, where there is none. Partitions of a program share a word, and run at one time: a look takes
# the row out of it as it begins, and any other event what is there, so whoever has a row has it alone.
ASKED, ROOM, CONTEXTS, LAST_LOOKS = map(tl.constexpr, (0, 1, 2, 16))
NUM_LAST_LOOKS = tl.constexpr(4096)
HEADER = tl.constexpr(LAST_LOOKS.value + NUM_LAST_LOOKS.value)

# A row. NAME and FORM: numbers of `NAMES` and `FORMS`. PROGRAM: its number, and in the upper half that of the context,
# which tells launches apart; 0 where there is none. TARGET: the rank that is reached. ADDRESS: in the caller's heap;
# of a block of pointers, where that begins. VALUE: what a flag is set to, or awaited for; SEEN: what the operation
# found in it, and AFTER: what it left there. LOOKS: how many looks at a flag the event is.
(
    BEGAN, ENDED, NAME, FORM, PROGRAM, TARGET, ADDRESS, BYTES, VALUE, SEEN, AFTER, PID_M, PID_N, LOOKS,
) = map(tl.constexpr, range(14))  # fmt: skip
WORDS = tl.constexpr(14)

NAMES = (
    "load", "store", "get", "put", "copy", "atomic_add", "atomic_sub", "atomic_cas", "atomic_xchg", "atomic_xor",
    "atomic_and", "atomic_or", "atomic_min", "atomic_max", "signal", "wait", "barrier", "compute",
)  # fmt: skip

# An event that the kernel has named itself; a move of data; an operation on one flag, whose values count; the
# same of a flag that has been reached, whole or in one half; a barrier; data that carry their own arrival.
FORMS = ("named", "move", "flag", "whole", "high", "low", "meeting", "data")
FLAG = tl.constexpr("flag")

# Atomic operations that change nothing with an operand of 0.
LOOKING = ("add", "sub", "or", "xor")

SEVERAL = tl.constexpr(-2)
"""The target of an event that reaches more than one rank."""


class TraceEvent:
    """The kinds of events, as numbers for ``record_event_start``: ``iris.TraceEvent.compute`` and so on."""

    # For Triton, which may then find it among the globals of a kernel.
    __triton_builtin__ = True

    # Older programs write ``TraceEvent().put``.
    def __new__(cls, **_):
        return cls


for _number, _name in enumerate(NAMES):
    setattr(TraceEvent, _name, tl.constexpr(_number))


@triton.constexpr_function
def number_of(name):
    return list(NAMES).index(name)


@triton.constexpr_function
def form_of(name):
    return list(FORMS).index(name)


@triton.constexpr_function
def is_flag(value):
    """Whether this is one integer, or the pointer to one."""
    element = value.dtype.element_ty if value.dtype.is_ptr() else value.dtype
    return not value.type.is_block() and element.is_int()


@triton.constexpr_function
def may_look(op, mask):
    """Whether the atomic operation, on a flag, is a look at it if its operand is 0."""
    return op in LOOKING and mask is None


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
def extent(ptr, rank, mask, base):
    """An address, the bytes of what ``mask`` lets through, and the rank, if it is only one.

    Of a block of pointers the address is ``base``: a minimum of them would keep all addresses of a tile in
    registers, which do not hold them.
    """
    ranks = tl.cast(rank, tl.int64)
    places = tl.cast(ptr, tl.int64) + ranks * 0
    here = places == places
    if mask is not None:
        here = here & mask
    moved = tl.cast(total(tl.cast(here, tl.int32)), tl.int64) * bytes_of(ptr.dtype.scalar.element_ty)
    first = least(ranks)
    address = base if places.type.is_block() else places
    return address, moved, tl.where(first == most(ranks), first, SEVERAL)


@jit
def write(buffer, row, word, value, here):
    at = tl.cast(row, tl.int64) * WORDS
    tl.store(buffer + HEADER + at + word, tl.cast(value, tl.int64) + at * 0, mask=here)


@jit
def after(op: tl.constexpr, old, val):
    """What an atomic operation leaves behind."""
    val = tl.cast(val, old.dtype)
    if op == "add":
        return old + val
    elif op == "sub":
        return old - val
    elif op == "and":
        return old & val
    elif op == "or":
        return old | val
    elif op == "xor":
        return old ^ val
    elif op == "min":
        return tl.minimum(old, val)
    elif op == "max":
        return tl.maximum(old, val)
    else:
        return val


@jit
def read(buffer, row, word, here):
    return tl.load(buffer + HEADER + row * WORDS + word, mask=here, other=0)


@jit
def last_look(buffer, context):
    """Where the row of this program's last look is."""
    number = tl.cast(context, tl.int64)
    return buffer + LAST_LOOKS + tl.where(number == 0, linear_program_id(), number) % NUM_LAST_LOOKS


@jit
def begin(
    buffer, context, name, form: tl.constexpr, target, address, moved, value, pid_m, pid_n, lanes=None, asked=None,
    look=None,
):  # fmt: skip
    """Begin an event, or one for each of ``lanes``, if ``asked``; returns its row, -1 if there is none.

    ``look``: whether it may be one more of several looks, which go on in the row of the last one.
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
        # Behind what the last look, which may be another partition's, has written into its row.
        before = atomic("xchg", last, nothing, room > 0, "acquire", "gpu") - 1
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
    write(buffer, row, NAME, name, here)
    write(buffer, row, FORM, form_of(form), here)
    write(buffer, row, PROGRAM, program, here)
    write(buffer, row, TARGET, target, here)
    write(buffer, row, ADDRESS, address, here)
    write(buffer, row, BYTES, moved, here)
    write(buffer, row, VALUE, value, here)
    write(buffer, row, PID_M, pid_m, here)
    write(buffer, row, PID_N, pid_n, here)
    # Last of all, so that what comes before is not part of the event.
    write(buffer, row, BEGAN, clock(), here)
    # As narrow as the constant that stands for it where nothing is traced, so that branches agree.
    return tl.cast(tl.where(here, row, tl.where(again, before, -1)), tl.int32)


@jit
def end(buffer, row):
    block_barrier()
    write(buffer, row, ENDED, clock(), row >= 0)


@aggregate
class Tracing:
    """What a context, or a functional operation, records with; nothing if it is not ``enabled``."""

    enabled: tl.constexpr
    buffer: tl.tensor | tl.constexpr
    base: tl.tensor | tl.constexpr
    context: tl.tensor | tl.constexpr

    @triton.constexpr_function
    def __init__(self, enabled, buffer, base, context):
        self.enabled = tl.constexpr(enabled)
        self.buffer = buffer if isinstance(buffer, tl.tensor) else tl.constexpr(buffer)
        self.base = base if isinstance(base, tl.tensor) else tl.constexpr(base)
        self.context = context if isinstance(context, tl.tensor) else tl.constexpr(context)

    @jit
    def record_event_start(self, event_id, target_rank=-1, address=None, pid_m=0, pid_n=0, mask=None):
        """Begin an event of the kernel's own; returns what `record_event_end` takes.

        ``event_id``: of `iris.TraceEvent`. For what moves data: the rank that it goes to or comes from, and
        ``address``, a pointer or block of pointers into the caller's heap, whose elements, where ``mask``, are
        what is moved. ``pid_m``, ``pid_n``: any two numbers, such as a tile's row and column.
        """
        if self.enabled:
            if address is None:
                place, moved, target = 0, 0, target_rank
            else:
                place, moved, target = extent(address, target_rank, mask, self.base)
            return begin(self.buffer, self.context, event_id, "named", target, place, moved, 0, pid_m, pid_n)
        else:
            return 0

    @jit
    def record_event_end(self, handle):
        """End the event that ``handle`` is of, once all of the block is here."""
        if self.enabled:
            end(self.buffer, handle)

    @jit
    def _begin(
        self,
        name: tl.constexpr,
        form: tl.constexpr,
        target,
        address,
        moved,
        value,
        lanes=None,
        asked=None,
        look=None,
    ):
        number: tl.constexpr = number_of(name)
        m, n = tl.program_id(0), tl.program_id(1)
        return begin(self.buffer, self.context, number, form, target, address, moved, value, m, n, lanes, asked, look)

    @jit
    def begin_move(self, name: tl.constexpr, ptr, rank, mask, asked=None):
        """Begin an access to ``rank``'s copy of ``ptr``, if ``asked``."""
        if self.enabled:
            address, moved, target = extent(ptr, rank, mask, self.base)
            return self._begin(name, "move", target, address, moved, 0, None, asked)
        else:
            return 0

    @jit
    def begin_copy(self, ptr, from_rank, to_rank, cur_rank, mask):
        """Begin a copy between the caller and the other of the two ranks: a get or a put."""
        if self.enabled:
            # Of two numbers, one of which is the caller's, the sum less that is the other.
            address, moved, target = extent(ptr, from_rank + to_rank - cur_rank, mask, self.base)
            get: tl.constexpr = number_of("get")
            put: tl.constexpr = number_of("put")
            number = tl.where(target == least(tl.cast(from_rank, tl.int64)), get, put)
            m, n = tl.program_id(0), tl.program_id(1)
            return begin(self.buffer, self.context, number, "move", target, address, moved, 0, m, n)
        else:
            return 0

    @jit
    def begin_bulk(self, name: tl.constexpr, ptr, rank, moved, asked=None):
        """Begin a copy of ``moved`` bytes to or from ``rank``'s part of the memory that ``ptr`` points into.

        With ``asked``, a mask, ``rank`` is a block of lanes, and each of them has an event of its own.
        """
        if self.enabled:
            lanes = None if asked is None else rank
            return self._begin(name, "move", rank, tl.cast(ptr, tl.int64), moved, 0, lanes, asked)
        else:
            return 0

    @jit
    def begin_wait_for_data(self, ptr, rank):
        """Begin to wait for data in the caller's memory from ``ptr`` on, one pointer; ``rank``: the caller's."""
        if self.enabled:
            return self._begin("wait", "data", rank, tl.cast(ptr, tl.int64), 0, 0)
        else:
            return 0

    @jit
    def end_load(self, row, values):
        """A load has ended when what it read is there, so something that is made of all of it is stored first."""
        if self.enabled:
            if values.dtype.scalar.is_floating():
                bits: tl.constexpr = signed_type(values.dtype.scalar)
                write(self.buffer, row, SEEN, most(tl.cast(values, bits, bitcast=True)), row >= 0)
            elif values.dtype.scalar.is_int():
                write(self.buffer, row, SEEN, most(values), row >= 0)
            end(self.buffer, row)

    @jit
    def begin_flag(self, name: tl.constexpr, ptr, rank, value, mask, form: tl.constexpr = FLAG):
        """Begin an operation on ``rank``'s copy of a flag: one integer. What is none is an access like others."""
        if self.enabled:
            address, moved, target = extent(ptr, rank, mask, self.base)
            if is_flag(ptr):
                return self._begin(name, form, target, address, moved, value)
            else:
                return self._begin(name, "move", target, address, moved, 0)
        else:
            return 0

    @jit
    def end_flag(self, row, seen, now):
        """``seen``: what the operation found in the flag; ``now``: what it left there."""
        if self.enabled:
            if is_flag(seen):
                write(self.buffer, row, SEEN, seen, row >= 0)
                write(self.buffer, row, AFTER, now, row >= 0)
            end(self.buffer, row)

    @jit
    def _begin_look(self, name: tl.constexpr, ptr, rank, value, look):
        address, moved, target = extent(ptr, rank, None, self.base)
        return self._begin(name, FLAG, target, address, moved, value, None, None, look)

    @jit
    def _end_look(self, row, seen, now, over):
        """``over``: this one has found what it was for. So it has, too, if it sees something else than before."""
        here = row >= 0
        place = tl.cast(row, tl.int64)
        looks = read(self.buffer, place, LOOKS, here)
        changed = (looks > 0) & (read(self.buffer, place, SEEN, here) != tl.cast(seen, tl.int64))
        write(self.buffer, row, LOOKS, looks + 1, here)
        self.end_flag(row, seen, now)
        # Behind all that this look has written there, for whoever takes the row next.
        left = tl.where(over | changed, 0, place + 1)
        atomic("xchg", last_look(self.buffer, self.context), left, here, "release", "gpu")

    @jit
    def begin_atomic(self, op: tl.constexpr, ptr, rank, val, mask):
        """Begin an atomic operation on ``rank``'s copy, which may be a look at it."""
        if self.enabled:
            if is_flag(ptr) and may_look(op, mask):
                return self._begin_look("atomic_" + op, ptr, rank, val, tl.cast(val, tl.int64) == 0)
            else:
                return self.begin_flag("atomic_" + op, ptr, rank, val, mask)
        else:
            return 0

    @jit
    def end_atomic(self, row, op: tl.constexpr, old, val, mask):
        if self.enabled:
            if is_flag(old) and may_look(op, mask):
                self._end_look(row, old, after(op, old, val), tl.cast(val, tl.int64) != 0)
            else:
                self.end_flag(row, old, after(op, old, val) if is_flag(old) else old)

    @jit
    def begin_cas(self, ptr, rank, cmp):
        """Begin a comparison of ``rank``'s copy, which is a look at it until it finds what it is for."""
        if self.enabled:
            if is_flag(ptr):
                return self._begin_look("atomic_cas", ptr, rank, cmp, tl.cast(1, tl.int1))
            else:
                return self.begin_flag("atomic_cas", ptr, rank, cmp, None)
        else:
            return 0

    @jit
    def end_cas(self, row, old, cmp, val):
        if self.enabled:
            if is_flag(old):
                found = old == tl.cast(cmp, old.dtype)
                self._end_look(row, old, tl.where(found, tl.cast(val, old.dtype), old), found)
            else:
                self.end_flag(row, old, old)

    @jit
    def begin_flags(self, name: tl.constexpr, form: tl.constexpr, flags, ranks, values, here):
        """Begin an operation on a flag of each of the ``ranks``, where ``here``: blocks of lanes."""
        if self.enabled:
            width: tl.constexpr = bytes_of(flags.dtype.scalar.element_ty)
            return self._begin(name, form, ranks, tl.cast(flags, tl.int64), width, values, ranks, here)
        else:
            return 0

    @jit
    def end_flags(self, rows, now):
        if self.enabled:
            write(self.buffer, rows, SEEN, now, rows >= 0)
            write(self.buffer, rows, AFTER, now, rows >= 0)
            end(self.buffer, rows)


@jit
def trace_into(record, base, numbered: tl.constexpr):
    """The buffer that the host of this device record has enabled; one without room, if it has not.

    ``base``: where the memory begins that pointers of this rank are into. ``numbered``: this is a context.
    """
    buffer = tl.cast(tl.load(record + TRACE), tl.pointer_type(tl.int64))
    context = 0
    if numbered:
        one = tl.cast(1, tl.int64)
        context = tl.atomic_add(buffer + CONTEXTS, one, sem="relaxed", scope="gpu") + 1
    return Tracing(True, buffer, base, context)
