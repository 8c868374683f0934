"""Pages show what the records hold: the README's tables and docs/performance*.md are those that bench.pages makes."""

from __future__ import annotations

import re

import pytest

from bench import pages, report
from bench.environment import ROOT
from bench.record import RESULTS
from bench.record_list import command_of
from bench.sections import ATTENTION, MODELS, WHOLE
from cute_kernels.formats.kv.base import HEAD_DIMS


def test_the_readme_shows_the_records():
    text = pages.README.read_text()
    assert pages.readme(text) == text, "want `python -m bench pages`"


def test_the_pages_of_performance_show_the_records():
    assert pages.PERFORMANCE.read_text() == pages.performance(), "want `python -m bench pages`"
    assert pages.LAYERS.read_text() == pages.performance_of_layers(), "want `python -m bench pages`"
    assert pages.STEPS.read_text() == pages.performance_of_steps(), "want `python -m bench pages`"


def test_a_record_that_nobody_has_made_yet_has_no_section():
    sections = (*ATTENTION, *MODELS, *WHOLE)
    text = pages.performance() + pages.performance_of_layers() + pages.performance_of_steps()
    for title, name, *_ in sections:
        assert (f"## {title}\n" in text) == (RESULTS / f"{name}.json").exists()


def test_the_page_of_benchmarks_lists_every_record_with_its_command():
    text = pages.HOW.read_text()
    assert pages.how(text) == text, "want `python -m bench pages`"
    assert all(f"| `{path.stem}` |" in text for path in RESULTS.glob("*.json"))
    given = {"command": ["linear", "--format", "a b", "--json", "/somewhere", "--rows", "1"]}
    assert command_of(given) == "`python -m bench linear --format 'a b' --rows 1`"
    assert command_of({"command": ["a_program.py"]}) == command_of({}) == ""


def test_the_picture_shows_the_records():
    assert pages.PICTURE.read_text() == pages.picture(), "want `python -m bench pages`"


def test_the_page_of_keys_in_blocks_shows_its_record():
    text = (ROOT / "docs/design/channel_blocks.md").read_text()
    table = report.markdown(pages.load("channel_blocks"))
    assert report.filled(text, report.mark("main"), table) == text, "want `python -m bench table`"


def test_every_record_is_named_by_a_page_or_a_program():
    folders = [ROOT / name for name in ("docs", "bench", "tests")]
    texts = [path.read_text() for folder in folders for kind in ("*.md", "*.py") for path in folder.rglob(kind)]
    words = set(re.findall(r"[\w-]+", " ".join([*texts, pages.README.read_text()])))
    assert {path.stem for path in RESULTS.glob("*.json")} - words == set()


@pytest.mark.parametrize("mark", pages.PARTS)
def test_another_figure_in_the_readme_would_be_found(mark: str):
    text = pages.README.read_text()
    before, _, rest = text.partition(mark)
    part, _, after = rest.partition(report.MARK_END)
    figure = re.search(r"\*\*(\d+)", part)
    assert figure is not None
    wrong = part[: figure.start(1)] + str(int(figure[1]) + 1) + part[figure.end(1) :]
    edited = f"{before}{mark}{wrong}{report.MARK_END}{after}"
    assert pages.readme(edited) == text != edited


def test_the_readme_sets_apart_the_weight_format_that_one_peer_has():
    peers: dict[str, set[str]] = {}
    for row in pages.load("linear_formats")["linear_formats"]:
        for form, times in row["peers"].items():
            peers.setdefault(form, set()).update(name for name, time in times.items() if time["us"])
    del peers["bf16"]
    assert [form for form, names in peers.items() if len(names) == 1] == [pages.ONE_PEER]
    assert "FP8 in blocks takes 0.60 of the time of Marlin, its only peer." in pages.headline()
    assert "take 0.85 to 0.96 of the time of the fastest" in pages.headline()


def test_the_readme_has_gains_by_the_medians_of_runs_and_the_weights_of_its_model():
    text = pages.headline()
    assert "1.55 (Llama-3-8B), 2.03 (Qwen3) and 1.24 (gpt-oss) times as fast" in text
    assert "GGUF of 4 bits (Q4_1)" in text and "GGUF Q4_1" in pages.load("model_accuracy")["model"]["name"]


def test_the_page_of_experts_has_what_batch_invariance_costs():
    text = (ROOT / "docs/moe.md").read_text()
    cost: dict[str, list[str]] = {}
    for row in pages.load("moe_options")["options"]:
        us = {option: row["options"][option]["us"] for option in ("plain", "batch invariant")}
        cost.setdefault(row["name"].split(", ")[1].split()[0], []).append(f"{us['batch invariant'] / us['plain']:.2f}")
    assert cost and all(f"| {tokens} | {' | '.join(times)} |\n" in text for tokens, times in cost.items()), cost
    rows = pages.load("moe")["moe"]
    ratios = [(row["shape"]["tokens"], row["batch_invariant_us"] / row["eager_us"]) for row in rows]
    few = [ratio for tokens, ratio in ratios if 16 <= tokens <= 128]
    many = [ratio for tokens, ratio in ratios if tokens > 128]
    assert f"16 to 128 tokens take {min(few):.2f} to {max(few):.2f} times as long" in text
    assert f"more tokens at most {max(many):.2f} times" in text


def test_figures_that_were_not_measured_beside_ours_are_labelled():
    table = pages.decode()
    for row in ("FBGEMM, CUDA [1]", "FBGEMM, CUDA [2]"):
        assert row in table
    assert "[1] NVIDIA H200, 2026-11-20: measured" in table and "[2] H100, published by its authors" in table
    (line,) = (line for line in table.splitlines() if "| vLLM, Triton [3] |" in line)
    assert len(re.findall(r"\d+\.\d", line)) == len(pages.BATCHES) + 1 and "[3] NVIDIA H200, " in table
    assert "vLLM 0.26.0 with `int4_per_token_head`" in table and "perplexity +6.51 % (SmolLM2-135M" in table


def test_the_readme_names_the_head_sizes_of_attention():
    rows = [row for row in pages.README.read_text().splitlines() if "attention](docs/" in row and row.startswith("|")]
    assert len(rows) == 2 and all(f"head_dim {min(HEAD_DIMS)} to {max(HEAD_DIMS)}" in row for row in rows), rows


def test_the_readmes_first_screen_has_no_table_of_figures_and_no_commit():
    text = pages.README.read_text()
    screen = text.partition("## ")[0]
    assert "| ---" not in screen and screen.count("](docs/figures/") == 1
    assert not re.search(r"commit [0-9a-f]{7}", text)
