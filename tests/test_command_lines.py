"""Every command line of the repository answers --help and refuses what it does not know, before it does anything."""

from __future__ import annotations

import ast
import copy
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("bench", "cute_kernels", "examples", "layouts", "simulator", "tests", "tools")
STARTS = "if __name__ == '__main__':"
MAIN = "def main(arguments: Sequence[str] | None=None) -> int:"
DECORATOR = "@ends_with_its_reader"  # calls main first


def sources() -> dict[str, ast.Module]:
    """By module, the files that may be run."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(text)
        for path, text in texts.items()
        if "__main__" in text or "argv" in text
    }


SOURCES = sources()
PROGRAMS = [name for name, tree in SOURCES.items() if any(ast.unparse(node).startswith(STARTS) for node in tree.body)]


def parses_first(main: ast.FunctionDef) -> bool:
    """Whether its statements do nothing but make a parser until one has parsed the arguments."""
    for statement in main.body:
        text = ast.unparse(statement)
        if ".parse_args(arguments)" in text:
            return True
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_docstring and not text.startswith(("parser = argparse.", "parser.")):
            return False
    return False


def mistakes(tree: ast.Module) -> list[str]:
    """What keeps a program from asking a parser before anything else."""
    mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    lines = [line for main in mains for line in ast.unparse(main).splitlines() if line not in ("", DECORATOR)]
    if len(mains) != 1 or lines[0] != MAIN:
        return [f"want {MAIN}"]
    found = [] if parses_first(mains[0]) else ["main does something before it parses its arguments"]
    if ast.unparse(tree.body[-1]) != f"{STARTS}\n    sys.exit(main())":
        found.append("the last statement is not sys.exit(main()) under the usual if")
    return found


def test_programs_are_found():
    assert {"bench.__main__", "tests.golden.compare", "tools.setup_env", "cute_kernels.runtime.worker"} <= set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_asks_its_parser_first(name: str, capsys: pytest.CaptureFixture[str]):
    assert not mistakes(SOURCES[name])
    try:
        main = importlib.import_module(name).main
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in FOLDERS:
            raise
        pytest.skip(str(error))
    for arguments, code in ((["--help"], 0), (["--no-such-option"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr()
        assert ended.value.code == code
        assert (said.out if code == 0 else said.err).startswith("usage: ")


def test_no_other_file_reads_its_command_line():
    """`bench` writes its command into records; parsers read the others'."""
    reading = {name for name, tree in SOURCES.items() if "sys.argv" in ast.unparse(without_strings(tree))}
    assert reading <= {"bench.__main__"}


def without_strings(tree: ast.Module) -> ast.Module:
    """A copy of the tree with its strings empty: some are programs that tests start."""
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return tree


def test_a_program_that_starts_at_once_is_found():
    text = 'import sys\ndef main() -> None:\n    start()\nif __name__ == "__main__":\n    main()\n'
    assert mistakes(ast.parse(text)) == [f"want {MAIN}"]
    text = f"{MAIN}\n    start()\n    parser.parse_args(arguments)\n{STARTS}\n    main()\n"
    assert [*map(len, [mistakes(ast.parse(text))])] == [2]
