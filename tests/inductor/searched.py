"""Compiling with Inductor's passes over graphs, without the code that it makes of them, which takes seconds."""

import functools

import torch
from functorch.compile import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, config
from torch._inductor.virtualized import V

from iris.inductor import FusionReport, graph_pass


def compiled(function, report=None, **options):
    """``function`` with its graphs searched, which run as they are then; ``report`` is filled. None: not searched."""

    def change(graph):
        if report is not None:
            graph_pass.search(graph, report)

    def run_as_it_is(module, inputs, **kwargs):
        # As Inductor does before its passes.
        compile_fx.view_to_reshape(module)
        with config.patch(post_grad_custom_pre_pass=change), V.set_fake_mode(detect_fake_mode(inputs)):
            compile_fx._recursive_post_grad_passes(module, is_inference=kwargs.get("is_inference", False))
        module.recompile()
        return make_boxed_func(module.forward)

    torch.compiler.reset()
    backend = functools.partial(compile_fx.compile_fx, inner_compile=run_as_it_is)
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def expect(report, fused, *kept):
    """That these patterns were fused so many times, and others left for reasons with these words."""
    patterns = {each.pattern for each in report if each.kept is None}
    assert {each: report.fused(each) for each in patterns} == fused, str(report)
    reasons = [each.kept for each in report if each.kept is not None]
    assert len(reasons) == len(kept), str(report)
    assert all(words in reason for words, reason in zip(kept, reasons, strict=True)), str(report)


__all__ = ["FusionReport", "compiled", "expect"]
