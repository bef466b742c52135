"""Whether the memory of an mbarrier is anything else's, by a kernel's PTX.

Triton gives shared memory that is not used any more to others. Of an mbarrier the GPU has to be told first (PTX ISA,
"mbarrier.inval"); else it may write the barrier's state there. An H100 did, where several processes took turns, and a
wait found that for the value of its flag.
"""

import re
from collections import Counter
from typing import NamedTuple

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
BARRIER_BYTES = 8


class Access(NamedTuple):
    begin: int
    end: int
    line: str


def used_otherwise(ptx: str) -> list[str]:
    """The lines that access a barrier's memory, but for its own operations, or make another barrier there.

    Not where each barrier is invalidated: that is its last use, up to which Triton keeps its memory from others.
    Of accesses at addresses that are known when the kernel is compiled: those of what Triton itself puts there are.
    """
    kept, accesses = _accesses(ptx)
    found = [line for begin, end, line in accesses if any(begin < b + BARRIER_BYTES and b < end for b in kept)]
    return found + [f"two barriers at byte {b}" for b in sorted(kept) if kept[b] > 1]


def _accesses(ptx: str) -> tuple[Counter[int], list[Access]]:
    """Where in shared memory how many barriers are made that are not invalidated, and what else is accessed."""
    lines = [line.strip() for line in ptx.splitlines()]
    known = _addresses(lines)
    made: Counter[int] = Counter()
    invalidated: Counter[int] = Counter()
    accesses = []
    for line in lines:
        if barrier := re.search(r"mbarrier\.(init|inval)\.shared::cta\.b64 \[([%\w]+)(?:\+(\d+))?\]", line):
            # One that has a variable of its own has that for the whole kernel.
            if f".b8 {barrier[2]}[" not in ptx:
                assert barrier[2] in known, f"where is this barrier? {line}"
                counted = made if barrier[1] == "init" else invalidated
                counted[known[barrier[2]] + int(barrier[3] or 0)] += 1
        elif access := re.search(
            r"\b(?:st|ld|red|atom)\.shared([\w.:]*)\s.*?\[\s*([%\w]+)\s*(?:\+\s*(\d+))?\s*\]", line
        ):
            if access[2] in known:
                begin = known[access[2]] + int(access[3] or 0)
                vector, bits = re.search(r"\.v(\d)", access[1]), re.search(r"\.[bsuf](\d+)$", access[1])
                assert bits is not None, f"how wide is this access? {line}"
                accesses.append(Access(begin, begin + int(vector[1] if vector else 1) * BYTES[bits[1]], line))
    return made - invalidated, accesses


def _addresses(lines: list[str]) -> dict[str, int]:
    """By register, the byte in shared memory that it points to, if that is known when the kernel is compiled."""
    known = {"global_smem": 0}
    # Twice, as what a block needs may be computed in one that runs before it and stands after it.
    for line in lines * 2:
        if moved := re.match(r"mov\.[bu]32\s+(%\w+), global_smem;", line):
            known[moved[1]] = 0
        elif added := re.match(r"add\.s32\s+(%\w+), (%\w+), (\d+);", line):
            if added[2] in known:
                known[added[1]] = known[added[2]] + int(added[3])
    return known
