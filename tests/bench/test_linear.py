"""The benchmark of linear layers: its shapes and bytes, the kernels it needs, its check, bars, tables and figure."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from bench import linear, linear_peers
from bench.__main__ import main
from bench.bars import judge
from bench.linear import Layer, LinearShape
from bench.linear_peers import CUBLAS, LinearPeer
from bench.suites import WrongOutput
from cute_kernels.linear import linear as product
from cute_kernels.linear.compile import shipped_specs


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_timing_without_a_gpu_is_refused_in_words(capsys):
    assert main(["linear"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_are_those_of_the_packed_weight(bits):
    shape = LinearShape(192, 384, 5, bits)
    assert linear.pack(linear.make_weights(192, 384, bits, "cpu")).nbytes == shape.weight_bytes


@pytest.mark.parametrize("bits", [4, 8])
def test_the_packed_weight_is_the_dense_one_of_the_peers(bits):
    weights = linear.make_weights(128, 256, bits, "cpu")
    assert torch.equal(linear.pack(weights).dequantize(torch.bfloat16), weights.dense)
    x = torch.randn(3, 256).to(torch.bfloat16)
    want = x.float() @ weights.dense.float().T
    chosen = torch.arange(3)
    assert linear.check(product(x, linear.pack(weights)), chosen, want) < linear.TOLERANCE
    assert linear.check(linear_peers.PEERS[0].prepare(weights)(x), chosen, want) < linear.TOLERANCE


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


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_consecutive_inputs(bits):
    weights = linear.make_weights(64, 128, bits, "cpu")
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
    layer = Layer.of(linear.make_weights(64, 128, 4, "cpu"), peers)
    assert layer.why_not == {"absent": "not installed", "failing": "RuntimeError: no kernel image"}
    assert not layer.products


def test_many_rows_need_only_kernels_that_ship():
    shipped = set(shipped_specs())
    assert [spec for spec in linear.specs(rows=[16, 64, 512, 8192]) if spec not in shipped] == []


def row(shape: LinearShape, us: float, floor: float = 10.0, **peers: float | None) -> dict:
    found: dict[str, dict] = {name.replace("_", " "): {"us": time} for name, time in peers.items()}
    found["absent"] = {"us": None, "why_not": "not installed"}
    return {
        "name": shape.name,
        "format": shape.format,
        "shape": asdict(shape),
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
    few = row(LinearShape(8192, 8192, 1, 4), us=11.0, fast=10.0, slow=30.0)
    small = row(LinearShape(4096, 4096, 16, 8), us=13.0, fast=20.0)
    many = row(LinearShape(57344, 8192, 1024, 4), us=1200.0)
    verdicts = {verdict.what: verdict.met for verdict in judge(record(few, small, many))}
    assert verdicts == {
        "w4a16 8192 x 8192, M = 1: ratio to the floor": True,
        "w4a16 8192 x 8192, M = 1: time over fast's": False,
        "w8a16 4096 x 4096, M = 16: ratio to the floor": True,
        "w8a16 4096 x 4096, M = 16: time over fast's": True,
        "w4a16 57344 x 8192, M = 1024: rate": False,
    }


def test_tables_and_figure(tmp_path):
    pytest.importorskip("matplotlib")
    from bench import plots

    rows = []
    for m in (1, 64):
        peers = {CUBLAS.replace(" ", "_"): 40.0, "Marlin": 20.0 * m}
        rows.append(row(LinearShape(8192, 8192, m, 4), us=15.0 + m, **peers))
    data = record(*rows)
    lines = linear.text(data).splitlines()
    assert any(line.split()[:5] == ["w4a16", "8192", "x", "8192", "64"] and "1280.0" in line for line in lines)
    assert "absent (w4a16): not installed" in lines
    assert "| 8192 x 8192 | w4a16 | 10.0 | **16.0** (20.0) | **79.0** (40.0) |" in linear.markdown(data)
    (path,) = plots.plot(data, tmp_path)
    assert path.name == "linear_speed.svg" and "8192 x 8192" in path.read_text()
