"""The benchmark of linear layers: its shapes and bytes, the kernels it needs, its check, bars, tables and figure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench import linear, linear_apart, linear_peers
from bench.__main__ import main
from bench.bars import judge
from bench.floor import Floor
from bench.linear import Layer, LinearShape
from bench.linear_peers import LinearPeer, cublas_name
from bench.random_weights import Format, weight_format
from bench.report import INVARIANT
from bench.suites import WrongOutput
from bench.timing import Clock, Protocol, Timing, ticking
from cute_kernels.gemm import quantized_linear as product
from cute_kernels.gemm.compile import shipped_specs


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_timing_without_a_gpu_is_refused_in_words(capsys):
    assert main(["linear"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


FORMATS = ("w4g128", "w8g128", "w4g128z-fp16", "w4g64", "w4gchannel-fp16", "w8gchannelz")
CUBLAS = cublas_name("bf16")
every_format = pytest.mark.parametrize("form", [weight_format(name) for name in FORMATS], ids=FORMATS)


@every_format
def test_bytes_are_those_of_the_packed_weight(form):
    shape = LinearShape(192, 384, 5, form)
    assert linear.pack(linear.make_weights(192, 384, form, "cpu")).nbytes == shape.weight_bytes


@every_format
def test_the_packed_weight_is_the_dense_one_of_the_peers(form):
    weights = linear.make_weights(128, 256, form, "cpu")
    dtype = weights.scales.dtype
    assert torch.equal(linear.pack(weights).dequantize(dtype), weights.dense)
    x = torch.randn(3, 256).to(dtype)
    want = x.float() @ weights.dense.float().T
    chosen = torch.arange(3)
    assert linear.check(product(x, linear.pack(weights)), chosen, want) < linear.TOLERANCE
    (dense,) = (peer for peer in linear_peers.DENSE if peer.takes(weights))
    assert dense.name == f"cuBLAS {form.dtype}"
    assert linear.check(dense.prepare(weights)(x), chosen, want) < linear.TOLERANCE


def test_formats_have_the_names_that_the_command_takes_and_the_usual_ones_their_own():
    shapes = [LinearShape(64, 128, 1, weight_format(name)) for name in FORMATS]
    assert [shape.format for shape in shapes[:2]] == ["w4a16", "w8a16"]
    assert [weight_format(shape.format) for shape in shapes[2:]] == [weight_format(name) for name in FORMATS[2:]]
    assert shapes[0].as_dict() == {"n": 64, "k": 128, "m": 1, "bits": 4}
    assert shapes[2].as_dict() == {"n": 64, "k": 128, "m": 1, "bits": 4, "zero_point": True, "dtype": "fp16"}


def test_libraries_are_given_the_formats_that_they_have_in_common():
    names = {
        name: [peer.name for peer in linear_peers.PEERS if peer.takes(linear.make_weights(64, 256, form, "cpu"))]
        for name, form in zip(FORMATS, map(weight_format, FORMATS), strict=True)
    }
    assert names["w4g128"] == [CUBLAS, "Marlin", "Machete", "QuACK"]
    assert names["w8g128"] == [CUBLAS, "Marlin", "Machete", "QuACK by row"]
    assert names["w4g128z-fp16"] == names["w4gchannel-fp16"] == ["cuBLAS fp16"]
    assert names["w4g64"] == names["w8gchannelz"] == [CUBLAS]


def test_the_check_notices_what_is_wrong_or_missing():
    want = torch.ones(2, 8)
    rows = torch.tensor([0, 2])
    out = torch.ones(4, 8)
    assert linear.check(out, rows, want) == 0
    with pytest.raises(WrongOutput):
        linear.check(out * 1.01, rows, want)
    out[3, 5] = torch.nan  # in no chosen row
    with pytest.raises(WrongOutput):
        linear.check(out, rows, want)


def test_a_peer_with_a_scale_for_each_row_is_held_to_its_own_weight(monkeypatch):
    """It computes another product than ours, and what it would make of ours is wrong."""

    def prepare(weights):
        assert weights.scales.shape == (64, 1)
        return lambda x: x @ weights.dense.T

    monkeypatch.setattr(
        linear, "time_cold_in_turn", lambda calls, *_: {name: Timing(9.0, 9.0, 9.0, 1) for name in calls}
    )
    bench = SimpleNamespace(flush=None, protocol=Protocol(), floor=lambda num_bytes: Floor(num_bytes, 5.0, "reader"))
    peers = [
        LinearPeer("by row", (8,), lambda: None, prepare, by_row=True),
        LinearPeer("mistaken", (8,), lambda: None, lambda weights: prepare(weights.by_row)),
    ]
    layer = Layer.of(linear.make_weights(64, 256, Format(8), "cpu"), peers)
    found = linear.measure(bench, LinearShape(64, 256, 33, Format(8)), layer)  # pyright: ignore[reportArgumentType]
    assert found["peers"]["by row"] == {"us": 9.0}
    assert "disagrees" in found["peers"]["mistaken"]["why_not"]


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_consecutive_inputs(bits):
    weights = linear.make_weights(64, 128, Format(bits), "cpu")
    words = linear_peers.words_of(weights)
    inputs = 32 // bits
    assert words.shape == (128 // inputs, 64)
    for i in range(inputs):
        found = (words >> (bits * i)) & ((1 << bits) - 1)
        assert torch.equal(found.T, weights.codes[:, i::inputs].int())


def test_peers_that_are_absent_or_fail_say_why():
    def fail(_weights):
        raise RuntimeError("no kernel image")

    peers = [
        LinearPeer("absent", (4,), lambda: "not installed", fail),
        LinearPeer("failing", (4,), lambda: None, fail),
        LinearPeer("other", (8,), lambda: None, fail),
    ]
    layer = Layer.of(linear.make_weights(64, 128, Format(4), "cpu"), peers)
    assert layer.why_not == {"absent": "not installed", "failing": "RuntimeError: no kernel image"}
    assert not layer.products


def test_many_rows_need_only_kernels_that_ship():
    shipped = set(shipped_specs())
    rows = [16, 64, 512, 8192, *linear.BETWEEN_ROWS]
    assert [spec for spec in linear.specs(rows=rows) if spec not in shipped] == []


def test_a_row_holds_what_was_measured():
    """With clocks that stand still: the peers that agree are timed beside ours, one that is wrong is named."""

    def time_each(calls, _flush, protocol):
        for call in calls.values():
            call()
        return {name: Timing(10.0 + len(name), 9.0, 11.0, protocol.samples) for name in calls}

    def wrong(_weights):
        return lambda x: torch.zeros((x.shape[0], 64), dtype=x.dtype)

    bench = SimpleNamespace(flush=None, protocol=Protocol(), floor=lambda num_bytes: Floor(num_bytes, 5.0, "reader"))
    weights = linear.make_weights(64, 256, Format(8), "cpu")
    layer = Layer.of(weights, [linear_peers.PEERS[0], LinearPeer("wrong", (8,), lambda: None, wrong)])
    shape = LinearShape(64, 256, 33, Format(8))
    with ticking(Clock(time_each)):
        found = linear.measure(bench, shape, layer)  # pyright: ignore[reportArgumentType]
    assert found["us"]["median_us"] == 10.0 and found["floor_ratio"] == 2.0
    assert found["batch_invariant_us"] == 10.0 + len(INVARIANT) and INVARIANT not in found["peers"]
    assert found["peers"][CUBLAS] == {"us": 10.0 + len(CUBLAS)}
    assert "disagrees" in found["peers"]["wrong"]["why_not"] and found["error"] < linear.TOLERANCE
    assert found["host_us"] is None  # measured for few rows only
    with ticking(Clock(time_each)):
        few = linear.measure(bench, LinearShape(64, 256, 2, Format(8)), layer)  # pyright: ignore
    assert 0 < few["host_us"] < 1e6
    assert found["tflops"] == pytest.approx(2 * 33 * 64 * 256 / 10e-6 * 1e-12)


def row(shape: LinearShape, us: float, floor: float = 10.0, **peers: float | None) -> dict:
    found: dict[str, dict] = {name.replace("_", " "): {"us": time} for name, time in peers.items()}
    found["absent"] = {"us": None, "why_not": "not installed"}
    return {
        "name": shape.name,
        "format": shape.format,
        "shape": shape.as_dict(),
        "weight_bytes": shape.weight_bytes,
        "us": {"median_us": us, "min_us": us},
        "tflops": shape.flops / us * 1e-6,
        "floor": {"us": floor},
        "floor_ratio": us / floor,
        "peers": found,
    }


def record(*rows: dict) -> dict:
    environment = {"gpu": "GPU", "versions": {"torch": "2"}, "commit": "0", "date": "2026"}
    data = {"schema": 1, "kind": "linear", "environment": environment, "linear": list(rows), "rows": [], "failures": []}
    return data | {"bars": [verdict.as_dict() for verdict in judge(data)], "samples": 3}


def test_bars():
    few = row(LinearShape(8192, 8192, 1, Format(4)), us=11.0, fast=10.0, slow=30.0)
    small = row(LinearShape(4096, 4096, 16, Format(8)), us=13.0, fast=20.0)
    many = row(LinearShape(57344, 8192, 1024, Format(4)), us=1200.0)
    verdicts = {verdict.what: verdict.met for verdict in judge(record(few, small, many))}
    assert verdicts == {
        "w4a16 8192 x 8192, M = 1: ratio to the floor": True,
        "w4a16 8192 x 8192, M = 1: time over fast's": False,
        "w8a16 4096 x 4096, M = 16: ratio to the floor": True,
        "w8a16 4096 x 4096, M = 16: time over fast's": True,
        "w4a16 57344 x 8192, M = 1024: rate": False,
    }


def test_peers_of_another_process_are_compared_with_what_was_timed_beside_them():
    shape = LinearShape(8192, 8192, 1, Format(4))
    here, there = row(shape, us=11.0, Marlin=20.0), row(shape, us=15.0, floor=12.0, QuACK=14.0, Marlin=19.0)
    there["peers"]["other"] = {"us": None, "why_not": "no kernel"}
    earlier = record(row(LinearShape(8192, 8192, 2, Format(4)), us=1.0, QuACK=1.0), there)
    merged = linear_apart.with_peers(here, earlier)
    assert merged["peers"] == {
        "Marlin": {"us": 20.0},
        "absent": {"us": None, "why_not": "not installed"},
        "other": {"us": None, "why_not": "no kernel"},
        "QuACK": {"us": 14.0, "beside": {"us": 15.0, "floor_us": 12.0}},
    }
    verdicts = {verdict.what: verdict for verdict in judge(record(merged))}
    found = verdicts["w4a16 8192 x 8192, M = 1: time over QuACK's"]
    assert found.measured == pytest.approx(15 / 14) and not found.met
    assert "14.0" in linear.text(record(merged)) and linear_apart.with_peers(merged, earlier) == merged


@pytest.mark.parametrize("name", ["gpu_uuid", "commit", "driver"])
def test_peers_of_another_machine_or_commit_are_refused(name):
    here, earlier = record(), record()
    linear_apart.check(earlier, here)
    earlier["environment"] = earlier["environment"] | {name: "other"}
    with pytest.raises(ValueError, match=f"got a run with {name} other"):
        linear_apart.check(earlier, here)
    with pytest.raises(ValueError, match="kind moe, want linear"):
        linear_apart.check(record() | {"kind": "moe"}, here)


def test_tables_and_figure(tmp_path):
    pytest.importorskip("matplotlib")
    from bench import plots

    rows = []
    for m in (1, 64):
        peers = {CUBLAS.replace(" ", "_"): 40.0, "Marlin": 20.0 * m}
        rows.append(row(LinearShape(8192, 8192, m, Format(4)), us=15.0 + m, **peers))
    data = record(*rows)
    lines = linear.text(data).splitlines()
    assert any(line.split()[:5] == ["w4a16", "8192", "x", "8192", "64"] and "1280.0" in line for line in lines)
    assert "absent (w4a16): not installed" in lines
    assert "| 8192 x 8192 | w4a16 | 10.0 | **16.0** (20.0) | **79.0** (40.0) |" in linear.markdown(data)
    (path,) = plots.plot(data, tmp_path)
    assert path.name == "linear_speed.svg" and "8192 x 8192" in path.read_text()
    half = LinearShape(8192, 8192, 1, weight_format("w4g128z-fp16"))
    (path,) = plots.plot(record(row(half, us=10.0, cuBLAS_fp16=30.0)), tmp_path)
    assert "w4g128z-fp16" in path.read_text() and "cuBLAS fp16" in path.read_text()


def test_formats_that_have_no_bars_are_compared_with_peers_alone():
    half = LinearShape(8192, 8192, 1, weight_format("w4g128z-fp16"))
    (verdict,) = judge(record(row(half, us=100.0, cuBLAS_fp16=30.0)))
    assert verdict.what == "w4g128z-fp16 8192 x 8192, M = 1: time over cuBLAS fp16's" and not verdict.met
