"""`tp_plan`: a model's own plan, with the products that Iris fuses."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

# transformers finds out how many heads of keys a rank has by asking whether one of these is "colwise".
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


def tp_plan(config: Any, auto_class: Any = AutoModelForCausalLM) -> dict[str, str]:
    """What ``DistributedConfig(tp_plan=...)`` takes in the place of ``"auto"``. Local.

    It has the rules of the model's plan for which there is a fused form; transformers adds the others.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Of the model, which is made without memory to see its plan.
    auto_class : type
        By which transformers makes the model, such as ``AutoModelForImageTextToText``.
    """
    with torch.device("meta"):
        model = auto_class.from_config(copy.deepcopy(config))
    linear = {
        replace_layer_number_by_wildcard(name)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
    }
    fused = {"rowwise": "iris_rowwise", "colwise": "iris_colwise"}
    return {
        name: fused[style]
        for name, style in model.tp_plan.items()
        if style in fused and name in linear and not (style == "colwise" and name.endswith(KEY_PROJECTIONS))
    }
