"""The factories: torch's tensors, on the heap."""

import numpy
import pytest
import torch
from torch_factories import Torch

from iris import world
from iris.errors import (
    InvalidDtypeError,
    InvalidLayoutError,
    InvalidOutputError,
    InvalidValueError,
    NotATensorError,
    WrongDeviceError,
)
from iris.heap import SymmetricHeap
from iris.heap.symmetric_tensors import SymmetricTensors
from iris.tensors import Factories
from iris.world import Group


class Tensors(Factories, SymmetricTensors):
    """The factories, and what is done with tensors, over a heap of one rank."""

    def __init__(self):
        self.heap = SymmetricHeap(Group(None), 1 << 20, world.choose_device())


@pytest.fixture(scope="module")
def ctx():
    return Tensors()


MODEL = torch.arange(6.0, dtype=torch.float64).view(2, 3)

CALLS = {
    "zeros": lambda t: t.zeros(2, 3),
    "zeros of a tuple": lambda t: t.zeros((2, 3), dtype=torch.int16),
    "zeros of a list": lambda t: t.zeros([4], dtype=torch.bool),
    "zeros by name": lambda t: t.zeros(size=(2, 3)),
    "zeros without dimensions": lambda t: t.zeros(()),
    "zeros without elements": lambda t: t.zeros(3, 0),
    "zeros of Python's type": lambda t: t.zeros(2, dtype=float),
    "ones": lambda t: t.ones(5, dtype=torch.bfloat16),
    "ones by name": lambda t: t.ones(size=(2, 3)),
    "ones of fp8": lambda t: t.ones(5, dtype=torch.float8_e4m3fn),
    "full of an integer": lambda t: t.full((2, 2), 7),
    "full of a float": lambda t: t.full((2, 2), 1.5),
    "full of a bool": lambda t: t.full((3,), True),
    "full of a complex": lambda t: t.full((3,), 1 + 2j),
    "full of a tensor": lambda t: t.full((3,), torch.tensor(4)),
    "full with a dtype": lambda t: t.full((3,), 7, dtype=torch.float16),
    "arange": lambda t: t.arange(5),
    "arange of floats": lambda t: t.arange(1.0, 2.0, 0.3),
    "arange downwards": lambda t: t.arange(9, -9, -4),
    "arange by names": lambda t: t.arange(start=2, end=11, step=3),
    "arange to a name": lambda t: t.arange(end=4),
    "arange with a dtype": lambda t: t.arange(6, dtype=torch.bfloat16),
    "arange of nothing": lambda t: t.arange(0),
    "arange of fractions in int64": lambda t: t.arange(0.5, 7.9, 2.5, dtype=torch.int64),
    "arange of fractions in int32": lambda t: t.arange(0.5, 7.9, 1.5, dtype=torch.int32),
    "arange of large integers": lambda t: t.arange(2**62 + 1, 2**62 + 8, 3),
    "arange of numpy's integers": lambda t: t.arange(numpy.int64(2), numpy.int32(9)),
    "linspace": lambda t: t.linspace(-1, 1, 7),
    "linspace of complex": lambda t: t.linspace(0, 1 + 1j, 3),
    "linspace of tensors": lambda t: t.linspace(torch.tensor(0.0), torch.tensor(3.0), 4, dtype=torch.float64),
    "rand": lambda t: t.rand(3, 4),
    "rand by name": lambda t: t.rand(size=(3, 4)),
    "rand of fp16": lambda t: t.rand(9, dtype=torch.float16),
    "randn": lambda t: t.randn(17, dtype=torch.float64),
    "randn by name": lambda t: t.randn(size=[5]),
    "randn of complex": lambda t: t.randn(4, dtype=torch.complex64),
    "randint to high": lambda t: t.randint(10, (3, 4)),
    "randint from low": lambda t: t.randint(-5, 5, (40,), dtype=torch.int8),
    "randint by names": lambda t: t.randint(low=3, high=9, size=(6,)),
    "randint of floats": lambda t: t.randint(3, (5,), dtype=torch.float32),
    "uniform": lambda t: t.uniform((2, 5)),
    "uniform in bounds": lambda t: t.uniform(4, -3.0, 9.0, torch.float64),
    "zeros_like": lambda t: t.zeros_like(MODEL),
    "ones_like": lambda t: t.ones_like(MODEL.t()),
    "zeros_like without dimensions": lambda t: t.zeros_like(torch.tensor(3)),
    "full_like": lambda t: t.full_like(MODEL, 3, dtype=torch.int32),
    "rand_like": lambda t: t.rand_like(MODEL),
    "randn_like": lambda t: t.randn_like(MODEL, dtype=torch.float32),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_factory_makes_what_torch_makes(ctx, name):
    """The same shape, dtype and values (random ones too, on the CPU), contiguous and on the heap."""
    torch.manual_seed(sum(map(ord, name)))
    with ctx.heap.device:
        expected = CALLS[name](Torch())
    torch.manual_seed(sum(map(ord, name)))
    result = CALLS[name](ctx)
    assert (result.shape, result.dtype, result.device) == (expected.shape, expected.dtype, ctx.heap.device)
    assert result.is_contiguous() and ctx.is_symmetric(result)
    assert result.untyped_storage().data_ptr() % 1024 == 0
    if result.device.type == "cpu" or "rand" not in name and "uniform" not in name:
        assert torch.equal(
            result.cpu().view(-1).view(torch.uint8), expected.cpu().contiguous().view(-1).view(torch.uint8)
        )


@pytest.mark.parametrize(
    ("call", "shape", "dtype"),
    [
        (lambda t: t.empty(2, 3), (2, 3), torch.float32),
        (lambda t: t.empty(((2, 3),), dtype=torch.int8), (2, 3), torch.int8),
        (lambda t: t.empty((2, (3, 4))), (2, 3, 4), torch.float32),
        (lambda t: t.empty_like(MODEL), (2, 3), torch.float64),
        (lambda t: t.allocate(12, torch.uint8), (12,), torch.uint8),
        (lambda t: t.linspace(0, 1, ((5,),)), (5,), torch.float32),
    ],
)
def test_sizes_may_be_nested(ctx, call, shape, dtype):
    result = call(ctx)
    assert (result.shape, result.dtype) == (shape, dtype)
    assert ctx.is_symmetric(result)


def test_the_default_dtype_is_torchs(ctx):
    torch.set_default_dtype(torch.float64)
    try:
        assert {call(ctx).dtype for call in (CALLS["zeros"], CALLS["rand"], CALLS["linspace"])} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_generator_gives_its_numbers(ctx):
    for make in (
        lambda t, g: t.rand(5, generator=g),
        lambda t, g: t.randn(5, generator=g),
        lambda t, g: t.randint(0, 99, (5,), generator=g),
    ):
        results = []
        for _ in range(2):
            generator = torch.Generator(ctx.heap.device).manual_seed(5)
            results.append([make(ctx, generator), make(ctx, generator)])
        (one, more), (again, _) = results
        assert torch.equal(one, again) and not torch.equal(one, more)


@pytest.mark.parametrize("name", ["zeros", "ones", "full of a float", "rand", "randn", "linspace"])
def test_out_is_filled_and_shaped(ctx, name):
    expected = CALLS[name](ctx)
    flat = ctx.full((expected.numel(),), -5, dtype=expected.dtype)
    fill = {
        "zeros": lambda o: ctx.zeros(2, 3, out=o),
        "ones": lambda o: ctx.ones(5, dtype=torch.bfloat16, out=o),
        "full of a float": lambda o: ctx.full((2, 2), 1.5, out=o),
        "rand": lambda o: ctx.rand(3, 4, out=o),
        "randn": lambda o: ctx.randn(17, dtype=torch.float64, out=o),
        "linspace": lambda o: ctx.linspace(-1, 1, 7, out=o),
    }[name]
    count = ctx.heap.stats().count
    result = fill(flat)
    assert ctx.heap.stats().count == count
    assert result.shape == expected.shape and result.data_ptr() == flat.data_ptr()
    assert not (flat == -5).any()
    if "rand" not in name:
        assert torch.equal(result, expected)


def test_out_may_be_a_view_with_strides(ctx):
    whole = ctx.zeros(3, 4)
    assert torch.equal(ctx.arange(3, out=whole[:, 1]), torch.arange(3.0, device=whole.device))
    assert whole.sum() == whole[:, 1].sum() == 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda t: t.zeros(3, 3, out=t.allocate(4, torch.float32)),
            "The output tensor has 4 elements, but 9 are required",
        ),
        (
            lambda t: t.ones(3, 3, dtype=torch.float32, out=t.allocate(9, torch.int32)),
            "The output tensor has dtype torch.int32, but torch.float32 is required",
        ),
        (lambda t: t.rand(3, out=torch.zeros(3)), "The output tensor is not on the symmetric heap"),
        (lambda t: t.arange(3, out=t.allocate(4, torch.int64)), "The output tensor has 4 elements, but 3 are required"),
        (lambda t: t.empty(3, out=t.allocate(4, torch.int64)), "The output tensor has 4 elements, but 3 are required"),
    ],
)
def test_an_output_that_does_not_do_is_refused(ctx, call, text):
    with pytest.raises(InvalidOutputError, match=text) as caught:
        call(ctx)
    assert isinstance(caught.value, RuntimeError)


