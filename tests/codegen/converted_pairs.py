"""Whether numbers that are converted to fp8 by pairs are used in a way that NVIDIA's assembler gets wrong, by PTX.

A conversion writes two of them to a register of 16 bits. Where that is widened as the lower half of a register whose
upper half nothing has written, ptxas 12.8 makes both one instruction (F2FP with a register to merge into), and moves
it past other uses of the pair: an H200 stored bytes of the pair before. So such a pair has no other use.
"""

import re
from collections import Counter

CONVERTED = re.compile(r"\bcvt\.[\w.]*(?:e4m3|e5m2)x2\.[\w.]+\s+(%rs\d+),")
WIDENED = re.compile(r"\bmov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\};")
REGISTER = re.compile(r"%rs\d+")


def widened_and_used(ptx: str) -> list[str]:
    """The registers of such pairs."""
    converted = set(CONVERTED.findall(ptx))
    if not converted:
        return []
    named = Counter(REGISTER.findall(ptx))
    # What is named once is not written anywhere. The pair is named where it is written, and where it is widened.
    return [low for low, high in WIDENED.findall(ptx) if low in converted and named[high] == 1 and named[low] > 2]
