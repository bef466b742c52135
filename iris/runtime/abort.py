"""The abort flag of a group: whether the group is broken, in the host's memory, for all members to see.

After a wait that gave up, a call that was interrupted or messages of unequal size the ranks are out of step, and later
calls would return what belongs to earlier ones. So the group is aborted, as a communicator of NCCL is
(``ncclCommAbort``): every later call of it is an error, on every rank. Other groups go on.

The flag is memory that all members map. A call reads one word of it, without asking the GPU: 0 while all is well. A
kernel that gives up writes it too (`iris.language.ordering.give_up`): the memory is registered with CUDA, so that
kernels can store to it.

Layout: the state, which is 0 or names the member that aborted; then a section of each member: what its kernel has
recorded, in the words of `iris.failures.device_record`, and what its host says about it. Each member writes its own
section before the state, and nobody resets either, so whoever sees the state can read the section; if a host has not
said anything yet, the kernel's record stands for it.
"""

import ctypes
import mmap
import weakref
from collections.abc import Callable

import torch

from iris import simulator
from iris.errors import GroupAbortedError, IrisError, MappingError
from iris.failures.device_record import CLAIMED, WORDS, DeviceRecord, error_of, from_afar
from iris.heap import host
from iris.heap.mapping import locate
from iris.world import Group

# The state: 1 + the member that aborted; and whether ranks that wait leave at once, or when their own limit is over.
MEMBER_BITS = 32
AT_ONCE = 1 << MEMBER_BITS

SECTION_BYTES = 2048
# In a section, in int64 words: how many rooted collectives the member has called (`iris.ccl.refusal`); how many bytes
# of text there are; and in bytes where these begin. At its end: of what size the last of these calls are, the n-th in
# word n % SIZES_KEPT.
CALLED, TEXT_LENGTH = 14, 15
TEXT = 128
SIZES_KEPT = 16
SIZES = SECTION_BYTES // 8 - SIZES_KEPT
LONGEST_TEXT = SECTION_BYTES - TEXT - 8 * SIZES_KEPT

# cudaHostRegisterPortable | cudaHostRegisterMapped (CUDA Runtime API, "cudaHostRegister"); HIP has the same numbers.
REGISTER_MAPPED = 3

# All flags of this process, where a kernel that waits in the simulator looks whether its group is broken.
_flags: "weakref.WeakSet[AbortFlag]" = weakref.WeakSet()
# What the GPU may still write to. It stays mapped until it is closed.
_registered: "set[AbortFlag]" = set()