FACTORIES = {
    "empty": lambda t, **o: t.empty(2, **o),
    "zeros": lambda t, **o: t.zeros(2, **o),
    "ones": lambda t, **o: t.ones(2, **o),
    "full": lambda t, **o: t.full((2,), 1.0, **o),
    "arange": lambda t, **o: t.arange(2.0, **o),
    "linspace": lambda t, **o: t.linspace(0, 1, 2, **o),
    "rand": lambda t, **o: t.rand(2, **o),
    "randn": lambda t, **o: t.randn(2, **o),
    "randint": lambda t, **o: t.randint(9, (2,), **{"dtype": torch.float32} | o),
    "zeros_like": lambda t, **o: t.zeros_like(torch.ones(2), **o),
    "full_like": lambda t, **o: t.full_like(torch.ones(2), 3, **o),
    "randn_like": lambda t, **o: t.randn_like(torch.ones(2), **o),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_options_mean_what_they_mean_in_torch(ctx, name):
    make = FACTORIES[name]
    result = make(ctx, device=ctx.heap.device, layout=torch.strided, requires_grad=True, pin_memory=False)
    assert result.requires_grad and result.is_leaf
    with pytest.raises(InvalidLayoutError, match="cannot be pinned"):
        make(ctx, pin_memory=True)
    with pytest.raises(InvalidLayoutError, match="torch.strided, not torch.sparse_coo") as caught:
        make(ctx, layout=torch.sparse_coo)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(WrongDeviceError, match="cannot be on meta") as caught:
        make(ctx, device="meta")
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(InvalidDtypeError, match="'float32'") as caught:
        make(ctx, dtype="float32")
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.zeros_like(MODEL.view(1, 2, 3, 1), memory_format=torch.channels_last),
        lambda t: t.empty(1, 2, 3, 1, memory_format=torch.channels_last),
    ],
)
def test_what_the_heap_does_not_have_is_refused(ctx, call):
    with pytest.raises(InvalidLayoutError):
        call(ctx)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.randint(3),
        lambda t: t.randint(1, 2, 3, 4),
        lambda t: t.arange(),
        lambda t: t.zeros(),
        lambda t: t.rand(2, size=(2,)),
        lambda t: t.zeros("23"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(ctx, call):
    with pytest.raises(TypeError):
        call(ctx)


def test_arange_in_integers_by_less_than_one_is_refused(ctx):
    """As by torch, in whose version 2.11 it ends the process."""
    text = r"arange\(start=0, end=3, step=0\.5, dtype=torch\.int64\) .*step must be nonzero"
    with pytest.raises(InvalidValueError, match=text):
        ctx.arange(0, 3, 0.5, dtype=torch.int64)


@pytest.mark.parametrize("bound", [float("nan"), float("inf")])
def test_arange_without_an_end_raises_as_torch_does(ctx, bound):
    with pytest.raises(RuntimeError, match="unsupported range"):
        ctx.arange(bound)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.zeros_like([1, 2]),
        lambda t: t.zeros(2, out=[1, 2]),
        lambda t: t.is_symmetric([1, 2]),
        lambda t: t.as_symmetric([1, 2]),
        lambda t: t.free([1, 2]),
        lambda t: t.peer([1, 2], 0),
    ],
)
def test_what_is_no_tensor_is_told(ctx, call):
    with pytest.raises(NotATensorError, match=r"this is a list: \[1, 2\]"):
        call(ctx)


def test_gpu_devices_are_compared_as_torch_means_them(monkeypatch):
    tensors = Factories()
    tensors.heap = type("Heap", (), {"device": torch.device("cuda:1")})()
    current = [1]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    tensors._check(torch.strided, "cuda")
    tensors._check(torch.strided, "cuda:1")
    current[0] = 0
    for wrong in ("cuda", "cuda:0", "cpu"):
        with pytest.raises(WrongDeviceError):
            tensors._check(torch.strided, wrong)


def test_as_symmetric_copies_only_what_is_elsewhere(ctx):
    elsewhere = torch.arange(12.0).view(3, 4).t()
    copy = ctx.as_symmetric(elsewhere)
    assert ctx.is_symmetric(copy) and copy.is_contiguous()
    assert torch.equal(copy.cpu(), elsewhere)
    assert ctx.as_symmetric(copy) is copy


def test_free_and_peer_are_the_heaps(ctx):
    tensor = ctx.arange(5)
    assert torch.equal(ctx.peer(tensor, 0), tensor)
    before = ctx.heap.stats().count
    ctx.free(tensor)
    ctx.heap.meet()
    assert ctx.heap.stats().count < before
