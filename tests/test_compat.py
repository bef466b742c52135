"""Private parts of torch and Triton that are gone: each is taken away, and its file in `iris.compat` is run anew.

Then either exactly one sentence comes, which names the package, its release, the part and what it is for; or something
stands in for the part, as the file's docstring says.
"""

import ast
import types
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import triton

from iris.compat.parts import missing
from iris.errors import IrisError, MissingPartError

FILES = sorted(set((Path(__file__).parents[1] / "iris" / "compat").glob("*.py")))
FILES = [file for file in FILES if file.name not in ("__init__.py", "parts.py")]
CPU = torch.device("cpu")


def found_in(file):
    """For each part that a file looks for: how, its path and purpose, and the name that it gets in the module, if any.

    With None for a name where it is looked for in a function.
    """
    module, tree = import_module(f"iris.compat.{file.stem}"), ast.parse(file.read_text())
    for statement in tree.body:
        target = getattr(statement, "target", None) or getattr(statement, "targets", [None])[0]
        inside = isinstance(statement, ast.FunctionDef)
        for node in ast.walk(statement):
            how = ast.unparse(node.func) if isinstance(node, ast.Call) else None
            if how in ("required", "optional", "function", "late", "member"):
                given = [eval(ast.unparse(each), vars(module)) for each in node.args[how == "member" :]]
                yield (file, how, *given, *[""] * (2 - len(given)), None if inside or not target else target.id, inside)


PARTS = [part for file in FILES for part in found_in(file)]


def selected(*hows, inside):
    chosen = [part for part in PARTS if part[1] in hows and part[5] == inside]
    return pytest.mark.parametrize(
        ("how", "file", "path", "purpose", "name"),
        [(how, file, path, purpose, name) for file, how, path, purpose, name, _ in chosen],
        ids=[path for _, _, path, *_ in chosen],
    )


def take_away(path, patch):
    """Have torch or Triton without this part."""
    module, _, names = path.partition(":")
    owner, (*outer, last) = import_module(module), names.split(".")
    for name in outer:
        if owner is torch.ops.aten:
            take_away_operator(name, patch)
            return
        owner = getattr(owner, name)
    if hasattr(owner, last):
        has_it = last in vars(owner) or isinstance(owner, (type, types.ModuleType))
        patch.delattr(owner if has_it else type(owner), last)


def take_away_operator(operator, patch):
    """Which torch looks for when it is asked for it."""
    namespace = type(torch.ops.aten)
    find = namespace.__getattr__

    def without(self, name):
        if name == operator:
            raise AttributeError(name)
        return find(self, name)

    patch.delattr(torch.ops.aten, operator)
    patch.setattr(namespace, "__getattr__", without)


def run_anew(file):
    """The file as a module of its own; that of the program stays as it is."""
    spec = spec_from_file_location(f"anew_{file.stem}", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sentence(path, purpose):
    name, release, known = ("torch", torch.__version__, "2.9 to 2.13")
    if path.startswith("triton"):
        name, release, known = ("Triton", triton.__version__, "3.6 to 3.9")
    return (
        f"{name} {release} has no {path.replace(':', '.')}, which Iris needs to {purpose}. Iris knows {name} {known}: "
        "install one of these, or a newer Iris."
    )


def test_the_sentence():
    error = missing("triton.language.core:is_builtin", "run kernels on the CPU")
    assert isinstance(error, IrisError) and isinstance(error, ImportError)
    assert str(error) == (
        f"Triton {triton.__version__} has no triton.language.core.is_builtin, which Iris needs to run kernels on the "
        "CPU. Iris knows Triton 3.6 to 3.9: install one of these, or a newer Iris."
    )


# What stands in for a part, and has to be taken away with it.
ALSO = {"triton.language.core:_aggregate": "triton:aggregate"}


@selected("required", inside=False)
def test_a_part_that_a_file_cannot_do_without(how, file, path, purpose, name, monkeypatch):
    with monkeypatch.context() as patch:
        for each in (path, ALSO.get(path)):
            if each is not None:
                take_away(each, patch)
        with pytest.raises(MissingPartError) as caught:
            run_anew(file)
    assert str(caught.value) == sentence(path, purpose)
    run_anew(file)


@selected("function", "late", inside=False)
def test_a_function_that_is_missed_when_it_is_called(how, file, path, purpose, name, monkeypatch):
    with monkeypatch.context() as patch:
        take_away(path, patch)
        call = getattr(run_anew(file), name)
        with pytest.raises(MissingPartError) as caught:
            call()
    assert str(caught.value) == sentence(path, purpose)


class Nothing:
    """In the place of an object of torch or Triton that lacks everything but what it is given."""

    def __init__(self, **has):
        vars(self).update(has)

    def __getitem__(self, grid):
        return self


def kernel(**compiled):
    return Nothing(warmup=lambda *args, **options: Nothing(**compiled))


def launched(module, kernel):
    return module.load(kernel, (1, 1, 1), (), {})


# How a file comes to look for a part that it looks for in a function.
CALLS = {
    "torch._inductor.config:post_grad_custom_pre_pass": lambda module: module.add_graph_pass(None, str),
    "torch._inductor.custom_graph_pass:CustomGraphPass": lambda module: module.graph_pass(None, str),
    "torch._ops:OpOverload._schema": lambda module: (module.arguments_of(Nothing()), module.results_of(Nothing())),
    "torch._ops:OpOverload._opname": lambda module: module.operation_name(Nothing()),
    "torch.distributed.distributed_c10d:_world.pg_map": lambda module: module.existing_groups(),
    "torch.distributed:ProcessGroup._get_backend": lambda module: module.backend_of(Nothing(), CPU),
    "torch.distributed:ProcessGroup._register_backend": lambda module: module.set_backend(Nothing(), CPU, None, None),
    "torch.distributed:ProcessGroup._set_default_backend": lambda module: module.set_backend(
        Nothing(_register_backend=lambda *_: None), CPU, None, None
    ),
    "torch.distributed:ProcessGroup._set_group_desc": lambda module: module.describe(Nothing(), "a group"),
    "torch.distributed:ProcessGroupNCCL": lambda module: module.make_nccl(None, "rail", 0, (0,), None),
    "torch._C._distributed_c10d:Backend._allgather_base": lambda module: module.all_gather(Nothing(), None, None),
    "torch._C._distributed_c10d:Backend._reduce_scatter_base": lambda module: module.reduce_scatter(
        Nothing(), None, None, None
    ),
    "torch.distributed._symmetric_memory:lib": lambda module: module.replace({}, "CPU"),
    "torch.distributed:Work._source_rank": lambda module: module.source_of(Nothing()),
    "triton.experimental.gluon._runtime:GluonJITFunction": lambda module: module.replace_function_class(Nothing),
    "triton.language.core:_aggregate": lambda module: module.replace_aggregate(None),
    "triton.runtime:Autotuner._bench": lambda module: module.replace_measurements(None, None),
    "triton.runtime:Autotuner.check_disk_cache": lambda module: module.replace_measurements(None, None),
    "triton.backends.nvidia.compiler:CUDAOptions": lambda module: module.compiler_options(),
    "triton.backends.amd.compiler:HIPOptions": lambda module: module.compiler_options(),
    "triton:JITFunction.warmup": lambda module: launched(module, Nothing()),
    "triton.compiler:CompiledKernel.run": lambda module: launched(module, kernel()),
    "triton.compiler:CompiledKernel.function": lambda module: launched(module, kernel(run=0)),
    "triton.compiler:CompiledKernel.packed_metadata": lambda module: launched(module, kernel(run=0, function=0)),
    "triton.compiler:CompiledKernel.n_regs": lambda module: launched(
        module, kernel(run=0, function=0, packed_metadata=())
    ),
}


@selected("required", "member", inside=True)
def test_a_part_that_is_missed_in_a_call(how, file, path, purpose, name, monkeypatch):
    module = run_anew(file)
    with monkeypatch.context() as patch:
        if how == "required":  # of a member it is said that `Nothing` lacks it
            take_away(path, patch)
        with pytest.raises(MissingPartError) as caught:
            CALLS[path](module)
    assert str(caught.value) == sentence(path, purpose)


def increments(module, patch):
    assert module.increment_version is torch.autograd.graph.increment_version


def asks_for_the_stream(module, patch):
    patch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=100 + index))
    assert module.current_raw_stream(3) == 103


