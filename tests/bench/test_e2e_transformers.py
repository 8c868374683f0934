"""The record of `generate`: what it is judged by, and how it is printed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from bench import e2e_transformers, report
from bench.bars import judge
from bench.environment import ROOT
from bench.record import RESULTS, load


def record(**ours: Any) -> dict[str, Any]:
    """A run in which "int4_g4 cache, W4" takes 4 ms, SDPA 64 and the compiled static cache 40."""
    times = {"transformers, SDPA": 64.0, "transformers, static cache, compiled": 40.0, "int4_g4 cache, W4": 4.0}
    rows = []
    for case in e2e_transformers.CASES:
        row = {**asdict(case), "batch": 2, "context": 8, "layers": 1, "memory_gb": 1.0, "tokens": [[1, 2], [3, 4]]}
        host = {"host_us": 100.0, "host_in_order_us": 90.0} if case.kv_format and case.cuda_graphs else {}
        rows.append(row | {"step_ms": times.get(case.name, 8.0), "graph_ms": 3.5} | host)
    rows[[row["name"] for row in rows].index("int4_g4 cache, W4")].update(ours)
    batches = [
        {"kv_format": kv, "batch": b, "context": 4, "layers": 1, "step_ms": ms}
        for kv, ms in (("bf16", 2.0), ("int4_g4", 1.9))
        for b in (1, 64)
    ]
    environment = {
        "gpu": "GPU",
        "versions": {"torch": "2", "transformers": "5"},
        "commit": "0" * 10,
        "date": "2026-11-26",
    }
    found = {"engine": "transformers", "rows": rows, "batches": batches, "environment": environment}
    return found | {"parts": {"bare_ms": 3.0, "lm_head_ms": 0.4, "loop_ms": 0.2}}


def met(data: dict[str, Any]) -> dict[str, bool]:
    return {verdict.what: verdict.met for verdict in judge(data)}


def test_cases_are_chosen_by_name_and_then_batches_are_asked_for():
    few = e2e_transformers.chosen(r"^transformers, SDPA$|\+ int4_g4 cache, W4$")
    assert [case.name for case in few["cases"]] == ["transformers, SDPA", "int8_token_head + int4_g4 cache, W4"]
    assert not few["batches"] and e2e_transformers.chosen("W4", [2])["batches"] == (2,)
    assert e2e_transformers.chosen("") == {"cases": [*e2e_transformers.CASES], "batches": e2e_transformers.BATCHES}


def test_every_bar_is_judged():
    recorded = sum(case.kv_format is not None and case.cuda_graphs for case in e2e_transformers.CASES)
    assert list(met(record()).values()) == [True] * (3 + 2 * recorded + 2)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"step_ms": 4.3}, {"SDPA", "output layer"}),
        ({"step_ms": 17.0}, {"SDPA", "static", "output layer"}),
        ({"host_us": 151.0}, {"W4, steps ahead"}),
        ({"host_in_order_us": 151.0}, {"W4, in order"}),
    ],
)
def test_a_bar_that_is_missed_says_so(changes, missed):
    found = {what for what, is_met in met(record(**changes)).items() if not is_met}
    assert len(found) == len(missed) and all(any(word in what for what in found) for word in missed)


def test_int4_is_judged_at_every_batch():
    data = record()
    data["batches"][-1]["step_ms"] = 2.1
    assert [what for what, is_met in met(data).items() if not is_met] == [
        "generate: a step with the INT4 cache over BF16's, 64 requests"
    ]


def test_the_record_is_printed_with_its_bars():
    data = record()
    data["bars"] = [verdict.as_dict() for verdict in judge(data)]
    text = e2e_transformers.text(data)
    assert "64 requests: INT4 1.900 ms, BF16 2.000 (0.95)" in text and "MISSED" not in text
    rows = e2e_transformers.markdown(data).splitlines()
    assert any(row.startswith("| int4_g4 cache, W4 | **4.0** |") and row.endswith("| 100, 90 |") for row in rows)
    assert "| 64 | 2.00 | 1.90 | 0.95 |" in e2e_transformers.markdown_batches(data)


def test_the_parts_of_a_step_are_a_table():
    data = record(replays=30, ahead=29)
    lines = e2e_transformers.markdown_ahead(data).splitlines()
    assert lines[2:6] == [
        "| bare loop over the library, a CUDA graph | 3.00 |",
        "| output layer, 16 bits | 0.40 |",
        "| transformers' loop around an empty model | 0.20 |",
        "| their sum | 3.60 |",
    ]
    assert lines[7] == "| **a step of `generate`** | **4.00** |" and "SDPA" not in lines[-1]
    data["rows"][0]["first_run_ms"] = 99.0
    assert "SDPA took 64.0 ms in the same run, 16.0 times as long." in e2e_transformers.markdown_ahead(data)
    with pytest.raises(ValueError, match="record: got no parts of a step"):
        e2e_transformers.markdown_ahead({"rows": []})


def test_nothing_is_compared_with_a_run_that_was_not_warmed():
    data = record()
    assert "times" not in e2e_transformers.markdown(data).splitlines()[0]
    data["rows"][0]["first_run_ms"] = 99.0
    head, _, *rows = e2e_transformers.markdown(data).splitlines()
    assert "| times |" in head and any(" | 16.0 | " in row for row in rows)


def test_pages_of_transformers_show_their_records():
    pages = {"main": ("tasks", "e2e_transformers"), "ahead": ("reference", "e2e_transformers_ahead")}
    pages["batches"] = ("reference", "e2e_transformers_batches")
    for suite, (folder, name) in pages.items():
        make, mark = e2e_transformers.TABLES[suite]
        text = (ROOT / "docs" / folder / "transformers.md").read_text()
        assert report.filled(text, mark, make(load(RESULTS / f"{name}.json"))) == text, (
            f"want `bench table --suite {suite}`"
        )


def test_a_record_without_figures_is_no_table():
    with pytest.raises(ValueError, match="record: got no measured case"):
        e2e_transformers.markdown({"rows": []})
    with pytest.raises(ValueError, match="record: got no batch with both caches"):
        e2e_transformers.markdown_batches({"rows": []})
