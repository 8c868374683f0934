"""The site: `make docs`. Pages are MyST Markdown, notebooks are shown as executed, the reference is docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cute_kernels import __version__  # noqa: E402

try:
    import tomllib  # pyright: ignore[reportMissingImports]
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # pyright: ignore[reportMissingImports]

URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
project = "cute-kernels"
author = "the cute-kernels authors"
copyright = f"2026, {author}"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
# Anchors within paragraphs are not known to other pages; tools/check_site.py looks at what was built.
suppress_warnings = ["myst.xref_missing"]
nb_execution_mode = "off"  # tools/run_notebook.py executes them, in `make test`
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 4

default_role = "code"  # `name` in docstrings
autodoc_typehints = "none"  # docstrings say shapes and dtypes, which annotations cannot
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False

html_theme = "furo"
if source := URLS.get("Source"):  # "view" and "edit" of a page
    html_theme_options = {"source_repository": source, "source_branch": "main", "source_directory": "docs/"}
html_title = f"cute-kernels {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
copybutton_prompt_text = r"^(\$|>>>) "
copybutton_prompt_is_regexp = True

CODE = re.compile(r"(``.+?``|`[^`]+`)")
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')


def plain(line: str) -> str:
    """A line of a docstring with what reStructuredText would take for markup escaped, but for `code`."""
    parts = CODE.split(line)
    parts[::2] = [re.sub(r"([*|])", r"\\\1", part) for part in parts[::2]]
    # "`Layer`s" is code and an s.
    parts[2::2] = [f"\\ {part}" if part[:1].isalnum() else part for part in parts[2::2]]
    return "".join(parts)


def as_table(rows: list[str]) -> list[str]:
    """A Markdown table as reStructuredText."""
    cells = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]
    body = [row for row in cells if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in body:
        lines += [f"   {'* ' if column == 0 else '  '}- {plain(cell)}" for column, cell in enumerate(row)]
    return [*lines, ""]


def readable(app: Any, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Docstrings are written to be read as they are: tables and asterisks are made reStructuredText's here."""
    made: list[str] = []
    rows: list[str] = []
    literal: int | None = None  # the indentation of the line that a literal block follows
    for line in [*lines, ""]:
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        if literal is None and line.lstrip().startswith("|") and line.rstrip().endswith("|"):
            rows.append(line)
            continue
        if rows:
            made += as_table(rows)
            rows = []
        made.append(line if literal is not None else plain(line))
        if line.rstrip().endswith("::"):
            literal = indent
    lines[:] = made[:-1]


def with_anchors(app: Any, name: str, source: list[str]) -> None:
    """Anchors that GitHub understands, as the ones that links find here."""
    source[0] = ANCHOR.sub(r"[]{#\1}", source[0])


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", readable, priority=400)  # before napoleon
    app.connect("source-read", with_anchors)
