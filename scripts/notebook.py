"""Runs a notebook as Jupyter would, without Jupyter: says where outputs differ from those that the file holds.

    python scripts/notebook.py docs/notebook.ipynb            # exit status 1 if an output differs
    python scripts/notebook.py docs/notebook.ipynb --write    # stores the outputs

It knows what these notebooks use: code, ``%%writefile NAME``, and ``!{sys.executable} ARGUMENTS``. Files are written to
a temporary folder. What goes to standard error is shown, and is no output.
"""

import argparse
import contextlib
import io
import json
import linecache
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WRITES, RUNS = "%%writefile ", "!{sys.executable} "


def run(number: int, source: str, namespace: dict) -> str:
    """What the cell prints."""
    if source.startswith(WRITES):
        name, _, text = source.removeprefix(WRITES).partition("\n")
        Path(name).write_text(text)
        return f"Writing {name}\n"
    if source.startswith(RUNS):
        command = [sys.executable, *source.removeprefix(RUNS).split()]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    # As IPython does it: the text of a kernel can be read although there is no file.
    name = f"<cell {number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, name, "exec"), namespace)
    return printed.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true", help="store the outputs in the file")
    arguments = parser.parse_args()
    path = arguments.notebook.resolve()
    notebook = json.loads(path.read_text())
    namespace, differs = {"__name__": "__main__"}, False
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, "")
        for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
            stored = "".join(text for output in cell["outputs"] for text in output["text"])
            printed = run(number, "".join(cell["source"]), namespace)
            if printed != stored:
                differs = True
                print(f"Cell {number} printed:\n{printed}\nand the file says:\n{stored}", file=sys.stderr)
            lines = printed.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        os.chdir(path.parent)
    if arguments.write:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    return int(differs and not arguments.write)


if __name__ == "__main__":
    sys.exit(main())
