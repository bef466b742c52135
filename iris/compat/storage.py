"""Tensors on memory that torch has not allocated, and views that torch has no public function for.

`torch._C._construct_storage_from_data_pointer` and `torch._neg_view` are there in torch 2.9 to 2.13. Where one is gone,
its call raises `MissingPartError`: torch offers no other way.
"""

from iris.compat.parts import function

storage_at = function("torch._C:_construct_storage_from_data_pointer", "make tensors of memory that ranks share")
"""``storage_at(address, device, size)``: a storage over bytes that somebody else owns and keeps alive."""

lazily_negated = function("torch:_neg_view", "give a peer's copy of a tensor that is lazily negated")
"""A view of a tensor with the negative bit set, as torch makes of the imaginary part of a conjugate."""
