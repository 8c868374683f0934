"""Bars: every one that the run has figures for is judged, against figures of the same run."""

import pytest

from bench.bars import judge
from bench.record import RESULTS, load
from tests.bench.conftest import row


def verdicts(record):
    return {verdict.what: verdict for verdict in judge(record)}


def test_each_kind_of_bar_is_judged(record):
    found = verdicts(record)
    row = "T=8192 HQ=8 HKV=1 D=128"
    assert found[f"int4_g1 B=1 {row}: time"].met
    assert not found[f"int4_g1 B=512 {row}: ratio to the floor"].met  # 140 / 127 = 1.102, bar 1.10
    assert found[f"bf16 B=512 {row}: time over SDPA cudnn's"].met
    assert found[f"int4_g1 B=512 {row}: speed-up over the best BF16"].met  # 470 / 140
    assert not found[f"int4_g4 B=512 {row}: speed-up over the best BF16"].met  # 470 / 170
    assert found["int4_g1 B=16 T=131072 HQ=8 HKV=1 D=128: ratio to the floor"].met  # 1.17, bar 1.25
    assert found["host cost of one eager call"].met


def test_the_speed_up_is_over_the_fastest_bf16_of_the_run_whoever_made_it(record):
    record["rows"][0]["peers"]["SDPA cudnn"]["us"] = 400.0
    found = verdicts(record)
    assert abs(found["int4_g1 B=512 T=8192 HQ=8 HKV=1 D=128: speed-up over the best BF16"].measured - 400 / 140) < 1e-9
    assert not found["bf16 B=512 T=8192 HQ=8 HKV=1 D=128: time over SDPA cudnn's"].met


def test_what_was_not_measured_is_not_judged(record):
    del record["rows"][1]["us"]
    del record["host_us"]
    assert not [what for what in verdicts(record) if "B=1 " in what or "host" in what]
    assert judge({"rows": []}) == []


def test_a_bar_reads_as_a_sentence(record):
    met = [verdict.as_dict() for verdict in judge(record)]
    assert {"what", "measured", "bar", "met"} == set(met[0])
    assert any(entry["bar"] == ">= 3.2 x" for entry in met) and any(entry["bar"] == "<= 9 us" for entry in met)


def _in_layouts(suite, tokens_us, heads_us):
    """A case's rows over both layouts, the second in a graph of so many us; without those that have no time."""
    rows = []
    for layout, us in (("", tokens_us), (", heads first", heads_us)):
        if us is not None:
            one = row("int4_g4", 32, us - 2, 100.0, suite=suite, num_kv_heads=8)
            rows.append(one | {"name": f"a case{layout}", "graph_us": {"median_us": us}})
    return rows


@pytest.mark.parametrize(("suite", "limit"), [("skewed", 120.0), ("heads", 118.0), ("blocks", 115.0)])
def test_a_case_is_judged_in_its_better_layout_which_the_bar_names(suite, limit):
    for times, best, us in (((130, 110), ", heads first", 110), ((110, 130), ", tokens first", 110)):
        (verdict,) = judge({"rows": _in_layouts(suite, *times)})
        assert (verdict.what, verdict.measured) == (f"int4_g4 a case: time{best}", us)
        assert verdict.met and verdict.limit == pytest.approx(limit)
    (missed,) = judge({"rows": _in_layouts(suite, 130, 125)})
    assert not missed.met and missed.measured == 125
    (alone,) = judge({"rows": _in_layouts(suite, 130, None)})
    assert alone.what == "int4_g4 a case: time" and not alone.met
    (heads,) = judge({"rows": _in_layouts(suite, None, 110)})
    assert heads.what == "int4_g4 a case: time, heads first" and heads.met


def test_layouts_of_other_formats_suites_and_cases_are_judged_apart():
    rows = [*_in_layouts("skewed", 130, 110), *_in_layouts("heads", 130, 110)]
    rows += [one | {"kv_format": "bf16"} for one in rows] + [{**one, "name": f"other {one['name']}"} for one in rows]
    assert len(judge({"rows": rows})) == 6


@pytest.mark.parametrize("name", ["decode_apart", "decode_heads", "decode_blocks", "decode_short"])
def test_recorded_cases_have_the_bars_of_their_record(name):
    record = load(RESULTS / f"{name}.json")
    assert [verdict.as_dict() for verdict in judge(record)] == record["bars"]


def test_one_request_of_few_tokens_is_judged_by_the_fastest_peer_that_ran():
    peers = {"slow": {"us": 12.0}, "fast": {"us": 10.0}, "failed": {"us": None}}
    row = {"suite": "short", "name": "a case", "kv_format": "bf16", "shape": {"batch": 1}, "us": {"median_us": 9.1}}
    (verdict,) = judge({"rows": [row | {"peers": peers}]})
    assert verdict.what == "bf16 a case: time over fast's" and verdict.measured == pytest.approx(0.91)
    assert not verdict.met and judge({"rows": [row | {"peers": {}}]}) == []
