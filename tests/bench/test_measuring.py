"""Measuring: statistics, peers and suites, with the GPU clock replaced by a fake one."""

import os
from dataclasses import replace

import pytest
import torch

from bench import floor, ladder, peers, suites, timing
from bench import record as records
from bench.entry import Entry
from bench.peers import Peer, Variant, measure_peer
from bench.timing import Clock, Protocol, Timing, time_host
from bench.workloads import DecodeShape, make_inputs
from cute_kernels.attention.decode_schedule import make_schedule
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.attention.reference import decode_attention_reference
from simulator import stand_in

PROTOCOL = Protocol(samples=3, warmup=0)


@pytest.fixture
def inputs():
    return make_inputs(DecodeShape(5, seq_len=16, num_q_heads=4, num_kv_heads=2, head_dim=64), "bf16", device="cpu")


def fake(calls, flush, protocol):
    """Runs calls and reads their times from their labels, put there by the test."""
    times = {}
    for name, call in calls.items():
        call()
        us = getattr(call, "us", 10.0)
        times[name] = Timing(us, us, us, protocol.samples)
    return times


@pytest.fixture
def clock():
    with timing.ticking(Clock(fake, lambda call, warmup: call)):
        yield


def exact(inputs):
    out, _ = decode_attention_reference(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.seq_lens, kv_format=inputs.kv_format
    )
    return out


def timed(result, us):
    def call():
        if isinstance(result, Exception):
            raise result
        return result

    call.us = us
    return call


def peer_of(*variants, missing=None):
    return Peer("peer", ("bf16",), lambda: missing, lambda inputs: iter(variants))


def as_is(out):
    return out


def measured(peer, inputs):
    rows, want = suites.reference_rows(inputs)
    return measure_peer(peer, inputs, want, rows, lambda: None, PROTOCOL)


def test_a_timing_is_the_median_the_least_and_the_ninth_decile():
    assert Timing.of([float(x) for x in range(11, 0, -1)]) == Timing(6.0, 1.0, 10.0, 11)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_host_time_is_per_call():
    calls = []
    result = time_host(lambda: calls.append(1), calls=50, repeats=4)
    assert len(calls) == 10 + 4 * 50 and result.samples == 4 and 0 < result.min_us < 1000


def test_the_fastest_variant_that_agrees_speaks_for_the_peer(inputs, clock):
    good = exact(inputs)
    result = measured(
        peer_of(
            Variant("slow", timed(good, 9.0), as_is),
            Variant("fast", timed(good, 5.0), as_is),
            Variant("wrong", timed(good * 1.1, 1.0), as_is),
            Variant("poisoned", timed(torch.full_like(good, torch.nan), 1.0), as_is),
        ),
        inputs,
    )
    assert (result.us, result.label) == (5.0, "fast")
    assert result.error is not None and result.error < 1e-5
    assert set(result.notes) == {"wrong", "poisoned"} and "disagrees" in result.notes["wrong"]


def test_one_variant_failing_loses_nothing_else(inputs, clock):
    result = measured(
        peer_of(
            Variant("broken", timed(RuntimeError("no kernel"), 1.0), as_is),
            Variant("ok", timed(exact(inputs), 7.0), as_is),
        ),
        inputs,
    )
    assert result.us == 7.0 and result.notes == {"broken": "RuntimeError: no kernel"}


def test_a_peer_that_is_not_there_says_why(inputs, clock):
    assert measured(peer_of(missing="not installed: no module"), inputs).why_not == "not installed: no module"
    failing = Peer("peer", ("bf16",), lambda: None, lambda inputs: (_ for _ in ()).throw(OSError("no file")))
    assert measured(failing, inputs).why_not == "setting up: OSError: no file"


def test_every_peer_names_the_reason_for_its_absence():
    for peer in peers.PEERS:
        reason = peer.missing()
        assert reason is None if peer.name.startswith("SDPA") else reason and reason.startswith("not installed")


@pytest.mark.parametrize("name", ["SDPA flash", "SDPA cudnn"])
def test_sdpa_variants_are_the_same_attention(inputs, name):
    """Run with any backend allowed: what is checked here is how the problem is posed."""
    peer = next(peer for peer in peers.PEERS if peer.name == name)
    labels = []
    for variant in peer.variants(inputs):
        out = variant.output(variant.call())
        assert out.shape == inputs.q.shape
        assert peers.relative_error(out, exact(inputs)) < 1e-2
        labels.append(variant.label)
    assert labels == ["heads as tokens", "enable_gqa"]


