"""The allocator: offsets in, offsets out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris.heap.allocator import ALIGNMENT, Allocator, round_up

BLOCKS = 64
CAPACITY = BLOCKS * ALIGNMENT

# A program: ask for so many bytes, or free the n-th block in use.
programs = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, CAPACITY // 4)),
        st.tuples(st.just("free"), st.integers(0, BLOCKS)),
    ),
    max_size=150,
)


def run(allocator, program):
    """Run a program beside a map of the bytes in use, and yield after each step what is in use."""
    used = {}
    for action, number in program:
        if action == "allocate":
            fits = allocator.fits(number)
            offset = allocator.allocate(number)
            assert (offset is not None) == fits
            if offset is not None:
                assert offset not in used
                used[offset] = number
        elif used:
            offset = sorted(used)[number % len(used)]
            allocator.free(offset)
            del used[offset]
        yield used


def block(size):
    return max(round_up(size), ALIGNMENT)


def gaps(used):
    """The sizes of the free stretches between blocks."""
    ends = [0] + [offset + block(size) for offset, size in sorted(used.items())]
    starts = [*sorted(used), CAPACITY]
    return [start - end for start, end in zip(starts, ends, strict=True)]


@settings(max_examples=150, deadline=None)
@given(programs)
def test_blocks_are_aligned_apart_and_counted(program):
    allocator = Allocator(CAPACITY)
    peak = 0
    for used in run(allocator, program):
        assert all(offset % ALIGNMENT == 0 for offset in used)
        assert min(gaps(used)) >= 0
        stats = allocator.stats()
        assert stats.allocated == sum(used.values())
        assert stats.reserved == sum(map(block, used.values())) == CAPACITY - sum(gaps(used))
        assert stats.count == len(used)
        # Free neighbours are one block, so the largest stretch is also the largest request that fits.
        assert stats.largest_free_block == max(gaps(used))
        peak = max(peak, stats.reserved)
        assert stats.peak == peak
    for offset in list(used) if program else []:
        allocator.free(offset)
    assert allocator.stats().largest_free_block == CAPACITY
    assert allocator.allocate(CAPACITY) == 0


@settings(max_examples=50, deadline=None)
@given(programs)
def test_the_same_calls_give_the_same_offsets(program):
    one, two = Allocator(CAPACITY), Allocator(CAPACITY)
    for here, there in zip(run(one, program), run(two, program), strict=True):
        assert here == there


def test_the_smallest_block_that_fits_is_taken_and_the_first_of_equals():
    allocator = Allocator(16 * ALIGNMENT)
    offsets = [allocator.allocate(n * ALIGNMENT) for n in (3, 1, 2, 1, 2, 1)]
    for index in (0, 2, 4):
        allocator.free(offsets[index])
    assert allocator.allocate(2 * ALIGNMENT) == offsets[2]
    assert allocator.allocate(2 * ALIGNMENT) == offsets[4]
    assert allocator.allocate(2 * ALIGNMENT) == offsets[0]


def test_nothing_takes_a_block_of_its_own():
    allocator = Allocator(2 * ALIGNMENT)
    assert [allocator.allocate(0) for _ in range(3)] == [0, ALIGNMENT, None]


@pytest.mark.parametrize("offset", [0, 1, ALIGNMENT, CAPACITY])
def test_only_a_block_in_use_can_be_freed(offset):
    allocator = Allocator(CAPACITY)
    with pytest.raises(KeyError):
        allocator.free(offset)
    allocator.free(allocator.allocate(1))
    with pytest.raises(KeyError):
        allocator.free(offset)
