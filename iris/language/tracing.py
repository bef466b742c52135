"""Records the events of a traced kernel in memory of its own GPU: when each began and ended, and what it moved.

A context that was initialised with ``tracing=True`` records its own operations, and what the kernel itself marks by
``ctx.tracing.record_event_start`` and ``record_event_end``. With ``IRIS_TRACE=1``, which ``python -m iris trace`` sets,
every context and every functional operation records. Otherwise the generated code has nothing of it. The events are
written by `iris.language.trace_buffer`, and read by `iris.tracing`.

An event begins when the first warp comes to it, and ends when the last one has left it: a block barrier stands before
the end. What was loaded is there then. What was stored has been issued, and may still be on the link.

A *look* is an atomic operation on a flag that changes nothing. Kernels may poll with it in a loop of their own, and
should not fill the buffer. So looks of a program that follow each other and see the same value share one row.
"""

from typing import Any

import triton
import triton.language as tl

from iris.compat.language import allowed_in_kernels
from iris.language.address import bytes_of
from iris.language.jit import aggregate, jit
from iris.language.ordering import atomic, signed_type
from iris.language.trace_buffer import (
    AFTER,
    CONTEXTS,
    LOOKING,
    LOOKS,
    NAMES,
    SEEN,
    TRACE,
    begin,
    end,
    last_look,
    least,
    most,
    number_of,
    read,
    total,
    write,
)
from iris.switches import switched_on

VARIABLE = "IRIS_TRACE"

TRACES_ALL = tl.constexpr(switched_on(VARIABLE))
"""Whether every kernel is traced, whatever its context says."""

FLAG = tl.constexpr("flag")

SEVERAL = tl.constexpr(-2)
"""The target of an event that accesses more than one rank."""


@allowed_in_kernels
class TraceEvent:
    """The kinds of events, as numbers for ``record_event_start``: ``iris.TraceEvent.compute`` and so on.

    The names: load, store, get, put, copy, the atomic operations, signal, wait, barrier and compute.
    """

    load: tl.constexpr
    store: tl.constexpr
    get: tl.constexpr
    put: tl.constexpr
    copy: tl.constexpr
    atomic_add: tl.constexpr
    atomic_sub: tl.constexpr
    atomic_cas: tl.constexpr
    atomic_xchg: tl.constexpr
    atomic_xor: tl.constexpr
    atomic_and: tl.constexpr
    atomic_or: tl.constexpr
    atomic_min: tl.constexpr
    atomic_max: tl.constexpr
    signal: tl.constexpr
    wait: tl.constexpr
    barrier: tl.constexpr
    compute: tl.constexpr

    # Older programs write ``TraceEvent().put``.
    def __new__(cls, **_: Any) -> Any:
        return cls


for _number, _name in enumerate(NAMES):
    setattr(TraceEvent, _name, tl.constexpr(_number))


@triton.constexpr_function
def is_flag(value):
    """Whether this is a single integer, or the pointer to one."""
    element = value.dtype.element_ty if value.dtype.is_ptr() else value.dtype
    return not value.type.is_block() and element.is_int()


@triton.constexpr_function
def may_look(op, mask):
    """Whether the atomic operation is a look at its flag if its operand is 0."""
    return op in LOOKING and mask is None


