"""What is installed and imported as cute-kernels: its version, its command, and its `layouts` rather than another's."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cute_kernels

try:
    import tomllib  # pyright: ignore[reportMissingImports]
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

OTHERS = {
    "another's, as it would be after their install": "class Layout:\n    pass\n",
    "another's that lacks what it imports": "import a_package_that_nobody_has\n",
}


@pytest.mark.parametrize("text", OTHERS.values(), ids=list(OTHERS))
def test_another_projects_layouts_is_named_in_one_line(text: str, tmp_path: Path):
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts/__init__.py").write_text(text)
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import cute_kernels"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1
    assert last.startswith("ImportError: layouts: got another package than cute-kernels' (")
    assert (
        "`pip uninstall layouts`, then in this package's checkout `pip install --force-reinstall --no-deps .`" in last
    )


def test_the_version_is_written_once_and_in_the_changelog():
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    (latest,) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:1]
    assert latest == cute_kernels.__version__


PLACEHOLDER = re.compile(
    r"example\.(com|org|net)|your[-_ ]?(org|name|domain)|\b(TODO|FIXME|TBD|XXX)\b|<(owner|url|email)>", re.I
)


def test_no_address_is_made_up():
    """Addresses of the project are real or missing, and nothing that ships asks its reader to fill something in."""
    urls = PROJECT.get("urls", {})
    assert set(urls) <= {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith("https://") for url in urls.values())
    pages = [ROOT / name for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*")]
    found = {
        path.name: match[0] for path in pages if path.is_file() and (match := PLACEHOLDER.search(path.read_text()))
    }
    assert not found
    assert PLACEHOLDER.search("https://example.com/x") and PLACEHOLDER.search("https://github.com/your-org/x")


def test_the_pythons_that_are_claimed_were_tested():
    claimed = set(re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"])))
    page = (ROOT / "docs/install.md").read_text()
    table = set(re.findall(r"^\| (3\.\d+) \|", page, re.MULTILINE))
    assert claimed and claimed == table | set(re.findall(r"with Python (3\.\d+), PyTorch", page, re.I))


def test_the_command_is_the_modules():
    module, _, name = PROJECT["scripts"]["cute-kernels"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_extras_are_those_that_the_pages_name():
    extras = PROJECT["optional-dependencies"]
    assert {"transformers", "vllm", "checkpoints", "docs", "bench", "dev"} <= extras.keys()
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"cute-kernels\[(\w+)\]", page.read_text())}
    assert named <= extras.keys()


def test_what_make_quick_runs_is_there():
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (listed,) = re.findall(r"^QUICK = (.*)$", text, re.MULTILINE)
    names = listed.split()
    assert len(names) == len(set(names)) > 20
    assert all((ROOT / name).exists() for name in names), [name for name in names if not (ROOT / name).exists()]


def test_the_sdist_names_every_package_of_the_tree():
    grafted = set(re.findall(r"^graft (\S+)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE))
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} <= grafted