def asks_for_the_capture(module, patch):
    assert module.is_current_stream_capturing is torch.cuda.is_current_stream_capturing


def disables(module, patch):
    given = []
    patch.setattr(torch.compiler, "disable", lambda function, reason: given.append(reason) or function)
    assert module.disable(disables, "of the reason") is disables and given == ["of the reason"]


def sees_pythons_futures(module, patch):
    assert module.Future is torch.futures.Future


def knows_no_code_of_torchs(module, patch):
    assert not module.is_of_torch_distributed(dist.all_reduce.__wrapped__.__code__)
    assert import_module("iris.compat.c10d").is_of_torch_distributed(dist.all_reduce.__wrapped__.__code__)


def counts_no_links(module, patch):
    assert module.nvlinks(0, 1) == 0


def registers_all_the_same(module, patch):
    with module.registered("a name", dist.HashStore(), 0, 1):
        assert import_module("iris.compat.c10d").group_named("a name").size() == 1


def takes_the_older_name(module, patch):
    assert module.aggregate is triton.language.core._aggregate


def says_nothing_of_windows(module, patch):
    assert module.unified_window() is None


# What stands in for a part.
OTHER_WAYS = {
    "torch._C:_increment_version": increments,
    "torch._C:_cuda_getCurrentRawStream": asks_for_the_stream,
    "torch._C:_cuda_isCurrentStreamCapturing": asks_for_the_capture,
    "torch._C._dynamo.eval_frame:set_code_exec_strategy": disables,
    "torch._C._dynamo.eval_frame:_FrameExecStrategy": disables,
    "torch._C._dynamo.eval_frame:_FrameAction.SKIP": disables,
    "torch._C:Future": sees_pythons_futures,
    "torch.distributed.distributed_c10d:__file__": knows_no_code_of_torchs,
    "torch._C._distributed_c10d:_detect_dma_connectivity": counts_no_links,
    "torch._C._autograd:DeviceType.CUDA": counts_no_links,
    "torch._C._distributed_c10d:_SymmetricMemory.set_group_info": registers_all_the_same,
    "torch._C._distributed_c10d:WindowAttr": says_nothing_of_windows,
    "torch._C._distributed_c10d:WindowAccessType": says_nothing_of_windows,
    "triton:aggregate": takes_the_older_name,
}


@pytest.mark.parametrize("path", OTHER_WAYS)
def test_a_part_that_something_stands_in_for(path, monkeypatch):
    (file,) = {file for file, how, found, *_ in PARTS if how == "optional" and found == path}
    with monkeypatch.context() as patch:
        take_away(path, patch)
        OTHER_WAYS[path](run_anew(file), patch)


def test_every_part_is_taken_away():
    looked_for = {path for _, how, path, _, _, inside in PARTS if how == "optional"}
    in_calls = {path for _, how, path, _, _, inside in PARTS if how != "optional" and inside}
    assert looked_for == set(OTHER_WAYS) and in_calls == set(CALLS)
    for file in FILES:
        mentioned = {path for found, _, path, *_ in PARTS if found == file}
        assert mentioned, f"{file.name} looks for nothing"
