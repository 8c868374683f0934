"""The table of tested versions on docs/install.md is the record's, and what pyproject.toml claims was tested."""

from __future__ import annotations

import json
import re

import pytest

from tools import try_versions as versions

PROJECT = (versions.ROOT / "pyproject.toml").read_text()


def rows() -> list[dict[str, object]]:
    return json.loads(versions.RECORD.read_text())["rows"]


def test_the_page_shows_the_record():
    page = versions.PAGE.read_text()
    assert page == versions.with_table(page, rows())


@pytest.mark.parametrize(
    "claim, column",
    [(r'requires-python = ">=([\d.]+)"', "python"), (r'"torch>=([\d.]+)"', "torch")],
    ids=["python", "torch"],
)
def test_the_oldest_release_that_is_claimed_was_tested(claim: str, column: str):
    oldest = re.search(claim, PROJECT)
    assert oldest and any(str(row[column]).startswith(oldest[1]) for row in rows()), f"{column}: run `make versions`"


def test_every_row_passed():
    assert all(row["passed"] and not row["failed"] for row in rows())


def test_closing_lines_are_read_whatever_they_hold():
    text = "FAILED tests/a.py::b in 3 parts\n== 2 failed, 5 passed, 1 skipped, 1 error in 3.20s =="
    assert versions.summary(text) == {"passed": 5, "failed": 3, "skipped": 1}
    assert versions.summary("no tests ran in 0.01s") == {"passed": 0, "failed": 0, "skipped": 0}
