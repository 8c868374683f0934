"""Nothing smaller is shipped that is slower than what it replaces, or a page says so."""

import re

from bench.environment import ROOT
from bench.slower_formats import Slower, Step, found_in, row_bytes, slower, steps_of

ROW = re.compile(r"^\| `(.+?)` \| `(.+?)` \| (\d+(?:\.\d+)?) % ", re.MULTILINE)
HEADING = "## Smaller and slower"


def test_only_a_smaller_format_of_the_same_step_counts_as_slower():
    steps = [
        Step("a", "bf16", 2.0),
        Step("a", "int8_token_head", 2.05),  # noise
        Step("a", "int4_g4", 2.2),
        Step("b", "int8_token_head + int4_g4", 9.0),
    ]
    assert slower(steps) == [
        Slower("int4_g4", "bf16", 1.1, "a"),
        Slower("int4_g4", "int8_token_head", 2.2 / 2.05, "a"),
    ]
    sizes = {"int8_token_head + int4_g4": 212, "e4m3_tensor": 256, "mla_fp8": 656}
    assert all(row_bytes(kv) == size for kv, size in sizes.items())


def test_steps_of_engines_and_of_attention_alone_count_too():
    served = {"model": "m", "weights": "w4", "batch": 1, "context": 8, "kv": "auto"}
    rows = [
        served | {"plugin": "on", "kv_format": "int8_token_head,int4_g4", "tpot_ms": 2.0},
        served | {"plugin": "on", "kv_format": "", "tpot_ms": 3.0},
        served | {"plugin": "off", "kv_format": "", "tpot_ms": 4.0},  # the engine's own
    ]
    rows.append(
        {
            "how": {"weights": "w4", "kv": "int8_token_head", "v": "int4_g4"},
            "model": "m",
            "batch": 1,
            "context": 8,
            "ms": 1.5,
        }
    )
    alone = {"name": "B=1", "formats": ["int4_g4", "int4_g4"], "graph_us": {"median_us": 16.0}}
    assert steps_of({"rows": rows, "steps": [alone]}) == [
        Step("m, w4, 1 x 8", "int8_token_head + int4_g4", 2.0),
        Step("m, w4, 1 x 8", "bf16", 3.0),
        Step("m, w4, 1 x 8", "int8_token_head + int4_g4", 1.5),
        Step("attention, B=1", "int4_g4", 0.016),
    ]


def test_attention_alone_counts_in_the_faster_layout_of_its_cache():
    rows = [
        {"name": f"B=1{layout}", "formats": [kv, kv], "graph_us": {"median_us": us}}
        for kv, layout, us in (
            ("int4_g4", "", 18.0),
            ("int4_g4", ", heads first", 12.0),
            ("bf16", "", 17.0),
            ("bf16", ", heads first", 17.5),
        )
    ]
    steps = steps_of({"rows": [], "steps": rows})
    assert steps == [Step("attention, B=1", "int4_g4", 0.012), Step("attention, B=1", "bf16", 0.017)]
    assert slower(steps) == []
    assert len(slower(steps_of({"rows": [], "steps": [rows[0], rows[2]]}))) == 1


def test_the_page_names_every_format_whose_recorded_step_is_slower_than_a_larger_ones():
    """By how much at most, rounded to percent; and it names no other."""
    worst: dict[tuple[str, str], float] = {}
    for one in found_in():
        worst[one.kv, one.than] = max(worst.get((one.kv, one.than), 0), one.ratio)
    _, _, section = (ROOT / "docs/accuracy.md").read_text().partition(HEADING)
    told = {(kv, than): float(percent) for kv, than, percent in ROW.findall(section.partition("\n## ")[0])}
    assert told == {pair: round(100 * (ratio - 1)) for pair, ratio in worst.items()}
