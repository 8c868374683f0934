"""Weight formats in turn: every row is checked first, and has its own floor."""

from __future__ import annotations

import pytest
import torch

from bench import by_format
from bench.bars import judge
from bench.format_peers import PEERS, Codes, FormatPeer, Peers
from bench.linear_peers import in_fragments
from bench.moe import Inputs
from bench.pages import load
from bench.record import Recorder
from bench.suites import Bench
from bench.tables import table_of
from bench.timing import Protocol, ticking
from bench.workloads import MoeModel, MoeShape
from cute_kernels import fused_moe, quantize_weight
from cute_kernels.formats.weights.fp4 import LEVELS
from simulator import stand_in
from tests.bench.clocks import every_call_takes
from tests.launchers import recording

SMALL = MoeModel("small", 5, 2, 192, 96)


@pytest.fixture
def bench():
    floors = stand_in(lambda flush, protocol, quick: lambda size: type("Floor", (), {"us": size * 1e-3}))
    with ticking(every_call_takes(30.0)):
        yield Bench(Recorder(None), Protocol(samples=1), device="cpu", flush=lambda: None, make_floor=floors)


def shown(bench):
    data = {**bench.recorder.data, "environment": {"gpu": "a GPU"}}
    return table_of({**data, "kind": "linear"}, "")[0](data)


def test_products_of_all_formats_are_checked_and_have_a_floor_each(bench):
    by_format.run_linear(bench, 600, [(96, 256)], (1, 3))
    rows = bench.recorder.data["linear_formats"]
    assert not bench.recorder.data["failures"] and [row["shape"]["m"] for row in rows] == [1, 3]
    for row in rows:
        assert list(row["formats"]) == list(by_format.FORMATS)
        assert row["formats"]["fp8"]["bytes"] > 1.8 * row["formats"]["mxfp4"]["bytes"]
        assert all(0 < one["error"] < 4e-3 and one["floor_ratio"] > 0 for one in row["formats"].values())
    assert "96 x 256, M = 3" in shown(bench) and "nvfp4" in shown(bench)
    by_format.run_linear(bench, -1, [(96, 256)], (1,))
    assert len(bench.recorder.data["linear_formats"]) == 2


def test_experts_are_held_to_fp64_with_biases_and_clamps(bench):
    by_format.run_experts(bench, 600, (1, 3), {SMALL: ("mxfp4", "fp8_block")})
    rows = bench.recorder.data["moe_formats"]
    assert not bench.recorder.data["failures"] and rows[0]["active"] == 2
    assert list(rows[1]["formats"]) == ["mxfp4", "fp8_block"]
    assert "small, 3 tokens" in shown(bench)
    environment = {"gpu": "a GPU", "commit": "0", "date": "2026-01-02", "versions": {"torch": "2.13"}}
    assert "| small, 3 tokens | 30.00 (" in by_format.markdown({**bench.recorder.data, "environment": environment})
    layer, inputs = by_format.OssLayer.of(SMALL, "mxfp4", "cpu"), Inputs.of(MoeShape(SMALL, 3), "cpu")
    tokens = torch.tensor([0, 2])
    plain = fused_moe(inputs.x, layer.gate_up, layer.down, inputs.weights, inputs.ids)
    want = layer.reference(inputs, tokens)
    assert (layer.call(inputs)()[tokens].double() - want).norm() < 6e-3 * want.norm()
    assert (plain[tokens].double() - want).norm() > 0.1 * want.norm()


def test_formats_are_judged_against_their_floor_and_their_fastest_peer():
    def row(m: int, us: float, floor_ratio: float, **peers: float):
        formats = {form: {"us": us, "floor_ratio": floor_ratio} for form in ("mxfp4", "fp8", "w4g128")}
        beside = {"mxfp4": {name: {"us": us} for name, us in peers.items()} | {"absent": {"us": None}}}
        return {"name": f"M = {m}", "shape": {"m": m}, "formats": formats, "peers": beside}

    rows = [row(1, 10.0, 1.18, a=9.6, b=20.0), row(64, 10.0, 9.0, a=9.4), row(8192, 10.0, 9.0, a=12.0)]
    found = {verdict.what: verdict.met for verdict in judge({"linear_formats": rows})}
    assert found == {
        "mxfp4 M = 1: ratio to the floor": True,
        "mxfp4 M = 1: time over the best peer's": True,
        "fp8 M = 1: ratio to the floor": False,
        "mxfp4 M = 64: time over the best peer's": False,
        "mxfp4 M = 8192: time over the best peer's": True,
        "mxfp4, 3 products: mean time over the best peer's": True,
    }


@pytest.mark.parametrize(("tokens", "ratio", "met"), [(4, 1.39, True), (4, 1.41, False), (16, 1.21, False)])
def test_experts_are_judged_against_their_floor_and_int4_by_bytes(tokens: int, ratio: float, met: bool):
    formats = {"mxfp4": {"us": 19.7, "bytes": 17, "floor_ratio": ratio}, "w4g32": {"us": 20.0, "bytes": 18}}
    row = {"name": "x", "shape": {"tokens": tokens}, "formats": formats}
    assert [verdict.met for verdict in judge({"moe_formats": [row]})] == [met, True]
    formats["mxfp4"]["us"] = 20.0
    assert [verdict.met for verdict in judge({"moe_formats": [row]})] == [met, False]