@jit
def extent(ptr, rank, mask, base):
    """What an event says of an access: an address, the bytes under ``mask``, and the rank, or `SEVERAL`.

    For a block of pointers the address is ``base``: to find the lowest one, all addresses of a tile would have to be
    kept in registers, and there are too many.
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
def after(op: tl.constexpr, old, val):
    """What the memory holds after an atomic operation that found ``old``."""
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


@aggregate
class Tracing:
    """Records the events of a context, or of a functional operation; does nothing if it is not ``enabled``."""

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
        """Begin an event that the kernel names itself; returns what `record_event_end` takes.

        ``event_id``: of `iris.TraceEvent`. For events that move data: ``target_rank`` is the rank that they go to or
        come from, and ``address`` a pointer or block of pointers into the caller's heap to the elements that are moved,
        under ``mask``. ``pid_m``, ``pid_n``: any two numbers, such as a tile's row and column.
        """
        if self.enabled:
            if address is None:
                place, moved, target = 0, 0, target_rank
            else:
                place, moved, target = extent(address, target_rank, mask, self.base)
            return begin(
                self.buffer,
                self.context,
                event_id,
                form="named",
                target=target,
                address=place,
                moved=moved,
                pid_m=pid_m,
                pid_n=pid_n,
            )
        else:
            return 0

    @jit
    def record_event_end(self, handle):
        """End the event ``handle``, once all warps of the block have come here."""
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
        value=0,
        lanes=None,
        asked=None,
        look=None,
    ):
        """Begin an event of the library's own, with the program's ids for ``pid_m`` and ``pid_n``."""
        number: tl.constexpr = number_of(name)
        m, n = tl.program_id(0), tl.program_id(1)
        return begin(
            self.buffer,
            self.context,
            number,
            form=form,
            target=target,
            address=address,
            moved=moved,
            pid_m=m,
            pid_n=n,
            value=value,
            lanes=lanes,
            asked=asked,
            look=look,
        )

    @jit
    def begin_move(self, name: tl.constexpr, ptr, rank, mask, asked=None):
        """Begin an access to ``rank``'s copy of ``ptr``. ``asked``: whether it is recorded; None: it is."""
        if self.enabled:
            address, moved, target = extent(ptr, rank, mask, self.base)
            return self._begin(name, "move", target=target, address=address, moved=moved, asked=asked)
        else:
            return 0

    @jit
    def begin_copy(self, ptr, from_rank, to_rank, cur_rank, mask):
        """Begin a copy between the caller and the other of the two ranks: a get or a put."""
        if self.enabled:
            # The other rank of the two: their sum less the caller's.
            address, moved, target = extent(ptr, from_rank + to_rank - cur_rank, mask, self.base)
            get: tl.constexpr = number_of("get")
            put: tl.constexpr = number_of("put")
            number = tl.where(target == least(tl.cast(from_rank, tl.int64)), get, put)
            m, n = tl.program_id(0), tl.program_id(1)
            return begin(
                self.buffer,
                self.context,
                number,
                form="move",
                target=target,
                address=address,
                moved=moved,
                pid_m=m,
                pid_n=n,
            )
        else:
            return 0

    @jit
    def begin_bulk(self, name: tl.constexpr, ptr, rank, moved, asked=None):
        """Begin a copy of ``moved`` bytes to or from ``rank``'s copy of the memory that ``ptr`` points into.

        If the mask ``asked`` is given, ``rank`` is a block, and each of its ranks gets an event of its own.
        """
        if self.enabled:
            lanes = None if asked is None else rank
            return self._begin(
                name, "move", target=rank, address=tl.cast(ptr, tl.int64), moved=moved, lanes=lanes, asked=asked
            )
        else:
            return 0

    @jit
    def begin_wait_for_data(self, ptr, rank):
        """Begin a wait for data at the single pointer ``ptr`` in the caller's memory. ``rank`` is the caller."""
        if self.enabled:
            return self._begin("wait", "data", target=rank, address=tl.cast(ptr, tl.int64), moved=0)
        else:
            return 0

    @jit
    def end_load(self, row, values):
        """End a load. It has ended when its values are there, so a number computed from all of them is stored first."""
        if self.enabled:
            if values.dtype.scalar.is_floating():
                bits: tl.constexpr = signed_type(values.dtype.scalar)
                write(self.buffer, row, SEEN, value=most(tl.cast(values, bits, bitcast=True)), here=row >= 0)
            elif values.dtype.scalar.is_int():
                write(self.buffer, row, SEEN, value=most(values), here=row >= 0)
            end(self.buffer, row)

    @jit
    def begin_flag(self, name: tl.constexpr, ptr, rank, value, mask, form: tl.constexpr = FLAG):
        """Begin an operation on ``rank``'s copy of a flag. If ``ptr`` is not to one integer, it is a plain access."""
        if self.enabled:
            address, moved, target = extent(ptr, rank, mask, self.base)
            if is_flag(ptr):
                return self._begin(name, form, target=target, address=address, moved=moved, value=value)
            else:
                return self._begin(name, "move", target=target, address=address, moved=moved)
        else:
            return 0

    @jit
    def end_flag(self, row, seen, now):
        """End it. ``seen``: what the operation found in the flag; ``now``: what it left there."""
        if self.enabled:
            if is_flag(seen):
                write(self.buffer, row, SEEN, seen, here=row >= 0)
                write(self.buffer, row, AFTER, now, here=row >= 0)
            end(self.buffer, row)

    @jit
    def _begin_look(self, name: tl.constexpr, ptr, rank, value, look):
        address, moved, target = extent(ptr, rank, None, self.base)
        return self._begin(name, FLAG, target=target, address=address, moved=moved, value=value, look=look)

    @jit
    def _end_look(self, row, seen, now, over):
        """``over``: whether this look ends the series of looks in one row. A changed value ends it, too."""
        here = row >= 0
        place = tl.cast(row, tl.int64)
        looks = read(self.buffer, place, LOOKS, here)
        changed = (looks > 0) & (read(self.buffer, place, SEEN, here) != tl.cast(seen, tl.int64))
        write(self.buffer, row, LOOKS, looks + 1, here=here)
        self.end_flag(row, seen, now)
        # A release, after all writes of this look: the next one takes the row by an acquire.
        left = tl.where(over | changed, 0, place + 1)
        atomic("xchg", last_look(self.buffer, self.context), left, here, sem="release", scope="gpu")

    @jit
    def begin_atomic(self, op: tl.constexpr, ptr, rank, val, mask):
        """Begin an atomic operation on ``rank``'s copy of ``ptr``, which may be a look."""
        if self.enabled:
            if is_flag(ptr) and may_look(op, mask):
                return self._begin_look("atomic_" + op, ptr, rank=rank, value=val, look=tl.cast(val, tl.int64) == 0)
            else:
                return self.begin_flag("atomic_" + op, ptr, rank=rank, value=val, mask=mask)
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
        """Begin a compare-and-swap on ``rank``'s copy of ``ptr``. It is a look as long as it does not swap."""
        if self.enabled:
            if is_flag(ptr):
                return self._begin_look("atomic_cas", ptr, rank=rank, value=cmp, look=tl.cast(1, tl.int1))
            else:
                return self.begin_flag("atomic_cas", ptr, rank=rank, value=cmp, mask=None)
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
        """Begin an operation on a flag of each of the ``ranks`` under ``here``: blocks with a lane for each rank."""
        if self.enabled:
            width: tl.constexpr = bytes_of(flags.dtype.scalar.element_ty)
            address = tl.cast(flags, tl.int64)
            return self._begin(
                name, form, target=ranks, address=address, moved=width, value=values, lanes=ranks, asked=here
            )
        else:
            return 0

    @jit
    def end_flags(self, rows, now):
        if self.enabled:
            write(self.buffer, rows, SEEN, now, here=rows >= 0)
            write(self.buffer, rows, AFTER, now, here=rows >= 0)
            end(self.buffer, rows)


@jit
def trace_into(record, base, numbered: tl.constexpr):
    """A `Tracing` into the buffer that the host has enabled, or into one without room if it has enabled none.

    ``base``: where the heap of this rank begins. ``numbered``: whether this is for a context, which gets a number.
    """
    buffer = tl.cast(tl.load(record + TRACE), tl.pointer_type(tl.int64))
    context = 0
    if numbered:
        one = tl.cast(1, tl.int64)
        context = tl.atomic_add(buffer + CONTEXTS, one, sem="relaxed", scope="gpu") + 1
    return Tracing(True, buffer, base, context)
