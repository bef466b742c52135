"""The pass over each graph of Inductor: it looks for each pattern of `PATTERNS`, in their order."""

import hashlib
from pathlib import Path

from torch.fx import Graph

from iris.distributed.contexts import known_reasons
from iris.inductor import all_gather, all_reduce, reduce_scatter, rms_norm
from iris.inductor.report import FusionReport

# Norms first. An all_reduce between a product and a norm is fused with the norm; all_reduce.fuse gets the rest.
PATTERNS = (rms_norm.fuse, all_reduce.fuse, all_gather.fuse, reduce_scatter.fuse)
# A digest of these passes, so that graphs that an older version has left in Inductor's cache are not used.
VERSION = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def identity() -> str | None:
    """What this pass adds to the key of Inductor's cache; None, for no caching, as long as it is not known.

    Besides the version it is which groups can have no context, since their graphs are left as they are.
    """
    reasons = known_reasons()
    return None if reasons is None else f"{VERSION} {sorted(reasons.items())}"


report = FusionReport()
"""What `iris.fusion_report` returns: of all graphs of this process."""


def search(graph: Graph, report: FusionReport = report) -> None:
    """Put Iris' fused operators in the place of ATen's and c10d's in ``graph``, and say in ``report`` what was found.

    Local, and the same on all ranks, whose graphs are the same.
    """
    for pattern in PATTERNS:
        pattern(graph, report)
    graph.lint()