@pytest.mark.parametrize("name", ["linear_formats", "linear_few_rows", "moe_formats"])
def test_records_of_formats_are_judged_by_the_bars_of_today(name: str):
    record = load(name)
    assert record["bars"] == [verdict.as_dict() for verdict in judge(record)] != []


def test_a_layer_that_fails_leaves_the_others(bench):
    by_format.run_linear(bench, 600, [(0, 256), (96, 256)], (1,))
    assert len(bench.recorder.data["failures"]) == 1
    assert [row["name"] for row in bench.recorder.data["linear_formats"]] == ["96 x 256, M = 1"]


def test_kernels_of_all_formats_are_found_without_a_launch():
    with recording() as cache:
        symbols = [spec.symbol for spec in by_format.linear_specs([(128, 256)], (1, 16), "cpu")]
        assert not cache.launches
    for kind in ("e2m1bf16_g32e8m0", "e2m1bf16_g16", "e4m3", "w4bf16_g128"):
        assert any(kind in symbol for symbol in symbols), kind


def numbers_of(form, codes):
    """W of a checkpoint's codes and scales, as its format's page has it."""
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    numbers = {
        "w4g128": lambda: codes.rows.double() - 8,
        "mxfp4": lambda: torch.cat((levels, -levels))[codes.rows.int()],
        "nvfp4": lambda: torch.cat((levels, -levels))[codes.rows.int()] * codes.tensor_scale,
        "fp8": lambda: codes.rows.view(torch.float8_e4m3fn).double(),
        "fp8_block": lambda: codes.rows.view(torch.float8_e4m3fn).double(),
    }[form]()
    scales = {
        "mxfp4": lambda: torch.exp2(codes.scales.double() - 127),
        "nvfp4": lambda: codes.scales.view(torch.float8_e4m3fn).double(),
    }.get(form, lambda: codes.scales.double())()
    return (numbers.view(*scales.shape, -1) * scales.unsqueeze(-1)).view(codes.rows.shape)


@pytest.mark.parametrize("form", ["w4g128", "mxfp4", "nvfp4", "fp8", "fp8_block"])
def test_peers_are_given_the_codes_and_scales_of_the_weight_itself(form):
    weight = quantize_weight(torch.randn(128, 256) / 16, format=form, dtype=torch.bfloat16)
    codes = Codes.of(weight)
    assert torch.equal(numbers_of(form, codes).float(), weight.dequantize(torch.float32))
    if codes.bits == 4:
        assert torch.equal(codes.nibbles & 15, codes.rows[:, ::2])
        assert torch.equal(codes.nibbles >> 4, codes.rows[:, 1::2])


def by_torch(codes):
    dense = numbers_of("mxfp4", codes).bfloat16()
    return lambda x: x @ dense.T


def test_peers_are_timed_beside_what_agrees_with_them_and_others_say_why_not(bench):
    def breaks(codes):
        raise RuntimeError("no such kernel")

    peers = [
        FormatPeer("torch", lambda: None, {"mxfp4": by_torch, "nvfp4": breaks}),
        FormatPeer("wrong", lambda: None, {"mxfp4": lambda codes: lambda x: -by_torch(codes)(x)}, compiles=True),
        FormatPeer("elsewhere", lambda: "not installed", {"fp8": by_torch}),
    ]
    by_format.run_linear(bench, 600, [(128, 256)], (1, 20), peers)
    assert not bench.recorder.data["failures"]
    _, row = bench.recorder.data["linear_formats"]
    times = {(form, name): one["us"] for form, found in row["peers"].items() for name, one in found.items()}
    assert {key for key, us in times.items() if us} == {("mxfp4", "torch"), ("bf16", "cuBLAS")}
    assert row["peers"]["nvfp4"]["torch"]["why_not"].endswith("no such kernel")
    assert "relative error 2.0" in row["peers"]["mxfp4"]["wrong"]["why_not"]
    text = shown(bench)
    assert "mxfp4 over its best peer: 1.000 in the geometric mean, 1.00 at 128 x 256, M = 1" in text
    assert "fp8 by elsewhere: not installed" in text


def test_every_peer_says_whether_it_is_here_and_its_scales_are_a_permutation():
    weight = quantize_weight(torch.randn(128, 256) / 16, format="nvfp4", dtype=torch.bfloat16)
    found = Peers.of({"nvfp4": weight}, (), [peer for peer in PEERS if peer.missing()])
    assert not found.products and all("not" in reason for reason in found.why_not.values())
    for groups in (1, 4):
        order = in_fragments(torch.arange(128 * groups).view(128, groups), of_rows=groups == 1)
        assert sorted(order.flatten().tolist()) == list(range(128 * groups))
        assert all(order[i].min() == i for i in range(groups))
