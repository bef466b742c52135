"""The operations of the device context as functions, with ranks and heap bases passed by hand.

``heap_bases`` is ``ctx.get_heap_bases()``. The caller is one of the two ranks; pointers are into the caller's heap.
The rank whose address space the pointer is in comes first. ``hint`` asserts that the pointer (or its value along each
dimension) is a multiple of so many bytes, as ``tl.multiple_of``; it is never needed for 16-byte accesses.
"""

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.language.address import check_reach, gluon_translate, in_simulator, triton_translate
from iris.language.ordering import ACQ_REL, CHECKS_POINTERS, SYS, gluon_ordering, triton_ordering


def heap_bases_tensor(bases: Sequence[int], size: int, record: int, device: torch.device) -> torch.Tensor:
    """What the functions take: int64 ``[num_ranks]`` on ``device``; in front of it, the device record and the size."""
    return torch.tensor([record, size, *bases], dtype=torch.int64, device=device)[2:]


def make_functions(jit: Callable, lang: ModuleType, move: Any, order: SimpleNamespace) -> SimpleNamespace:
    """The functions in the language that ``(jit, lang)`` stand for."""
    ordered_atomic, ordered_cas, check_pointer = order.atomic, order.atomic_cas, order.check_pointer

    @jit
    def translate(ptr, from_rank, to_rank, heap_bases, mask, hint: tl.constexpr):
        """The address of ``to_rank``'s copy of ``ptr``, which points into ``from_rank``'s heap and is used under
        ``mask``.
        """
        base = lang.load(heap_bases + from_rank)
        if in_simulator():
            check_reach(ptr, mask, base, to_rank)
        elif CHECKS_POINTERS:
            record = lang.cast(lang.load(heap_bases - 2), lang.pointer_type(lang.int64))
            check_pointer(ptr, mask, base, lang.load(heap_bases - 1), record)
        moved = move(ptr, base, lang.load(heap_bases + to_rank))
        if hint is not None:
            moved = lang.multiple_of(moved, hint)
        return moved

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
        """Read ``from_rank``'s copy of ``pointer``; ``to_rank`` is the caller."""
        source = translate(pointer, to_rank, from_rank, heap_bases, mask, hint)
        return lang.load(source, mask=mask, other=other, cache_modifier=cache_modifier, volatile=volatile)

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
        lang.store(
            translate(pointer, from_rank, to_rank, heap_bases, mask, hint),
            value,
            mask=mask,
            cache_modifier=cache_modifier,
        )

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
        """Read ``to_rank``'s copy of ``from_ptr`` into the caller's ``to_ptr``; ``from_rank`` is the caller."""
        source = translate(from_ptr, from_rank, to_rank, heap_bases, mask, hint)
        value = lang.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier)
        lang.store(to_ptr, value, mask=mask, cache_modifier=store_cache_modifier)

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
        value = lang.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier)
        target = translate(to_ptr, from_rank, to_rank, heap_bases, mask, hint)
        lang.store(target, value, mask=mask, cache_modifier=store_cache_modifier)

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
        source = translate(src_ptr, cur_rank, from_rank, heap_bases, mask, hint)
        value = lang.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier)
        target = translate(dst_ptr, cur_rank, to_rank, heap_bases, mask, hint)
        lang.store(target, value, mask=mask, cache_modifier=store_cache_modifier)

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
        """Add ``val`` to ``to_rank``'s copy; returns the old value, as the other atomics do."""
        return ordered_atomic(
            "add", translate(pointer, from_rank, to_rank, heap_bases, mask, hint), val, mask, sem, scope
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
        """Subtract ``val`` from ``to_rank``'s copy."""
        return ordered_atomic(
            "sub", translate(pointer, from_rank, to_rank, heap_bases, mask, hint), val, mask, sem, scope
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
        """Put ``val`` in the place of ``to_rank``'s copy."""
        return ordered_atomic(
            "xchg", translate(pointer, from_rank, to_rank, heap_bases, mask, hint), val, mask, sem, scope
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
        """Bitwise and of ``to_rank``'s copy with ``val``."""
        return ordered_atomic(
            "and", translate(pointer, from_rank, to_rank, heap_bases, mask, hint), val, mask, sem, scope
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
        """Bitwise or of ``to_rank``'s copy with ``val``."""
        return ordered_atomic(
            "or", translate(pointer, from_rank, to_rank, heap_bases, mask, hint), val, mask, sem, scope
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
        """Bitwise exclusive or of ``to_rank``'s copy with ``val``."""
        return ordered_atomic(
            "xor", translate(pointer, from_rank, to_rank, heap_bases, mask, hint), val, mask, sem, scope
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
        """The smaller of ``to_rank``'s copy and ``val``."""
        return ordered_atomic(
            "min", translate(pointer, from_rank, to_rank, heap_bases, mask, hint), val, mask, sem, scope
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
        """The larger of ``to_rank``'s copy and ``val``."""
        return ordered_atomic(
            "max", translate(pointer, from_rank, to_rank, heap_bases, mask, hint), val, mask, sem, scope
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
        """Put ``val`` in the place of ``to_rank``'s copy where that equals ``cmp``; returns the old value."""
        return ordered_cas(translate(pointer, from_rank, to_rank, heap_bases, None, hint), cmp, val, sem, scope)

    return SimpleNamespace(
        load=load,
        store=store,
        get=get,
        put=put,
        copy=copy,
        atomic_add=atomic_add,
        atomic_sub=atomic_sub,
        atomic_xchg=atomic_xchg,
        atomic_and=atomic_and,
        atomic_or=atomic_or,
        atomic_xor=atomic_xor,
        atomic_min=atomic_min,
        atomic_max=atomic_max,
        atomic_cas=atomic_cas,
    )


triton_functions = make_functions(triton.jit, tl, triton_translate, triton_ordering)
gluon_functions = make_functions(gluon.jit, gl, gluon_translate, gluon_ordering)
