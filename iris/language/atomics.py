"""The atomic operations of the device context (`iris.language.context`), for Triton and Gluon.

Each returns the old value. ``sem``: "relaxed", "acquire", "release" or "acq_rel", of the whole block; ``scope``: "cta",
"gpu" or "sys". ``hint``: what the translated pointer is a multiple of, in bytes. ``val`` is cast to the pointer's
dtype, as Triton's own atomics cast it: an integer keeps the low bits of a whole number, and the whole part of a float.
"""

import triton.language as tl

from iris.language.jit import jit
from iris.language.locality import guards
from iris.language.ordering import ACQ_REL, SYS
from iris.language.ordering import atomic as ordered_atomic
from iris.language.ordering import atomic_cas as ordered_cas


@jit
def atomic(
    self,
    op: tl.constexpr,
    ptr,
    val,
    to_rank,
    mask,
    sem: tl.constexpr,
    scope: tl.constexpr,
    hint: tl.constexpr,
):
    event = self.tracing.begin_atomic(op, ptr, rank=to_rank, val=val, mask=mask)
    # In Triton 3.6 no function returns a mask of None.
    if guards(self.table):
        mask = self._within_host(ptr, to_rank, mask)
    old = ordered_atomic(op, self._peers(ptr, to_rank, mask, hint), val, mask, sem=sem, scope=scope)
    self.tracing.end_atomic(event, op, old=old, val=val, mask=mask)
    return old


@jit
def atomic_add(
    self,
    ptr,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Add ``val`` to ``to_rank``'s copy of ``ptr``; returns the old value."""
    return self._atomic("add", ptr, val, to_rank, mask=mask, sem=sem, scope=scope, hint=hint)


@jit
def atomic_sub(
    self,
    ptr,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Subtract ``val`` from ``to_rank``'s copy of ``ptr``; returns the old value."""
    return self._atomic("sub", ptr, val, to_rank, mask=mask, sem=sem, scope=scope, hint=hint)


@jit
def atomic_xchg(
    self,
    ptr,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Put ``val`` in the place of ``to_rank``'s copy of ``ptr``; returns the old value."""
    return self._atomic("xchg", ptr, val, to_rank, mask=mask, sem=sem, scope=scope, hint=hint)


@jit
def atomic_and(
    self,
    ptr,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise and of ``to_rank``'s copy of ``ptr`` with ``val``; returns the old value."""
    return self._atomic("and", ptr, val, to_rank, mask=mask, sem=sem, scope=scope, hint=hint)


@jit
def atomic_or(
    self,
    ptr,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise or of ``to_rank``'s copy of ``ptr`` with ``val``; returns the old value."""
    return self._atomic("or", ptr, val, to_rank, mask=mask, sem=sem, scope=scope, hint=hint)


@jit
def atomic_xor(
    self,
    ptr,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise exclusive or of ``to_rank``'s copy of ``ptr`` with ``val``; returns the old value."""
    return self._atomic("xor", ptr, val, to_rank, mask=mask, sem=sem, scope=scope, hint=hint)


@jit
def atomic_min(
    self,
    ptr,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Leave the smaller of ``to_rank``'s copy of ``ptr`` and ``val``; returns the old value."""
    return self._atomic("min", ptr, val, to_rank, mask=mask, sem=sem, scope=scope, hint=hint)


@jit
def atomic_max(
    self,
    ptr,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Leave the larger of ``to_rank``'s copy of ``ptr`` and ``val``; returns the old value."""
    return self._atomic("max", ptr, val, to_rank, mask=mask, sem=sem, scope=scope, hint=hint)


@jit
def atomic_cas(
    self,
    ptr,
    cmp,
    val,
    to_rank,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Put ``val`` where ``to_rank``'s copy of ``ptr`` equals ``cmp``; returns the old value.

    The bits of the whole element are compared, so 0.0 is not -0.0. ``cmp`` and ``val`` are cast to the pointer's dtype;
    for integers they are whole numbers that fit it, as for `signal`. No mask, as in Triton.
    """
    event = self.tracing.begin_cas(ptr, to_rank, cmp)
    old = ordered_cas(self._peer_word(ptr, to_rank, hint), cmp, val, sem=sem, scope=scope)
    self.tracing.end_cas(event, old, cmp, val)
    return old
