"""What was fused in the graphs that were compiled, and what was found and left as it was, with the reason."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch.fx import Node

# With the separator after it, as names of other packages begin with "torch".
TORCH = str(Path(torch.__file__).parent) + os.sep


class Fusion(NamedTuple):
    """A collective in a graph, with what is before or after it."""

    pattern: str
    """What was found there, or looked for, such as "all_reduce + RMSNorm"."""
    kept: str | None
    """The reason why it was kept as it is; None if it was fused."""
    where: str
    """The module of the model, or the line of the program, that it comes from."""


class FusionReport(list[Fusion]):
    """The places in the order in which they were compiled; as a string, how many of each kind, and where they are."""

    def fused(self, pattern: str) -> int:
        """How often ``pattern`` was fused."""
        return sum(each.pattern == pattern and each.kept is None for each in self)

    def __str__(self) -> str:
        if not self:
            return (
                "No collective was found in what this process has compiled since iris.accelerate(). What Inductor has "
                "in its cache is not searched again: TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 has it compile anew."
            )
        counts = Counter((each.pattern, each.kept) for each in self)
        first = {(each.pattern, each.kept): each.where for each in reversed(self)}
        lines = []
        for (pattern, kept), count in counts.items():
            verdict = "fused" if kept is None else f"left as it is, since {kept}"
            lines.append(f"{count:4} x {pattern}: {verdict} (first at {first[pattern, kept]})")
        return "\n".join(lines)


def where(node: Node) -> str:
    """The module that a node comes from, as ``model.named_modules()`` names it; or else the line of the program."""
    modules = node.meta.get("nn_module_stack")
    if modules:
        path, _ = list(modules.values())[-1]
        return re.sub(r"^L\['\w+'\]\.?", "", path) or "the model"
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    of_program = [each for each in lines if not each[0].startswith(TORCH)]
    return ":".join(of_program[-1]) if of_program else node.name
