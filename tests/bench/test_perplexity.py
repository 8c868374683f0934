"""No INT4 figure stands without what it costs in perplexity."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import e2e_vllm, perplexity, report
from bench.environment import ROOT
from bench.perplexity import Cache


@pytest.mark.parametrize(
    ("text", "caches"),
    [
        ("int4_g1", [Cache(None, 1)]),
        ("W4, int4_g4 cache", [Cache(None, 4)]),
        ("int8_token_head,int4_g2 and int4_g8", [Cache(None, 8), Cache("int8_token_head", 2)]),
        ("e4m3_head + int4_g4, calibrated", [Cache("e4m3_head", 4)]),
        ("int4_g3, int8_g4, w4a16, int4_per_token_head", []),
    ],
)
def test_caches_are_found_by_name(text: str, caches: list[Cache]):
    assert perplexity.caches_in([text]) == caches


def rows(**increases: float) -> dict[str, Any]:
    named = [(name.replace("_AND_", " + "), increase) for name, increase in increases.items()]
    return {
        "model": {"head_dim": 64},
        "rows": [
            {
                "name": name,
                "k_format": name.partition(" + ")[0],
                "v_format": name.rpartition(" + ")[2],
                "increase_percent": increase,
            }
            for name, increase in named
        ],
    }


def test_costs_are_of_as_many_columns_to_a_scale():
    model = perplexity.model_of(rows(int4_g2=7.0, int4_g4=4.0, bf16=0.0, int8_token_head_AND_int4_g2=0.5), "m")
    assert model.cost(Cache(None, 4)) == "+7.00 %"  # 32 columns
    assert model.cost(Cache(None, 8)) == "+4.00 %"
    assert model.cost(Cache("int8_token_head", 4)) == "+0.50 %"
    assert model.cost(Cache("int8_token_head", 8)) is None
    finer = perplexity.model_of(rows(int4_g4=4.0), "m")
    assert finer.cost(Cache(None, 4)) == finer.cost(Cache(None, 1)) == "more than +4.00 %"
    coarse = perplexity.model_of(rows(int4_g1=17.0, int4_g2=7.0), "m")
    assert coarse.cost(Cache(None, 1)) == "more than +17.00 %"  # of 128 columns; 64 were measured at most


def test_a_cost_names_the_format_that_was_measured():
    model = perplexity.model_of(rows(int4_g2=7.0, int4_g4=4.0), "m")
    assert model.said(Cache(None, 4)) == "+7.00 % (int4_g2, head_dim 64, m)"  # 32 columns a scale in both
    assert model.said(Cache(None, 1)) == "more than +7.00 % (int4_g2, head_dim 64, m)"
    assert model.said(Cache("int8_token_head", 4)) is None


def test_rows_of_other_methods_are_not_a_plain_caches():
    record = rows(int4_g2=7.0)
    record["rows"] += [
        {"name": "int4_g2, smoothed", "k_format": "int4_g2", "v_format": "int4_g2", "increase_percent": 1.0}
    ]
    assert perplexity.model_of(record, "m").cost(Cache(None, 4)) == "+7.00 %"


def test_rows_of_weights_and_of_grids_that_no_cache_has_say_nothing_of_caches():
    record = rows(int4_g2=7.0, kivi32_AND_int4_g2=1.8)
    record["rows"].append({"name": "weights w4g64", "weights": "w4g64", "increase_percent": 3.0})
    assert perplexity.model_of(record, "m").increases == {Cache(None, 2): 7.0}


def test_a_table_says_what_its_int4_caches_cost():
    record = json.loads((ROOT / "bench/results/e2e_vllm.json").read_text())
    below = e2e_vllm.markdown(record).partition("\n\n")[2]
    assert "Perplexity against 16-bit caches, with a scale per 32 columns (int4_g4 here): +" in below
    others = {**record, "rows": [row for row in record["rows"] if not row["kv_format"]]}
    assert "erplexity" not in e2e_vllm.markdown(others)


def test_a_cache_that_nobody_measured_is_said_to_be_so():
    said = perplexity.sentence([Cache(None, 2)], [perplexity.Model("m", 128, {})])
    assert said.endswith("with a scale per 64 columns (int4_g2 here): not measured.")


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/performance.md",
        "docs/performance_layers.md",
        "docs/tasks/vllm.md",
        "docs/tasks/transformers.md",
        "docs/reference/vllm.md",
        "docs/reference/transformers.md",
        "docs/design/channel_blocks.md",
    ],
)
def test_pages_with_int4_figures_say_what_they_cost(page: str):
    """Every table between marks that names an INT4 cache, and the sentence that the README begins with."""
    text = (ROOT / page).read_text()
    parts = text.split("<!-- bench:")[1:] if not page.startswith("docs/performance") else text.split("\n## ")[1:]
    named = [part.partition(report.MARK_END)[0] for part in parts]
    times = [part for part in named if not part.startswith("same-tokens")]  # which is about accuracy itself
    shown = [part for part in times if "INT4" in part or perplexity.caches_in([part])]
    assert shown
    for part in shown:
        assert "erplexity" in part, part[:300]
