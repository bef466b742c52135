"""What was fused in the graphs that were compiled, and what was found and left as it was, with the reason."""

from collections import Counter
from typing import NamedTuple

from torch.fx import Node


class Fusion(NamedTuple):
    """A place of a graph that was looked at."""

    pattern: str
    """What stands there, such as "all_reduce + RMSNorm"."""
    kept: str | None
    """Why it stays as it is; None if it was fused."""
    where: str
    """The module of the model, or the line of the program, that it comes from."""


class FusionReport(list[Fusion]):
    """The places in the order in which they were compiled; as a string, how many of each kind, and where they are."""

    def fused(self, pattern: str) -> int:
        """How often ``pattern`` was fused."""
        return sum(each.pattern == pattern and each.kept is None for each in self)

    def __str__(self) -> str:
        if not self:
            return "No graph with collectives has been compiled since iris.accelerate()."
        counts = Counter((each.pattern, each.kept) for each in self)
        first = {(each.pattern, each.kept): each.where for each in reversed(self)}
        lines = []
        for (pattern, kept), count in counts.items():
            verdict = "fused" if kept is None else f"left as it is, since {kept}"
            lines.append(f"{count:4} x {pattern}: {verdict} (first at {first[pattern, kept]})")
        return "\n".join(lines)


def where(node: Node) -> str:
    """The module that a node comes from, as ``model.named_modules()`` names it; or else the program's last line."""
    modules = node.meta.get("nn_module_stack")
    if modules:
        path = str(list(modules.values())[-1][0])
        return path.replace("L['self'].", "").replace("L['self']", "the model")
    trace = node.meta.get("stack_trace")
    return trace.strip().splitlines()[-1].strip() if trace else node.name
