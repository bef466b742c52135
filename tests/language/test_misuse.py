"""What only the simulator can notice: a kernel that reaches for what is not in its context's heap, or for no rank."""

import pytest
import torch
import triton
from rank_pool import Hosts
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris
from iris.errors import (
    InvalidArgumentError,
    InvalidContextError,
    InvalidValueError,
    KernelBoundsError,
    NotSymmetricError,
    NotTheCallerError,
    RankOutOfRangeError,
)
from iris.gluon import IrisDeviceCtx
from language import atomic_kernels, initialise_kernels, meeting_kernels, mistaken_kernels, move_kernels

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="only the simulator looks at a kernel's pointers"),
    pytest.mark.usefixtures("mistaken"),
]

FORMS = ["triton_context", "triton_functional", "gluon_context", "gluon_functional"]


def put(ctx, form, source, target, peer, n=100):
    kernel = getattr(move_kernels, form)
    args = ctx.get_device_context(), ctx.get_heap_bases(), source, target, n, ctx.cur_rank, peer, "put"
    kernel[(1,)](*args, 128)


def foreign(ctx, form):
    source, inside = ctx.zeros(100), ctx.zeros(100)
    with pytest.raises(NotSymmetricError, match="not in any heap"):
        put(ctx, form, source, torch.zeros(100), 0)
    with iris.iris(1 << 20) as other:
        with pytest.raises(NotSymmetricError, match=r"rank \d's float32\[100\]"):
            put(ctx, form, source, other.zeros(100), 0)
        # What is only read here may be anywhere.
        put(ctx, form, torch.ones(100), inside, ctx.cur_rank)
    assert inside.tolist() == [1] * 100
    peer = (ctx.cur_rank + 1) % ctx.num_ranks
    theirs = ctx.peer(inside, peer)
    with pytest.raises(
        NotSymmetricError, match=rf"rank {peer}'s float32\[100\].* this rank's own heap.* ctx\.peer\(\)"
    ):
        put(ctx, form, source, theirs, peer)
    with pytest.raises(NotSymmetricError, match="this rank's symmetric heap.* pass your own tensor"):
        ctx.peer(theirs, ctx.cur_rank)
    with pytest.raises(RankOutOfRangeError, match=f"no rank {ctx.num_ranks}"):
        put(ctx, form, source, inside, ctx.num_ranks)
    with pytest.raises(RankOutOfRangeError, match="no rank -1"):
        put(ctx, form, source, inside, -1)
    ctx.barrier()


@pytest.mark.parametrize("form", FORMS)
def test_a_pointer_of_another_context_or_of_none_and_a_rank_that_is_not_there(ranks, form):
    ranks.run(foreign, form)


def wrong_caller(ctx):
    source, target = ctx.zeros(100), ctx.zeros(100)
    other = (ctx.cur_rank + 1) % ctx.num_ranks
    args = ctx.get_device_context(), ctx.get_heap_bases(), source, target, 100, other, ctx.cur_rank, "put"
    with pytest.raises(NotTheCallerError, match=f"Rank {ctx.cur_rank} .* passed {other}"):
        move_kernels.triton_functional[(1,)](*args, 128)
    ctx.barrier()


def test_the_functional_form_wants_the_callers_rank(ranks):
    ranks.run(wrong_caller)


def wrong_caller_elsewhere(ctx):
    source, target = ctx.zeros(100), ctx.zeros(100)
    for other in set(range(4)) - {ctx.cur_rank}:
        args = ctx.get_device_context(), ctx.get_heap_bases(), source, target, 100, other, ctx.cur_rank, "put"
        passed = other if ctx.is_local(other) else "that of a rank on another host"
        with pytest.raises(NotTheCallerError, match=f"Rank {ctx.cur_rank} .* passed {passed}"):
            move_kernels.triton_functional[(1,)](*args, 128)
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 2), exactly=True)
def test_the_callers_rank_is_not_one_of_another_host(ranks):
    ranks.run(wrong_caller_elsewhere)


def copy_between_others(ctx, form):
    source, target = ctx.zeros(100), ctx.zeros(100)
    sender, receiver = (ctx.cur_rank + 1) % 3, (ctx.cur_rank + 2) % 3
    args = ctx.get_device_context(), ctx.get_heap_bases(), source, target, 100, sender, receiver, "copy_to"
    with pytest.raises(NotTheCallerError, match=f"from rank {sender} to rank {receiver}, and is neither"):
        getattr(move_kernels, form)[(1,)](*args, 128)
    ctx.barrier()


