"""The device context: the object in a kernel by which it accesses its peers, for Triton and Gluon.

    ctx = iris.DeviceContext.initialize(context_tensor, rank, num_ranks)     # @triton.jit
    ctx = IrisDeviceCtx.initialize(context_tensor)                           # @gluon.jit

Pointers are *rank-relative*: a kernel gives a pointer into its own heap and a rank, and the operation translates it to
the same object in the heap of that rank. Masks, blocks and scalars work as in ``tl.load`` and ``tl.store``. The rank
may be a block, too; then each of its elements must be a valid rank, also those that the mask leaves out. An operation
on a peer moves the bytes of its unmasked elements over the link, once; on the caller's own rank it is a local access.

The class is put together here. Its loads, stores and atomics are in `iris.language.moves` and `iris.language.atomics`,
and their memory order is that of `iris.language.ordering`. `iris.language.functional` has the same without a context.
"""

import hashlib
from pathlib import Path

import triton
import triton.language as tl

from iris.failures import device_record
from iris.language import atomics, locality, moves
from iris.language.address import check_reach, in_simulator, translate
from iris.language.barrier import WHOLE, lanes
from iris.language.barrier import barrier as ordered_barrier
from iris.language.barrier import signal_ranks as ordered_signal_ranks
from iris.language.barrier import wait_ranks as ordered_wait_ranks
from iris.language.context_tensor import BASES, num_ranks_of, rank_of, record_of, word_after_bases
from iris.language.failures import CHECKS_POINTERS, WAIT_LIMIT_NS, check_pointer
from iris.language.fences import fence as ordered_fence
from iris.language.fences import order_bulk_copies as ordered_bulk_copies
from iris.language.initialisation import check_context, is_switch, refuse
from iris.language.jit import aggregate, in_gluon, jit
from iris.language.locality import base_of, check_table, elsewhere, guarded, guards, note_all_remote
from iris.language.ordering import SET
from iris.language.ordering import signal as ordered_signal
from iris.language.ordering import wait as ordered_wait
from iris.language.tracing import TRACES_ALL, Tracing, trace_into

EQ = tl.constexpr("eq")


