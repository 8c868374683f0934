"""PackedWeight: what lies where, what it means, shards, state dicts, and what is refused."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import arguments, blocks
from cute_kernels.formats.weights import IntegerFormat, integers
from cute_kernels.gemm import PackedWeight, QuantizedLinear, quantized_linear
from cute_kernels.gemm import weight as weight_module
from cute_kernels.gemm.packed_experts import stack_experts
from layouts.transform import unpack
from layouts.weights import hopper
from tests.launchers import recording
from tests.linear.cases import GROUPS, known
from tests.observed import calls_of
from tests.tensors import offset

BF16, FP16 = torch.bfloat16, torch.float16


def same(a: PackedWeight, b: PackedWeight) -> bool:
    fields = (a.bits, a.group_size, a.shape) == (b.bits, b.group_size, b.shape)
    tensors = a.state_dict(), b.state_dict()
    return (
        fields
        and tensors[0].keys() == tensors[1].keys()
        and all(torch.equal(v, tensors[1][k]) for k, v in tensors[0].items())
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_point", [False, True])
def test_codes_scales_and_zeros_lie_where_the_kernels_look(bits, zero_point):
    case = known(70, 100, bits, 32, zero_point)
    packed = case.pack()
    assert packed.codes.shape == (2, 128 // hopper.tile_k(bits), 2048)
    assert packed.scales.shape == (2, 4, 64) and (packed.zeros is not None) == zero_point
    codes = unpack(hopper.restore(packed.codes, bits), bits)
    assert torch.equal(codes[:70, :100], case.codes)
    for n in (0, 63, 64, 69):
        for group in range(4):
            assert packed.scales[n // 64, group, n % 64] == case.scales[n, group]
            if packed.zeros is not None and case.zeros is not None:
                assert packed.zeros[n // 64, group, n % 64] == case.zeros[n, group]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("group_size", GROUPS)
def test_padding_stands_for_zero(bits, zero_point, group_size):
    packed = known(65, 70, bits, group_size, zero_point).pack()
    codes = unpack(hopper.restore(packed.codes, bits), bits)
    assert codes.shape == (128, 256 if group_size == 256 else 128)
    by_group = codes.view(128, packed.scales.shape[1], -1).int()
    zeros = torch.tensor(1 << (bits - 1)) if packed.zeros is None else packed.zeros.transpose(1, 2).reshape(128, -1, 1)
    offsets = (by_group - zeros.int()).view(codes.shape)
    assert not offsets[65:].any() and not offsets[:, 70:].any()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("group_size", GROUPS)
def test_a_weight_is_its_codes_less_zero_times_scale_rounded_once(dtype, bits, zero_point, group_size):
    case = known(70, 300, bits, group_size, zero_point, dtype)
    packed = case.pack()
    assert torch.equal(packed.dequantize(torch.float64), case.dense)
    assert torch.equal(packed.dequantize(torch.float32), case.dense.float())
    for rounded in (BF16, FP16):
        assert torch.equal(packed.dequantize(rounded), case.dense.to(rounded))
    assert packed.dequantize().dtype == packed.dtype == dtype


def test_zero_points_that_are_all_the_symmetric_one_are_dropped():
    case = known(64, 64, 4, 32, True)
    packed = replace(case, zeros=torch.full_like(case.scales, 8, dtype=torch.uint8)).pack()
    assert packed.zeros is None


def test_work_is_done_by_blocks_of_rows():
    case = known(300, 130, 8, 64, True)
    whole = case.pack()
    with blocks.at_most(64 * 192):
        assert list(weight_module.row_blocks(5, 192, torch.device("cpu"))) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
        assert same(case.pack(), whole)
        assert torch.equal(whole.dequantize(torch.float64), case.dense)


@pytest.mark.parametrize("device, calls", [("cpu", 56), ("cuda", 7)])
def test_a_gpu_has_few_and_large_blocks_since_each_is_many_launches(device, calls):
    found = list(weight_module.row_blocks(448, 4096, torch.device(device)))
    assert len(found) == calls and found[0][0] == 0 and found[-1][1] == 448


def test_act_order_takes_inputs_by_perm_and_gives_weights_in_their_own_order():
    perm = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    case = known(64, 96, 4, 32)
    position_of = perm.argsort()
    packed = replace(case, group_of=position_of // 32).pack(perm=perm)
    codes = unpack(hopper.restore(packed.codes, 4), 4)
    assert torch.equal(codes[:, :96], case.codes[:, perm])
    assert torch.equal(packed.dequantize(torch.float64), replace(case, group_of=position_of // 32).dense)
    with pytest.raises(ValueError, match="perm: got indices that are missing or repeated, want each of 0 to 95 once"):
        case.pack(perm=torch.zeros(96, dtype=torch.int64))


# -- shards ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.sampled_from(GROUPS),
    st.booleans(),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 2),
)
def test_shards_are_what_packing_the_parts_gives(bits, group_size, zero_point, world_size, rank):
    rank %= world_size
    share_n, share_k = 64, max(64, group_size or 64)
    case = known(share_n * world_size, share_k * world_size, bits, group_size, zero_point)
    packed = case.pack()
    rows = slice(rank * share_n, (rank + 1) * share_n)
    zeros = None if case.zeros is None else case.zeros[rows]
    part = replace(case, codes=case.codes[rows], scales=case.scales[rows], zeros=zeros)
    assert same(packed.shard_n(rank, world_size), part.pack())
    inputs = slice(rank * share_k, (rank + 1) * share_k)
    groups = (
        slice(None) if group_size is None else slice(rank * share_k // group_size, (rank + 1) * share_k // group_size)
    )
    zeros = None if case.zeros is None else case.zeros[:, groups]
    part = replace(case, codes=case.codes[:, inputs], scales=case.scales[:, groups], zeros=zeros)
    shard = packed.shard_k(rank, world_size)
    assert torch.equal(shard.dequantize(torch.float64), case.dense[:, inputs]) and same(shard, part.pack())


def test_a_shard_does_not_keep_the_whole_alive():
    packed = known(128, 128).pack()
    for shard in (packed.shard_n(1, 2), packed.shard_k(1, 2)):
        assert shard.codes.untyped_storage().nbytes() == packed.codes.nbytes // 2


def test_input_scale_and_perm_are_sharded_with_their_inputs():
    scale = torch.rand(128).bfloat16()
    perm = torch.cat((torch.arange(63, -1, -1), torch.arange(127, 63, -1)))
    shard = known(64, 128).pack(input_scale=scale, perm=perm).shard_k(1, 2)
    assert shard.input_scale is not None and torch.equal(shard.input_scale, scale[64:])
    assert shard.perm is not None and shard.perm.tolist() == list(range(63, -1, -1))
    mixed = known(64, 128).pack(perm=torch.arange(127, -1, -1))
    with pytest.raises(ValueError, match="^perm: rank 0 of 2 would take inputs outside its 64"):
        mixed.shard_k(0, 2)


# -- state dicts -------------------------------------------------------------------------------------------------------


def test_a_state_dict_comes_back_through_a_file(tmp_path):
    perm = torch.randperm(100)
    for packed in (
        known(70, 100, 8, None).pack(),
        known(70, 100, 4, 32, True, FP16).pack(perm=perm, input_scale=torch.rand(100).half()),
    ):
        safetensors.torch.save_file(packed.state_dict(), tmp_path / "weight.safetensors")
        back = PackedWeight.from_state_dict(safetensors.torch.load_file(tmp_path / "weight.safetensors"))
        assert same(back, packed)


BAD_STATES = {
    "no codes": ({"codes": None}, "codes: got no such tensor, want format, codes and scales"),
    "no format": ({"format": None}, "format: got no such tensor"),
    "another tensor": ({"qweight": torch.zeros(1)}, "qweight: got a tensor of that name, want none but codes"),
    "fp32 format": ({"format": torch.zeros(5)}, r"format: got torch.float32 \[5\], want torch.int64 \[5\]"),
    "format without data": (
        {"format": torch.zeros(5, dtype=torch.int64, device="meta")},
        "format: got a tensor without data",
    ),
    "a newer version": ({"format": torch.tensor([3, 70, 100, 4, 32])}, "format: got version 3, want 1 or 2"),
    "another K": (
        {"format": torch.tensor([1, 70, 200, 4, 32])},
        r"codes: got shape \[2, 2, 2048\], want \[2, 4, 2048\]",
    ),
    "a scale beyond all": (
        {"scales": torch.full((2, 4, 64), 3e8, dtype=torch.bfloat16)},
        r"scales: got a scale of .*, want bf16 scales below 2\*\*27",
    ),
    "perm out of range": ({"perm": torch.full((100,), 100).int()}, "perm: got indices that are missing or repeated"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_STATES.values(), ids=list(BAD_STATES))
def test_a_bad_state_dict_is_refused_by_name(changes, message):
    tensors = {**known(70, 100).pack().state_dict(), **changes}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        PackedWeight.from_state_dict({name: tensor for name, tensor in tensors.items() if tensor is not None})


ZEROED = integers(4, 32, True)
BAD_FIELDS = {
    "no format": ({"format": 4}, "format: got 4, want a WeightFormat, such as cute_kernels.formats.weights.integers"),
    "zero points there are not": ({"format": ZEROED}, "zeros: got none, want some for a weight in the format w4g32z"),
    "zero points there are": (
        {"zeros": torch.zeros(1, 2, 64).byte()},
        "zeros: got some, want None for a weight in the format w4g32$",
    ),
    "shape": ({"shape": (0, 64)}, r"shape: got \[0, 64\], want \(N, K\) with N and K at least 1"),
    "signed codes": ({"codes": torch.zeros(1, 1, 2048).char()}, "codes: got dtype torch.int8, want torch.uint8"),
    "wrong codes": (
        {"codes": torch.zeros(1, 2, 2048).byte()},
        r"codes: got shape \[1, 2, 2048\], want \[1, 1, 2048\] for a weight of 4-bit \[64, 64\] in groups of 32",
    ),
    "fp32 scales": ({"scales": torch.zeros(1, 2, 64)}, "scales: got dtype torch.float32, want torch.bfloat16 or"),
    "scales by row": ({"scales": torch.zeros(1, 64, 2).half()}, r"scales: got shape \[1, 64, 2\], want \[1, 2, 64\]"),
    "gaps": ({"scales": torch.zeros(1, 2, 128).half()[..., ::2]}, "scales: got strides .* want a contiguous tensor"),
    "zeros": ({"format": ZEROED, "zeros": torch.zeros(1, 2, 64)}, "zeros: got dtype torch.float32, want torch.uint8"),
    "perm": ({"perm": torch.zeros(64).long()}, "perm: got dtype torch.int64, want torch.int32"),
    "input_scale": (
        {"input_scale": torch.zeros(64).half()},
        "input_scale: got dtype torch.float16, want torch.bfloat16",
    ),
    "place": (
        {"format": ZEROED, "zeros": torch.zeros(1, 2, 64, dtype=torch.uint8, device="meta")},
        "zeros: got a tensor on meta",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_FIELDS.values(), ids=list(BAD_FIELDS))
def test_fields_that_do_not_fit_are_refused_by_name(changes, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        replace(known(64, 64).pack(), **changes)


@pytest.mark.parametrize("name", ["codes", "scales", "zeros", "perm", "input_scale"])
def test_codes_and_scales_at_odd_places_are_refused_on_a_gpu(name):
    """As of tensors of a file that is read into one buffer: kernels copy 16 bytes at a time. perm and input_scale they
    read anywhere."""
    packed = known(64, 64, 4, 32, zero_point=True).pack(perm=torch.arange(64), input_scale=torch.ones(64, dtype=BF16))
    moved = {name: offset(getattr(packed, name), 8)}
    assert torch.equal(replace(packed, **moved).dequantize(), packed.dequantize())  # a CPU reads them anywhere
    message = f"^{name}: got a tensor that starts 8 bytes past a multiple of 16"
    anywhere = name in ("perm", "input_scale")
    with recording(), nullcontext() if anywhere else pytest.raises(ValueError, match=message):
        replace(packed, **moved)


BAD_VALUES = {
    "a scale at the limit": (
        {"scales": torch.full((1, 2, 64), 2.0**27, dtype=BF16)},
        "scales: got a scale of 1.34218e",
    ),
    "a negative one": ({"scales": torch.full((1, 2, 64), -(2.0**30), dtype=BF16)}, "scales: got a scale of 1.07374e"),
    "an infinite one": ({"scales": torch.full((1, 2, 64), torch.inf, dtype=BF16)}, "scales: got a scale of inf, want"),
    "one beside NaN": (
        {"scales": torch.tensor([2.0**28, torch.nan]).to(BF16).repeat(64).view(1, 2, 64)},
        r"scales: got a scale of 2.68435e.08, want bf16 scales below 2\*\*27 = 134217728",
    ),
    "zero points": (
        {"format": ZEROED, "zeros": torch.full((1, 2, 64), 17).byte()},
        "zeros: got the zero point 17, want 0 to 16 for 4-bit",
    ),
    "no permutation": ({"perm": torch.zeros(64).int()}, "perm: got indices that are missing or repeated"),
    "inputs there are not": ({"perm": torch.arange(1, 65).int()}, "perm: got indices that are missing or repeated"),
}


@pytest.mark.parametrize(
    "make", [replace, lambda w, **changes: PackedWeight(**vars(w) | changes)], ids=["replaced", "made"]
)
@pytest.mark.parametrize(("changes", "message"), BAD_VALUES.values(), ids=list(BAD_VALUES))
def test_numbers_that_kernels_cannot_take_are_refused_in_a_weight_made_by_hand(changes, message, make):
    packed = known(64, 64).pack()
    with pytest.raises(ValueError, match=f"^{message}"):
        make(packed, **changes)
    assert make(packed, **changes, check_values=False).shape == packed.shape  # whoever has looked need not wait again


@pytest.mark.parametrize(
    ("dtype", "value"), [(BF16, 2.0**26.9), (BF16, -(2.0**26.9)), (BF16, torch.nan), (FP16, 65504.0), (FP16, torch.inf)]
)
def test_scales_that_kernels_can_take(dtype, value):
    packed = known(64, 64, dtype=dtype).pack()
    assert replace(packed, scales=torch.full_like(packed.scales, value)).dtype == dtype


@pytest.mark.parametrize(("bits", "zero"), [(4, 16), (8, 255)])
def test_zero_points_that_kernels_can_take(bits, zero):
    packed = known(64, 64, bits, zero_point=True).pack()
    replace(packed, zeros=torch.full_like(packed.scales, zero, dtype=torch.uint8))


def test_the_greatest_zero_point_is_what_the_decoder_has_room_for():
    """Four bits further up it is a bf16 number in units of the smallest one, and the next is not."""
    bits = torch.tensor([16 << 4, 17 << 4], dtype=torch.int16)
    assert (bits.view(BF16).double() * 2.0**133).tolist() == [16 << 4, 18 << 4]


@pytest.mark.parametrize("wrong", [1, None, "no"])
def test_check_values_is_a_flag(wrong):
    with pytest.raises(TypeError, match=f"^check_values: got {wrong!r}, want True or False"):
        replace(known(64, 64).pack(), check_values=wrong)


def test_numbers_are_looked_at_once():
    """What is made of a weight that was checked, or only looks at it, does not wait for a GPU again."""
    packed = known(128, 128, 4, 64, True).pack(perm=torch.arange(128))
    experts = stack_experts([replace(packed, perm=None)] * 2)
    layer = QuantizedLinear(packed)
    with calls_of(IntegerFormat.check_values, arguments.check_permutation) as looks:
        packed.to("cpu")
        packed.shard_n(1, 2)
        packed.shard_k(1, 2)
        assert layer.weight.bits == experts[1].bits == experts.to("cpu").bits == 4
        layer(torch.ones(1, 128, dtype=BF16))
        assert not looks
        replace(packed)
        assert looks


def unlooked(packed: PackedWeight) -> PackedWeight:
    """A weight made of tensors whose numbers no one may look at, with a scale that would be refused."""
    return replace(packed, scales=packed.scales * 2.0**40)


def test_tensors_without_numbers_are_not_looked_at():
    assert unlooked(known(64, 64).pack(perm=torch.arange(64)).to("meta")).device.type == "meta"
    packed = known(64, 64).pack()
    with FakeTensorMode() as mode:
        tensors: dict[str, Any] = {name: mode.from_tensor(getattr(packed, name)) for name in ("codes", "scales")}
        assert unlooked(PackedWeight(**tensors, zeros=None, format=integers(4, 32), shape=(64, 64))).dtype == BF16


def test_a_weight_is_made_within_a_compiled_function_without_a_break():
    packed = known(64, 64).pack()

    @torch.compile(fullgraph=True, backend="eager")
    def layer(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, PackedWeight(codes, scales, None, integers(4, 32), (64, 64)))

    x = torch.ones(2, 64, dtype=BF16)
    assert torch.equal(layer(x, packed.codes, packed.scales), quantized_linear(x, packed))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: w.shard_n(0, 3), "world_size: got 3, want one with N = 128 a multiple of 64 \\* world_size"),
        (lambda w: w.shard_k(0, 4), "world_size: got 4, want one with K = 128 a multiple of 64 \\* world_size"),
        (lambda w: w.shard_k(0, 0), "world_size: got 0, want at least 1"),
        (lambda w: w.shard_n(2, 2), "rank: got 2, want 0 to 1"),
    ],
)
def test_shards_that_do_not_exist_are_refused(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(known(128, 128).pack())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "file"])
def test_a_copy_does_not_take_what_was_kept_of_the_first(copied):
    weight = known(64, 128, 4, 64, True, BF16, 3).pack()
    for one in (weight, stack_experts([weight])):
        one.__dict__["form"] = one.form._replace(device_index=7)  # as on another machine
        found = copied(one)
        assert found.form.device_index == -1 and found.form.format is one.format
        assert torch.equal(found.codes, one.codes) and found.state_dict().keys() == one.state_dict().keys()


def test_it_says_what_it_is_and_how_large():
    packed = known(128, 256, 4, 64, True).pack()
    assert packed.nbytes == 128 * 256 // 2 + 128 * 4 * 2 + 128 * 4
    assert "4-bit, [128, 256], group_size=64, torch.bfloat16, with zeros" in repr(packed)
    moved = packed.to("meta")
    assert moved.device.type == "meta" and moved.shape == packed.shape and packed.device.type == "cpu"
