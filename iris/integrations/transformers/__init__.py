"""Models of Hugging Face's transformers on Iris: their experts on `ctx.experts`, their products with fused sums.

    import iris.integrations.transformers

    iris.integrations.transformers.register()
    DistributedConfig(tp_size=8, ep_size=8, ep_implementation="iris")
    DistributedConfig(tp_size=8, tp_plan=iris.integrations.transformers.tp_plan(config))

Nothing else of Iris imports transformers.
"""

from iris.integrations import transformers_version

transformers_version.check()

from iris.integrations.transformers.experts import IrisEP  # noqa: E402 (after the check)
from iris.integrations.transformers.plan import tp_plan  # noqa: E402
from iris.integrations.transformers.registration import register  # noqa: E402
from iris.integrations.transformers.tensor_parallel import FusedColwiseParallel, FusedRowwiseParallel  # noqa: E402

__all__ = ["FusedColwiseParallel", "IrisEP", "FusedRowwiseParallel", "register", "tp_plan"]
