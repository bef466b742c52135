"""Types and tensors of remembered shapes are those that the language makes."""

import pytest
import triton.language as tl

import iris  # noqa: F401 (switches the simulator on)


def as_the_language_makes(kind: type, *arguments):
    made = object.__new__(kind)
    kind.__init__.__wrapped__(made, *arguments)
    return made


def attributes(made) -> dict:
    """With the kinds of their sizes too, as a constant equals its number."""
    kinds = [type(made.numel), *map(type, made.shape)]
    return vars(made) | {"kinds": kinds}


SHAPES = [(8,), (8, 1), (1, 8), (2, 4), (2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_blocks(shape):
    for element in (tl.float32, tl.int8, tl.pointer_type(tl.float16)):
        for asked in (list(shape), [tl.constexpr(size) for size in shape]):
            made = tl.block_type(element, asked)
            assert attributes(made) == attributes(as_the_language_makes(tl.block_type, element, asked))
            values = tl.tensor(object(), made)
            assert attributes(values) == attributes(as_the_language_makes(tl.tensor, values.handle, made))


def test_of_scalars():
    for type_ in (tl.float32, tl.pointer_type(tl.int64)):
        value = tl.tensor(object(), type_)
        assert attributes(value) == attributes(as_the_language_makes(tl.tensor, value.handle, type_))


@pytest.mark.parametrize("shape, message", [([], "0d"), ([3], "power of 2"), ([8, 2.0], "float")], ids=str)
def test_shapes_that_are_none_are_refused_each_time(shape, message):
    tl.block_type(tl.float32, [8, 2])
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=message):
            tl.block_type(tl.float32, shape)
