"""The pass over each graph of Inductor: each pattern of `PATTERNS` is looked for, in their order."""

import hashlib
from pathlib import Path

from torch.fx import Graph

from iris.inductor import all_gather, all_reduce, reduce_scatter, rms_norm
from iris.inductor.report import FusionReport

# Norms first: what they take of a sum leaves the product before it, which is fused with sums that no norm has taken.
PATTERNS = (rms_norm.fuse, all_reduce.fuse, all_gather.fuse, reduce_scatter.fuse)
# What makes graphs differ from those that an older version has left in Inductor's cache.
IDENTITY = hashlib.sha256(
    b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()

report = FusionReport()
"""Of this process."""


def search(graph: Graph, report: FusionReport = report) -> None:
    """Put Iris' operators in the place of what they do in fewer steps, in a graph of ATen's and c10d's operators.

    Local, and the same on all ranks, whose graphs are the same.
    """
    for pattern in PATTERNS:
        pattern(graph, report)
    graph.lint()
