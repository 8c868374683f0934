"""The benchmark of layers of experts: its bytes, the kernels it needs, its references, its bars and table."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import moe, moe_peers
from bench.__main__ import main
from bench.bars import judge
from bench.moe import Inputs, Layer, make_weights
from bench.moe_peers import PEERS, Calls, MoePeer, Routed
from bench.suites import WrongOutput
from bench.workloads import MoeModel, MoeShape
from cute_kernels.families import shipped_specs
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.experts.plan import LayerForm, moe_plan_of
from cute_kernels.gemm.packed_experts import ExpertsForm
from cute_kernels.gemm.weight import padded_shape
from tests.gpu.specs import products_needed_by

SMALL = MoeModel("small", 4, 2, 128, 256)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_timing_without_a_gpu_is_refused_in_words(capsys):
    assert main(["moe"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_bytes_are_those_of_the_packed_experts():
    weights, shape = make_weights(SMALL, "cpu"), MoeShape(SMALL, 3)
    for product, weight in enumerate((weights.gate_up, weights.down)):
        assert shape.weight_bytes(product, len(weight)) == weight.nbytes
        assert weight.shape == SMALL.products[product]


def test_the_layer_agrees_with_the_reference_and_the_check_notices_what_does_not():
    weights, inputs = make_weights(SMALL, "cpu"), Inputs.of(MoeShape(SMALL, 5), "cpu")
    chosen = torch.tensor([0, 2, 4])
    want = moe.reference(weights, inputs, chosen)
    out = moe.layer_call(weights, inputs, torch.empty_like(inputs.x))()
    assert moe.check(out, chosen, want) < moe.TOLERANCE
    with pytest.raises(WrongOutput):
        moe.check(out * 1.02, chosen, want)
    out[1, 3] = torch.nan  # of no chosen token
    with pytest.raises(WrongOutput):
        moe.check(out, chosen, want)


def test_dense_experts_are_views_of_one_tensor():
    dense = make_weights(SMALL, "cpu").dense
    assert torch.equal(dense.gate_up[:, ::2], dense.gate) and torch.equal(dense.gate_up[:, 1::2], dense.up)
    assert dense.gate_up.is_contiguous()


@pytest.mark.skipif(PEERS[0].missing() is not None, reason="torch has no grouped products")
def test_the_peers_layer_agrees():
    weights, inputs = make_weights(SMALL, "cpu"), Inputs.of(MoeShape(SMALL, 5), "cpu")
    routed = Routed.of(inputs.x, inputs.ids, inputs.weights, SMALL.experts)
    try:
        out = PEERS[0].prepare(weights)(routed).layer()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"no grouped products on a CPU: {error}")
    assert moe.relative_error(out, moe.reference(weights, inputs, torch.arange(5))) < moe.TOLERANCE


def test_a_peer_that_disagrees_is_not_timed():
    weights, inputs = make_weights(SMALL, "cpu"), Inputs.of(MoeShape(SMALL, 2), "cpu")
    routed, chosen = Routed.of(inputs.x, inputs.ids, inputs.weights, SMALL.experts), torch.arange(2)
    want = moe.reference(weights, inputs, chosen)
    first = torch.randn(4, 6)

    def reason(in_order: torch.Tensor, layer: torch.Tensor) -> str:
        return moe._agreeing(lambda _: Calls(lambda: first, lambda: in_order, lambda: layer), routed, chosen, want)[1]

    assert reason(first[[2, 0, 3, 1]], want) == ""
    assert "disagrees with the reference" in reason(first, want + 1)
    assert "disagrees with the reference" in reason(first, want * torch.nan)
    assert "disagrees with the product of rows by index" in reason(first[[2, 0, 3, 0]], want)


GEMM = (
    "moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none, Tensor! "
    "b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? "
    "perm_or_none, Tensor! workspace, Tensor sorted_token_ids, Tensor! expert_ids, Tensor! num_tokens_past_padded, "
    "Tensor! topk_weights, int moe_block_size, int top_k, bool mul_topk_weights, int b_type_id, int size_m, int "
    "size_n, int size_k, bool is_full_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float, int thread_k, "
    "int thread_n, int blocks_per_sm) -> ()"
)  # as in vLLM 0.24, but that the result is its second argument only
ALIGN = (
    "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, "
    "Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map) -> ()"
)
REPACK = (
    "gptq_marlin_repack(Tensor b_q_weight, Tensor perm, int size_k, int size_n, int num_bits, bool is_a_8bit) -> Tensor"
)


class MarlinOperators:
    """What vLLM's operators compute, of weights that "repacking" leaves as they are."""

    def align(self, ids, num_experts, rows, assignments, experts, used, _map):
        """By expert, in whole blocks; what fills them up is the number of assignments, which is none."""
        place, flat = 0, ids.flatten()
        assignments.fill_(flat.numel())
        for expert in range(num_experts):
            own = (flat == expert).nonzero().flatten()
            assignments[place : place + len(own)] = own.int()
            blocks = -(-len(own) // rows)
            experts[place // rows : place // rows + blocks] = expert
            place += blocks * rows
        used[0] = place

    def repack(self, words, perm, k, n, bits, eight_bit):
        assert words.shape == (k * bits // 32, n) and not eight_bit and not perm.numel()
        return words.clone()

    def gemm(self, a, c, codes, bias, scales, *rest):
        blocks, experts, used, weights, rows, topk, weighted = rest[6:13]
        for place in range(0, int(used), rows):
            expert = int(experts[place // rows])
            w = self.dense(codes[expert], scales[expert])
            for assignment in blocks[place : place + rows].tolist():
                if assignment < a.shape[0] * topk:
                    share = weights.flatten()[assignment] if weighted else 1.0
                    c[assignment] = (share * (w @ a[assignment // topk].float())).to(c.dtype)

    def dense(self, words, scales):
        """[N, K] of codes in words of eight, scales in the order of Marlin's fragments."""
        codes = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], dim=1).flatten(0, 1) - 8
        n = words.shape[1]
        plain = torch.empty_like(scales).view(-1, 64)
        plain[:, [i + 8 * j for i in range(8) for j in range(8)]] = scales.view(-1, 64)
        return (codes.view(scales.shape[0], -1, n) * plain.view(-1, 1, n).float()).flatten(0, 1).T

    def gate(self, out, both):
        half = out.shape[1]
        out.copy_(torch.nn.functional.silu(both[:, :half].float()) * both[:, half:].float())


@pytest.fixture
def marlin(monkeypatch):
    """The peer with operators of vLLM's names and arguments."""
    mine = MarlinOperators()
    with (
        torch.library._scoped_library("_moe_C", "FRAGMENT") as of_experts,
        torch.library._scoped_library("_C", "FRAGMENT") as dense,
    ):
        for library, schema, work in (
            (of_experts, GEMM, mine.gemm),
            (of_experts, ALIGN, mine.align),
            (dense, REPACK, mine.repack),
            (dense, "silu_and_mul(Tensor! result, Tensor input) -> ()", mine.gate),
        ):
            library.define(schema)
            library.impl(schema.split("(")[0], work, "CPU")
        monkeypatch.setattr(moe_peers, "type_id", lambda bits: {4: 1}[bits])
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        yield next(peer for peer in PEERS if peer.name == "Marlin MoE")


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_marlin_is_given_the_layer(marlin, tokens):
    """Its layer is the reference's, whatever the blocks; its first product has gate before up, by assignment."""
    weights, inputs = make_weights(SMALL, "cpu"), Inputs.of(MoeShape(SMALL, tokens), "cpu")
    routed = Routed.of(inputs.x, inputs.ids, inputs.weights, SMALL.experts)
    calls, reason = moe._agreeing(
        marlin.prepare(weights), routed, torch.arange(tokens), moe.reference(weights, inputs, torch.arange(tokens))
    )
    assert calls is not None, reason
    expert, row = inputs.ids[tokens - 1, 1], inputs.x[tokens - 1].float()
    want = torch.cat((weights.dense.gate[expert].float() @ row, weights.dense.up[expert].float() @ row))
    assert moe.relative_error(calls.first()[2 * tokens - 1], want) < moe.TOLERANCE
    assert torch.equal(calls.in_order(), calls.first()[routed.order])


def test_marlin_takes_the_blocks_that_vllm_chooses(marlin):
    sizes = [moe_peers.MarlinBlocks.of(torch.zeros((tokens, 2), dtype=torch.int32), 8).rows for tokens in (1, 32, 256)]
    assert sizes == [8, 16, 64]
    blocks = moe_peers.MarlinBlocks.of(torch.tensor([[0, 3]], dtype=torch.int32), 8)
    assert blocks.assignments.numel() == 16 and int(blocks.used) == 16 and blocks.experts.tolist() == [0, 3]


def test_peers_that_are_absent_or_fail_say_why():
    def fail(_weights):
        raise RuntimeError("no kernel image")

    peers = [MoePeer("absent", lambda: "not installed", fail), MoePeer("failing", lambda: None, fail)]
    layer = Layer.of(make_weights(SMALL, "cpu"), peers)
    assert layer.why_not == {"absent": "not installed", "failing": "RuntimeError: no kernel image"} and not layer.peers


class RecordedBench:
    """What `moe.run` asks of a bench: keeps what is recorded, and goes on after failures."""

    def __init__(self):
        self.recorder = SimpleNamespace(data={}, set=lambda key, value: self.recorder.data.update({key: value}))
        self.floor = SimpleNamespace(release=lambda: None)
        self.failed = []

    def attempt(self, what, work):
        try:
            work()
        except RuntimeError as error:
            self.failed.append((what, str(error)))


def test_a_peer_that_is_slow_to_start_joins_when_all_else_is_recorded(monkeypatch):
    tokens, rounds = (1, 4), []

    def measure(bench, shape, layer):
        rounds.append((shape.tokens, sorted(layer.peers)))
        if "slow" in layer.peers and shape.tokens == 4:
            raise RuntimeError("the run has to end")
        return {"tokens": shape.tokens, "peers": sorted(layer.peers), "why_not": layer.why_not}

    monkeypatch.setattr(moe, "measure", measure)
    monkeypatch.setattr(moe, "make_weights", lambda model: None)
    monkeypatch.setattr(moe, "_host_cost", lambda bench, model, weights: bench.recorder.set("moe_host_us", {}))
    nothing: Any = lambda weights: None  # noqa: E731
    prompt = MoePeer("prompt", lambda: None, nothing)
    slow = MoePeer("slow", lambda: None, nothing, slow_start=True)
    bench: Any = RecordedBench()
    moe.run(bench, [SMALL], tokens, [slow, prompt])
    assert rounds == [(1, ["prompt"]), (4, ["prompt"]), (1, ["prompt", "slow"]), (4, ["prompt", "slow"])]
    assert [row["peers"] for row in bench.recorder.data["moe"]] == [["prompt", "slow"], ["prompt"]]
    assert bench.recorder.data["moe"][1]["why_not"] == {"slow": moe.NOT_YET}
    assert [what for what, _ in bench.failed] == ["moe: small, 4 tokens"]
    absent = MoePeer("slow", lambda: "not installed", nothing, slow_start=True)
    rounds.clear()
    bench = RecordedBench()
    moe.run(bench, [SMALL], tokens, [absent, prompt])
    assert rounds == [(1, ["prompt"]), (4, ["prompt"])]


def test_every_kernel_can_be_compiled():
    found = moe.specs()
    assert len(found) == len(set(found)) and len(found) > 10
    for spec in found:
        spec.check()
        assert spec.config.can_implement() is None  # type: ignore[attr-defined]


def test_kernels_of_all_models_ship():
    """So a machine without a compiler runs the benchmark."""
    assert set(moe.specs()) <= set(shipped_specs())


@pytest.mark.parametrize("model", moe.MODELS, ids=lambda model: model.name)
def test_kernels_of_layers_of_every_number_of_tokens_are_among_them(model):
    """As plans load them."""
    sizes = [(n, k, padded_shape((n, k), moe.GROUP_SIZE)[1]) for n, k in model.products]
    forms = [ExpertsForm(model.experts, *size, integers(4, moe.GROUP_SIZE), torch.bfloat16, -1) for size in sizes]

    def plan_all() -> None:
        for tokens in moe.TOKENS:
            moe_plan_of(LayerForm(tokens, model.topk, 32, forms[0], forms[1]), torch.bfloat16)

    needed = set(products_needed_by(plan_all))
    assert needed <= set(moe.specs())
    assert any("_assigned" in spec.symbol for spec in needed)


def row(model: str, tokens: int, us: float, rival: float) -> dict[str, Any]:
    product = {"us": us, "floor_us": 100.0, "floor_ratio": us / 100, "tflops": 600.0}
    return {
        "name": f"{model}, {tokens} tokens",
        "shape": {"model": {**asdict(SMALL), "name": model}, "tokens": tokens},
        "active": 8,
        "most_rows": 9,
        "first": product,
        "in_order": {**product, "us": us - 15},
        "second": product,
        "layer": product,
        "eager_us": us,
        "peers": {
            "slow": {"first_us": 2 * rival, "in_order_us": 2 * rival, "layer_us": 1.0},
            "fast": {"first_us": rival, "in_order_us": rival, "layer_us": rival},
            "absent": {"first_us": None, "in_order_us": None, "layer_us": None, "why_not": "not installed"},
        },
    }


ORIGIN = {"gpu": "H200", "driver": "1", "versions": {"torch": "2"}, "commit": "0123456789ab", "date": "2026-11-25T01"}


def test_the_markdown_table_has_a_line_for_each_layer_and_says_where_from():
    """Peers that were not there have no columns; other numbers of tokens no lines."""
    rows = [row("Mixtral-8x7B", tokens, 115.0, 112.0) for tokens in (1, 2, 3)]
    table = moe.markdown({"moe": rows, "samples": 16, "environment": ORIGIN}, tokens=(1, 3))
    head, _, first, second, *below = table.splitlines()
    assert head.split(" | ")[6:] == ["slow", "fast", "layer: cute-kernels", "slow", "fast |"]
    assert first == "| Mixtral-8x7B | 1 | 100.0 | **115.0** | 1.15 | 600 | 224.0 | 112.0 | **115.0** | 1.0 | 112.0 |"
    assert second.startswith("| Mixtral-8x7B | 3 |")
    assert below[0] == "" and below[1].startswith(
        "H200, driver 1, torch 2, commit 0123456789, 2026-11-25; us, median of"
    )
    with pytest.raises(ValueError, match="record: got no measured layer of experts"):
        moe.markdown({"moe": rows, "environment": ORIGIN}, tokens=(7,))


def test_bars_and_table():
    rows = [row("Mixtral-8x7B", 1, 115.0, 112.0), row("Mixtral-8x7B", 8192, 120.0, 110.0)]
    record: dict[str, Any] = {"moe": rows, "moe_host_us": {"Mixtral-8x7B": 30.0}, "failures": []}
    verdicts = judge(record)
    assert [(verdict.limit, verdict.met) for verdict in verdicts] == [
        (1.2, True),
        (1.03, True),
        (1.03, True),
        (1.0, False),
        (1.0, True),
        (620, False),
        (25.0, False),
    ]
    record |= {"bars": [verdict.as_dict() for verdict in verdicts], "environment": {"gpu": "H200"}}
    text = moe.text(record)
    assert "4 of 7 bars met" in text and "absent: not installed" in text
    assert "NOT MET moe: Mixtral-8x7B, 8192 tokens, first product: rate" in text
