"""Makes pages of the site from notebooks: a hook of MkDocs, which `mkdocs.yml` names.

Cells of text are Markdown already. Cells of code become blocks of code, and what they printed becomes a block of text,
so a notebook looks like any other page, and the search finds what is in it. Outputs are those that the file holds.
"""

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# How a cell runs a command with the Python of the notebook.
RUNS = "!{sys.executable} "


class Notebook(File):
    """A file that is a page although its name does not end in ``.md``."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(Notebook(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls))
    return files


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    if not isinstance(page.file, Notebook):
        return None
    return as_markdown(json.loads(Path(page.file.abs_src_path).read_text()))


def as_markdown(notebook: dict) -> str:
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        if source.startswith(RUNS):
            parts.append(f"```bash\npython {source.removeprefix(RUNS)}\n```")
        else:
            parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts)
