"""Suites of decode attention apart from the main table: what they read, that each row is checked before it is timed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from bench import bars, decode_cases, decode_steps, report
from bench.decode_cases import BlockShape, MixedShape
from bench.peers import PEERS, Peer
from bench.record import Recorder
from bench.suites import Bench, WrongOutput
from bench.timing import Clock, Protocol, Timing, ticking
from bench.workloads import DecodeShape, make_inputs
from simulator import stand_in
from tests.bench.clocks import every_call_takes
from tests.launchers import recording

ENVIRONMENT = {"gpu": "a GPU", "commit": "0", "date": "2026-01-02", "versions": {"torch": "2.13"}}
SMALL = {
    "skewed": MixedShape.of("1 x 200 + 2 x 70", [(1, 200), (2, 70)], (4, 2)),
    "short": DecodeShape(1, 64, 4, 2, 64),
    "heads": DecodeShape(2, 128, 6, 2, 96, page_size=64),
    "pages": DecodeShape(2, 128, 4, 2, 64, page_size=64),
    "blocks": BlockShape(2, 384, 4, 2, 64, page_size=64, chosen=3),
}


@pytest.fixture
def bench():
    floors = stand_in(lambda flush, protocol, quick: _floor)
    said: list[str] = []
    with ticking(every_call_takes(50.0)):
        yield Bench(
            Recorder(None),
            Protocol(samples=1),
            device="cpu",
            flush=lambda: None,
            make_floor=floors,
            free_bytes=lambda: 1 << 40,
            say=said.append,
        )


def _floor(num_bytes):
    assert num_bytes % 64 == 0
    return type("Floor", (), {"us": 10.0, "kernel": "read", "sweep_us": {}})


def test_mixed_lengths_are_those_of_the_label_and_so_are_the_bytes():
    first, *_ = decode_cases.skewed_shapes()
    assert first.batch == 32 and first.lengths == [131072] + 31 * [4096] and first.seq_len == 131072
    assert first.cache_bytes("bf16") == 2 * (131072 + 31 * 4096) * 256
    shape = SMALL["skewed"]
    inputs = make_inputs(shape, "bf16", device="cpu")
    assert inputs.seq_lens.tolist() == [200, 70, 70] and (inputs.options["block_table"] >= 0).sum() == 4 + 2 + 2


def test_rows_are_left_by_format_and_name():
    found = decode_cases.cases(["short", "blocks"], only=r"^int4_g4 B=32.* 16 blocks")
    name = "B=32 T=32768 HQ=32 HKV=8 D=128 pages of 64, 16 blocks of 128"
    assert [(suite, shape.name, form) for suite, shape, form in found] == [
        ("blocks", name, "int4_g4"),
        ("blocks", f"{name}, heads first", "int4_g4"),
    ]


def test_cases_of_several_kv_heads_are_measured_in_both_layouts_where_a_format_may_gain():
    found = decode_cases.cases(["skewed", "short", "heads", "pages", "blocks"])
    names = {(suite, form, shape.name) for suite, shape, form in found}
    several = {  # suite, and the formats that have head-major rows
        "skewed": (decode_cases.skewed_shapes(), ("int4_g4",)),
        "heads": (decode_cases.head_shapes(), ("bf16", "int8_token_head", "int4_g1")),
        "blocks": (decode_cases.block_shapes(), ("bf16", "int4_g4")),
    }
    wanted = {
        (suite, form, f"{shape.name}, heads first")
        for suite, (shapes, forms) in several.items()
        for shape in shapes
        for form in forms
        if shape.num_kv_heads > 1
    }
    assert len(wanted) == 3 + 18 + 8 and len(found) == len(names)
    assert {name for name in names if name[2].endswith("heads first")} == wanted
    assert wanted <= {(suite, form, f"{name}, heads first") for suite, form, name in names}  # each beside its twin


def test_steps_are_measured_in_both_layouts_unless_there_is_one_kv_head():
    found = [(shape.name, formats) for shape, formats in decode_steps.cases()]
    plain = [(name, formats) for name, formats in found if not name.endswith("heads first")]
    assert len(plain) == 5 * len(decode_steps.FORMATS) and len(found) == 9 * len(decode_steps.FORMATS)
    assert set(found) == {*plain, *((f"{name}, heads first", each) for name, each in plain if "HKV=8" in name)}


def test_lognormal_lengths_are_the_same_in_every_run_and_far_apart():
    lengths = [tokens for _, tokens in decode_cases.lognormal()]
    assert lengths == [tokens for _, tokens in decode_cases.lognormal()]
    assert len(lengths) == 64 and max(lengths) > 10 * min(lengths) and 64 <= min(lengths)


def test_blocks_ascend_and_end_with_the_last_and_their_bytes_are_the_floor():
    shape = SMALL["blocks"]
    options = make_inputs(shape, "int4_g4", device="cpu").options
    assert options["block_list"].shape == (2, 2, 3)
    assert bool((options["block_list"].diff() > 0).all()) and bool((options["block_list"][..., -1] == 5).all())
    assert shape.cache_bytes("bf16") == 2 * 2 * 3 * 64 * 2 * 128


@pytest.mark.parametrize("suite", decode_cases.SUITES)
def test_a_suite_checks_times_and_tells_every_row(suite, bench, monkeypatch):
    monkeypatch.setitem(decode_cases.SUITES, suite, (lambda: [SMALL[suite]], ("bf16", "e4m3_tensor")))
    chosen = decode_cases.cases([suite, "step"])
    decode_cases.run(bench, chosen, True, 600)
    assert not bench.recorder.data["failures"]
    rows = bench.recorder.data["rows"]
    name = SMALL[suite].name
    both = [f"{name}, heads first"] if suite in ("heads", "blocks") else []
    assert [(row["suite"], row["kv_format"], row["name"]) for row in rows] == [
        *((suite, "bf16", one) for one in (name, *both)),
        (suite, "e4m3_tensor", name),
    ]
    assert all(row["graph_us"]["median_us"] == 50.0 and row["error"] < 4e-3 for row in rows)
    assert bars.judge(bench.recorder.data)
    decode_cases.run(bench, chosen, False, -1)
    assert len(bench.recorder.data["rows"]) == len(rows)


@pytest.mark.parametrize("suite", ("skewed", "heads", "blocks"))
def test_rows_of_both_layouts_are_checked_and_share_a_bar_and_stand_in_the_table(suite, bench, monkeypatch):
    monkeypatch.setitem(decode_cases.SUITES, suite, (lambda: [SMALL[suite]], ("int4_g1", "int8_token_head")))
    given = []
    bound = bench.entry.bind

    def bind(inputs, out=None, **options):
        given.append((inputs.options.get("cache_layout", "NHD"), tuple(inputs.k_cache.shape[1:3])))
        return bound(inputs, out=out, **options)

    bench.entry = replace(bench.entry, bind=stand_in(bind))
    decode_cases.run(bench, decode_cases.cases([suite]), True, 600)
    assert not bench.recorder.data["failures"]
    assert given == 2 * [("NHD", (64, 2)), ("HND", (2, 64))]
    rows = bench.recorder.data["rows"]
    assert all(row["error"] < 4e-3 and row["us"]["median_us"] == 50.0 for row in rows)
    assert ["FBGEMM" in row.get("peers", {}) for row in rows] == [suite != "blocks", False, False, False]
    assert [verdict.what for verdict in bars.judge(bench.recorder.data)] == [
        f"{form} {SMALL[suite].name}: time, tokens first" for form in ("int4_g1", "int8_token_head")
    ]
    table = report.markdown({**bench.recorder.data, "environment": ENVIRONMENT}, suite)
    assert table.count(f"| {SMALL[suite].name} |") == table.count(f"| {SMALL[suite].name}, heads first |") == 2
    assert '"Heads first": pages are [KV heads, tokens, row], `cache_layout="HND"`.' in table


def test_a_graph_is_replayed_with_lengths_that_it_was_not_captured_with(bench):
    seen = []

    def capture(call, warmup):
        def replay():
            seen.append(inputs_of[0].seq_lens.tolist())
            call()

        seen.append(inputs_of[0].seq_lens.tolist())
        return replay

    inputs_of = []
    bound = bench.entry.bind

    def bind(inputs, out=None, **options):
        inputs_of.append(inputs)
        return bound(inputs, out=out, **options)

    bench.entry = replace(bench.entry, bind=stand_in(bind))
    with ticking(Clock(lambda calls, flush, protocol: dict.fromkeys(calls, Timing(1.0, 1.0, 1.0, 1)), capture)):
        decode_cases.run_rows(bench, "skewed", [SMALL["skewed"]], ["bf16"], False)
    assert seen == [[1, 1, 1], [200, 70, 70]] and not bench.recorder.data["failures"]


@pytest.mark.parametrize("suite", decode_cases.SUITES)
def test_kernels_of_a_suite_are_found_without_a_launch(suite, bench):
    with recording() as cache:
        cases = [(suite, SMALL[suite], form) for form in ("no such format", "bf16", "int4_g4")]
        found = decode_cases.specs(cases, bench)
        assert found and not cache.launches


def test_peers_that_take_no_pages_say_so():
    contiguous, paged = (make_inputs(SMALL[name], "bf16", device="cpu") for name in ("short", "skewed"))
    refused = {peer.name for peer in PEERS if peer.refuses(paged)}
    assert refused == {"SDPA cudnn", "SDPA flash", "SDPA efficient", "FlashAttention-3 in FP8", "FBGEMM"}
    assert not any(peer.refuses(contiguous) for peer in PEERS if peer.name.startswith("SDPA"))
    assert Peer("other", (), lambda: None, lambda inputs: iter(())).agreement < 0.03


@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("formats", decode_steps.FORMATS)
def test_a_step_is_checked_against_fp64_over_what_it_appended(formats, layout, bench):
    shape = DecodeShape(2, 100, 4, 2, 64, page_size=64, cache_layout=layout)
    decode_steps.run(bench, [(shape, formats)], 600)
    assert not bench.recorder.data["failures"]
    (row,) = bench.recorder.data["steps"]
    assert row["floor_ratio"] == 5.0 and row["formats"] == list(formats) and row["error"] < 4e-3
    assert row["cache_bytes"] == sum(shape.cache_bytes(name) // 2 for name in formats[:2])
    shown = decode_steps.text({**bench.recorder.data, "environment": {"gpu": "a GPU"}, "failures": []})
    assert formats[0] in shown and "5.00 of it" in shown
    table = decode_steps.markdown({**bench.recorder.data, "environment": ENVIRONMENT})
    line = "2 (2 KV heads)" if layout == "NHD" else "2 (2 KV heads), heads first"
    assert f"| {line} | **50.0** (5.00) |" in table and formats[-1] in table
    assert ('`cache_layout="HND"`' in table) == (layout == "HND")


def test_a_table_of_steps_has_a_line_for_each_layout(bench):
    shape = DecodeShape(2, 100, 16, 8, 64, page_size=64)
    chosen = [(one, (form, form)) for one in (shape, shape.heads_first) for form in ("bf16", "int4_g4")]
    decode_steps.run(bench, chosen, 600)
    table = decode_steps.markdown({**bench.recorder.data, "environment": ENVIRONMENT})
    assert [line for line in table.splitlines() if line.startswith("| 2")] == [
        f"| {line} | **50.0** (5.00) | **50.0** (5.00) |" for line in ("2", "2, heads first")
    ]


def test_steps_of_128_requests_have_eight_kv_heads_and_one_and_are_left_by_name():
    found = decode_steps.cases(only="rotated B=128|^int8_token_head, int4_g4 B=(32|128)")
    assert [
        (shape.batch, shape.num_kv_heads, formats[-1]) for shape, formats in found if shape.cache_layout == "NHD"
    ] == [
        (32, 8, "int4_g4"),
        *[(128, heads, last) for heads in (8, 1) for last in ("int4_g4", "rotated")],
    ]


@dataclass(frozen=True)
class OneRowWrong(decode_steps.CacheStep):
    def reference(self, rows):
        wanted = super().reference(rows)
        wanted[-1] *= 1.5
        return wanted


def test_a_step_whose_last_request_is_wrong_is_not_timed(bench):
    step = OneRowWrong.of(DecodeShape(2, 100, 4, 2, 64, page_size=64), ("bf16", "bf16"), "cpu")
    with pytest.raises(WrongOutput, match="relative error"):
        decode_steps.measure(bench, OneRowWrong(**vars(step)))


def test_a_step_of_one_token_is_one_launch():
    plain = DecodeShape(2, 128, 32, 8, 128, page_size=64)
    with recording():
        for shape, formats in itertools.product((plain, plain.heads_first), decode_steps.FORMATS):
            step = decode_steps.CacheStep.of(shape, formats, "cpu")
            assert len(decode_steps.needed_by([step.bind()])) == 1, formats
    assert torch.equal(step.new[0], decode_steps.CacheStep.of(shape, formats, "cpu").new[0])
