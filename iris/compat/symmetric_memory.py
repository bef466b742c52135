"""Memory that the GPUs of one host share, by the C++ classes behind `torch.distributed._symmetric_memory`.

`torch._C._distributed_c10d._SymmetricMemory`, `_register_process_group` and `_unregister_process_group` are there in
torch 2.9 to 2.13, as are the names of the Python module, which benchmarks use. Where one is gone, its call raises
`MissingPartError`, but for `set_group_info`, which newer releases of torch do without. Iris also relies on the keys
under which torch exchanges handles in a store (`CountingStore`), and on the environment variable that switches
multicast off.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from iris.compat.parts import function, late, optional

_SHARES = "share memory between GPUs"

_empty_strided_p2p = function("torch._C._distributed_c10d:_SymmetricMemory.empty_strided_p2p", _SHARES)
_register_process_group = function("torch._C._distributed_c10d:_register_process_group", _SHARES)
_unregister_process_group = function("torch._C._distributed_c10d:_unregister_process_group", _SHARES)
# Releases of torch before 2.11 look for the group here.
_set_group_info = optional("torch._C._distributed_c10d:_SymmetricMemory.set_group_info")

rendezvous = function("torch._C._distributed_c10d:_SymmetricMemory.rendezvous", _SHARES)
"""``rendezvous(memory, name)``: exchange the members' memory; the result has all addresses. Collective."""

# The Python module takes long to import.
_MEASURES = "measure torch's own symmetric memory"
_empty = late("torch.distributed._symmetric_memory:empty", _MEASURES)
_rendezvous = late("torch.distributed._symmetric_memory:rendezvous", _MEASURES)

allow_fused_operators = late("torch.distributed._symmetric_memory:enable_symm_mem_for_group", _MEASURES)
"""Let torch's operators of `torch.ops.symm_mem` use the process group with this name."""


def allocate(size: int, device: torch.device) -> torch.Tensor:
    """``size`` bytes of a GPU, undefined, that can be shared.

    Not by `torch.distributed._symmetric_memory.empty`, which allocates from a memory pool: there the block may begin
    anywhere in an allocation that other blocks use, too, and at another offset on each rank.
    """
    return _empty_strided_p2p((size,), (1,), torch.uint8, device)


def pooled(count: int, dtype: torch.dtype, device: torch.device, group_name: str) -> torch.Tensor:
    """A tensor from torch's own pool, shared with the members of a process group. Collective."""
    tensor = _empty(count, dtype=dtype, device=device)
    _rendezvous(tensor, group_name)
    return tensor


class CountingStore(dist.Store):
    """A wrapper of ``store`` in which the exchanges of one group are numbered from 0 on.

    torch's keys are ``prefix/number/rank``. It counts the exchanges of all groups of a process together, so ranks that
    are in different groups would come to different numbers.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def _key(self, key: str) -> str:
        prefix, number, rank = key.rsplit("/", 2)
        if self._first is None:
            self._first = int(number)
        return f"{prefix}/{int(number) - self._first}/{rank}"

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # what torch gives it
        self._store.set(self._key(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)


@contextlib.contextmanager
def registered(name: str, store: dist.Store, rank: int, size: int) -> Iterator[None]:
    """In this context torch finds a group by this name: its ranks, and the store by which they exchange handles.

    The group that the program has made may be written in Python, as that of Iris' own backend. Such a group has no
    store that C++ could find, so another group is registered.
    """
    counting = CountingStore(store)
    process_group = dist.ProcessGroup(counting, rank, size)
    _register_process_group(name, process_group)
    if _set_group_info is not None:
        _set_group_info(name, rank, size, counting)
    try:
        yield
    finally:
        _unregister_process_group(name)


@contextlib.contextmanager
def without_multicast() -> Iterator[None]:
    """Keep torch from setting up NVLink multicast, which Iris does not use and some machines refuse."""
    variable = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
