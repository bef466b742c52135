"""No module of iris imports, by whatever way, one that imports it: each can be read after what it builds on.

Nor does a folder import from one that imports from it. The tables of docs/contributing.md are floors, each built on
those before it.
"""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules(root):
    """The files of iris, by the names of their modules."""
    files = {}
    for file in (root / "iris").rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def imports(tree, known):
    """Those of the ``known`` modules that a file imports: inside functions and for annotations alone, too.

    ``import a.b`` and ``from a.b import c`` count for a.b, or for a.b.c if that is a module; not for the package a,
    which Python only passes on the way.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "modules of iris are imported by their full names"
            paths = {each.name: f"{node.module}.{each.name}" for each in node.names}
            found |= {path if path in known else node.module for path in paths.values()}
    return found & known


def circles(graph):
    """The strongly connected components of more than one module (Tarjan's algorithm)."""
    order, lowest, stack, found = {}, {}, [], set()

    def visit(module):
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            begin = stack.index(module)
            component = frozenset(stack[begin:])
            del stack[begin:]
            if len(component) > 1:
                found.add(component)

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return found


def graph_of(sources):
    return {module: imports(ast.parse(text), set(sources)) - {module} for module, text in sources.items()}


@functools.cache
def graph_of_iris():
    return graph_of({module: file.read_text() for module, file in modules(ROOT).items()})


def test_the_finder_finds_circles():
    sources = {
        "iris": "from iris import a, b",
        "iris.a": "import iris.b",
        "iris.b": "def f():\n    from iris.c import x",
        "iris.c": "if TYPE_CHECKING:\n    from iris import a",
        "iris.d": "from iris.a import anything",
        "iris.e": "from iris import __version__",
    }
    assert graph_of(sources)["iris.e"] == {"iris"}
    assert circles(graph_of(sources)) == {frozenset({"iris.a", "iris.b", "iris.c"})}
    assert not circles(graph_of(sources | {"iris.c": "from torch import a"}))


def test_no_modules_import_each_other():
    found = circles(graph_of_iris())
    assert not found, "\n".join(", ".join(sorted(circle)) for circle in found)


def room(module):
    """The folder or file at the root of iris."""
    return ".".join(module.split(".")[:2])


def test_no_folders_import_from_each_other():
    graph = graph_of_iris()
    rooms = {room(module): set() for module in graph}
    for module, others in graph.items():
        rooms[room(module)] |= {room(other) for other in others} - {room(module)}
    found = circles(rooms)
    assert not found, "\n".join(", ".join(sorted(circle)) for circle in found)


def floors(page):
    """The number of the table of the guide that has a file or a folder, by the name of its module."""
    found = {}
    tables = page[page.index("## Where things are") : page.index("## Commands")].split("\n### ")[1:]
    for number, table in enumerate(tables):
        for where, what in re.findall(r"^\| (`iris.*?) \| (.*) \|$", table, re.MULTILINE):
            places = re.findall(r"`([\w/.]+)`", where)
            folder = next((place for place in places if place.endswith("/")), "")
            named = places + [folder + file for file in re.findall(r"`(\w+\.py)`", what) if folder]
            for place in named:
                found.setdefault(
                    place.removesuffix(".py").removesuffix("/__init__").strip("/").replace("/", "."), number
                )
    return found


def test_no_module_imports_one_of_a_higher_floor():
    floor = floors((ROOT / "docs" / "contributing.md").read_text())
    graph = graph_of_iris()
    assert graph.keys() <= floor.keys()
    upwards = [(one, other) for one in graph for other in graph[one] if floor[other] > floor[one]]
    assert not upwards
