"""Lets the site show the interface as callers see it: an extension of griffe, which reads the package and runs nothing.

* What a class takes from other files, or gets later, becomes its own: moves, atomics, `is_local`, `initialize`, its
  name in Gluon.
* A default that is a named constant for compilers shows its value: ``sem='acq_rel'``, not ``sem=ACQ_REL``.
* Parameters of device functions show no ``tl.constexpr``: the pages say which are constants.
* A default that is a private name is shown as ``...``.
* Names of errors in docstrings lead to what the host reference says of them.
"""

import ast
import re
from collections.abc import Iterator

import griffe

# Of these, static reading sees the parts, but not how they are put together when the package is imported.
CONTEXT = "language.context"


class Interface(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        context = pkg[f"{CONTEXT}.DeviceContext"]
        context.set_member("initialize", _copied(pkg[f"{CONTEXT}.initialize"]))
        for name, member in list(context.members.items()):
            value = str(member.value) if member.is_attribute else ""
            if value.startswith(("atomics.", "locality.", "moves.")) and not name.startswith("_"):
                context.set_member(name, _copied(pkg[f"language.{value}"]))
        del context.members["__init__"], context.members["base"], context.members["table"]
        # Its classes are shown in groups, each of which would begin with what it says of all.
        pkg["errors"].docstring = None
        errors = {name for name in pkg["errors"].members if name.endswith("Error")}
        for each in _everything(pkg):
            if each.docstring is not None:
                for name in errors & set(re.findall(r"^\w+Error$", each.docstring.value, flags=re.M)):
                    # Below "Raises", where a name is looked up in the module.
                    each.module.members.setdefault(name, griffe.Alias(name, f"{pkg.name}.errors.{name}"))
                each.docstring.value = _linked(each.docstring.value, errors)
            if each.is_function:
                for parameter in each.parameters:
                    _simplify(parameter, each, pkg)


def _everything(top: griffe.Object) -> Iterator[griffe.Object]:
    for member in list(top.members.values()):
        if not member.is_alias:
            yield member
            yield from _everything(member)


def _copied(function: griffe.Function) -> griffe.Function:
    copy = griffe.Function(
        function.name, lineno=function.lineno, endlineno=function.endlineno, parameters=function.parameters
    )
    text = function.docstring.value if function.docstring else ""
    copy.docstring = griffe.Docstring(text, lineno=function.lineno, parent=copy)
    return copy


def _linked(text: str, errors: set[str]) -> str:
    return re.sub(
        r"(?<![`\[])`(\w+Error)`(?![`\]])",
        lambda match: f"[`{match[1]}`][iris.errors.{match[1]}]" if match[1] in errors else match[0],
        text,
    )


def _simplify(parameter: griffe.Parameter, function: griffe.Function, package: griffe.Module) -> None:
    if str(parameter.default).startswith("_"):
        parameter.default = "..."
    if str(parameter.annotation) != "tl.constexpr":
        return
    parameter.annotation = None
    name = str(parameter.default)
    if name.isupper():
        constant = package["language.ordering"].members.get(name) or function.module.members[name]
        parameter.default = repr(ast.literal_eval(re.fullmatch(r"tl\.constexpr\((.*)\)", str(constant.value))[1]))
