"""load, store, get, put and copy of the device context (`iris.language.context`), for Triton and Gluon.

``mask``, ``other`` and the modifiers are those of ``tl.load`` and ``tl.store``. ``hint``: what the translated pointer
is a multiple of, in bytes.
"""

import triton.language as tl

from iris.language.address import check_copy, in_simulator
from iris.language.jit import jit
from iris.language.locality import guards
from iris.language.note import note


@jit
def load(
    self,
    ptr,
    from_rank,
    mask=None,
    other=None,
    cache_modifier: tl.constexpr = None,
    volatile: tl.constexpr = False,
    hint: tl.constexpr = None,
):
    """Read ``from_rank``'s copy of ``ptr``; returns the values.

    It takes one round trip, for which the block waits when it first uses them.
    """
    if in_simulator():
        note("loads_for_caller")
    event = self.tracing.begin_move("load", ptr, from_rank, mask)
    if guards(self.table):
        mask = self._within_host(ptr, from_rank, mask)
    values = tl.load(
        self._peers(ptr, from_rank, mask, hint),
        mask=mask,
        other=other,
        cache_modifier=cache_modifier,
        volatile=volatile,
    )
    self.tracing.end_load(event, values)
    return values


@jit
def store(self, ptr, value, to_rank, mask=None, cache_modifier: tl.constexpr = None, hint: tl.constexpr = None):
    """Write ``to_rank``'s copy of ``ptr``.

    The block does not wait for the data to arrive; `signal`, `fence` or a barrier orders them.
    """
    event = self.tracing.begin_move("store", ptr, to_rank, mask)
    if guards(self.table):
        mask = self._within_host(ptr, to_rank, mask)
    tl.store(self._peers(ptr, to_rank, mask, hint), value, mask=mask, cache_modifier=cache_modifier)
    self.tracing.record_event_end(event)


@jit
def get(
    self,
    from_ptr,
    to_ptr,
    from_rank,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Read ``from_rank``'s copy of ``from_ptr``, write the caller's ``to_ptr``.

    ``to_ptr`` is not translated and may be any memory of the caller.
    """
    event = self.tracing.begin_move("get", from_ptr, from_rank, mask)
    if guards(self.table):
        mask = self._within_host(from_ptr, from_rank, mask)
    source = self._peers(from_ptr, from_rank, mask, hint)
    value = tl.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier)
    tl.store(to_ptr, value, mask=mask, cache_modifier=store_cache_modifier)
    self.tracing.record_event_end(event)


@jit
def put(
    self,
    from_ptr,
    to_ptr,
    to_rank,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Read the caller's ``from_ptr``, write ``to_rank``'s copy of ``to_ptr``.

    ``from_ptr`` is not translated and may be any memory of the caller.
    """
    event = self.tracing.begin_move("put", to_ptr, to_rank, mask)
    if guards(self.table):
        mask = self._within_host(to_ptr, to_rank, mask)
    # The load of the peer's heap base comes first, so that it is under way together with that of the data.
    target = self._peers(to_ptr, to_rank, mask, hint)
    value = tl.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier)
    tl.store(target, value, mask=mask, cache_modifier=store_cache_modifier)
    self.tracing.record_event_end(event)


@jit
def copy(
    self,
    src_ptr,
    dst_ptr,
    from_rank,
    to_rank,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Read ``from_rank``'s copy of ``src_ptr``, write ``to_rank``'s copy of ``dst_ptr``.

    The caller is one of the two ranks, and both pointers are in its heap. In the simulator `NotTheCallerError` is
    raised if it is neither.
    """
    if in_simulator():
        check_copy(from_rank, to_rank, self.cur_rank)
    event = self.tracing.begin_copy(dst_ptr, from_rank=from_rank, to_rank=to_rank, cur_rank=self.cur_rank, mask=mask)
    if guards(self.table):
        mask = self._within_host(dst_ptr, to_rank, self._within_host(src_ptr, from_rank, mask))
    source = self._peers(src_ptr, from_rank, mask, hint)
    value = tl.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier)
    target = self._peers(dst_ptr, to_rank, mask, hint)
    tl.store(target, value, mask=mask, cache_modifier=store_cache_modifier)
    self.tracing.record_event_end(event)
