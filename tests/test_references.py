"""The references have each public name, with the signature that it has."""

import functools
import inspect
import operator
import re
from pathlib import Path

import pytest

import iris
import iris.gluon
from iris import errors
from iris.__main__ import commands as command_line

DOCS = Path(__file__).parent.parent / "docs"


@functools.cache
def variables_of_the_package():
    sources = "".join(file.read_text() for file in (DOCS.parent / "iris").rglob("*.py"))
    return set(re.findall(r"\bIRIS_[A-Z_]+\b", sources))


def signature(function):
    """As the references print it: without annotations, ``self`` and Triton's wrappers around defaults."""
    function = getattr(function, "fn", function)
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind == parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in shown):
            shown.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = getattr(parameter.default, "value", parameter.default)
        shown.append(stars + parameter.name + ("" if default is parameter.empty else f"={default!r}"))
    return f"({', '.join(shown)})".replace('"', "'")


def context_members(context):
    """The public members of a device context, methods as the jitted functions that they are."""
    members = {}
    for name in dir(context):
        if not name.startswith("_"):
            member = inspect.getattr_static(context, name)
            member = getattr(member, "__func__", member)
            if inspect.isfunction(member):  # in the simulator, a method that calls the jitted function
                member = inspect.getclosurevars(member).nonlocals["function"]
            members[name] = member
    return members


COMPILED = "a compiled aggregate is a class of Triton's own"


OPERATIONS = "load store get put copy".split() + [name for name in iris.__all__ if name.startswith("atomic_")]


def generated(side):
    """The names whose signature and docstring the site puts there; `test_site.py` looks at what comes out."""
    return set(re.findall(r"^::: ([\w.]+)$", (DOCS / f"{side}-reference.md").read_text(), flags=re.M))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_reference_has_each_function(name):
    assert f"iris.{name}" in generated("device")
    assert getattr(iris, name).fn.__doc__ and signature(getattr(iris, name)) == signature(getattr(iris.gluon, name))


@pytest.mark.parametrize("name", ["load", "atomic_cas", "DeviceContext.put", "DeviceContext.initialize"])
def test_help_shows_the_arguments_of_a_device_operation(name):
    member = operator.attrgetter(name)(iris)
    function = inspect.unwrap(member)
    assert len(inspect.signature(member).parameters) == function.__code__.co_argcount
    assert inspect.getdoc(member) == inspect.getdoc(function)


@pytest.mark.skipif(not iris.simulator.ACTIVE, reason=COMPILED)
@pytest.mark.parametrize("context", [iris.DeviceContext, iris.gluon.IrisDeviceCtx], ids=["triton", "gluon"])
def test_the_reference_has_each_member_of_the_context(context):
    page = (DOCS / "device-reference.md").read_text()
    for name, member in context_members(context).items():
        if not hasattr(member, "fn"):
            assert f"``{name}``" in iris.DeviceContext.__doc__
        elif not hasattr(iris.x, name):  # of tiles: the page shows the functions
            assert f"iris.DeviceContext.{name}" in generated("device")
            assert member.fn.__doc__
    assert f"`IrisDeviceCtx.initialize{signature(iris.gluon.IrisDeviceCtx.initialize)}`" in page
    assert "iris.x" in generated("device")


@pytest.mark.parametrize("name", iris.x.__all__)
def test_the_reference_has_the_signature_of_each_function_of_tiles(name):
    page, member = (DOCS / "tiles.md").read_text(), getattr(iris.x, name)
    if inspect.isclass(member) and not iris.simulator.ACTIVE:
        pytest.skip(COMPILED)
    # Of a class, its fields in their order.
    fields = f"({', '.join(member.__annotations__)})" if inspect.isclass(member) else None
    assert f"`{name}{fields or signature(member)}`" in page


@pytest.mark.parametrize("name", [name for name in dir(iris.Iris) if not name.startswith("_")])
def test_the_reference_has_each_method_of_a_context(name):
    assert f"iris.Iris.{name}" in generated("host")
    assert getattr(iris.Iris, name).__doc__


def test_the_references_have_each_public_name():
    pages = "".join((DOCS / f"{side}-reference.md").read_text() for side in ("host", "device"))
    assert "iris.spawn.launch" in generated("host")
    shown = {part for side in ("host", "device") for name in generated(side) for part in name.split(".")}
    for name in {*iris.__all__, *iris.gluon.__all__, *variables_of_the_package()} - shown:
        assert re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", pages), name
    for name in ["cur_rank", "num_ranks", "device", "gpu_id", "heap_size", "heap", "heap_bases", "local_ranks"]:
        assert re.search(rf"^    {name} : ", iris.Iris.__doc__, flags=re.M), name
    for name in iris.heap.HeapStats.__dataclass_fields__:
        assert re.search(rf"^    {name} : ", iris.heap.HeapStats.__doc__, flags=re.M), name


def test_the_reference_has_each_error():
    page = (DOCS / "host-reference.md").read_text()
    shown = ["IrisError", *re.findall(r"\w+Error", " ".join(re.findall(r"members: \[(.*?)\]", page, flags=re.S)))]
    classes = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
    there = [name for name, kind in classes.items() if issubclass(kind, errors.IrisError)]
    assert sorted(shown) == sorted(there)


def test_the_reference_has_each_command():
    page = (DOCS / "host-reference.md").read_text()
    for name, command in command_line.commands.items():
        for words in [f"{name} {each}" for each in getattr(command, "commands", ())] or [name]:
            assert f"`python -m iris {words}" in page, words
