"""Tensors that do not make a layer: the error names the tensor, what came and what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import PackedWeight
from tests.integrations.checkpoints import goldens

Changes = dict[str, Any]


def refused(make: Callable[..., PackedWeight], arguments: Changes, changes: Changes, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        make(**(arguments | changes))


LAYER = goldens.layer(72, 128, 32, lowest_zero=1)
AWQ: dict[str, tuple[Changes, str]] = {
    "no scales": ({"scales": None}, "scales: got NoneType, want a torch.Tensor"),
    "a word too few": (
        {"qweight": torch.zeros(128, 8, dtype=torch.int32)},
        r"qweight: got shape \[128, 8\], want \[128, 9\]: 8 codes a word for the 72 columns of scales",
    ),
    "zeros of other groups": (
        {"qzeros": torch.zeros(3, 9, dtype=torch.int32)},
        r"qzeros: got shape \[3, 9\], want \[4, 9\]: 8 codes a word for each group",
    ),
    "codes as bytes": ({"qweight": torch.zeros(128, 36).byte()}, "qweight: got dtype torch.uint8, want torch.int32"),
    "flat": ({"qweight": torch.zeros(9).int()}, r"qweight: got shape \[9\], want \[K, N / 8\]"),
    "odd columns": ({"scales": torch.ones(4, 70).half()}, r"scales: got shape \[4, 70\], want .* a multiple of 8"),
    "another group size": ({"group_size": 64}, "group_size: got 64, want one of 16, .*, 4 groups of K = 128"),
    "no groups": ({"group_size": -1}, "group_size: got -1, one scale per channel, want what the scales' 4 groups say"),
    "NaN": ({"scales": torch.full((4, 72), torch.nan).half()}, "scales: got values that are not finite"),
    "beyond fp16": (
        {"scales": torch.full((4, 72), 1e6), "dtype": torch.float16},
        "scales: got values that are not finite in torch.float16",
    ),
    "dtype": ({"dtype": torch.float32}, "dtype: got torch.float32, want None, torch.bfloat16 or torch.float16"),
    "input_scale": (
        {"input_scale": torch.ones(72)},
        r"input_scale: got shape \[72\], want \[128\]: one for each input",
    ),
    "input_scale NaN": ({"input_scale": torch.full((128,), torch.nan)}, "input_scale: got values that are not finite"),
    "input_scale beyond fp16": (
        {"input_scale": torch.full((128,), 1e6)},
        "input_scale: got values that are not finite in torch.float16",
    ),
}


def test_a_scale_that_kernels_have_no_room_for_is_named_as_the_checkpoint_names_it():
    arguments = goldens.compressed_tensors(LAYER)
    large = {"weight_scale": torch.full_like(arguments["weight_scale"], 2.0**30, dtype=torch.float32)}
    refused(
        PackedWeight.from_compressed_tensors, arguments, large, "weight_scale: got a scale of 1.07374e.09, want bf16"
    )


@pytest.mark.parametrize(("changes", "message"), AWQ.values(), ids=list(AWQ))
def test_awq(changes, message):
    refused(PackedWeight.from_awq, goldens.awq(LAYER), changes, message)


def test_groups_that_are_none_of_the_kernels():
    tensors = goldens.awq(goldens.layer(72, 128, 8))
    message = "scales: got 16 groups of K = 128, want groups of 16, 32, 64, 128, 256 or 1"
    refused(PackedWeight.from_awq, tensors, {}, message)


def test_groups_of_one_size_that_kernels_have_not_are_not_taken_for_longer_ones():
    """Two groups of 192 are of 96, which 128 and a shorter last one would fit, too."""
    tensors = goldens.awq(goldens.layer(72, 192, 96))
    message = "group_size: got None, want it said: 2 groups of K = 192 are of 96, or of 128 with a shorter last one"
    refused(PackedWeight.from_awq, tensors, {}, message)
    refused(PackedWeight.from_awq, tensors, {"group_size": 96}, "group_size: got 96, want one of 16, 32, 64, 128, 256")
    assert PackedWeight.from_awq(**tensors, group_size=128).group_size == 128


def g_idx(**changes: int) -> torch.Tensor:
    groups = torch.tensor(LAYER.group_of, dtype=torch.int32)
    for place, group in changes.items():
        groups[int(place.removeprefix("at_"))] = group
    return groups


GPTQ: dict[str, tuple[Changes, str]] = {
    "no qzeros": ({"qzeros": None}, "qzeros: got NoneType, want a torch.Tensor"),
    "g_idx too high": ({"g_idx": g_idx(at_5=4)}, "g_idx: got group 4 for input 5, want 0 to 3"),
    "g_idx negative": ({"g_idx": g_idx(at_7=-1)}, "g_idx: got group -1 for input 7, want 0 to 3"),
    "uneven groups": ({"g_idx": g_idx(at_0=1)}, "g_idx: got 31 inputs in group 0, want 32"),
    "short g_idx": (
        {"g_idx": g_idx()[:120]},
        r"qweight: got shape \[16, 72\], want \[15, 72\]: 8 codes a word for g_idx",
    ),
    "floating g_idx": ({"g_idx": g_idx().float()}, "g_idx: got dtype torch.float32, want torch.int32 or torch.int64"),
    "bits": ({"bits": 3}, "bits: got 3, want 4 or 8"),
    "8 bits": ({"bits": 8}, r"qweight: got shape \[16, 72\], want \[32, 72\]: 4 codes a word for g_idx"),
    "format": ({"checkpoint_format": "marlin"}, "checkpoint_format: got 'marlin', want 'gptq' or 'gptq_v2'"),
    "columns": (
        {"scales": torch.ones(4, 64).half()},
        r"qweight: got shape \[16, 72\], want \[16, 64\]: a column for each",
    ),
    "qzeros": ({"qzeros": torch.zeros(4, 8).int()}, r"qzeros: got shape \[4, 8\], want \[4, 9\]: 8 codes a word"),
}


@pytest.mark.parametrize(("changes", "message"), GPTQ.values(), ids=list(GPTQ))
def test_gptq(changes, message):
    refused(PackedWeight.from_gptq, goldens.gptq(LAYER), changes, message)


@pytest.mark.parametrize(("bits", "zero"), [(4, 9), (8, 129)])
def test_symmetric_gptq_v2_zero_points_taken_for_v1(bits, zero):
    tensors = goldens.gptq(goldens.layer(bits=bits, symmetric=True), version=2)
    message = f"qzeros: got the zero point {zero} everywhere, .* give checkpoint_format='gptq_v2'"
    refused(PackedWeight.from_gptq, tensors, {"bits": bits}, message)


COMPRESSED: dict[str, tuple[Changes, str]] = {
    "no scale": ({"weight_scale": None}, "weight_scale: got NoneType, want a torch.Tensor"),
    "a word too few": (
        {"weight_packed": torch.zeros(72, 15, dtype=torch.int32)},
        r"weight_packed: got shape \[72, 15\], want 8 or 4 codes a word for weight_shape \[72, 128\]",
    ),
    "other rows": (
        {"weight_shape": torch.tensor([64, 128])},
        r"weight_packed: got shape \[72, 16\], want 8 or 4 codes a word for weight_shape \[64, 128\]",
    ),
    "no bits": ({"bits": 0, "weight_shape": None}, "bits: got 0, want 4 or 8"),
    "other bits": ({"bits": 8}, r"weight_packed: got shape \[72, 16\], want 4 codes a word for weight_shape"),
    "scales by column": (
        {"weight_scale": torch.ones(4, 72)},
        r"weight_scale: got shape \[4, 72\], want \[72, groups\]",
    ),
    "zero points": (
        {"weight_zero_point": torch.zeros(8, 4, dtype=torch.int32)},
        r"weight_zero_point: got shape \[8, 4\], want \[9, 4\]: 8 codes a word",
    ),
    "one zero point of many groups": (
        {"weight_zero_point": torch.zeros(1, dtype=torch.int8)},
        r"weight_zero_point: got shape \[1\], want \[72, 4\], a row for each of W",
    ),
    "zero points beyond 4 bits": (
        {"weight_zero_point": torch.full((72, 4), 8, dtype=torch.int8)},
        "weight_zero_point: got values outside -8 to 7, want 4-bit ones",
    ),
    "g_idx": ({"weight_g_idx": g_idx(at_3=9)}, "weight_g_idx: got group 9 for input 3, want 0 to 3"),
}


@pytest.mark.parametrize(("changes", "message"), COMPRESSED.values(), ids=list(COMPRESSED))
def test_compressed_tensors(changes, message):
    refused(PackedWeight.from_compressed_tensors, goldens.compressed_tensors(LAYER), changes, message)


HQQ: dict[str, tuple[Changes, str]] = {
    "no zero": ({"zero": None}, "zero: got NoneType, want a torch.Tensor"),
    "axis 0": ({"axis": 0}, "axis: got 0, want 1: groups along K"),
    "scales of axis 0": ({"scale": torch.ones(1, 288)}, r"scale: got shape \[1, 288\], that of axis 0, want \[N"),
    "another shape": ({"shape": (72, 64)}, r"W_q: got 4608 bytes, want 2304: 4-bit codes of \[72, 64\]"),
    "8 bits": ({"bits": 8}, "W_q: got 4608 bytes, want 9216: 8-bit codes"),
    "3-bit words": ({"W_q": torch.zeros(9, dtype=torch.int32)}, "W_q: got dtype torch.int32, want torch.uint8"),
    "scales": ({"scale": torch.ones(71, 1)}, "scale: got 71 numbers, want a multiple of the 72 rows"),
    "fewer zeros": ({"zero": torch.ones(72, 1)}, "zero: got 72 numbers, want 288, as many as scale"),
    "zero is NaN": ({"zero": torch.full((288, 1), torch.nan)}, "zero: got values that are not finite, want finite"),
    "no shape": ({"shape": (9216,)}, r"shape: got \[9216\], want \(N, K\)"),
}


@pytest.mark.parametrize(("changes", "message"), HQQ.values(), ids=list(HQQ))
def test_hqq(changes, message):
    refused(PackedWeight.from_hqq, goldens.hqq(LAYER) | {"shape": LAYER.shape}, changes, message)


TORCHAO: dict[str, tuple[Changes, str]] = {
    "nothing": ({"packed_weight": None}, "packed_weight: got NoneType, want a torch.Tensor"),
    "both kinds": ({"int_data": torch.zeros(8, 128).char()}, "int_data: got it together with INT4 tensors"),
    "lanes": ({"packed_weight": torch.zeros(9, 1, 16, 4).int()}, r"packed_weight: got shape \[9, 1, 16, 4\], want"),
    "no scales": ({"scale_and_zero": None}, "scale_and_zero: got NoneType"),
    "scales": (
        {"scale_and_zero": torch.ones(4, 64, 2)},
        r"scale_and_zero: got shape \[4, 64, 2\], want \[groups, 72, 2",
    ),
    "shape": ({"shape": (80, 128)}, r"shape: got \[80, 128\], want what packed_weight's \[72, 128\] pads"),
}


@pytest.mark.parametrize(("changes", "message"), TORCHAO.values(), ids=list(TORCHAO))
def test_torchao(changes, message):
    refused(PackedWeight.from_torchao, goldens.tinygemm(LAYER), changes, message)


PLAIN: dict[str, tuple[Changes, str]] = {
    "no scale": ({"scale": None}, "scale: got NoneType"),
    "codes in int32": ({"int_data": torch.zeros(8, 64).int()}, "int_data: got dtype torch.int32, want torch.int8"),
    "scale of columns": ({"scale": torch.ones(64)}, r"scale: got shape \[64\], want \[8\] or \[8, groups\]"),
    "one zero point": ({"zero_point": torch.zeros(1)}, r"zero_point: got shape \[1\], want that of scale, \[8\]"),
}


@pytest.mark.parametrize(("changes", "message"), PLAIN.values(), ids=list(PLAIN))
def test_torchao_plain(changes, message):
    arguments = {"int_data": torch.zeros(8, 64, dtype=torch.int8), "scale": torch.ones(8)}
    refused(PackedWeight.from_torchao, arguments, changes, message)


FASTERTRANSFORMER: dict[str, tuple[Changes, str]] = {
    "no scales": ({"scales": None}, "scales: got NoneType, want a torch.Tensor"),
    "unsigned": ({"weight": torch.zeros(128, 36).byte()}, "weight: got dtype torch.uint8, want torch.int8"),
    "a stack": ({"weight": torch.zeros(2, 128, 36).char()}, r"weight: got shape \[2, 128, 36\], want \[K, N"),
    "8 bits": ({"bits": 8}, r"scales: got shape \[72\], want \[36\] or \[groups, 36\]"),
    "K off the tile": ({"weight": torch.zeros(96, 36).char()}, "weight: K is 96; want a positive multiple of 64"),
    "arch": ({"arch": 61}, "arch: got 61, want one of 70, 72"),
}


@pytest.mark.parametrize(("changes", "message"), FASTERTRANSFORMER.values(), ids=list(FASTERTRANSFORMER))
def test_fastertransformer(changes, message):
    arguments = {"weight": torch.zeros(128, 36, dtype=torch.int8), "scales": torch.ones(72), "bits": 4, "arch": 80}
    refused(PackedWeight.from_fastertransformer, arguments, changes, message)
