"""What README.md and docs/ say is true: their code runs, their commands exist, and what they name is there.

A code block without a checker for its language fails. The rules for writers:

* ``python``: a block whose first statement is an import begins a program, any other continues the one above. Programs
  run on two ranks. One that begins with a comment ``# name.py`` is run by the commands on the page that name the file.
  One that imports from Triton's ``nvidia.hopper`` is left out on GPUs before Hopper, and on AMD's.
* ``bash``: a command a line. Those that take seconds are run; of the others, every file, target and option that
  they name must exist.
* ``text``: what the block before it prints, on one of the ranks; ``...`` stands for anything.
"""

import ast
import contextlib
import csv
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conftest import UNDER_TORCHRUN, import_path
from covering import EVERYTHING
from preloaded import LIMIT_S, python
from test_references import variables_of_the_package

import iris
import iris.gluon
from iris.__main__ import commands as command_line
from iris.spawn import launch

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

alone = pytest.mark.skipif(UNDER_TORCHRUN, reason="starts processes of its own; run it without torchrun")


# The blocks of a page ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of its first line of text, from 1 on
    language: str
    text: str


@dataclass(frozen=True)
class Program:
    name: str | None
    blocks: tuple[Block, ...]


def blocks_of(page):
    text = page.read_text()
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.M | re.S):
        yield Block(page, text.count("\n", 0, match.start(2)) + 1, match[1].strip(), match[2])


def programs_of(page):
    programs = []
    for block in blocks_of(page):
        if block.language == "python":
            if isinstance(ast.parse(block.text).body[0], (ast.Import, ast.ImportFrom)):
                name = re.match(r"# (\w+\.py)\n", block.text)
                programs.append(Program(name and name[1], (block,)))
            else:
                programs[-1] = Program(programs[-1].name, (*programs[-1].blocks, block))
    return programs


def commands_of(page):
    return [
        (line, block)
        for block in blocks_of(page)
        if block.language == "bash"
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def expected_after(block):
    """What the ``text`` block right after ``block`` says, or None."""
    following = [other for other in blocks_of(block.page) if other.line > block.line][:1]
    return following[0].text if following and following[0].language == "text" else None


def assert_printed(expected, outputs):
    pattern = re.escape(expected.strip()).replace(r"\.\.\.", ".*?")
    assert any(re.fullmatch(pattern, output.strip(), flags=re.S) for output in outputs), "\n---\n".join(outputs)


def where(value):
    if isinstance(value, Block):
        return f"line {value.line}"
    return value.name if isinstance(value, Path) else None


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_every_block_has_a_checker(page):
    blocks = list(blocks_of(page))
    assert 2 * len(blocks) == len(re.findall(r"^\s*(?:```|~~~)", page.read_text(), flags=re.M))
    for before, block in zip([None, *blocks], blocks, strict=False):
        assert block.language in ("python", "bash", "text"), block
        if block.language == "text":
            assert before.language == "python" or before.language == "bash" and before.text.count("\n") == 1, block
    run = [word for line, _ in commands_of(page) for word in line.split()]
    for program in programs_of(page):
        assert program.name is None or program.name in run, f"nothing runs {program.name}"


# Programs ------------------------------------------------------------------------------------------------------------


def runs_here(program):
    """Whether there is TMA, if the program uses it."""
    if iris.simulator.ACTIVE or not any("nvidia.hopper" in block.text for block in program.blocks):
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


def run_programs(ctx, page):
    """Run the page's programs on this rank; what each block printed, by its line."""
    printed = {}
    with tempfile.TemporaryDirectory() as folder:
        for program in programs_of(page):
            if program.name is not None or not runs_here(program):
                continue
            namespace = {"__name__": "__main__"}
            for block in program.blocks:
                # In a file, for Triton reads a kernel's source; at the page's own lines, for whoever reads a traceback.
                file = Path(folder, f"{page.stem}_{block.line}.py")
                file.write_text("\n" * (block.line - 1) + block.text)
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(file.read_text(), str(file), "exec"), namespace)
                printed[block.line] = out.getvalue()
            ctx.barrier()
    return printed