def fake_floor(flush, protocol, quick):
    return lambda num_bytes: floor.Floor(num_bytes, 5.0, "fake")


@pytest.fixture
def bench(tmp_path, clock):
    recorder = records.Recorder(tmp_path / "run.json", kind="decode", samples=3)
    return suites.Bench(
        recorder, PROTOCOL, peers=(peer_of(),), quick=True, device="cpu", flush=lambda: None,
        make_floor=stand_in(fake_floor), entry=Entry(bind_reference), free_bytes=lambda: 1 << 40,
    )  # fmt: skip


def bind_reference(inputs, out=None, **options):
    return lambda: out.copy_(exact(inputs)) if out is not None else exact(inputs)


SMALL = DecodeShape(3, seq_len=16, head_dim=64)


def test_a_row_holds_time_floor_ratio_bandwidth_and_peers(bench):
    suites.run_rows(bench, "main", [SMALL], ["bf16", "int4_g4"], peers=True)
    first, second = bench.recorder.data["rows"]
    assert first["us"]["median_us"] == 10.0 and first["floor_ratio"] == 2.0
    assert first["gb_per_s"] == pytest.approx(SMALL.cache_bytes("bf16") / 10.0 * 1e-3)
    assert first["peers"]["peer"]["why_not"] == "no variant" and second["peers"] == {}
    assert not bench.recorder.data["failures"]


def test_a_wrong_output_is_a_failure_and_never_a_time(bench):
    def bind_wrong(inputs, out=None, **options):
        def call():
            assert out is not None
            out[1:].copy_(exact(inputs)[1:])  # the first request is never written: poison must show

        return call

    bench.entry = Entry(stand_in(bind_wrong))
    suites.run_rows(bench, "main", [SMALL], ["bf16"], peers=True)
    (row,) = bench.recorder.data["rows"]
    assert "us" not in row and "floor_ratio" not in row and "WrongOutput" in row["why_not"]
    assert row["floor"]["us"] == 5.0 and "peer" in row["peers"]  # the rest of the row is kept
    assert len(bench.recorder.data["failures"]) == 1


def test_a_graph_that_cannot_be_captured_leaves_the_eager_time(bench):
    def refuse(call, warmup):
        raise RuntimeError("cannot capture")

    with timing.ticking(Clock(fake, refuse)):
        suites.run_rows(bench, "main", [SMALL], ["bf16"], peers=False)
    (row,) = bench.recorder.data["rows"]
    assert row["us"]["median_us"] == 10.0 and "graph_us" not in row
    assert bench.recorder.data["failures"][0]["error"] == "RuntimeError: cannot capture"


def test_one_shape_failing_does_not_stop_the_suite(bench):
    bench.free_bytes = lambda: suites.MEMORY_RESERVE + 2 * SMALL.cache_bytes("bf16")
    suites.run_rows(bench, "shapes", [DecodeShape(64, seq_len=16, head_dim=64), SMALL], ["bf16"], peers=False)
    assert [row["name"] for row in bench.recorder.data["rows"]] == [SMALL.name]
    assert bench.recorder.data["failures"][0]["error"].startswith("MemoryError: this shape wants")


def problem(batch, kv_format="int4_g1"):
    return AttentionProblem.uniform(batch, 8192, 8, 1, 128, kv_format, "bf16")


def fake_kernels(batch, us_of):
    """The schedule of the main table's shape at `batch`; configurations give the reference output and take `us_of`."""

    def bind_config(config, inputs, **launch):
        return timed(exact(inputs), us_of(config, launch))

    return Entry(
        schedule_for=lambda inputs: make_schedule(problem(batch, inputs.kv_format)), bind_config=stand_in(bind_config)
    )


def rungs_of(bench):
    (found,) = bench.recorder.data["ladder"]
    assert [rung["number"] for rung in found["rungs"]][:10] == list(range(1, 11))
    return {rung["title"]: rung for rung in found["rungs"]}


