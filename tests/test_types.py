"""What type checkers are told nothing of: `: Any` and suppressions, which may only become fewer."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_ANY, MOST_SUPPRESSIONS, MOST_PATCHES = 138, 4, 47  # lines; lower them when there are fewer
ANY, SUPPRESSION = re.compile(r":\s*Any\b"), re.compile(r"#\s*(type:\s*ignore|pyright:)")
PATCH = re.compile(r"\bmonkeypatch\.setattr\(")
INSTEAD = """
A field or argument of device code has one of the DSL's types (Int32, Float32, cute.Pointer ...), or RegisterTensor or
Index (cute_kernels/device/types.py). One that several classes fit has their union, or a Protocol. What is not known
before it is checked is an object. A test's double goes through simulator.stand_in. Where a library's stubs are wrong,
narrow with isinstance or typing.cast, in one place."""


def lines_with(pattern: re.Pattern[str], *folders: str, root: Path = ROOT) -> Iterator[str]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if pattern.search(line):
                    yield f"{path.relative_to(root)}:{number}: {line.strip()}"


def check(found: list[str], most: int, what: str, instead: str = INSTEAD) -> None:
    assert len(found) <= most, f"{len(found)} lines have {what}, want at most {most}.{instead}\n" + "\n".join(found)


def test_any_is_no_more_frequent_than_it_was():
    check(list(lines_with(ANY, "cute_kernels", "layouts", "simulator")), MOST_ANY, "`: Any`")


def test_suppressions_are_no_more_frequent_than_they_were():
    check(list(lines_with(SUPPRESSION, "cute_kernels")), MOST_SUPPRESSIONS, "type: ignore or pyright:")


def test_tests_patch_no_more_than_they_did():
    instead = " Instead: a backend of simulator, tests.launchers.recording, bench.timing.ticking, an argument."
    check(list(lines_with(PATCH, "tests")), MOST_PATCHES, "a patch", instead)


def test_overloads_by_a_flag_take_a_bool_whose_value_is_not_known():
    """Pyright does without such an overload. Mypy does not: it takes no bool for one of two literals."""
    literals, with_bool = set(), set()
    for path in (ROOT / "cute_kernels").rglob("*.py"):
        arguments = defaultdict(set)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(each) == "overload" for each in node.decorator_list
            ):
                for each in (*node.args.args, *node.args.kwonlyargs):
                    arguments[node.name, each.arg].add(ast.unparse(each.annotation) if each.annotation else "")
        for name, types in arguments.items():
            literals |= {(path.name, *name)} if types & {"Literal[True]", "Literal[False]"} else set()
            with_bool |= {(path.name, *name)} if "bool" in types else set()
    assert literals and literals <= with_bool


def test_lines_are_found(tmp_path):
    """An annotation, one without a space, and both suppressions; not what only looks like them."""
    text = "x: Any\nx:Any = 1\nx: AnyOther\nx = 1  # type: ignore[x]\nx = 2  # pyright: ignore\nx = 'pyright:'\n"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text(text)
    assert [line.split(":")[1] for line in lines_with(ANY, "code", root=tmp_path)] == ["1", "2"]
    assert [line.split(":")[1] for line in lines_with(SUPPRESSION, "code", root=tmp_path)] == ["4", "5"]