@pytest.mark.parametrize("page", [p for p in PAGES if any(q.name is None for q in programs_of(p))], ids=where)
def test_the_programs_run(ranks, page):
    printed = ranks.run(run_programs, page)
    for block in blocks_of(page):
        expected = expected_after(block)
        if block.line in printed[0] and expected is not None:
            assert_printed(expected, [each[block.line] for each in printed])


# Commands ------------------------------------------------------------------------------------------------------------


class Commands:
    """A method for each command that the pages use; returns what to run, or None where checking had to do."""

    def __init__(self, page):
        self.programs = {program.name: program for program in programs_of(page)}

    def make(self, target, *settings):
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{target}:", makefile, flags=re.M)
        for setting in settings:
            assert re.search(rf"^{setting.partition('=')[0]} \?=", makefile, flags=re.M)

    def source(self, script):
        assert script.removesuffix("activate") + "python" in (ROOT / "Makefile").read_text()

    def pip(self, action, *arguments):
        assert action == "install"
        project = (ROOT / "pyproject.toml").read_text()
        for argument in arguments:
            if argument not in ("-e", "--no-deps", ".", "torch"):
                extra = re.fullmatch(r"\.\[(\w+)\]", argument)[1]
                assert re.search(rf"^{extra} = \[", project, flags=re.M)

    def python(self, *arguments):
        if arguments[0] in self.programs or arguments[:2] == ("-m", "iris"):
            return [*python(), *arguments]
        if arguments[:2] == ("-m", "pytest") and arguments[-1] in self.programs:
            return [*python(), *arguments]
        if arguments[:2] == ("-m", "pytest"):
            arguments = [argument for argument in arguments[2:] if argument != "-q"]
        self._exists(*arguments)

    def torchrun(self, *arguments):
        # What comes first, as a program has options of its own.
        first = next(i for i, argument in enumerate(arguments) if argument == "-m" or argument.endswith(".py"))
        if arguments[first] == "-m":
            # Ranks of its own, which another test has started.
            return self._understood(arguments[first:])
        if arguments[first] in self.programs:
            return [*python(), "-m", "torch.distributed.run", *arguments]
        self._exists(*arguments[first:])

    def _understood(self, arguments):
        """The command of Iris is there, and its options."""
        assert arguments[:2] == ("-m", "iris")
        asked = CliRunner().invoke(command_line, [*arguments[2:], "--help"])
        assert asked.exit_code == 0, asked.output

    def _exists(self, path, *arguments):
        assert (ROOT / path).exists()
        # What folders share lies beside them.
        folder = (ROOT / path).parent
        sources = "".join(file.read_text() for each in (folder, folder.parent) for file in each.glob("*.py"))
        if "from iris.bench.options import num_ranks" in sources:
            sources += (ROOT / "iris" / "bench" / "options.py").read_text()
        for option in arguments:
            if option.startswith("--"):
                # Options may be the fields of a tuple of sizes.
                field = option.removeprefix("--").replace("-", "_")
                assert f'"{option}"' in sources or re.search(rf"^    {field}: int$", sources, flags=re.M), option


def run_as_rank(program):
    """What a process of torchrun does."""
    os.chdir(program.parent)
    with open(f"{os.environ['RANK']}.printed", "w") as printed, contextlib.redirect_stdout(printed):
        runpy.run_path(str(program), run_name="__main__")


def commands():
    """Those that wait for twenty seconds, as another waits for one, or compile or shard whole models are thorough.

    So is what finds another race as one does.
    """
    for page in PAGES:
        for line, block in commands_of(page):
            waits, shards = "IRIS_WAIT_TIMEOUT_S=20" in line, "train_sharded.py" in line
            takes_long = waits or shards or "check reuse.py" in line or page.stem in ("your-model", "transformers")
            marks = [pytest.mark.thorough] * takes_long
            yield pytest.param(page, line, block, marks=marks)


