"""The documentation as a site: it builds, shows the interface as it is, and its search finds every public name."""

import html
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import UNDER_TORCHRUN
from preloaded import LIMIT_S
from test_references import OPERATIONS, context_members, signature

import iris
from iris import errors
from iris.spawn import launch

ROOT = Path(__file__).parent.parent
NEEDED = ["material", "mkdocstrings_handlers"]

pytestmark = [
    pytest.mark.thorough,  # `make docs`, which CI runs beside `make test`, builds it, too
    pytest.mark.skipif(UNDER_TORCHRUN, reason="once is enough; run it without torchrun"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)), reason="what builds the site is not installed: the extra `docs`"
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return folder


def text_of(fragment):
    return html.unescape(re.sub(r"<[^>]*>", "", fragment))


def shown(site, page):
    """By the names under which a page has them: the signatures that it shows, in one line."""
    found = {}
    source = (site / page / "index.html").read_text()
    for name, rest in re.findall(
        r'<h\d id="([\w.]+)" class="doc doc-heading">(.*?)(?=<h\d id=|\Z)', source, flags=re.S
    ):
        code = re.search(r'<div class="doc-signature highlight">(.*?)</div>', rest, flags=re.S)
        one_line = re.sub(r"\s+", " ", text_of(code[1])).strip() if code else ""
        one_line = one_line.replace("( ", "(").replace(", )", ")").replace(",)", ")").replace(" )", ")")
        found[name] = one_line.partition(" -> ")[0].replace('"', "'")
    return found


def parameters(text):
    """Their names, and stars."""
    return re.findall(r"[(,] ?([*\w]+)", text)


def names():
    """What a reader looks for: of the package, of contexts on the host and in kernels, of tiles and products."""
    contexts = [iris.Iris, *([iris.DeviceContext] if iris.simulator.ACTIVE else [])]
    members = [name for context in contexts for name in dir(context) if not name.startswith("_")]
    return {*iris.__all__, *iris.gluon.__all__, *iris.x.__all__, *members, "FusedConfig", "all_gather_matmul"}


def test_the_search_finds_public_names(site):
    # The search takes pages apart at what its separator matches, and finds words by their beginnings.
    index = json.loads((site / "search" / "search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])
    texts = [text_of(each[part]) for each in index["docs"] for part in ("title", "text")]
    words = {word.lower() for text in texts for word in separator.split(text)}
    assert {name for name in names() if name.lower() not in words} == set()


@pytest.mark.skipif(not iris.simulator.ACTIVE, reason="a compiled aggregate is a class of Triton's own")
def test_the_device_reference_shows_each_signature(site):
    page = shown(site, "device-reference")
    for name in OPERATIONS:
        assert page[f"iris.{name}"] == f"{name}{signature(getattr(iris, name))}"
    for name, member in context_members(iris.DeviceContext).items():
        if hasattr(member, "fn") and not hasattr(iris.x, name):
            assert page[f"iris.DeviceContext.{name}"] == f"{name}{signature(member)}"
    for name in iris.x.__all__:
        member = getattr(iris.x, name)
        if inspect.isclass(member):
            assert parameters(page[f"iris.x.{name}"]) == list(member.__annotations__)
        else:
            assert page[f"iris.x.{name}"] == f"{name}{signature(member)}"


def test_the_host_reference_shows_each_signature(site):
    page = shown(site, "host-reference")
    assert page["iris.spawn.launch"] == f"launch{signature(launch)}"
    for function in (iris.iris, iris.do_bench, iris.set_logger_level):
        assert parameters(page[f"iris.{function.__name__}"]) == parameters(signature(function))
    for name in dir(iris.Iris):
        if not name.startswith("_"):
            assert parameters(page[f"iris.Iris.{name}"]) == parameters(signature(getattr(iris.Iris, name)))


def test_the_host_reference_shows_each_error(site):
    source = (site / "host-reference" / "index.html").read_text()
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.IrisError) and kind is not errors.IrisError:
            entry = source.partition(f'id="iris.errors.{name}"')[2].partition("doc doc-heading")[2]
            bases = text_of(re.search(r"Bases: .*?</p>", entry, flags=re.S)[0])
            assert re.findall(r"\w+", bases)[1:] == [base.__name__ for base in kind.__bases__]


@pytest.mark.parametrize("page", ["host-reference", "device-reference"])
def test_a_reference_shows_each_name_once(site, page):
    names = re.findall(r'id="([\w.]+)" class="doc doc-heading"', (site / page / "index.html").read_text())
    assert sorted(names) == sorted(set(names))


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|link|img|iframe)[^>]*\b(?:src|href)="(?:https?:)?//([^"]*)"', page.read_text()
        )
        assert fetched == [], page


def test_the_notebook_is_a_page(site):
    page = text_of((site / "notebook" / "index.html").read_text())
    assert "python -m iris check race.py" in page and "1 found." in page
