"""Every importer gives exactly the weights of a layer that was packed, code by code, from the format's description."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_kernels import PackedWeight, blocks, quantized_linear
from cute_kernels.formats.weights import shifted
from cute_kernels.integrations.checkpoints.gptq import words_of_v2
from tests.integrations.checkpoints import goldens
from tests.layouts.test_fastertransformer import CASES, naive_preprocess

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def assert_exact(packed: PackedWeight, golden: goldens.Layer) -> None:
    """The weight is the golden one; so are one-hot products, which take act-order's way through the layer."""
    assert packed.shape == golden.shape and packed.dtype == golden.scales.dtype
    assert torch.equal(packed.dequantize(FP64), golden.dense)
    one_hot = torch.eye(golden.shape[1], dtype=packed.dtype)
    assert torch.equal(quantized_linear(one_hot, packed), golden.dense.T.to(packed.dtype))


# -- AWQ ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [False, True])
def test_awq(group, symmetric):
    golden = goldens.layer(group=group, symmetric=symmetric)
    packed = PackedWeight.from_awq(**goldens.awq(golden))
    assert packed.group_size == (None if group == 128 else group) and (packed.zeros is None) == symmetric
    assert_exact(packed, golden)


def test_awq_written_out():
    """One word holds columns 0, 2, 4, 6, 1, 3, 5, 7; 0x76543210 puts 0 in column 0, 4 in column 1, 1 in column 2."""
    qweight = torch.full((32, 1), 0x76543210, dtype=torch.int32)
    packed = PackedWeight.from_awq(qweight, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 8).half())
    assert packed.dequantize(FP32)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_awq_scales_of_inputs_are_kept_apart():
    golden, scale = goldens.layer(), torch.linspace(0.5, 2, 128).half()
    packed = PackedWeight.from_awq(**goldens.awq(golden), input_scale=scale)
    assert torch.equal(packed.dequantize(FP64), golden.dense)
    got = quantized_linear(torch.eye(128).half(), packed, out_dtype=FP32)
    assert torch.equal(got, (scale[:, None].double() * golden.dense.T.half().double()).float())


# -- GPTQ --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(bits, version, act_order, symmetric):
    golden = goldens.layer(bits=bits, act_order=act_order, symmetric=symmetric, lowest_zero=2 - version)
    stored_as = "gptq" if version == 1 else "gptq_v2"
    packed = PackedWeight.from_gptq(**goldens.gptq(golden, version), bits=bits, checkpoint_format=stored_as)
    assert (packed.perm is not None) == act_order and (packed.zeros is None) == symmetric and packed.group_size == 32
    assert_exact(packed, golden)


def test_gptq_without_groups_in_order_and_with_a_short_last_group():
    golden = goldens.layer(k=160, group=64)
    tensors = goldens.gptq(golden, version=2)
    del tensors["g_idx"]
    assert_exact(PackedWeight.from_gptq(**tensors, checkpoint_format="gptq_v2", group_size=64), golden)


def test_zero_points_of_one_word_a_group_are_taken_whatever_their_strides():
    """Of 8 columns: torch calls [groups, 1] contiguous with any last stride."""
    codes = torch.randint(0, 2**31, (32, 8), dtype=torch.int32)
    zeros, scales = torch.randint(0, 2**31, (2, 1), dtype=torch.int32), torch.rand(2, 8).half()
    want = PackedWeight.from_gptq(codes, zeros, scales, checkpoint_format="gptq_v2").dequantize(FP32)
    apart = zeros.as_strided((2, 1), (1, 2))
    assert torch.equal(PackedWeight.from_gptq(codes, apart, scales, checkpoint_format="gptq_v2").dequantize(FP32), want)


def test_gptq_act_order_with_a_short_last_group():
    golden = goldens.layer(k=160, group=64, act_order=True)
    assert_exact(PackedWeight.from_gptq(**goldens.gptq(golden, 2), checkpoint_format="gptq_v2"), golden)


@pytest.mark.parametrize(("bits", "ones"), [(4, 0x11111111), (8, 0x01010101)])
def test_gptq_v1_zero_points_of_zero_are_refused_since_writers_differ(bits, ones):
    """GPTQModel makes v1 of v2 by one subtraction from each word: a zero point 0 borrows from its neighbour. Others
    subtract from each zero point."""
    golden = goldens.layer(bits=bits)
    assert any(zero == 0 for row in golden.zeros for zero in row)
    tensors = goldens.gptq(golden, version=2)
    whole = tensors["qzeros"] - ones
    each = goldens.pack_rows([[(z - 1) % (1 << bits) for z in row] for row in goldens.transposed(golden.zeros)], bits)
    assert not torch.equal(whole, each) and torch.equal(words_of_v2(whole, bits), tensors["qzeros"])
    for qzeros in (whole, each):
        with pytest.raises(ValueError, match="^qzeros: got a zero point 0 in format 'gptq', which writers store in"):
            PackedWeight.from_gptq(**tensors | {"qzeros": qzeros}, bits=bits)


