"""Launches like an earlier one: what a template fills in is what a GPU's kernel would be given without it."""

import weakref
from typing import NamedTuple

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris import simulator
from iris.runtime.launch import addresses
from iris.runtime.template import template_of, tensor_keys

BF16 = torch.bfloat16


class Matrix(NamedTuple):
    rows: torch.Tensor
    pitch: int
    bias: torch.Tensor | None


@pytest.fixture
def on_gpu(monkeypatch):
    """Arguments as a GPU's launches take them: numbers in the place of tensors. Nothing is launched."""
    monkeypatch.setattr(simulator, "ACTIVE", False)


def tensors(seed, *shapes):
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16) for shape in shapes]


def arguments(a, b, bias, workspace):
    layout = gl.NVMMASharedLayout.get_default_for([16, 32], gl.bfloat16)
    return workspace, Matrix(a, 32, bias), 7, TensorDescriptor.from_tensor(b, [16, 32], layout), (workspace, (b, 3))


def plain(given):
    """A map of a tensor by its fields, with the address of the tensor."""
    if isinstance(given, TensorDescriptor):
        return {**vars(given), "base": given.base.data_ptr()}
    return tuple(map(plain, given)) if isinstance(given, tuple) else given


def test_it_fills_in_the_addresses_of_later_calls(on_gpu):
    shapes = (16, 32), (64, 32), (32,)
    (workspace,), first = tensors(0, (8,)), tensors(1, *shapes)
    fill = template_of(arguments(*first, workspace), first)
    for seed in (2, 3, 1):
        own = tensors(seed, *shapes)
        assert plain(fill(own)) == plain(addresses(arguments(*own, workspace)))
    made_of = [weakref.ref(tensor) for tensor in first]
    first.clear()
    assert [tensor() for tensor in made_of] == 3 * [None]  # it keeps none of them alive


def test_what_cannot_be_told_apart_has_none(on_gpu):
    (workspace, same, other) = tensors(0, (8,), (16, 32), (16, 32))
    assert template_of((workspace, same, same), [same, same]) is None
    # The kernel is given a copy of it.
    assert template_of((workspace, same, other.clone()), [same, other]) is None
    assert template_of((workspace, same[1:], other), [same, other]) is None


def test_what_calls_are_alike():
    x = torch.zeros(64, dtype=BF16)
    alike = tensor_keys([x[:16], None])
    assert alike == tensor_keys([x[16:32], None]) is not None
    others = x[1:17], x[:15], x[:32:2], x[:16].half(), x[:16].view(4, 4)
    assert len({alike, *(tensor_keys([other, None]) for other in others)}) == 6
    assert tensor_keys([x.to_sparse()]) is None and tensor_keys([x[:0].clone()]) is None and tensor_keys([3]) is None
