"""Parts of packed weights that begin inside tiles and groups: exactly those rows and columns, whatever the format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import PackedExperts, PackedWeight, quantize_experts, quantized_linear
from cute_kernels.formats.weights.integers import check_scales
from cute_kernels.gemm import reorder_outputs, slice_inputs, slice_outputs
from tests.linear.cases import GROUPS, known

FP64 = torch.float64


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.sampled_from(GROUPS),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.integers(1, 300),
    st.integers(1, 700),
    st.data(),
)
def test_a_part_is_those_rows_and_those_columns(bits, group_size, zero_point, dtype, n, k, data):
    case = known(n, k, bits, group_size, zero_point, dtype)
    weight = case.pack()
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    rows = slice_outputs(weight, start, stop)
    assert torch.equal(rows.dequantize(FP64), case.dense[start:stop])
    assert (rows.bits, rows.group_size, rows.dtype) == (bits, group_size, dtype)
    step = 1 if group_size is None else 32
    first = step * data.draw(st.integers(0, (k - 1) // step))
    last = data.draw(st.integers(first + 1, k))
    columns = slice_inputs(weight, first, last)
    assert torch.equal(columns.dequantize(FP64), case.dense[:, first:last])
    check_scales("scales", columns.scales)
    PackedWeight(columns.codes, columns.scales, columns.zeros, columns.format, columns.shape)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([4, 8]), st.sampled_from(GROUPS), st.booleans(), st.integers(1, 300), st.integers(1, 300))
def test_rows_in_another_order_are_those_rows(bits, group_size, zero_point, n, k):
    case = known(n, k, bits, group_size, zero_point)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    for perm in (None, torch.randperm(k).int()):
        weight = replace(case.pack(), perm=perm)
        found = reorder_outputs(weight, order.int() if k % 2 else order)
        assert torch.equal(found.dequantize(FP64), weight.dequantize(FP64)[order])
        PackedWeight(found.codes, found.scales, found.zeros, found.format, found.shape, found.perm)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (torch.arange(69), r"order: got torch.int64 \[69\], want int32 or int64 \[70\], a row for each"),
        (torch.zeros(70, dtype=torch.int32), "order: got indices that are missing or repeated"),
        (torch.arange(70.0), r"order: got torch.float32 \[70\]"),
        ([0], "order: got list"),
    ],
)
def test_an_order_of_rows_has_each_once(order, message):
    with pytest.raises((TypeError, ValueError), match=message):
        reorder_outputs(known(70, 64, 4, 64).pack(), order)
    with pytest.raises(TypeError, match="weight: got Tensor, want a PackedWeight"):
        reorder_outputs(torch.zeros(2, 2), torch.arange(2))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("k", "group_size", "world_size", "want"), [
    (29568, 128, 2, 64),  # Qwen2-72B's down projection
    (29568, 128, 4, 32),
    (29568, 128, 1, 128),
    (11008, 128, 2, 128),
    (11008, 256, 4, 64),
    (320, 64, 2, 32),
    (29568, None, 8, None),
])  # fmt: skip
def test_shares_of_tensor_parallelism_add_up_to_the_layer(k, group_size, world_size, want):
    case = known(70, k, 4, group_size, zero_point=True)
    weight, share = case.pack(), k // world_size
    parts = [slice_inputs(weight, rank * share, (rank + 1) * share) for rank in range(world_size)]
    assert min(part.group_size or 1 << 30 for part in parts) == (want or 1 << 30)
    x = torch.randn(3, k, dtype=torch.bfloat16)
    got = sum(
        quantized_linear(x[:, rank * share : (rank + 1) * share], part, out_dtype=torch.float32).double()
        for rank, part in enumerate(parts)
    )
    wanted = x.double() @ case.dense.T
    assert isinstance(got, torch.Tensor) and (got - wanted).norm() < 4e-3 * wanted.norm()
    rows = [slice_outputs(weight, first, last) for first, last in ((0, 23), (23, 70))]
    assert torch.equal(torch.cat([part.dequantize(FP64) for part in rows]), case.dense)


def test_parts_that_begin_between_tiles_and_groups_are_what_shards_are():
    weight = known(256, 512, 4, 128, zero_point=True).pack()
    for rank in range(2):
        for part, shard in (
            (slice_outputs(weight, rank * 128, (rank + 1) * 128), weight.shard_n(rank, 2)),
            (slice_inputs(weight, rank * 256, (rank + 1) * 256), weight.shard_k(rank, 2)),
        ):
            for name in ("codes", "scales", "zeros"):
                assert torch.equal(getattr(part, name), getattr(shard, name))
            assert (part.group_size, part.shape) == (shard.group_size, shard.shape)


def test_orders_and_scales_of_inputs_go_with_rows_and_columns():
    scale, perm = torch.rand(96).bfloat16(), torch.randperm(96)
    weight = known(70, 96).pack(perm=perm, input_scale=scale)
    rows = slice_outputs(weight, 3, 50)
    assert torch.equal(rows.dequantize(FP64), weight.dequantize(FP64)[3:50])
    assert rows.input_scale is not None and torch.equal(rows.input_scale, scale)
    columns = slice_inputs(known(70, 96).pack(input_scale=scale), 32, 90)
    assert columns.input_scale is not None and torch.equal(columns.input_scale, scale[32:90])
    with pytest.raises(ValueError, match="^weight: got one with perm"):
        slice_inputs(weight, 0, 64)


@pytest.mark.parametrize("zero_point", [False, True])
def test_parts_of_experts_are_parts_of_each(zero_point):
    experts = quantize_experts(torch.randn(3, 70, 320).bfloat16(), 4, 64, zero_point)
    dense = experts.dequantize(FP64)
    rows, columns = slice_outputs(experts, 5, 60), slice_inputs(experts, 160, 320)
    assert isinstance(rows, PackedExperts) and isinstance(columns, PackedExperts)
    assert torch.equal(rows.dequantize(FP64), dense[:, 5:60])
    assert torch.equal(columns.dequantize(FP64), dense[:, :, 160:]) and columns.group_size == 32


CALLS: list[tuple[Any, str]] = [
    (lambda w: slice_outputs(w, -1, 5), "start: got -1"),
    (lambda w: slice_outputs(w, 5, 5), "stop: got 5"),
    (lambda w: slice_outputs(w, 0, 71), "stop: got 71"),
    (lambda w: slice_inputs(w, 0, 97), "stop: got 97"),
    (lambda w: slice_inputs(w, 8, 64), "start: got 8, want a multiple of 16, the smallest group of inputs"),
    (lambda w: slice_inputs(w.dequantize(), 0, 64), "weight: got Tensor, want PackedWeight or PackedExperts"),
    (lambda w: slice_outputs(w, "1", 5), "start: got"),  # pyright: ignore[reportArgumentType]
    (lambda w: w.shard_k(0, 4), r"world_size: got 4, .*slice_inputs cuts inside groups"),
    (lambda w: w.shard_n(0, 2), r"world_size: got 2, .*slice_outputs takes any rows"),
]


@pytest.mark.parametrize(
    ("call", "message"), CALLS, ids=[message[:12] + str(i) for i, (_, message) in enumerate(CALLS)]
)
def test_parts_that_are_none_are_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call(known(70, 96).pack())
