"""Operators that skip the checks of types and shapes of the language: results, types and errors are the same."""

import itertools

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from iris.simulator import arithmetic

OPERATORS = [
    "add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne",
]  # fmt: skip
SHAPES = [(), (4,), (4, 1), (1, 8), (4, 8)]
TYPES = [tl.int32, tl.int64, tl.uint32, tl.int1, tl.float32]
NUMBERS = [0, 3, -5, 2**31 - 1, -(2**31), 2**31, 2**40, True, 0.5, tl.constexpr(7), tl.constexpr(-(2**35))]


def values(dtype, shape, seed):
    """Of both signs, the least and the greatest among them."""
    chance = np.random.default_rng(seed)
    if dtype == tl.int1:
        return chance.integers(0, 2, shape).astype(bool)
    if dtype == tl.float32:
        return chance.standard_normal(shape, np.float32)
    limits = np.iinfo({tl.int32: np.int32, tl.int64: np.int64, tl.uint32: np.uint32}[dtype])
    made = chance.integers(max(-9, limits.min), 9, shape).astype(limits.dtype)
    if made.size > 2:
        made.flat[0], made.flat[1] = limits.min, limits.max
    return made


def tensor(dtype, shape, made):
    return tl.tensor(TensorHandle(made, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def numbers(dtype, shape, seed):
    return tensor(dtype, shape, values(dtype, shape or (1,), seed))


def pointers(element, shape):
    first, count = 1 << 20, int(np.prod(shape))
    addresses = np.arange(first, first + 8 * count, 8, dtype=np.uint64)
    return tensor(tl.pointer_type(element), shape, addresses.reshape(shape or (1,)))


def outcome(operator, left, right):
    """What it gives: its type, shape and values, or the kind of error."""
    with np.errstate(all="ignore"):
        try:
            result = operator(left, right)
        except Exception as error:
            return type(error)
    data = result.handle.data
    return str(result.type), list(map(int, result.shape)), str(result.handle.dtype), data.dtype.name, data.tobytes()


def the_languages(name):
    """The operator that looks at types and shapes."""
    operator = getattr(tl.tensor, f"__{name}__")
    while operator.__code__.co_filename == arithmetic.__file__:
        operator = operator.__wrapped__
    return operator


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_what_the_languages_gives(name):
    operator, language = getattr(tl.tensor, f"__{name}__"), the_languages(name)
    assert operator is not language
    tensors = list(itertools.product(TYPES, SHAPES))
    for (dtype, shape), (other_dtype, other_shape) in itertools.product(tensors, repeat=2):
        left, right = numbers(dtype, shape, 1), numbers(other_dtype, other_shape, 2)
        assert outcome(operator, left, right) == outcome(language, left, right), (left.type, right.type)
    for (dtype, shape), number in itertools.product(tensors, NUMBERS):
        left = numbers(dtype, shape, 1)
        assert outcome(operator, left, number) == outcome(language, left, number), (left.type, number)


@pytest.mark.parametrize("element", [tl.int1, tl.int8, tl.bfloat16, tl.int64, tl.pointer_type(tl.float32)])
def test_a_pointer_moves_as_the_languages_does(element):
    for shape, dtype, other_shape in itertools.product(SHAPES, TYPES, SHAPES):
        left, right = pointers(element, shape), numbers(dtype, other_shape, 1)
        for operands in ((left, right), (right, left)):
            assert outcome(tl.tensor.__add__, *operands) == outcome(the_languages("add"), *operands), (
                left.type,
                right.type,
            )
    for shape, number in itertools.product(SHAPES, NUMBERS):
        left = pointers(element, shape)
        assert outcome(tl.tensor.__add__, left, number) == outcome(the_languages("add"), left, number), (shape, number)