@alone
@pytest.mark.parametrize(("page", "line", "block"), [*commands()], ids=where)
def test_the_commands_work(page, line, block, tmp_path):
    words = shlex.split(line, comments=True)
    settings = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        settings[name] = value
    assert settings.keys() <= variables_of_the_package() | {"PYTHON"}
    commands = Commands(page)
    command = getattr(commands, words[0])(*words[1:])
    if command is None:
        return
    if words[-1] in commands.programs:
        for package, version in (("transformers", "5.24"), ("accelerate", "1.15")):  # which are not for Python 3.10
            if f"from {package}" in commands.programs[words[-1]].blocks[0].text:
                pytest.importorskip(package, version)
    # Results that a command reads, as from the root of a clone.
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for program in commands.programs.values():
        if program.name is not None:
            (tmp_path / program.name).write_text("".join(part.text for part in program.blocks))
    if words[0] == "torchrun" and words[-1] in commands.programs and not EVERYTHING:
        # The launcher itself is tested in test_acceptance.py.
        launch(run_as_rank, int(words[words.index("--nproc-per-node") + 1]), tmp_path / words[-1])
        outputs = [file.read_text() for file in tmp_path.glob("*.printed")]
    else:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("IRIS_")}
        done = subprocess.run(
            command,
            env={**environment, **settings, "PYTHONPATH": import_path()},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        # What the pages check has a mistake.
        assert done.returncode == (1 if "check" in words else 0), done.stdout + done.stderr
        outputs = [done.stdout]
    expected = expected_after(block)
    if expected is not None:
        assert_printed(expected, outputs)


# Examples ------------------------------------------------------------------------------------------------------------


def rows_of_the_gallery():
    """The cells of each row that names an example, by the example."""
    rows = {}
    for line in (DOCS / "examples.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        named = re.fullmatch(r"`([\w/]+?)(?:\.py)?`", cells[0])
        if named:
            rows[named[1]] = cells
    return rows


def test_the_gallery_has_each_example():
    programs = {path.relative_to(ROOT / "examples").with_suffix("") for path in (ROOT / "examples").rglob("*.py")}
    folders = {path.parent for path in programs if path.name == "benchmark"}
    alone = {path for path in programs if re.match(r"\d\d_\w+$", str(path))}
    parts = {"rounds", "trial"}  # which the programs of a folder share
    in_folders = {path for path in programs if path.parts[0] in ("collectives", "06_message_passing")}
    wanted = folders | alone | {path for path in in_folders if path.name not in parts}
    assert rows_of_the_gallery().keys() == {str(path) for path in wanted}


def test_the_gallery_has_the_figures_of_the_results():
    rows, results = rows_of_the_gallery(), ROOT / "benchmarks" / "results"
    measured = {}
    files = results / "examples_2.json", results / "model" / "examples_18_20_2.json"
    for entry in [entry for file in files for entry in json.loads(file.read_text())["results"]]:
        entry = entry | entry.get("microseconds", {})
        numbers = [each for value in entry.values() for each in (value if isinstance(value, list) else [value])]
        measured.setdefault(entry["example"], []).extend(each for each in numbers if isinstance(each, int | float))
    for example, figures in measured.items():
        shown = [int(number) for cell in rows[example][2:] for number in re.findall(r"\d+", cell)]
        assert shown and all(any(abs(each - figure) <= 0.5 for figure in figures) for each in shown), example
    with open(results / "collectives" / "collectives_2.csv") as file:
        taken = list(csv.DictReader(file))
    for example, cells in rows.items():
        for size, cell in zip((128 << 10, 64 << 20), cells[2:4] if "collectives/" in example else (), strict=False):
            if cell != "–":
                name = example.removeprefix("collectives/")
                there = {
                    row["library"]: float(row["microseconds"])
                    for row in taken
                    if row["collective"] == name and int(row["bytes"]) == size and row["microseconds"]
                }
                assert cell == " / ".join(f"{there[library]:.3g}" for library in ("iris", "nccl")), example


def test_the_first_page_leads_to_all_others():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text()))
    assert linked | {"index.md"} == {page.name for page in DOCS.glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_what_a_page_names_exists(page):
    text = page.read_text()
    for block in blocks_of(page):
        text = text.replace(block.text, "")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:iris|tests|examples|docs|scripts|benchmarks)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
    known = variables_of_the_package() | {"IRIS_TEST_ALL", "IRIS_TEST_LATE_RAILS"}
    assert set(re.findall(r"\bIRIS_[A-Z_]+\b", text)) <= known