@pytest.mark.ranks(3, exactly=True)
@pytest.mark.parametrize("form", ["triton_context", "gluon_context"])
def test_whoever_copies_is_one_of_the_two(ranks, form):
    ranks.run(copy_between_others, form)


def no_context(ctx, form):
    kernel = getattr(move_kernels, form)
    with iris.iris(1 << 20) as other:
        context, bases, gone = other.get_device_context(), other.get_heap_bases(), other.zeros(100)
    arbitrary = torch.arange(64) << 20
    for args in ((context, bases, gone, gone), (arbitrary, arbitrary, ctx.zeros(100), ctx.zeros(100))):
        with pytest.raises(InvalidContextError, match="of no open heap"):
            kernel[(1,)](*args, 100, ctx.cur_rank, 0, "put", 128)
    ctx.barrier()


@pytest.mark.parametrize("form", ["triton_functional", "gluon_functional"])
def test_a_context_that_was_closed_or_never_was_one(ranks, form):
    ranks.run(no_context, form)


def wrong_context(ctx):
    flag, seen = ctx.ones(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
    for wrong in (ctx.get_heap_bases(), torch.tensor([5, 2, 0, 0, 0])):
        with pytest.raises(InvalidContextError, match=r"rank -?\d+ of -?\d+"):
            meeting_kernels.triton_compare[(1,)](wrong, flag, 1, seen, "eq")
    with pytest.raises(InvalidContextError, match=r"of the type pointer<fp32>.*get_device_context\(\)"):
        meeting_kernels.gluon_compare[(1,)](ctx.zeros(4), flag, 1, seen, "eq")
    with pytest.raises(InvalidContextError, match=r"heap_bases of the type int32.*get_heap_bases\(\)"):
        move_kernels.triton_functional[(1,)](ctx.get_device_context(), 7, flag, seen, 1, ctx.cur_rank, 0, "get", 1)
    ctx.barrier()


def test_what_is_no_context_is_told(ranks):
    ranks.run(wrong_context)


def not_of_this_rank(ctx, language):
    """A rank, or more ranks, that the context tensor has not. Nothing is read past the end of what it has."""
    kernel, seen = getattr(initialise_kernels, f"{language}_initialise"), torch.zeros(3, dtype=torch.int32)
    rank, size = ctx.cur_rank, ctx.num_ranks
    for wrong, number in ((rank, size + 3), ((rank + 1) % size, size), (size, rank)):
        text = rf"rank {wrong} of {number}: the context tensor is that of rank {rank} of {size}"
        with pytest.raises(InvalidContextError, match=text):
            kernel[(1,)](ctx.get_device_context(), seen, wrong, number, 3, False)
    ctx.barrier()


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_context_of_another_rank_or_of_more_ranks(ranks, language):
    ranks.run(not_of_this_rank, language)


def no_caller(ctx, form):
    source, target = ctx.zeros(100), ctx.zeros(100)
    for wrong in (-1, ctx.num_ranks, ctx.num_ranks + 5):
        args = ctx.get_device_context(), ctx.get_heap_bases(), source, target, 100, wrong, 0, "put"
        with pytest.raises(RankOutOfRangeError, match=f"no rank {wrong}: the group has {ctx.num_ranks}"):
            getattr(move_kernels, form)[(1,)](*args, 128)
    ctx.barrier()


@pytest.mark.parametrize("form", ["triton_functional", "gluon_functional"])
def test_a_caller_that_is_not_there(ranks, form):
    ranks.run(no_caller, form)


def of_wrong_types(ctx, what):
    errors = InvalidArgumentError, InvalidContextError, InvalidValueError
    with pytest.raises(errors, match=mistaken_kernels.MISTAKES[what]):
        mistaken_kernels.store[(1,)](ctx.get_device_context(), ctx.get_heap_bases(), ctx.zeros(1), what)
    ctx.barrier()


@pytest.mark.parametrize("what", mistaken_kernels.MISTAKES)
def test_arguments_of_other_types_are_said_in_words(ranks, what):
    ranks.run(of_wrong_types, what)


@triton.jit
def by_its_class(context_tensor):
    iris.DeviceContext(context_tensor)


@gluon.jit
def by_its_class_gluon(context_tensor, Context: gl.constexpr):
    Context(context_tensor, tracing=True)


def without_initialize(ctx):
    context = ctx.get_device_context()
    with pytest.raises(InvalidContextError, match=r"write DeviceContext\.initialize\("):
        by_its_class[(1,)](context)
    with pytest.raises(InvalidContextError, match=r"write IrisDeviceCtx\.initialize\("):
        by_its_class_gluon[(1,)](context, IrisDeviceCtx)
    ctx.barrier()


def test_a_context_is_not_made_by_its_class_alone(ranks):
    ranks.run(without_initialize)


def translated(ctx, language):
    kernel, target = getattr(move_kernels, f"{language}_translated"), ctx.zeros(1, dtype=torch.int32)
    kernel[(1,)](ctx.get_device_context(), target, 7, ctx.cur_rank)
    assert target.item() == 7
    for wrong in (-1, ctx.num_ranks):
        with pytest.raises(RankOutOfRangeError, match=f"no rank {wrong}"):
            kernel[(1,)](ctx.get_device_context(), target, 7, wrong)
    ctx.barrier()


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_pointer_is_not_translated_for_a_rank_that_is_not_there(ranks, language):
    ranks.run(translated, language)


def masked(ctx):
    """Elements that a mask leaves out may point anywhere: the last tensor of a heap ends where the heap does."""
    with iris.iris(2048) as small:
        target = small.zeros(256)
        last = small.zeros(250)
        put(small, "triton_context", target, last[200:], small.cur_rank, n=50)
        small.barrier()


def test_masked_elements_are_not_looked_at(ranks):
    ranks.run(masked)


def flags_elsewhere(ctx):
    context = ctx.get_device_context()
    outside = torch.ones(ctx.num_ranks, dtype=torch.int64)
    with pytest.raises(NotSymmetricError):
        meeting_kernels.triton_compare[(1,)](context, outside, 1, outside, "eq")
    with pytest.raises(NotSymmetricError):
        atomic_kernels.gluon_count[(1,)](context, outside, outside, 1, 1)
    ctx.barrier()


def test_flags_and_counters_must_be_on_the_heap(ranks):
    ranks.run(flags_elsewhere)


def misuse_atomics(ctx, form):
    kernel, target = getattr(atomic_kernels, form), ctx.zeros(8)
    for operation, sem, scope, words in (
        ("add", "strong", "sys", "sem='strong' is not possible; .*'acq_rel'"),
        ("add", "relaxed", "world", "scope='world' is not possible; .*'sys'"),
        ("and", "relaxed", "sys", "for integers"),
    ):
        args = ctx.get_device_context(), ctx.get_heap_bases(), target, target, target, 8, ctx.cur_rank, 0
        with pytest.raises(AssertionError, match=words):
            kernel[(1,)](*args, operation, sem, scope, 8)
    ctx.barrier()


@pytest.mark.parametrize("form", FORMS)
def test_orders_and_types_that_atomics_do_not_have(ranks, form):
    ranks.run(misuse_atomics, form)


def misuse_flags(ctx, language):
    compare, tell = (getattr(meeting_kernels, f"{language}_{name}") for name in ("compare", "tell"))
    flag, seen = ctx.zeros(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match="cmp='=' is not possible; .*'reached'"):
        compare[(1,)](ctx.get_device_context(), flag, 1, seen, "=")
    with pytest.raises(AssertionError, match="op='sub' is not possible; .*'add'"):
        tell[(1,)](ctx.get_device_context(), flag, 1, ctx.cur_rank, "sub")
    with pytest.raises(AssertionError, match="not by pointer<fp32>"):
        tell[(1,)](ctx.get_device_context(), ctx.zeros(1), 1, ctx.cur_rank, "set")
    with pytest.raises(AssertionError, match="not by pointer<fp32>"):
        compare[(1,)](ctx.get_device_context(), ctx.zeros(1), 0, seen, "eq")
    for form, words in (("signal", "not by <"), ("wait", "not by <"), ("value", "compared to one value")):
        with pytest.raises(AssertionError, match=words):
            meeting_kernels.several[(1,)](ctx.get_device_context(), flag, ctx.cur_rank, form)
    ctx.barrier()


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_comparisons_operations_and_types_that_flags_do_not_have(ranks, language):
    ranks.run(misuse_flags, language)


# What a kernel gets as a number, and not as a constant: only the simulator knows it.
CUT = [
    (torch.int32, (1 << 40) + 5, InvalidValueError, "value=1099511627781, .* takes -2147483648 to 2147483647"),
    (torch.int32, -(1 << 31) - 1, InvalidValueError, "value=-2147483649, .* flag of int32"),
    (torch.uint32, -1, InvalidValueError, "value=-1, .* flag of uint32: that takes 0 to 4294967295"),
    (torch.int64, 1 << 63, InvalidValueError, "value=9223372036854775808, .* flag of int64"),
    (torch.int64, 1.5, InvalidArgumentError, "a value of fp32, and a flag of int64 takes a whole number"),
]


def cut_values(ctx, language):
    context = ctx.get_device_context()
    compare, tell = (getattr(meeting_kernels, f"{language}_{name}") for name in ("compare", "tell"))
    for dtype, value, error, words in CUT:
        flag, seen = ctx.zeros(1, dtype=dtype), ctx.zeros(1, dtype=dtype)
        with pytest.raises(error, match=rf"wait\(\) got {words}"):
            compare[(1,)](context, flag, value, seen, "ne")
        with pytest.raises(error, match=rf"signal\(\) got {words}"):
            tell[(1,)](context, flag, value, ctx.cur_rank, "set")
        assert flag.item() == 0
    # A count that has no sign may go down.
    flag = ctx.full((1,), 7, dtype=torch.uint32)
    tell[(1,)](context, flag, -3, ctx.cur_rank, "add")
    assert flag.item() == 4
    ctx.barrier()


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_value_that_a_flag_cannot_hold_is_not_cut(ranks, language):
    ranks.run(cut_values, language)


# Expected and new values of a compare-and-swap; None where it is done, since a number of either sign is bits.
SWAPS = [
    (torch.int32, 1 << 32, 1, "cmp=4294967296, .* element of int32: that takes -2147483648 to 4294967295"),
    (torch.int32, 0, -(1 << 31) - 1, "val=-2147483649, .* element of int32"),
    (torch.int64, 0, 1.5, "a val of fp32, and an element of int64 takes a whole number"),
    (torch.int32, 0, (1 << 32) - 1, None),
    (torch.uint32, 0, -1, None),
]


def swap_for_cut_values(ctx, language):
    kernel, old = getattr(atomic_kernels, f"{language}_cas"), ctx.zeros(1, dtype=torch.int64)
    for functional in (False, True):
        for dtype, expected, new, words in SWAPS:
            word, rank = ctx.zeros(1, dtype=dtype), ctx.cur_rank
            args = ctx.get_device_context(), ctx.get_heap_bases(), word, old, expected, new, rank, rank, functional
            if words is None:
                kernel[(1,)](*args)
                assert word.view(torch.int32).item() == -1
            else:
                with pytest.raises((InvalidArgumentError, InvalidValueError), match=rf"atomic_cas\(\) got {words}"):
                    kernel[(1,)](*args)
                assert word.item() == 0
    ctx.barrier()


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_value_that_an_element_cannot_hold_is_not_cut_and_compared(ranks, language):
    ranks.run(swap_for_cut_values, language)


def too_few_flags(ctx, language):
    ranks, kernel = ctx.num_ranks, getattr(meeting_kernels, f"{language}_meeting")
    for programs, shape in ((1, (ranks - 1,)), (3, (2, ranks))):
        flags = ctx.zeros(shape, dtype=torch.int32)
        words = rf"program {programs - 1} .* shape \[{programs}, {ranks}\].* int32\[.*\] has {flags.numel()} from"
        with pytest.raises(KernelBoundsError, match=words):
            kernel[(programs,)](ctx.get_device_context(), flags)
    ctx.barrier()


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_a_barrier_does_not_run_past_its_flags(ranks, language):
    ranks.run(too_few_flags, language)


@triton.jit
def to_nobody(context_tensor, target):
    iris.DeviceContext.initialize(context_tensor).store(target, 1.0)


def without_a_rank(ctx):
    with pytest.raises(TypeError, match=r"^DeviceContext.store\(\) missing 1 required positional argument: 'to_rank'"):
        to_nobody[(1,)](ctx.get_device_context(), ctx.zeros(1))
    ctx.barrier()


def test_a_store_to_no_rank(ranks):
    ranks.run(without_a_rank)
