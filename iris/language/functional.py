"""The operations of the device context as plain functions, which take the ranks and the heap bases as arguments.

``heap_bases`` is ``ctx.get_heap_bases()``. The caller is one of the two ranks, and pointers are into the caller's heap;
each docstring says which rank is the caller. ``hint`` asserts that the pointer (or its value along each dimension) is a
multiple of so many bytes, as ``tl.multiple_of``; 16-byte accesses never need it.
"""

import triton.language as tl

from iris.language.address import check_caller, check_copy, check_reach, in_simulator, translate
from iris.language.failures import CHECKS_POINTERS, check_pointer
from iris.language.jit import jit
from iris.language.locality import base_of, elsewhere, guarded, guards
from iris.language.note import note
from iris.language.ordering import ACQ_REL, SYS
from iris.language.ordering import atomic as ordered_atomic
from iris.language.ordering import atomic_cas as ordered_cas
from iris.language.tracing import TRACES_ALL, Tracing, trace_into


@jit
def record_of(heap_bases):
    return tl.cast(tl.load(heap_bases - 2), tl.pointer_type(tl.int64))


@jit
def tracing_of(heap_bases, rank):
    """The `Tracing` of the caller, which is ``rank``."""
    if TRACES_ALL:
        return trace_into(record_of(heap_bases), base_of(heap_bases, rank), False)
    else:
        return Tracing(False, 0, 0, 0)


@jit
def peer_address(ptr, from_rank, to_rank, heap_bases, mask, hint: tl.constexpr):
    """The address of ``to_rank``'s copy of ``ptr``, which points into ``from_rank``'s heap and is used under
    ``mask``.
    """
    if in_simulator():
        check_caller(from_rank, tl.load(heap_bases))
    base = base_of(heap_bases, from_rank)
    if in_simulator():
        check_reach(ptr, mask, base, to_rank)
    elif CHECKS_POINTERS:
        size = tl.cast(tl.load(heap_bases - 1), tl.int64)
        check_pointer(ptr, mask, base=base, size=size, record=record_of(heap_bases))
    return translate(ptr, base, base_of(heap_bases, to_rank), hint)


@jit
def within_host(ptr, rank, heap_bases, mask):
    """``mask`` without the elements whose ``rank`` is on another host (`iris.language.locality.guarded`)."""
    return guarded(ptr, rank, mask, table=heap_bases, record=record_of(heap_bases))


@jit
def load(
    pointer,
    to_rank,
    from_rank,
    heap_bases,
    mask=None,
    other=None,
    cache_modifier: tl.constexpr = None,
    volatile: tl.constexpr = False,
    hint: tl.constexpr = None,
):
    """Read ``from_rank``'s copy of ``pointer``; returns the values. ``to_rank`` is the caller."""
    if in_simulator():
        note("loads_for_caller")
    tracing = tracing_of(heap_bases, to_rank)
    event = tracing.begin_move("load", pointer, from_rank, mask)
    if guards(heap_bases):
        mask = within_host(pointer, from_rank, heap_bases, mask)
    source = peer_address(pointer, to_rank, from_rank, heap_bases, mask=mask, hint=hint)
    values = tl.load(source, mask=mask, other=other, cache_modifier=cache_modifier, volatile=volatile)
    tracing.end_load(event, values)
    return values


@jit
def store(
    pointer,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    hint: tl.constexpr = None,
    cache_modifier: tl.constexpr = None,
):
    """Write ``to_rank``'s copy of ``pointer``; ``from_rank`` is the caller."""
    tracing = tracing_of(heap_bases, from_rank)
    event = tracing.begin_move("store", pointer, to_rank, mask)
    if guards(heap_bases):
        mask = within_host(pointer, to_rank, heap_bases, mask)
    target = peer_address(pointer, from_rank, to_rank, heap_bases, mask=mask, hint=hint)
    tl.store(target, value, mask=mask, cache_modifier=cache_modifier)
    tracing.record_event_end(event)


@jit
def get(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Read ``to_rank``'s copy of ``from_ptr``, write the caller's ``to_ptr``; ``from_rank`` is the caller.

    In the context's form ``from_rank`` is the rank that is read.
    """
    tracing = tracing_of(heap_bases, from_rank)
    event = tracing.begin_move("get", from_ptr, to_rank, mask)
    if guards(heap_bases):
        mask = within_host(from_ptr, to_rank, heap_bases, mask)
    source = peer_address(from_ptr, from_rank, to_rank, heap_bases, mask=mask, hint=hint)
    value = tl.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier)
    tl.store(to_ptr, value, mask=mask, cache_modifier=store_cache_modifier)
    tracing.record_event_end(event)


@jit
def put(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Read the caller's ``from_ptr``, write ``to_rank``'s copy of ``to_ptr``; ``from_rank`` is the caller."""
    tracing = tracing_of(heap_bases, from_rank)
    event = tracing.begin_move("put", to_ptr, to_rank, mask)
    if guards(heap_bases):
        mask = within_host(to_ptr, to_rank, heap_bases, mask)
    value = tl.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier)
    target = peer_address(to_ptr, from_rank, to_rank, heap_bases, mask=mask, hint=hint)
    tl.store(target, value, mask=mask, cache_modifier=store_cache_modifier)
    tracing.record_event_end(event)