class AbortFlag:
    """The abort flag of one group. To make it is collective over ``group`` and blocks the host.

    Attributes
    ----------
    state : memoryview
        int64; the first word is 0 while the group is whole.
    record_words : torch.Tensor
        The device record of the group's kernels.
    record : int
        Its address.
    """

    def __init__(self, group: Group, device: torch.device, record: DeviceRecord) -> None:
        self._group = group
        size = -(-SECTION_BYTES * (1 + group.size) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = host.share_one(group, size)
        self.state = memoryview(self._memory).cast("q")
        self._address = host.address_of(self._memory)
        self._reported = self._ends_waits = False
        seen_by_gpu = self._address
        if device.type == "cuda":

            def register() -> None:
                nonlocal seen_by_gpu
                seen_by_gpu = _register(self._address, size)
                _registered.add(self)

            try:
                group.agree(register, "share the abort flag of a group with its GPU")
            except BaseException:
                self.close()
                raise
        own = seen_by_gpu + SECTION_BYTES * (1 + group.rank)
        self.record_words = record.of_group(own, seen_by_gpu, 1 + group.rank)
        self.record = self.record_words.data_ptr()
        group.check_whole, group.abort = self.check, self.abort
        _flags.add(self)

    def abort(self, why: str, at_once: bool = True) -> None:
        """Break the group, by the host. ``at_once``: ranks that wait in the simulator do not wait any longer."""
        self._say(why)
        if not self.state[0]:
            self.state[0] = 1 + self._group.rank + (AT_ONCE if at_once else 0)

    def interrupted(self, call: str, error: BaseException) -> None:
        """Break the group since a ``call`` of it has ended with this ``error``, unless it had not begun.

        What Iris refuses has not begun: all ranks may have refused it, and go on.
        """
        if isinstance(error, IrisError) and not isinstance(error, TimeoutError | ConnectionError):
            return
        rank = self._group.ranks[self._group.rank]
        # The other ranks notice a time limit or a lost rank by themselves, and report it in their own words.
        finds = isinstance(error, TimeoutError | ConnectionError)
        self.abort(f"{call}() of rank {rank} ended with {_described(error)}", at_once=not finds)

    def place(self, word: int, member: int) -> int:
        """Where in the `state` a word of a member's section is."""
        return SECTION_BYTES * (1 + member) // 8 + word

    def explain(self, why: str) -> None:
        """Say why a kernel of this rank will break the group."""
        self._say(why)
        self._reported = True

    def check(self) -> None:
        """Raise `GroupAbortedError` if the group is broken. In the path of a call, look at ``state[0]`` instead."""
        if self.state[0]:
            raise self.error()

    def error(self) -> GroupAbortedError:
        """That the group is broken, and why."""
        member = (self.state[0] & (AT_ONCE - 1)) - 1
        return GroupAbortedError(self._group.ranks, self._why(member))

    def ends_waits(self) -> bool:
        """Whether programs that wait in the simulator leave now. Asked after each round of looks at their flags.

        The first time it is False, so that one more round finds what had come before the abort.
        """
        before, self._ends_waits = self._ends_waits, self.state[0] >= AT_ONCE
        return before

    def raise_recorded(self, describe: Callable[[int], str | None]) -> None:
        """Raise what a kernel of this rank has recorded, once. The caller has drained its stream."""
        if not self.state[0] or self._reported:
            return
        words = self._words(self._group.rank)
        if words[CLAIMED]:
            self._reported = True
            error = error_of(words, self._group.ranks[self._group.rank], describe, self._group.ranks)
            self._say(_described(error))
            self.state[0] |= AT_ONCE
            raise error

    def close(self) -> None:
        """The caller guarantees that no kernel of the group runs any more on this rank."""
        if self in _registered:
            _registered.discard(self)
            torch.cuda.cudart().cudaHostUnregister(self._address)
        _flags.discard(self)
        self._group.check_whole = self._group.abort = None
        # Now, and not when a collector comes: a mapping holds a descriptor.
        self.state.release()
        self._memory.close()

    def _say(self, text: str) -> None:
        """For the other members, in this one's section."""
        data = text.encode()[:LONGEST_TEXT]
        begin = SECTION_BYTES * (1 + self._group.rank)
        self._memory[begin + TEXT : begin + TEXT + len(data)] = data
        self.state[self.place(TEXT_LENGTH, self._group.rank)] = len(data)

    def _why(self, member: int) -> str:
        begin = SECTION_BYTES * (1 + member)
        length = self.state[self.place(TEXT_LENGTH, member)]
        if length:
            return self._memory[begin + TEXT : begin + TEXT + length].decode(errors="ignore")
        return from_afar(self._words(member), self._group.ranks[member], self._group.ranks)

    def _words(self, member: int) -> list[int]:
        begin = self.place(CLAIMED, member)
        return self.state[begin : begin + WORDS].tolist()


def _watch(polled: Callable[[], list[int]]) -> GroupAbortedError | None:
    """The error that ends a launch of the simulator whose programs wait for flags of a broken group; None if none does.

    ``polled`` returns the addresses of the flags.
    """
    broken = [flag for flag in _flags if flag.ends_waits()]
    for address in polled() if broken else ():
        found = locate(address)
        if found is None:
            continue
        owner = found[0].owner()
        # Groups share segments: the block at the address says which group it is.
        used = owner.user_at(found[2]) if hasattr(owner, "user_at") else (owner, None)
        flag = getattr(used[0], "abort_flag", None) if used else None
        if flag in broken:
            return flag.error()
    return None


if simulator.ACTIVE:
    simulator.grid.watchers.append(_watch)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _register(address: int, size: int) -> int:
    """Let kernels store to the host's memory; returns its address there."""
    error = torch.cuda.cudart().cudaHostRegister(address, size, REGISTER_MAPPED)
    if int(error):
        raise MappingError(f"The GPU cannot be given memory of the host (cudaHostRegister: error {int(error)}).")
    pointer = ctypes.c_void_p()
    if torch.version.hip:
        find = ctypes.CDLL("libamdhip64.so").hipHostGetDevicePointer
    else:
        find = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2
    error = find(ctypes.byref(pointer), ctypes.c_void_p(address), 0)
    if error:
        raise MappingError(f"The GPU has no address for memory of the host (error {error}).")
    assert pointer.value is not None
    return pointer.value
