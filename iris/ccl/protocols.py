"""What a context is to those who use its collectives."""

from typing import Protocol

from iris.ccl.collectives import Collectives
from iris.runtime.workspace import RankContext


class CollectivesContext(RankContext, Protocol):
    """A context with its collectives."""

    ccl: Collectives
