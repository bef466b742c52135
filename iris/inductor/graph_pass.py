"""The pass over each graph of Inductor: each pattern of `PATTERNS` is looked for, in their order."""

import hashlib
from pathlib import Path

from torch.fx import Graph

from iris.distributed.contexts import known_reasons
from iris.inductor import all_gather, all_reduce, reduce_scatter, rms_norm
from iris.inductor.report import FusionReport

# Norms first: what they take of a sum leaves the product before it, which is fused with sums that no norm has taken.
PATTERNS = (rms_norm.fuse, all_reduce.fuse, all_gather.fuse, reduce_scatter.fuse)
# What makes graphs differ from those that an older version has left in Inductor's cache.
VERSION = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def identity() -> str | None:
    """What is the same for graphs in which the same is fused; None as long as that is not known.

    A graph may come from the cache of a run in which its groups could have contexts, or could not.
    """
    reasons = known_reasons()
    return None if reasons is None else f"{VERSION} {sorted(reasons.items())}"


report = FusionReport()
"""Of this process."""


def search(graph: Graph, report: FusionReport = report) -> None:
    """Put Iris' operators in the place of what they do in fewer steps, in a graph of ATen's and c10d's operators.

    Local, and the same on all ranks, whose graphs are the same.
    """
    for pattern in PATTERNS:
        pattern(graph, report)
    graph.lint()
