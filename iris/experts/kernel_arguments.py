"""What the kernels take, by name: the NamedTuples of their arguments. What the JIT makes of their fields:
`iris.ops.kernel_arguments`."""

from typing import Any, NamedTuple


class Extents(NamedTuple):
    """Sizes that do not change: a constant of the kernels.

    W, E, K, M and H as in the tables of `iris.experts.memory`.
    """

    W: int
    """Ranks."""
    E: int
    """Experts of all ranks, and of one rank."""
    LOCAL: int
    K: int
    """Choices of a token at most."""
    M: int
    """Tokens of a rank at most."""
    H: int
    """Elements of a row."""
    EXPERTS: int
    """E, LOCAL and K, each rounded up to a power of two."""
    LOCALS: int
    CHOICES: int
    RANKS: int
    """W, rounded up to a power of two."""
    COUNTED: int
    """Tokens whose choices a program compares with each other."""
    STEP: int
    """Tokens of a rank that a program moves together, in a step of its own flag."""
    STEPS: int
    """Steps of a call at most, and one: what flags rise by from call to call."""
    PROGRAMS: int
    """That send, and as many that receive."""
    SUMS: int
    """Tokens of a rank whose sums it sends with a flag of their own."""
    WARPS: int
    """Of a program."""
    BLOCK: int
    """Columns that it sends at a time."""
    ADDED: int
    """Columns of a row that it adds up at a time, a piece, where warps have 32 threads."""
    AHEAD: int
    """Pieces of rows that are under way; one where a program receives from three ranks and more."""
    COPIED: int
    """Bytes of a row that it copies at a time."""
    TALLIES: int
    """Programs whose numbers of rows it adds up at a time."""


class Slot(NamedTuple):
    """The symmetric memory of one dispatch and its combine: `iris.experts.memory` has shapes, and who writes what."""

    context: Any
    """Of this memory, from which a kernel makes a `iris.DeviceContext`."""
    calls: Any
    routed: Any
    sent: Any
    weighed: Any
    returned: Any
    tokens: Any
    tallies: Any
    choices: Any
    weights: Any
    rows: Any
    partials: Any


class Layout(NamedTuple):
    """Where a dispatch puts rows, in memory of this rank alone."""

    rows: Any
    """``[rows, H]``."""
    counts: Any
    """int32 ``[LOCAL]``: rows of each expert."""
    offsets: Any
    """int32 ``[LOCAL + 1]``: where they begin, and the end of the last."""
    places: Any
    """int32 ``[W, M, K]``: which row each choice of each token is, -1 where its expert is not here."""


class Scales(NamedTuple):
    """The factors of rows of fp8, float32."""

    given: Any
    """``[tokens, SCALES]``, those of own tokens; anything where rows are quantized on the way."""
    sent: Any
    """``[W, M, SCALES]``, symmetric."""
    placed: Any
    """``[rows, SCALES]``, of the layout."""


class Bias(NamedTuple):
    """What combine adds to its result, ``[tokens, H]`` each, or None."""

    first: Any = None
    second: Any = None


class Form(NamedTuple):
    """What rows are when they travel: a constant of dispatch."""

    SCALES: int = 0
    """Factors of a row, and the power of two from there on."""
    LANES: int = 1
    QUANTIZE: str = "not"
    """Whether rows are quantized: "not", "by row" or "by block" of ``GROUP`` elements."""
    GROUP: int = 1
    LARGEST: float = 0.0
    """The largest number of the type that they are rounded to."""
    MOVES: bool = True
    """Whether rows travel, and not the choices alone."""


class FewTokens(NamedTuple):
    """`Extents` of the kernels for few tokens, `iris.experts.low_latency`: a constant of these.

    The first fields are those of `Extents`.
    """

    W: int
    E: int
    LOCAL: int
    K: int
    M: int
    H: int
    LOCALS: int
    CHOICES: int
    RANKS: int
    SPLIT: int
    """Programs that share a token, each of which has so many columns of its row, its slice."""
    COLUMNS: int
    PROGRAMS: int
    """Of a launch."""
    BLOCK: int
    """Columns that a program sends at a time."""
    SHARE: int
    """Experts whose rows a program counts."""
    TARGETS: int
    """The power of two from K + SHARE on."""
    TOKENS: int
    """Tokens whose choices a program compares with those at a time, a power of two."""
    AWAITED: int
    """Words with numbers of rows, or with choices of a token of all ranks, whichever are more, as powers of two."""
    THREADS: int
    """Of a program."""
    WORDS: int
    """Words of 4 bytes that a block has at least, of what all of it waits for together."""
    CLEARED: int
    """Words that are cleared at a time."""


class LowLatencySlot(NamedTuple):
    """`Slot` of these kernels: `iris.experts.low_latency.memory` has shapes, and who writes what."""

    context: Any
    calls: Any
    tokens: Any
    begins: Any
    found: Any
    over: Any
    choices: Any
    counts: Any
    sent: Any
    weights: Any
    given: Any
    rows: Any
    partials: Any
