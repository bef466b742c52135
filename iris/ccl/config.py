"""How a collective is carried out, where the caller knows better than the library's choice."""

import math
import warnings
from dataclasses import dataclass, fields
from enum import Enum

from iris.errors import InvalidConfigError, UnsupportedReductionError, short_repr


class ReduceOp(Enum):
    """How the elements of several ranks become one: SUM, AVG (of floating-point types alone), MIN, MAX or PRODUCT."""

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @classmethod
    def _missing_(cls, value: object) -> None:
        known = ", ".join(repr(op.value) for op in cls)
        raise UnsupportedReductionError(f"op={short_repr(value)} is not one of {known}.")


ALL_REDUCE_VARIANTS = (
    "auto",
    "one_shot",
    "two_shot_push",
    "two_shot_direct",
    "two_shot",
    "pull",
    "ring",
    "atomic",
    "spinlock",
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "all_gather_variant": ("persistent", "partitioned"),
    "all_reduce_variant": ALL_REDUCE_VARIANTS,
    "reduce_scatter_variant": ("two_shot",),
    "all_to_all_variant": ("persistent",),
    "over_hosts": ("iris", "vendor"),
}
_POWERS_OF_TWO = ("block_size_m", "block_size_n", "num_warps", "chunk_size")
_COUNTS = ("swizzle_size", "comm_sms", "num_xcds", "all_reduce_num_rings", "all_reduce_ring_slice_n", "num_stages")

# Kernels take numbers of 32 bits.
MOST = (1 << 31) - 1

# Accepted for programs that set them, and said once in a process.
_WITHOUT_EFFECT = (
    "swizzle_size",
    "num_xcds",
    "chunk_size",
    "num_stages",
    "waves_per_eu",
    "reduce_scatter_variant",
    "all_to_all_variant",
)
_warned: set[str] = set()

# So many SMs, or fewer, want other variants and larger blocks than a GPU that is free for a collective.
FEW_SMS = 32

# The time of NVIDIA's assembler grows with the square of it: for all_to_all_v between two ranks, by Triton 3.6, it was
# 3 s of a processor's time for 128 elements, and 44 s for the 512 that two warps have of a block of bytes. Meanwhile
# the other ranks wait.
ELEMENTS_OF_A_THREAD = 128


