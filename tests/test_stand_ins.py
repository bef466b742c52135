"""Tensors that stand for others: no kernel gets one, and the error says what to do."""

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.masked import masked_tensor
from torch.utils._pytree import tree_map_only
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris  # noqa: F401 (chooses the simulator where there is no GPU)
from iris.errors import InvalidArgumentError, InvalidCollectiveError, LaunchError, PeerFailedError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SIMULATED = not torch.cuda.is_available()


@triton.jit
def copy(x, y):
    i = tl.arange(0, 4)
    tl.store(y + i, tl.load(x + i))


@gluon.jit
def copy_in_gluon(x, y):
    i = gl.arange(0, 4, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y + i, gl.load(x + i))


def fake(function, x):
    with FakeTensorMode() as mode:
        return function(mode.from_tensor(x))


def distributed(function, x):
    mesh = dist.DeviceMesh.from_group(dist.group.WORLD, x.device.type)
    return function(DTensor.from_local(x, mesh, [Replicate()]))


class Wrapped(torch.Tensor):
    """A subclass that holds a tensor, and says nothing of it."""

    @staticmethod
    def __new__(cls, x):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)
        wrapper.inner = x
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        return function(*args, **kwargs)


def given_back(function, x):
    x.untyped_storage().resize_(0)
    return function(x)


# How a function gets one, and what it is told to do.
GIVEN = {
    "DTensor": (distributed, r"a DTensor.*x\.to_local\(\)"),
    "AsyncCollectiveTensor": (lambda f, x: f(AsyncCollectiveTensor(x)), r"nobody has waited for.*wait_tensor\(x\)"),
    "FakeTensor": (fake, "without memory .FakeTensor on .*operator"),
    "vmap": (lambda f, x: torch.vmap(f)(x.expand(2, -1)), "transform of torch.func.*outside of the transform"),
    "grad": (lambda f, x: torch.func.grad(lambda x: f(x).sum())(x), "transform of torch.func"),
    "functionalize": (lambda f, x: torch.func.functionalize(f)(x), "transform of torch.func"),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), "transform of torch.func"),
    "a wrapper": (lambda f, x: f(Wrapped(x)), "a Wrapped, which has no memory of its own.*that it wraps"),
    "MaskedTensor": (lambda f, x: f(masked_tensor(x, x > 0)), "a MaskedTensor, which has no memory of its own"),
    "functional": (lambda f, x: f(torch._to_functional_tensor(x)), "a tensor without memory"),
    "zeros": (lambda f, x: f(torch._efficientzerotensor((4,), device=x.device)), "a tensor without memory"),
    "given back": (lambda f, x: given_back(f, x.clone()), "a tensor without memory: its storage was given back"),
    "sparse": (lambda f, x: f(x.to_sparse()), r"of the layout torch.sparse_coo. Pass x.to_dense\(\)"),
}


def to_kernels(ctx, name):
    give, words = GIVEN[name]
    x = torch.arange(4.0, device=ctx.device)
    for kernel in (copy, copy_in_gluon):

        def launch(given, kernel=kernel):
            kernel[(1,)](given, torch.zeros(4, device=ctx.device))
            return given

        with pytest.raises(LaunchError, match=f"(?s)Argument 'x' of kernel '{kernel.__name__}' is .*{words}"):
            give(launch, x)
    result = torch.zeros(4)
    copy[(1,)](torch.nn.Parameter(x), result)
    assert torch.equal(result, x)


@pytest.mark.skipif(not SIMULATED, reason="on a GPU Triton itself launches kernels of users")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", GIVEN)
def test_a_kernel_in_the_simulator(ranks, name):
    ranks.run(to_kernels, name)


def to_calls(ctx, name):
    give, words = GIVEN[name]
    x, plain = torch.ones(4, device=ctx.device), torch.zeros(4, device=ctx.device)
    square, product = torch.ones(4, 4, device=ctx.device), torch.zeros(4, 4, device=ctx.device)
    calls = [
        lambda given: ctx.ccl.all_reduce(plain, given),
        lambda given: ctx.ccl.all_reduce(given, plain),
        lambda given: ctx.ccl.broadcast(given, 0),
        lambda given: ctx.ccl.all_gather(torch.zeros(4 * ctx.num_ranks, device=ctx.device), given),
        lambda given: ctx.ops.matmul_all_reduce(product, square, square, given),
        lambda given: ctx.ops.all_reduce_rms_norm(product, square, given),
    ]
    # What a plain tensor has prepared is not given to others.
    for call in calls:
        call(x.clone())
    for call in calls:
        with pytest.raises(InvalidCollectiveError, match=f"(?s)takes tensors with memory of their own.*{words}"):
            give(lambda given, call=call: call(given) or given, x)
    plain.zero_()
    ctx.ccl.all_reduce(plain, torch.nn.Parameter(x))
    assert plain.tolist() == [ctx.num_ranks] * 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", GIVEN)
def test_collectives_and_fused_operations(ranks, name):
    ranks.run(to_calls, name)


def on_the_host(ctx, name):
    give, words = GIVEN[name]
    x = torch.arange(4.0, device=ctx.device)
    with pytest.raises(
        InvalidArgumentError, match=f"(?s)as_symmetric.. copies tensors with memory of their own.*{words}"
    ):
        give(ctx.as_symmetric, x)
    if name != "sparse":  # which is sent as any other object
        with pytest.raises((InvalidArgumentError, PeerFailedError), match=f"(?s)broadcast.. sends tensors.*{words}"):
            give(ctx.broadcast, x)
    assert not ctx.is_symmetric(torch._efficientzerotensor((4,), device=ctx.device))
    ctx.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", GIVEN)
def test_the_host(ranks, name):
    ranks.run(on_the_host, name)
