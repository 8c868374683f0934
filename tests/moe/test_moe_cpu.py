"""Layers of experts on CPU tensors: against fp64 on the codes, the operators, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.gemm import PackedWeight, quantize_weight
from cute_kernels.gemm.experts import (
    PackedExperts,
    fused_moe,
    grouped_linear,
    interleave_experts,
    quantize_experts,
    stack_experts,
)
from cute_kernels.gemm.experts.reference import route_reference
from tests.linear.cases import known

BF16 = torch.bfloat16


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def experts(count: int, n: int, k: int, **options) -> tuple[PackedExperts, torch.Tensor]:
    """Packed experts, and their weights [E, N, K] in fp64, rounded as the tensor cores read them."""
    cases = [known(n, k, seed=seed, **options) for seed in range(count)]
    dense = torch.stack([case.dense for case in cases]).to(BF16).double()
    return stack_experts([case.pack() for case in cases]), dense


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 4e-3) -> None:
    assert ((found.double() - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-9)).item()


@pytest.mark.parametrize("counts", [(2, 0, 3), (0, 0, 5), (0, 0, 0), (1, 1, 1)])
@pytest.mark.parametrize("bits", [4, 8])
def test_each_place_is_multiplied_with_its_experts_weight(counts, bits):
    weight, dense = experts(3, 70, 100, bits=bits, zero_point=True)
    x, bias = numbers(6, 100), numbers(3, 70, seed=2)
    rows = torch.randint(0, 6, (sum(counts),), generator=torch.Generator().manual_seed(3)).int()
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    found = grouped_linear(x, weight, offsets, rows=rows, bias=bias, activation="silu")
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    y = torch.einsum("pk,pnk->pn", x.double()[rows.long()], dense[owner]) + bias.double()[owner]
    assert found.shape == (sum(counts), 70)
    if sum(counts):
        assert_near(found, y * y.sigmoid())


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("activations", [None, "fp8"])
def test_places_of_no_expert_stay_as_they_are(traced, activations):
    """Those of a given result, as on a GPU."""
    weight, _ = experts(3, 64, 128)
    x, offsets = numbers(6, 128), torch.tensor([0, 2, 2, 4]).int()
    x[4:] = torch.nan
    product = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True) if traced else grouped_linear
    out = torch.full((6, 64), torch.nan).bfloat16()
    out[5] = 7.0
    assert product(x, weight, offsets, out=out, activations=activations) is out
    assert out[4].isnan().all() and (out[5] == 7.0).all()
    new = grouped_linear(x, weight, offsets, activations=activations)
    assert torch.equal(out[:4], new[:4]) and not new[4:].any()


def test_a_batch_invariant_layer_gives_each_token_what_it_has_alone():
    """Bit for bit, whatever other tokens share its experts; grouped products likewise."""
    gate_up, _ = experts(3, 2 * 70, 100)
    down, _ = experts(3, 100, 70)
    x, weights = numbers(33, 100), numbers(33, 2, seed=4, dtype=torch.float32)
    ids = torch.randint(-1, 3, (33, 2), generator=torch.Generator().manual_seed(5))
    options: dict[str, Any] = {"out_dtype": torch.float32, "batch_invariant": True}
    whole = fused_moe(x, gate_up, down, weights, ids, **options)
    grouped = grouped_linear(x, gate_up, torch.tensor([0, 9, 9, 33]).int(), activation="gelu", **options)
    for token in (0, 8, 9, 20, 32):
        one = slice(token, token + 1)
        assert torch.equal(fused_moe(x[one], gate_up, down, weights[one], ids[one], **options), whole[one])
        offsets = torch.tensor([0, 1, 1, 1] if token < 9 else [0, 0, 0, 1]).int()
        assert torch.equal(grouped_linear(x[one], gate_up, offsets, activation="gelu", **options), grouped[one])


def moe_by_hand(x, gate, up, down, ids, weights) -> torch.Tensor:
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            if 0 <= e < gate.shape[0]:
                g, u = gate[e] @ x[t].double(), up[e] @ x[t].double()
                hidden = (g * g.sigmoid() * u).to(BF16).double()
                out[t] += weights[t, j].double() * (down[e] @ hidden)
    return out


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_a_layer_is_the_weighted_sum_of_its_experts(tokens, id_dtype):
    gate, dense_gate = experts(5, 64, 96)
    up, dense_up = (stack_experts([*gate][::-1]), dense_gate.flip(0))
    down, dense_down = experts(5, 80, 64, bits=8)
    x = numbers(tokens, 96)
    ids = torch.randint(-1, 6, (tokens, 3), generator=torch.Generator().manual_seed(1)).to(id_dtype)
    weights = numbers(tokens, 3, seed=4, dtype=torch.float32)
    found = fused_moe(x, interleave_experts(gate, up), down, weights, ids, out_dtype=torch.float32)
    assert found.shape == (tokens, 80)
    if tokens:
        assert_near(found, moe_by_hand(x, dense_gate, dense_up, dense_down, ids, weights))


def test_out_is_written_and_returned():
    gate_up, _ = experts(2, 64, 64)
    down, _ = experts(2, 64, 32)
    x, ids, weights = numbers(3, 64), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    out = torch.full((3, 64), float("nan"), dtype=torch.float16)
    assert fused_moe(x, gate_up, down, weights, ids, out=out) is out
    assert torch.equal(out, fused_moe(x, gate_up, down, weights, ids, out_dtype=torch.float16))


@pytest.mark.parametrize("compiled", [False, True])
def test_results_never_require_a_gradient(compiled):
    torch.compiler.reset()
    gate_up, down = experts(2, 64, 64)[0], experts(2, 64, 32)[0]
    x, bias, weights = numbers(5, 64), numbers(2, 64, seed=2), torch.rand(5, 2)
    for tensor in (x, bias, weights, gate_up.scales, down.scales):
        tensor.requires_grad_()

    def layers(x):
        return grouped_linear(x, gate_up, OFFSETS, bias=bias), fused_moe(x, gate_up, down, weights, IDS)

    call = torch.compile(layers, fullgraph=True, backend="aot_eager") if compiled else layers
    for found in call(x):
        assert not found.requires_grad


def test_routing_keeps_the_order_of_assignments():
    ids = torch.tensor([[2, 0], [2, -1], [0, 2], [7, 1]])
    offsets, rows, places = route_reference(ids, 3)
    assert offsets.tolist() == [0, 2, 3, 6]
    assert rows[:6].tolist() == [0, 2, 3, 0, 1, 2]
    assert places.tolist() == [[3, 0], [4, -1], [1, 5], [-1, 2]]


# -- weights -----------------------------------------------------------------------------------------------------------


def test_experts_are_packed_weights_in_one_memory():
    w = 0.02 * numbers(3, 70, 100)
    packed = quantize_experts(w, zero_point=True, group_size=32)
    alone = [quantize_weight(each, zero_point=True, group_size=32) for each in w]
    assert len(packed) == 3 and packed.shape == (70, 100) and packed.nbytes >= sum(p.nbytes for p in alone)
    for ours, theirs in zip(packed, alone, strict=True):
        assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.dequantize(), theirs.dequantize())
    assert torch.equal(packed.dequantize(), torch.stack([p.dequantize() for p in alone]))
    assert packed[1].codes.data_ptr() == packed.codes[1].data_ptr()


def test_symmetric_experts_among_others_keep_their_values():
    one, other = known(64, 64).pack(), known(64, 64, zero_point=True, seed=1).pack()
    both = stack_experts([one, other])
    assert torch.equal(both[0].dequantize(), one.dequantize()) and torch.equal(both[1].dequantize(), other.dequantize())


def test_state_dicts_and_shards():
    packed, _ = experts(3, 128, 128, zero_point=True)
    loaded = PackedExperts.from_state_dict(packed.state_dict())
    assert torch.equal(loaded.dequantize(), packed.dequantize())
    parts = [packed.shard_n(rank, 2).dequantize() for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), packed.dequantize())
    parts = [packed.shard_k(rank, 2).dequantize() for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=2), packed.dequantize())
    with pytest.raises(ValueError, match="^format: got no such tensor"):
        PackedExperts.from_state_dict({"codes": packed.codes})
    with pytest.raises(ValueError, match=r"^format: got a tensor without data \(meta\)"):
        state = packed.state_dict()
        PackedExperts.from_state_dict(state | {"format": state["format"].to("meta")})


# -- what is refused ---------------------------------------------------------------------------------------------------

OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)
BAD_GROUPED: dict[str, tuple[dict[str, Any], str]] = {
    "weight of one layer": ({"weight": known(70, 64).pack()}, "weight: got PackedWeight, want PackedExperts"),
    "x in fp32": ({"x": torch.zeros(5, 64)}, "x: got dtype torch.float32, want torch.bfloat16"),
    "x too wide": ({"x": numbers(5, 65)}, r"x: got shape \[5, 65\], want \[rows, 64\]"),
    "x elsewhere": ({"x": numbers(5, 64).to("meta")}, "x: got a tensor on meta, want it on cpu, where the weight is"),
    "offsets of another length": ({"expert_offsets": OFFSETS[:2]}, r"expert_offsets: got shape \[2\], want \[3\]"),
    "offsets in int64": ({"expert_offsets": OFFSETS.long()}, "expert_offsets: got dtype torch.int64, want torch.int32"),
    "offsets that fall": ({"expert_offsets": OFFSETS.flip(0)}, r"expert_offsets: got \[5, 2, 0\], want them to rise"),
    "offsets beyond the places": ({"expert_offsets": OFFSETS + OFFSETS}, "expert_offsets: got .* to at most 5"),
    "rows beyond x": ({"rows": torch.full((5,), 5, dtype=torch.int32)}, "rows: got 5 to 5, want 0 to 4"),
    "rows of no x": (
        {"x": numbers(0, 64), "rows": torch.zeros(5, dtype=torch.int32)},
        "rows: got 0 to 0, want none, as x has no rows",
    ),
    "rows a list": ({"rows": [0]}, "rows: got list, want a torch.Tensor"),
    "bias of one expert": ({"bias": numbers(70)}, r"bias: got shape \[70\], want \[2, 70\]"),
    "activation": ({"activation": "relu"}, "activation: got 'relu', want None"),
    "batch-invariant by a number": ({"batch_invariant": 1}, "batch_invariant: got 1, want True or False"),
    "out of another shape": ({"out": numbers(5, 71)}, r"out: got shape \[5, 71\], want \[5, 70\]"),
    "out a list": ({"out": [0.0]}, "out: got list, want a torch.Tensor"),
    "out in fp64": ({"out": numbers(5, 70).double()}, "out: got dtype torch.float64, want one of torch.bfloat16"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_GROUPED.values(), ids=list(BAD_GROUPED))
def test_grouped_arguments_that_do_not_fit_are_refused_by_name(changes, message):
    given = {"x": numbers(5, 64), "weight": experts(2, 70, 64)[0], "expert_offsets": OFFSETS}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        grouped_linear(**(given | changes))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["offsets beyond the places", "offsets that fall", "rows beyond x"])
def test_routing_is_checked_however_a_call_comes(name, compiled):
    torch.compiler.reset()
    changes, message = BAD_GROUPED[name]
    given = {"weight": experts(2, 70, 64)[0], "expert_offsets": OFFSETS, **changes}

    def product(x):
        return grouped_linear(x, **given)

    call = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled else product
    with pytest.raises(ValueError, match=f"^{message}"):
        call(numbers(5, 64) if compiled else torch.nn.Parameter(numbers(5, 64)))


IDS = torch.tensor([[0, 1]] * 5)
BAD_MOE: dict[str, tuple[dict[str, Any], str]] = {
    "x elsewhere": ({"x": numbers(5, 64).to("meta")}, "x: got a tensor on meta, want it on cpu, where the weight is"),
    "too many tokens": ({"x": numbers(1, 64).expand(65536, 64)}, "x: got 65536 rows, want at most 65535"),
    "down of other experts": ({"down": experts(3, 64, 32)[0]}, "down: got 3 experts, want 2"),
    "down of another width": ({"down": experts(2, 64, 64)[0]}, r"down: got shape \[64, 64\], want \[.., 32\]"),
    "ids of other tokens": ({"topk_ids": IDS[:4]}, r"topk_ids: got shape \[4, 2\], want \[5, topk\]"),
    "ids in fp32": ({"topk_ids": IDS.float()}, "topk_ids: got dtype torch.float32, want torch.int32 or torch.int64"),
    "weights of another topk": ({"topk_weights": torch.ones(5, 3)}, r"topk_weights: got shape \[5, 3\], want \[5, 2\]"),
    "activation": ({"activation": "relu"}, "activation: got 'relu', want 'silu', 'gelu', 'swiglu'"),
    "no activation": ({"activation": None}, "activation: got None, want 'silu'"),
    "rows without a gate": (
        {"activation": "gelu"},
        r"down: got shape \[64, 32\], want \[.., 64\], all of gate_up's rows, as activation is",
    ),
    "batch-invariant by a number": ({"batch_invariant": None}, "batch_invariant: got None, want True or False"),
    "out with gaps": ({"out": numbers(5, 128)[:, ::2]}, "out: got strides .* want a contiguous tensor"),
    "out a list": ({"out": [0.0]}, "out: got list, want a torch.Tensor"),
    "out in fp64": ({"out": numbers(5, 64).double()}, "out: got dtype torch.float64, want one of torch.bfloat16"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_MOE.values(), ids=list(BAD_MOE))
def test_layer_arguments_that_do_not_fit_are_refused_by_name(changes, message):
    given = {"x": numbers(5, 64), "gate_up": experts(2, 64, 64)[0], "down": experts(2, 64, 32)[0]}
    given |= {"topk_ids": IDS, "topk_weights": torch.ones(5, 2)}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        fused_moe(**(given | changes))


def test_an_expert_that_there_is_not():
    weights = experts(2, 64, 64)[0]
    assert torch.equal(weights[-1].codes, weights[1].codes)
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"^expert: got {index}, want -2 to 1"):
            weights[index]
    for wrong in ("a", 1.0, True, slice(0, 1)):
        with pytest.raises(TypeError, match="^expert: got .*, want an int"):
            weights[wrong]  # type: ignore[index]


def test_stacked_experts_must_be_alike():
    one: Any = known(64, 64).pack()
    cases: list[tuple[Any, str]] = [
        (known(64, 128).pack(), r"weights: got shape \(64, 128\) of expert 1, want \(64, 64\)"),
        (known(64, 64).pack(perm=torch.arange(64)), "weights: got perm with expert 1"),
        ("w", "weights: got str as expert 1, want a PackedWeight"),
    ]
    for other, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            stack_experts([one, other])
    with pytest.raises(ValueError, match="weights: got none"):
        stack_experts([])
    assert isinstance(stack_experts([one])[0], PackedWeight)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scales", 2.0**27, r"scales: got a scale of 1\.342.*, want bf16 scales below 2\*\*27"),
        ("zeros", 17, "zeros: got the zero point 17, want 0 to 16 for 4-bit codes"),
    ],
)
def test_numbers_that_kernels_cannot_take_are_refused_in_any_expert(name, value, message):
    weights, _ = experts(3, 64, 64, zero_point=True)
    spoilt = getattr(weights, name).clone()
    spoilt[2, 0, 1, 63] = value
    with pytest.raises(ValueError, match=f"^{message}"):
        replace(weights, **{name: spoilt})
    assert len(replace(weights, **{name: spoilt}, check_values=False)) == 3


# -- the operators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 4, 4, 1], dtype=torch.int32)])
def test_the_grouped_operator_passes_opcheck(rows):
    weight = experts(2, 70, 64, zero_point=True)[0]
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32)
    arguments = (numbers(5, 64), weight.codes, weight.scales, weight.zeros, offsets, rows, numbers(2, 70))
    fields = (weight.format.key, *weight.shape, "swiglu", BF16)
    torch.library.opcheck(torch.ops.cute_kernels.grouped_linear.default, (*arguments, *fields))


def test_the_layer_compiles_without_graph_breaks_and_passes_opcheck():
    gate_up, down = experts(2, 64, 64)[0], experts(2, 64, 32)[0]
    x, weights = numbers(5, 64), torch.rand(5, 2)
    tensors = (x, gate_up.codes, gate_up.scales, None, down.codes, down.scales, None, IDS, weights)
    fields = ("w4_g32", 64, 64, "w4_g32", 64, 32, BF16)
    torch.library.opcheck(torch.ops.cute_kernels.fused_moe.default, (*tensors, *fields))
    torch.compiler.reset()

    def layer(x):
        return fused_moe(x * 2, gate_up, down, weights, IDS) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_a_layer_is_exported_for_any_number_of_tokens():
    class Layer(torch.nn.Module):
        def forward(self, x, ids, weights):
            return fused_moe(x, gate_up, down, weights, ids)

    gate_up, down, tokens = experts(2, 64, 64)[0], experts(2, 64, 32)[0], torch.export.Dim("tokens")
    given = numbers(5, 64), IDS, torch.rand(5, 2)
    program = torch.export.export(Layer(), given, dynamic_shapes=({0: tokens},) * 3).module()
    fewer = [tensor[:3] for tensor in given]
    assert torch.equal(program(*fewer), fused_moe(fewer[0], gate_up, down, *fewer[:0:-1]))