@dataclass(frozen=True, repr=False)
class Config:
    """Choices for one call; what is None is chosen for the size and the machine. All ranks must give the same.

    Attributes
    ----------
    block_size_m, block_size_n : int
        Rows and columns of a block that a program moves at a time; powers of two. For all_gather, all_to_all, and the
        sums of "two_shot", "ring", "atomic" and "spinlock"; small calls have blocks of their own. There is room for
        blocks of 16 KiB, with fewer programs among many ranks; a larger block is moved in parts, fewer rows at a time.
        The last three count the bytes of what they add up in, float32 for narrower floats, and the last two have room
        for 8 KiB.
    swizzle_size, num_xcds, chunk_size, num_stages, waves_per_eu : int
        Accepted for programs that set them, and without effect: blocks are dealt out one by one, which leaves
        nothing to swizzle, and no kernel here is pipelined by the compiler.
    comm_sms : int
        Programs at most, each of which may take an SM (NVIDIA) or CU (AMD). Large calls never have more than the power
        of two below their number; small ones have up to two on each by default.
    use_gluon : bool
        The kernel in Gluon, where there is one: all but all_to_all_v.
    all_gather_variant : "persistent", "partitioned"
        Each program sends its blocks to every rank; or each program serves one rank.
    all_reduce_variant : str
        "auto", what the table of this machine says for the size and type; or "one_shot", "two_shot_push",
        "two_shot_direct", "two_shot", "pull", "ring", "atomic", "spinlock". The first three are for floating-point
        types; one that is asked for takes memory whatever the size, 3 W, 6 and 2 times the tensor among W ranks, up to
        what the group may have (`ChannelsExhaustedError`). The sums of "atomic" and "spinlock", for SUM and AVG alone,
        may differ in their last bits from run to run and from rank to rank.
    all_reduce_distribution : int
        0 or 1: a program's chunks lie apart (striding) or side by side, in the "ring" variant.
    all_reduce_num_rings : int
        Rings that share the programs of the "ring" variant, every second the other way round. Default: 2.
    all_reduce_ring_slice_n : int
        Elements that go round at a time; a power of two.
    reduce_scatter_variant : "two_shot"
    all_to_all_variant : "persistent"
        Accepted for programs that set them, and without effect: these are chosen by size.
    num_warps : int
        Of a program. More are taken where a thread would move over 128 elements.
    threads_per_warp : int
        Must be what the machine has; for programs that pass it to Gluon.
    fp32_partials : bool
        Over several hosts: these send each other float32 sums of narrower floats, so that a sum is rounded once, as on
        one host, instead of twice. It takes twice the bytes of bfloat16, between hosts and within. For all_reduce,
        reduce_scatter and reduce; an error for integers. Of float32 and wider nothing changes, nor of MIN and MAX, nor
        among ranks of one host, where sums are rounded once anyway.
    over_hosts : "iris", "vendor"
        Over several hosts: Iris' steps within and between hosts, or the collective of NCCL, RCCL or Gloo among all
        ranks. By default whichever is faster (in the simulator, Iris'). The vendor has sums of its own order and
        rounding; an error where it has no such collective, dtype or operation. Without effect among ranks of one host.
    batch_invariant : bool
        An element's sum does not depend on the size of the call, nor on where in it the element is.
    """

    block_size_m: int | None = None
    block_size_n: int | None = None
    swizzle_size: int | None = None
    comm_sms: int | None = None
    num_xcds: int | None = None
    chunk_size: int | None = None
    use_gluon: bool = False
    all_gather_variant: str | None = None
    all_reduce_variant: str = "auto"
    all_reduce_distribution: int | None = None
    all_reduce_num_rings: int | None = None
    all_reduce_ring_slice_n: int | None = None
    reduce_scatter_variant: str | None = None
    all_to_all_variant: str | None = None
    num_stages: int | None = None
    num_warps: int | None = None
    threads_per_warp: int | None = None
    waves_per_eu: int | None = None
    batch_invariant: bool = False
    fp32_partials: bool = False
    over_hosts: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            problem = _problem(field.name, value)
            if problem:
                raise InvalidConfigError(
                    f"Config({field.name}={short_repr(value)}) cannot work: {field.name} is {problem}."
                )
        if (self.block_size_m or 1) * (self.block_size_n or 1) > 1 << 20:
            raise InvalidConfigError(
                f"Config(block_size_m={self.block_size_m}, block_size_n={self.block_size_n}) cannot work: a block has "
                "at most 1048576 elements, which is the compiler's limit."
            )
        idle = [name for name in _WITHOUT_EFFECT if getattr(self, name) is not None and name not in _warned]
        if idle:
            _warned.update(idle)
            warnings.warn(
                f"iris.ccl.Config({', '.join(f'{name}={getattr(self, name)!r}' for name in idle)}): no collective has "
                "a use for what is set here, so leave it out.",
                stacklevel=3,
            )

    @property
    def block_shape(self) -> tuple[int, int] | None:
        """Rows and columns of a block, if either is asked for."""
        if self.block_size_m is None and self.block_size_n is None:
            return None
        return self.block_size_m or 8, self.block_size_n or 256

    def block_that_fits(self, itemsize: int, room: int) -> tuple[int, int]:
        """`block_shape`, or as much of it as takes ``room`` bytes at most: half its rows, and again, then columns."""
        assert self.block_shape is not None
        rows, columns = self.block_shape
        while rows * columns * itemsize > room:
            rows, columns = (rows // 2, columns) if rows > 1 else (1, columns // 2)
        return rows, columns

    def block_bytes(self, itemsize: int) -> int:
        """Of such a block, or 0."""
        return math.prod(self.block_shape) * itemsize if self.block_shape else 0

    def elements_per_block(self, itemsize: int, room: int) -> int:
        """As many as fit in ``room`` bytes, or fewer if a block of them is asked for."""
        return min(self.block_bytes(itemsize) or room, room) // itemsize

    def warps(self, elements: int, itemsize: int) -> int:
        """`num_warps`, or as many as move a block of so many elements by 16 bytes a thread.

        More, where a thread would move over `ELEMENTS_OF_A_THREAD`.
        """
        asked = self.num_warps or max(1, min(16, elements * itemsize // 512))
        return max(asked, min(16, elements // (32 * ELEMENTS_OF_A_THREAD)))

    @property
    def few_sms(self) -> bool:
        """Whether `comm_sms` leaves a call few multiprocessors."""
        return self.comm_sms is not None and self.comm_sms <= FEW_SMS

    def __repr__(self) -> str:
        given = (field.name for field in fields(self) if getattr(self, field.name) != field.default)
        return f"Config({', '.join(f'{name}={getattr(self, name)!r}' for name in given)})"


def _problem(name: str, value: object) -> str | None:
    """What ``name`` should have been, if ``value`` is not that."""
    if name in _CHOICES:
        known = isinstance(value, str) and value in _CHOICES[name]
        return None if known else f"one of {', '.join(map(repr, _CHOICES[name]))}"
    if name in ("use_gluon", "batch_invariant", "fp32_partials"):
        return None if isinstance(value, bool) else "True or False"
    if not isinstance(value, int) or isinstance(value, bool):
        return "a whole number"
    if name in _POWERS_OF_TWO:
        limit = 32 if name == "num_warps" else 1 << 20
        return None if 0 < value <= limit and value & (value - 1) == 0 else f"a power of two from 1 to {limit}"
    if name in _COUNTS:
        return None if 0 < value <= MOST else f"at least 1, and at most {MOST}"
    if name == "all_reduce_distribution":
        return None if value in (0, 1) else "0 (striding) or 1 (side by side)"
    if name == "threads_per_warp":
        return None if value in (32, 64) else "32 (NVIDIA) or 64 (AMD CDNA)"
    return None if 0 <= value <= MOST else f"at least 0, and at most {MOST}"


DEFAULT = Config()