def _digest() -> str:
    """A digest of all that the code generated for a context depends on: these sources, and the settings."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(device_record.__file__)]
    sources = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(
        sources + f"{WAIT_LIMIT_NS.value} {CHECKS_POINTERS.value} {TRACES_ALL.value}".encode()
    ).hexdigest()[:12]


@aggregate
class DeviceContext:
    """What a kernel accesses its peers with: its rank, the number of ranks, and where each rank's heap begins.

    Made inside the kernel by `initialize`. For Gluon's kernels it is called ``iris.gluon.IrisDeviceCtx``.

    Attributes
    ----------
    cur_rank : int32 scalar or constexpr
        This rank. The older name is ``rank``.
    num_ranks : int32 scalar or constexpr
        The number of ranks. The older name is ``world_size``.
    tracing : Tracing
        ``record_event_start`` and ``record_event_end``: events that the kernel names.
    """

    cur_rank: tl.tensor | tl.constexpr
    num_ranks: tl.tensor | tl.constexpr
    base: tl.tensor
    table: tl.tensor
    tracing: Tracing

    @triton.constexpr_function
    def __init__(self, cur_rank=None, num_ranks=None, base=None, table=None, tracing=None):
        if table is None:
            refuse(type(self).__name__)
        # Triton passes constants to a constexpr_function as plain values. Here they become constants again.
        self.cur_rank = cur_rank if isinstance(cur_rank, tl.tensor) else tl.constexpr(cur_rank)
        self.num_ranks = num_ranks if isinstance(num_ranks, tl.tensor) else tl.constexpr(num_ranks)
        self.base = base
        self.table = table
        self.tracing = tracing

    is_local = locality.is_local

    @jit
    def translate(self, ptr, rank):
        """The address of ``rank``'s copy of ``ptr``, for loads, stores and atomics of ``tl``.

        Call it before a loop that accesses one peer again and again: it costs one 8-byte load of the peer's heap base,
        from a table in the caller's memory.
        """
        if in_simulator():
            # Which elements of ``ptr`` will be accessed is not known here. With a mask of False only ranks are checked.
            check_reach(ptr, False, self.base, rank)
        base = base_of(self.table, rank)
        if guards(self.table):
            # A rank of another host cannot be accessed. For such a one the result is the caller's own copy, and the
            # error is recorded now, as the later access does not do so.
            self._within_host(ptr, rank, None)
            base = tl.where(base == 0, self.base, base)
        return translate(ptr, self.base, base)

    @jit
    def _peers(self, ptr, rank, mask, hint: tl.constexpr = None):
        """`translate` for an access that follows at once, under ``mask``. The result is divisible by ``hint`` bytes."""
        self._check(ptr, mask, rank)
        return translate(ptr, self.base, base_of(self.table, rank), hint)

    @jit
    def _within_host(self, ptr, rank, mask):
        """``mask`` without the elements whose ``rank`` is on another host (`iris.language.locality.guarded`)."""
        return guarded(ptr, rank, mask, table=self.table, record=self._record())

    @jit
    def _peer_word(self, ptr, rank, hint: tl.constexpr = None):
        """`_peers` for an operation that takes no mask."""
        target = self._peers(ptr, rank, None, hint)
        if guards(self.table):
            return elsewhere(target, self._within_host(ptr, rank, None), self._record())
        else:
            return target

    @jit
    def _check(self, ptr, mask, rank):
        """Check that ``ptr`` is in this heap: always in the simulator, on a GPU with ``IRIS_DEBUG=1``."""
        if in_simulator():
            check_reach(ptr, mask, self.base, rank)
        elif CHECKS_POINTERS:
            size = tl.cast(self._word_after_bases(1), tl.int64)
            check_pointer(ptr, mask, base=self.base, size=size, record=self._record())

    load = moves.load
    store = moves.store
    get = moves.get
    put = moves.put
    copy = moves.copy
    _atomic = atomics.atomic
    atomic_add = atomics.atomic_add
    atomic_sub = atomics.atomic_sub
    atomic_xchg = atomics.atomic_xchg
    atomic_and = atomics.atomic_and
    atomic_or = atomics.atomic_or
    atomic_xor = atomics.atomic_xor
    atomic_min = atomics.atomic_min
    atomic_max = atomics.atomic_max
    atomic_cas = atomics.atomic_cas

    @jit
    def signal(self, flag_ptr, value, to_rank, op: tl.constexpr = SET):
        """Set ``to_rank``'s flag to ``value``, or add to it, **after** everything that this block did so far.

        A release at system scope. Who waits for the flag with `wait` sees all that came before. ``flag_ptr`` is a
        scalar pointer to int32, uint32, int64 or uint64; ``op`` is "set" or "add". Over the link: 4 or 8 bytes.

        ``value``: a whole number that the flag can hold. Floats, and constants that do not fit, fail to compile; the
        simulator refuses all of these.
        """
        event = self.tracing.begin_flag("signal", flag_ptr, rank=to_rank, value=value, mask=None)
        now = ordered_signal(self._peer_word(flag_ptr, to_rank), value, op)
        self.tracing.end_flag(event, now, now)

    @jit
    def wait(self, flag_ptr, value, cmp: tl.constexpr = EQ):
        """Wait until the caller's own flag compares to ``value`` by ``cmp``; returns the flag as it was seen.

        ``cmp`` is "eq", "ne", "gt", "ge", "lt", "le" or "reached". The last is for counts that only rise: it holds at
        ``value`` and past it, even if the count has overflowed since. ``value`` is as for `signal`.

        Everything that the block does **after** it sees what the sender did before its `signal`: it is an acquire at
        system scope, in a loop. ``flag_ptr`` is a scalar pointer to int32, uint32, int64 or uint64. It is not
        translated; nothing goes over the link. With ``IRIS_WAIT_TIMEOUT_S`` set it returns after that time even though
        the comparison does not hold, and the next ``barrier()`` of the host raises `IrisTimeoutError`.
        """
        self._check(flag_ptr, None, self.cur_rank)
        event = self.tracing.begin_flag("wait", flag_ptr, rank=self.cur_rank, value=value, mask=None)
        seen = ordered_wait(flag_ptr, value, cmp, self._record())
        self.tracing.end_flag(event, seen, seen)
        return seen

    @jit
    def fence(self):
        """Order everything that this block did before everything that it will do, for observers on any rank.

        But for one pair: a load after it may still come before a store to other memory before it, as the fence is
        acq_rel and not sequentially consistent (PTX ISA, "membar / fence"). So of two ranks that each store a flag and
        then look at the other's, neither need see it.

        Nothing goes over the link, but it may take as long as earlier stores take to arrive.
        """
        ordered_fence()

    @jit
    def order_bulk_copies(self):
        """Order what this block has acquired or stored before the copies by TMA that it issues from here on.

        TMA accesses memory through another proxy than loads and stores do (PTX ISA, ``fence.proxy.async``). So this
        call goes between `wait` and a copy of the data that were waited for. On AMD it does nothing.
        """
        ordered_bulk_copies()

    @jit
    def put_signal(self, from_ptr, to_ptr, flag_ptr, value, to_rank, mask=None, op: tl.constexpr = SET):
        """`put`, then `signal` with ``op``: when ``to_rank`` sees the flag, it sees the data of this block."""
        self.put(from_ptr, to_ptr, to_rank, mask=mask)
        self.signal(flag_ptr, value, to_rank, op)

    @jit
    def barrier(self, flags_ptr, epoch=None):
        """Program p of this rank waits for program p of every other rank.

        What all of them did before is visible to all of them after it. ``flags_ptr`` is int32 or int64 of shape
        ``[programs, num_ranks]`` on the heap, zeros before the first use; another dtype fails to compile, and the
        simulator raises `KernelBoundsError` if there are fewer than programs and ranks need. With
        ``epoch`` None the flags count by themselves, which a CUDA graph needs; otherwise pass 1, 2, 3, ... in turn.
        Over the link: one flag to each peer, in one step.

        The caller guarantees that all ranks launch the same number of programs, no more than can be resident at once,
        and that one launch at a time uses the flags. They are never reset.
        """
        self._check(flags_ptr, None, self.cur_rank)
        event = self.tracing.begin_flag("barrier", flags_ptr, rank=self.cur_rank, value=0, mask=None, form="meeting")
        if guards(self.table):
            # Ranks of other hosts cannot be signalled, so the barrier would never end: record the error instead.
            note_all_remote(self.table, self.num_ranks, self._record())
            reached = 0
        else:
            reached = ordered_barrier(
                flags_ptr, epoch, self.cur_rank, self.num_ranks, table=self.table, base=self.base, record=self._record()
            )
        self.tracing.end_flag(event, reached, reached)

    # For the library's own kernels, which signal many ranks at a time, or wait for many: blocks of a lane for each rank
    # (`iris.language.barrier`), under the mask ``here``.

    @jit
    def _signal_ranks(self, flag_ptr, values, peers, here, op: tl.constexpr = SET):
        events = self.tracing.begin_flags("signal", "flag", flags=flag_ptr, ranks=peers, values=values, here=here)
        now = ordered_signal_ranks(flag_ptr, values, peers, here=here, table=self.table, base=self.base, op=op)
        self.tracing.end_flags(events, now)

    @jit
    def _wait_ranks(self, flag_ptrs, wanted, here, first, num_ranks, half: tl.constexpr = WHOLE):
        events = self.tracing.begin_flags(
            "wait", half, flags=flag_ptrs, ranks=first + lanes(), values=wanted, here=here
        )
        ordered_wait_ranks(
            flag_ptrs, wanted, here=here, first=first, num_ranks=num_ranks, record=self._record(), half=half
        )
        self.tracing.end_flags(events, wanted)

    @jit
    def _wait_unless(self, flag_ptr, value, stop: tl.constexpr):
        """Wait until the flag has reached ``value``, or one of its bits in ``stop`` is set; returns the flag."""
        self._check(flag_ptr, None, self.cur_rank)
        event = self.tracing.begin_flag("wait", flag_ptr, rank=self.cur_rank, value=value, mask=None)
        seen = ordered_wait(flag_ptr, value, "reached", self._record(), stop=stop)
        self.tracing.end_flag(event, seen, seen)
        return seen

    @jit
    def _record(self):
        return record_of(self.table)

    @jit
    def _word_after_bases(self, word):
        return word_after_bases(self.table, word)


@jit
def connect(context_tensor, rank, num_ranks, tracing: tl.constexpr):
    """The context of this rank, with all of its fields given."""
    if in_simulator():
        check_context(rank, num_ranks, rank_of(context_tensor), num_ranks_of(context_tensor))
    table = context_tensor + BASES
    base = base_of(table, rank)
    if tracing or TRACES_ALL:
        trace = trace_into(record_of(table), base, True)
    else:
        trace = Tracing(False, 0, 0, 0)
    return DeviceContext(cur_rank=rank, num_ranks=num_ranks, base=base, table=table, tracing=trace)


@jit
def identify(context_tensor, rank, num_ranks, tracing: tl.constexpr):
    """`connect` with rank and number of ranks from the context tensor, where they are None."""
    check_table(context_tensor, "initialize() a context tensor", "ctx.get_device_context()")
    return connect(
        context_tensor,
        rank_of(context_tensor) if rank is None else rank,
        num_ranks_of(context_tensor) if num_ranks is None else num_ranks,
        tracing,
    )


# In Triton `tracing` is the last argument, in Gluon the second. Older programs pass all of them by position, some in
# the other order. Both are accepted: the argument that is True or False is `tracing`, as a rank is neither.


@jit
def initialize(context_tensor, rank=None, num_ranks=None, tracing=False):
    """The context of a kernel; a static method, called on the class inside the kernel.

    ``context_tensor`` is ``ctx.get_device_context()``. Rank and number of ranks are read from it unless they are given;
    given as constexpr, they stay compile-time constants. With ``tracing=True`` the context's operations are recorded.
    In Gluon ``tracing`` is the second argument. Both languages accept the other's order, too.
    """
    if is_switch(rank):
        return identify(context_tensor, num_ranks, None if is_switch(tracing) else tracing, rank)
    else:
        return identify(context_tensor, rank, num_ranks, tracing)


@jit
def initialize_traced_second(context_tensor, tracing=False, rank=None, num_ranks=None):
    """`initialize` as Gluon's programs call it."""
    if is_switch(tracing):
        return identify(context_tensor, rank, num_ranks, tracing)
    else:
        # In Triton's order: `tracing` is the rank, `rank` the number of ranks unless that has its name, and the last
        # argument is `tracing` if it is a switch.
        return identify(
            context_tensor,
            tracing,
            num_ranks if rank is None and not is_switch(num_ranks) else rank,
            num_ranks if is_switch(num_ranks) else False,
        )


IrisDeviceCtx = in_gluon(DeviceContext)
IrisDeviceCtx.__name__ = "IrisDeviceCtx"
DeviceContext.initialize = staticmethod(initialize)
IrisDeviceCtx.initialize = staticmethod(initialize_traced_second.gluon)
for _class in (DeviceContext, IrisDeviceCtx):
    # Older names. They are properties, which Triton's aggregates do not take as members, so they are set here.
    _class.rank = property(lambda self: self.cur_rank)
    _class.world_size = property(lambda self: self.num_ranks)
    # A class that is passed to a kernel as a constexpr is known to Triton's compile cache by its name alone. With the
    # digest in the name, kernels are compiled anew after an edit of these files, and with other settings.
    _class.__qualname__ = f"{_class.__name__}_{_digest()}"
