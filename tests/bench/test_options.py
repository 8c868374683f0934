"""Options beside the plain call: that they are what their names say, and how they are judged; with a made-up clock."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from bench import options, report
from bench.append import AppendShape
from bench.options import PLACES, Option
from bench.timing import Clock, Timing, ticking
from bench.workloads import DecodeShape, make_inputs
from cute_kernels.formats.kv import CHANNEL_BLOCKS, FORMATS

SHAPE = DecodeShape(2, seq_len=64, num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16)


@pytest.fixture
def inputs():
    return make_inputs(SHAPE, "int4_g4", device="cpu")


def test_what_only_lies_elsewhere_gives_the_same(inputs):
    found = options.decode_options(inputs)
    plain = found["plain"].call()
    assert isinstance(plain, torch.Tensor)
    places = [name for name, option in found.items() if option.bar == PLACES]
    assert len(places) == 4
    for name in places:
        assert torch.equal(found[name].call(), plain), name  # type: ignore[arg-type]


def test_every_other_option_changes_the_result_and_runs(inputs):
    found = options.decode_options(inputs)
    plain = found["plain"].call()
    for name, option in found.items():
        result = option.call()
        if name not in ("plain", "lse") and option.bar != PLACES:
            assert not torch.equal(result, plain), name  # type: ignore[arg-type]


def test_a_bias_brings_bytes_of_its_own(inputs):
    found = options.decode_options(inputs)
    assert found["attn_bias fp32"].own_bytes == 2 * found["attn_bias bf16"].own_bytes == 2 * 4 * 64 * 4
    assert found["attn_bias fp32 for all heads"].own_bytes == 2 * 64 * 4


@pytest.mark.parametrize("kv_format", [*FORMATS, CHANNEL_BLOCKS.name])
def test_options_of_every_format_that_the_command_takes_run(kv_format):
    shape = options.paged_for(kv_format, SHAPE)
    found = options.decode_options(make_inputs(shape, kv_format, device="cpu"))
    for option in found.values():
        option.call()
    assert ("append_and_decode" in found) == (kv_format != CHANNEL_BLOCKS.name)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_options_of_appends_run_in_every_format(kv_format):
    found = options.append_options(AppendShape("decode", 4, 4, 2), kv_format, "cpu")
    for option in found.values():
        option.call()
    assert "append_and_decode, heads first" in found


@pytest.mark.parametrize("suite", ["decode", "prefill"])
def test_appends_with_options_run(suite, monkeypatch):
    from bench import append

    monkeypatch.setattr(append, "PREFILL_REQUESTS", 2)
    found = options.append_options(AppendShape(suite, 4, 4, 2), "int4_g4", "cpu")
    assert ("slots and positions" in found) == (suite == "decode")
    plain = found["plain"].call().clone()  # type: ignore[attr-defined]
    for name, option in found.items():
        same = torch.equal(option.call(), plain)  # type: ignore[arg-type]
        turned = name in ("qkv_bias", "q_norm and k_norm", "bias and norms", "no rope") or "rotated" in name
        turned |= "append_and_decode" in name
        assert same == (not turned), name


def test_an_option_may_take_its_bytes_and_a_share():
    assert Option(lambda: None, own_bytes=46_000_000).allowed_us(100.0) == pytest.approx(13.0)
    step = Option(lambda: None, bar=options.STEP_BAR)
    assert (step.allowed_us(10.0), step.allowed_us(100.0)) == (pytest.approx(0.2), pytest.approx(1.0))
    place = Option(lambda: None, bar=PLACES)
    assert (place.allowed_us(10.0), place.allowed_us(100.0)) == (pytest.approx(0.3), pytest.approx(1.0))


def test_an_option_is_compared_within_a_run_of_nothing_but_its_plain_call_and_itself():
    """The clock drifts by a tenth from run to run; the option always takes 2 us more than what it belongs to."""
    drift = itertools.cycle((10.0, 11.0, 12.1, 13.3, 14.6))
    turns = []

    def clock(calls, flush, protocol):
        turns.append(tuple(calls))
        base = next(drift)
        times = {"plain": base, "half": base / 2, "slow": base + 2.0, "window": base / 2 + 0.1}
        return {name: Timing(times[name], 0.0, 0.0, 1) for name in calls}

    bench = type("Bench", (), {"flush": None, "protocol": None})
    work = Option(lambda: None)
    given = {"plain": work, "half": replace(work, plain="half"), "slow": work, "window": replace(work, plain="half")}
    with ticking(Clock(clock, lambda call, warmup: call)):
        found = options.measure(bench, given)  # type: ignore[arg-type]
    assert set(turns) == {("plain",), ("half",), ("plain", "slow"), ("half", "window")}
    assert found["slow"]["plain_us"] == 12.1 and found["window"]["plain_us"] == 6.05
    assert found["slow"]["more_us"] == pytest.approx(2.0) and not found["slow"]["met"]
    assert found["window"]["more_us"] == pytest.approx(0.1) and found["window"]["met"]
    record = {"environment": {"gpu": "Test"}, "options": [{"name": "x", "kv_format": "bf16", "options": found}]}
    text = options.text(record | {"failures": [], "bars": []})
    assert text.count("NOT MET") == 1 and report.number(12.1, 2) in text