def test_the_ladder_switches_each_switchable_step_off(bench):
    def us_of(config, launch):
        return (
            100.0
            + 50.0 * (config.pipeline.num_stages == 2)
            + 25.0 * (config.copies[0] == "word")
            + 5.0 * (not config.pipeline.early_tiles)
        )

    bench.entry = fake_kernels(32, us_of)
    suites.run_ladder(bench, [32], ["int4_g1"], lambda batch: SMALL)
    rungs = rungs_of(bench)
    off = {title: rung["off_us"] for title, rung in rungs.items() if "off_us" in rung}
    assert off["Unroll K loads"] == 150.0 and rungs["Unroll K loads"]["on_us"] == 100.0
    assert off["Group-wise INT4 with vector loads"] == 125.0
    assert off["First tile before the length"] == 105.0
    assert "off_us" not in rungs["Swizzle P in shared memory"] and rungs["Swizzle P in shared memory"]["how"]


def test_a_step_that_the_schedule_leaves_off_is_not_timed_against_itself(bench):
    bench.entry = fake_kernels(512, lambda config, launch: 100.0)
    suites.run_ladder(bench, [512], ["int4_g1"], lambda batch: SMALL)
    split = rungs_of(bench)["Split the sequence"]  # 512 requests fill the GPU without splits
    assert "off_us" not in split and split["why_not"] == "the schedule runs this shape so anyway"


def test_a_configuration_that_is_wrong_has_no_time_and_stops_no_other(bench):
    right = fake_kernels(32, lambda config, launch: 100.0)

    def bind_config(config, inputs, **launch):
        if config.copies[0] == "word":
            return timed(exact(inputs) * 1.1, 1.0)
        if launch["num_splits"] == 1:
            raise RuntimeError("no such launch")
        return right.bind_config(config, inputs, **launch)

    bench.entry = replace(right, bind_config=stand_in(bind_config))
    suites.run_ladder(bench, [32], ["int4_g1"], lambda batch: SMALL)
    rungs = rungs_of(bench)
    word, split = rungs["Group-wise INT4 with vector loads"], rungs["Split the sequence"]
    assert "off_us" not in word and word["on_us"] == 100.0 and "WrongOutput: relative error 1.00e-01" in word["why_not"]
    assert split["why_not"] == "RuntimeError: no such launch"
    assert rungs["First tile before the length"]["off_us"] == 100.0


@pytest.mark.parametrize("kv_format", ["int4_g1", "int4_g4"])
def test_every_switch_of_the_ladder_can_be_compiled_and_matters_at_some_batch(kv_format):
    schedules = [make_schedule(problem(batch, kv_format)) for batch in (1, 32, 64, 512)]
    for rung in ladder.LADDER:
        changes = []
        for schedule in schedules:
            config, launch = rung.applied(schedule)
            assert config.can_implement() is None, rung.title
            changes.append((config, launch["num_splits"]) != (schedule.config, schedule.num_splits))
        assert any(changes) == bool(rung.off), f"{rung.title}: the switch changes nothing"


def test_padding_and_token_order_are_counted_in_wavefronts():
    rung = next(rung for rung in ladder.LADDER if rung.number == 10)
    assert rung.count is not None
    one_head = rung.count(make_schedule(problem(512)).config)
    assert one_head.startswith("wavefronts per load of K 1, of V 1, with 0 words between copies")
    assert one_head.endswith("without padding: K 2, V 4")
    eight_heads = rung.count(make_schedule(AttentionProblem.uniform(64, 8192, 64, 8, 128, "int4_g4", "bf16")).config)
    assert eight_heads.startswith("wavefronts per load of K 1, of V 1, with 4 words between copies")
    assert eight_heads.endswith("without padding: K 8, V 4")


def test_without_triton_the_floor_says_what_it_is(monkeypatch, clock):
    monkeypatch.setattr(floor, "HAVE_TRITON", False)
    result = floor.StreamingFloor(flush=lambda: None, device="cpu")(1 << 12)
    assert "triton is not installed" in result.kernel and result.gb_per_s == pytest.approx((1 << 12) / 10.0 * 1e-3)


def test_the_default_protocol_takes_at_least_fifteen_samples():
    assert timing.DEFAULT_PROTOCOL.samples >= 15


def test_a_record_that_goes_to_a_device_leaves_it_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    records.Recorder(path, kind="decode").save()
    assert path.is_fifo() and b'"kind": "decode"' in os.read(reader, 1 << 16)
    os.close(reader)
