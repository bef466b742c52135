"""`ctx.experts`: tokens go to the ranks that hold their experts, and come back."""

from iris.experts import functional
from iris.experts.config import ExpertsConfig
from iris.experts.expert_parallel import ExpertParallel
from iris.experts.pending import PendingCall
from iris.experts.received import Received
from iris.experts.statistics import Statistics

__all__ = ["ExpertParallel", "ExpertsConfig", "PendingCall", "Received", "Statistics", "functional"]