@pytest.mark.parametrize(("bits", "ones"), [(4, 0x11111111), (8, 0x01010101)])
def test_gptq_v1_zero_points_of_zero_that_are_the_last_of_a_word_are_no_riddle(bits, ones):
    golden = goldens.layer(bits=bits, lowest_zero=1)
    for row in golden.zeros[32 // bits - 1 :: 32 // bits]:
        row[:] = [0] * len(row)
    tensors = goldens.gptq(golden, version=2)
    tensors["qzeros"] = tensors["qzeros"] - ones
    assert_exact(PackedWeight.from_gptq(**tensors, bits=bits), golden)


# -- compressed-tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("n", "k"), [(72, 128), (70, 100), (67, 131)])
def test_compressed_tensors(bits, act_order, n, k):
    golden = goldens.layer(n, k, 32, bits, act_order=act_order, dtype=BF16)
    packed = PackedWeight.from_compressed_tensors(**goldens.compressed_tensors(golden), group_size=32)
    assert (packed.bits, packed.perm is not None) == (bits, act_order)
    assert_exact(packed, golden)


def test_compressed_tensors_symmetric_per_channel_and_whole():
    golden = goldens.layer(group=128, symmetric=True)
    tensors = goldens.compressed_tensors(golden)
    packed = PackedWeight.from_compressed_tensors(tensors["weight_packed"], tensors["weight_scale"])
    assert packed.group_size is None and packed.zeros is None
    assert_exact(packed, golden)
    whole = PackedWeight.from_compressed_tensors(tensors["weight_packed"], torch.tensor([0.25]).half())
    assert torch.equal(whole.dequantize(FP64), (torch.tensor(golden.codes).double() - 8) / 4)
    for zero in (0, -3):  # compressed-tensors keeps a symmetric weight's, too
        tensors["weight_zero_point"] = torch.tensor([zero], dtype=torch.int8)
        tensors |= {"weight_scale": torch.tensor([0.25]).half(), "weight_g_idx": torch.full((128,), -1)}
        whole = PackedWeight.from_compressed_tensors(**tensors)
        assert torch.equal(whole.dequantize(FP64), (torch.tensor(golden.codes).double() - 8 - zero) / 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_with_zero_points_that_are_not_packed(bits):
    golden = goldens.layer(bits=bits)
    tensors = goldens.compressed_tensors(golden)
    tensors["weight_zero_point"] = (torch.tensor(golden.zeros) - (1 << (bits - 1))).to(torch.int8)
    tensors["weight_g_idx"] = torch.full((128,), -1)
    assert_exact(PackedWeight.from_compressed_tensors(**tensors), golden)


# -- HQQ ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "group"), [(72, 64), (67, 64), (200, 128), (72, 32)])
def test_hqq(bits, n, group):
    golden = goldens.layer(n, 128, group, bits)
    packed = PackedWeight.from_hqq(**goldens.hqq(golden), shape=golden.shape, bits=bits)
    assert_exact(packed, golden)


@pytest.mark.parametrize("more", [0.25, 12.0], ids=["between codes", "beyond codes"])
@pytest.mark.parametrize("bits", [4, 8])
def test_hqq_zero_points_that_are_no_codes_are_kept(bits, more):
    """Exactly but for one rounding of (m - zero) * scale to the dtype of the scales."""
    golden = goldens.layer(group=64, bits=bits)
    tensors = goldens.hqq(golden)
    tensors["zero"] = tensors["zero"] + more
    steps = golden.scales.double().repeat_interleave(64, dim=1) * more
    packed = PackedWeight.from_hqq(**tensors, shape=golden.shape, bits=bits)
    assert packed.format is shifted(bits, 64)
    error = (packed.dequantize(FP64) - (golden.dense - steps)).abs()
    middle = 1 << (bits - 1)
    assert (error <= 2.0**-11 * middle * 2 * golden.scales.double().repeat_interleave(64, dim=1)).all()


# -- torchao -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner_k_tiles", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_torchao_tinygemm(inner_k_tiles, group):
    golden = goldens.layer(72, 256, group, dtype=BF16)
    assert_exact(PackedWeight.from_torchao(**goldens.tinygemm(golden, inner_k_tiles)), golden)


def test_torchao_padding_is_cut_off():
    golden = goldens.layer(72, 1024, 64, dtype=BF16)
    packed = PackedWeight.from_torchao(**goldens.tinygemm(golden), shape=(70, 800))
    assert packed.shape == (70, 800) and torch.equal(packed.dequantize(FP64), golden.dense[:70, :800])


def test_torchao_shifts_between_codes_are_kept_bit_by_bit():
    golden = goldens.layer(72, 256, 64, dtype=BF16)
    tensors = goldens.tinygemm(golden)
    shifts = torch.rand(4, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors["scale_and_zero"][..., 1] = shifts
    packed = PackedWeight.from_torchao(**tensors)
    scales, shifts = (values.repeat_interleave(64, dim=1) for values in (golden.scales.double(), shifts.T.double()))
    want = (torch.tensor(golden.codes).double() - 8) * scales + shifts
    assert packed.format is shifted(4, 64) and torch.equal(packed.dequantize(torch.float32), want.float())
    assert torch.equal(packed.dequantize(), want.bfloat16())


@pytest.mark.parametrize("symmetric", [False, True])
def test_torchao_plain_int8(symmetric):
    golden = goldens.layer(bits=8, group=128, symmetric=symmetric, dtype=BF16)
    signed = (torch.tensor(golden.codes) - 128).to(torch.int8)
    zero_point = None if symmetric else torch.tensor(golden.zeros)[:, 0] - 128
    packed = PackedWeight.from_torchao(int_data=signed, scale=golden.scales[:, 0], zero_point=zero_point)
    assert_exact(packed, golden)


# -- FasterTransformer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "arch", "activation_bits"), CASES)
@pytest.mark.parametrize("group", [32, 128])
def test_fastertransformer_of_every_architecture(bits, arch, activation_bits, group):
    golden = goldens.layer(72, 128, group, bits, symmetric=True)
    signed = goldens.transposed([[(code + (1 << bits - 1)) % (1 << bits) for code in row] for row in golden.codes])
    flat = [code for row in signed for code in row]
    if bits == 4:
        flat = [low | high << 4 for low, high in zip(flat[::2], flat[1::2], strict=True)]
    row_major = torch.tensor(flat, dtype=torch.uint8).view(torch.int8).view(128, -1)
    weight = naive_preprocess(row_major, bits, arch, activation_bits).view(128, -1)
    scales = golden.scales[:, 0] if group == 128 else golden.scales.T
    options = {"bits": bits, "arch": arch, "activation_bits": activation_bits}
    assert_exact(PackedWeight.from_fastertransformer(weight, scales, **options), golden)
    if arch >= 90:  # experts have the Ampere layout
        expert = naive_preprocess(row_major, bits, 120, activation_bits).view(1, 128, -1)
        assert_exact(PackedWeight.from_fastertransformer(expert, scales, **options), golden)


# -- all of them -------------------------------------------------------------------------------------------------------


@pytest.fixture
def smallest_blocks():
    with blocks.at_most(1):
        yield


@pytest.mark.usefixtures("smallest_blocks")
def test_blocks_of_rows_are_unpacked_one_at_a_time():
    golden = goldens.layer(200, 128, 64, act_order=True, lowest_zero=1)
    assert_exact(PackedWeight.from_gptq(**goldens.gptq(golden)), golden)
    golden = goldens.layer(200, 128, 64)
    assert_exact(PackedWeight.from_awq(**goldens.awq(golden)), golden)
    assert_exact(PackedWeight.from_hqq(**goldens.hqq(golden), shape=golden.shape), golden)
    assert_exact(PackedWeight.from_compressed_tensors(**goldens.compressed_tensors(golden)), golden)
    golden = goldens.layer(200, 128, 64, dtype=BF16)
    assert_exact(PackedWeight.from_torchao(**goldens.tinygemm(golden)), golden)


def test_scales_can_be_rounded_to_another_dtype():
    golden = goldens.layer()
    packed = PackedWeight.from_awq(**goldens.awq(golden), dtype=BF16)
    assert packed.dtype == BF16
    rounded = goldens.Layer(golden.codes, golden.zeros, golden.scales.bfloat16(), golden.group_of, 4)
    assert torch.equal(packed.dequantize(FP64), rounded.dense)
    tensors = goldens.awq(golden) | {"scales": golden.scales.T.float()}
    assert PackedWeight.from_awq(**tensors).dtype == BF16
    assert PackedWeight.from_awq(**tensors, dtype=FP16).dtype == FP16


def test_the_core_does_not_import_the_importers(output_of: Callable[..., str]):
    code = "import sys, cute_kernels.gemm; print([m for m in sys.modules if 'checkpoints' in m or m == 'safetensors'])"
    assert output_of(code) == "[]"