@jit
def copy(
    src_ptr,
    dst_ptr,
    from_rank,
    to_rank,
    cur_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Move ``from_rank``'s copy of ``src_ptr`` to ``to_rank``'s copy of ``dst_ptr``; ``cur_rank`` is the caller.

    Both pointers are in the caller's heap, and the caller is one of the two ranks.
    """
    if in_simulator():
        check_copy(from_rank, to_rank, cur_rank)
    tracing = tracing_of(heap_bases, cur_rank)
    event = tracing.begin_copy(dst_ptr, from_rank=from_rank, to_rank=to_rank, cur_rank=cur_rank, mask=mask)
    if guards(heap_bases):
        mask = within_host(dst_ptr, to_rank, heap_bases, within_host(src_ptr, from_rank, heap_bases, mask))
    source = peer_address(src_ptr, cur_rank, from_rank, heap_bases, mask=mask, hint=hint)
    value = tl.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier)
    target = peer_address(dst_ptr, cur_rank, to_rank, heap_bases, mask=mask, hint=hint)
    tl.store(target, value, mask=mask, cache_modifier=store_cache_modifier)
    tracing.record_event_end(event)


@jit
def atomic(
    op: tl.constexpr,
    pointer,
    val,
    from_rank,
    to_rank,
    table,
    mask,
    sem: tl.constexpr,
    scope: tl.constexpr,
    hint: tl.constexpr,
):
    tracing = tracing_of(table, from_rank)
    event = tracing.begin_atomic(op, pointer, rank=to_rank, val=val, mask=mask)
    if guards(table):
        mask = within_host(pointer, to_rank, table, mask)
    target = peer_address(pointer, from_rank, to_rank, table, mask=mask, hint=hint)
    old = ordered_atomic(op, target, val, mask, sem=sem, scope=scope)
    tracing.end_atomic(event, op, old=old, val=val, mask=mask)
    return old


@jit
def atomic_add(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Add ``val`` to ``to_rank``'s copy of ``pointer``; returns the old value.

    ``from_rank`` is the caller.
    """
    return atomic(
        "add", pointer, val, from_rank, to_rank=to_rank, table=heap_bases, mask=mask, sem=sem, scope=scope, hint=hint
    )


@jit
def atomic_sub(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Subtract ``val`` from ``to_rank``'s copy of ``pointer``; returns the old value.

    ``from_rank`` is the caller.
    """
    return atomic(
        "sub", pointer, val, from_rank, to_rank=to_rank, table=heap_bases, mask=mask, sem=sem, scope=scope, hint=hint
    )


@jit
def atomic_xchg(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Put ``val`` in the place of ``to_rank``'s copy of ``pointer``; returns the old value.

    ``from_rank`` is the caller.
    """
    return atomic(
        "xchg", pointer, val, from_rank, to_rank=to_rank, table=heap_bases, mask=mask, sem=sem, scope=scope, hint=hint
    )


@jit
def atomic_and(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise and of ``to_rank``'s copy of ``pointer`` with ``val``; returns the old value.

    ``from_rank`` is the caller.
    """
    return atomic(
        "and", pointer, val, from_rank, to_rank=to_rank, table=heap_bases, mask=mask, sem=sem, scope=scope, hint=hint
    )


@jit
def atomic_or(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise or of ``to_rank``'s copy of ``pointer`` with ``val``; returns the old value.

    ``from_rank`` is the caller.
    """
    return atomic(
        "or", pointer, val, from_rank, to_rank=to_rank, table=heap_bases, mask=mask, sem=sem, scope=scope, hint=hint
    )


@jit
def atomic_xor(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise exclusive or of ``to_rank``'s copy of ``pointer`` with ``val``; returns the old value.

    ``from_rank`` is the caller.
    """
    return atomic(
        "xor", pointer, val, from_rank, to_rank=to_rank, table=heap_bases, mask=mask, sem=sem, scope=scope, hint=hint
    )


@jit
def atomic_min(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Leave the smaller of ``to_rank``'s copy of ``pointer`` and ``val``; returns the old value.

    ``from_rank`` is the caller.
    """
    return atomic(
        "min", pointer, val, from_rank, to_rank=to_rank, table=heap_bases, mask=mask, sem=sem, scope=scope, hint=hint
    )


@jit
def atomic_max(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Leave the larger of ``to_rank``'s copy of ``pointer`` and ``val``; returns the old value.

    ``from_rank`` is the caller.
    """
    return atomic(
        "max", pointer, val, from_rank, to_rank=to_rank, table=heap_bases, mask=mask, sem=sem, scope=scope, hint=hint
    )


@jit
def atomic_cas(
    pointer,
    cmp,
    val,
    from_rank,
    to_rank,
    heap_bases,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Put ``val`` where ``to_rank``'s copy of ``pointer`` equals ``cmp``; returns the old value.

    The bits of the whole element are compared, so 0.0 is not -0.0. ``cmp`` and ``val`` are cast to the pointer's dtype;
    for integers they are whole numbers that fit it, as for `signal`. No mask, as in Triton. ``from_rank``: the caller.
    """
    tracing = tracing_of(heap_bases, from_rank)
    event = tracing.begin_cas(pointer, to_rank, cmp)
    target = peer_address(pointer, from_rank, to_rank, heap_bases, mask=None, hint=hint)
    if guards(heap_bases):
        target = elsewhere(target, within_host(pointer, to_rank, heap_bases, None), record_of(heap_bases))
    old = ordered_cas(target, cmp, val, sem=sem, scope=scope)
    tracing.end_cas(event, old, cmp, val)
    return old
