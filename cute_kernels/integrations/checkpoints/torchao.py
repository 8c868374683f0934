"""Import of torchao layers: INT4 in tinygemm's tensor-core tiles, plain INT8, and current tensors in safetensors files.

Current tensors are Int4Tensor, Int4TilePackedTo4dTensor, Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor,
NVFP4Tensor and MXTensor. A file stores each part of a weight as a tensor of its own, such as `_weight_qdata`. The
file's metadata gives the weight's class and attributes. No code in the metadata runs: classes are looked up by name
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels.arguments import check_matrix_shape
from cute_kernels.gemm.quantize import CodesOf, pack_codes
from cute_kernels.gemm.weight import PackedWeight, symmetric_zero
from cute_kernels.integrations.checkpoints import fields, float_codes
from layouts.algebra import Layout
from layouts.transform import Transform

TILE_N, STEP_K, LANES = 8, 16, 32
INNER_STEPS = (2, 4, 8)
PARTS = ("qdata", "scale", "zero_point", "scale_and_zero", "act_pre_scale", "per_tensor_scale")
# Of activations in fewer bits, which stay in 16 here.
ACTIVATION_PARTS = ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")
_FLOAT_CODES = float_codes.Names("qdata", "scale", "per_tensor_scale", optional=True)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
Tensors = Mapping[str, torch.Tensor]
Attributes = Mapping[str, Any]
Device = torch.device | str | None


def from_torchao(
    packed_weight: torch.Tensor | None = None,
    scale_and_zero: torch.Tensor | None = None,
    *,
    int_data: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    shape: Sequence[int] | None = None,
    group_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs the weight of a torchao layer: INT4 from packed_weight and scale_and_zero, INT8 from int_data and scale.

    INT4 is W = (q - 8) * s + z with a floating z. If every z is (8 - zero) * s for an integer zero, up to z's rounding
    in bf16, the weight gets these zero points. Otherwise the weight keeps z.

    Args:
        packed_weight: int32 [N / 8, K / (16 I), 32, I / 2] with I = 2, 4 or 8 inner k tiles (`innerKTiles`).
        scale_and_zero: floating [G, N, 2].
        int_data: int8 [N, K], W = (q - z) * s.
        scale, zero_point: s and z of int_data, each [N] or [N, G]: scale floating, zero_point integer. Without
            zero_point, z is 0.
        shape: (N, K) before torchao padded K to a multiple of 1024 and N to a multiple of 8; default the padded one.
        group_size, dtype, device: as for `from_awq`.

    Raises:
        TypeError, ValueError: a tensor does not fit; the message names it.
    """
    if int_data is not None:
        if packed_weight is not None or scale_and_zero is not None:
            raise ValueError("int_data: got it together with INT4 tensors, want one kind of weight")
        return _from_plain(int_data, scale, zero_point, group_size, dtype, device)
    codes_of, scales, shifts, (n, k) = _tiles(packed_weight, scale_and_zero, shape)
    # z = (8 - zero) * s was rounded to 8 bits of mantissa, and so was s.
    offsets = torch.where(scales == 0, shifts, shifts / scales)
    tolerance = offsets.abs() * 2**-8 + fields.ZERO_TOLERANCE
    rounded = fields.to_scales("scale_and_zero", scales, dtype or _dtype_of(scale_and_zero))
    points = fields.split_zeros("scale_and_zero", symmetric_zero(4) - offsets, rounded, 4, tolerance)
    points = points if "zeros" in points else {"zeros": None, "shifts": shifts}
    return pack_codes(
        codes_of,
        rounded,
        **points,
        bits=4,
        group_size=fields.group_size_of(k, scales.shape[1], group_size),
        shape=(n, k),
        device=device,
    )


def tile_transform(tiles_n: int, tiles_k: int, inner_steps: int) -> Transform:
    """Returns the transform from row-major 4-bit codes [N, K] to tinygemm's tiles.

    The tiles are those that `aten::_convert_weight_to_int4pack` makes on CUDA. A tile has 8 rows. Lane 4 n + c holds
    four inputs of row n in each step of 16 inputs: 2c, 2c + 1, 2c + 8 and 2c + 9, which are the lane's B fragment of
    mma.m16n8k16. A word holds two steps; the word's low half has the even inputs of both steps.
    """
    k = tiles_k * inner_steps * STEP_K
    modes: tuple[tuple[int, int], ...] = (
        (2, 8),  # nibbles 0 and 1: inputs 2c and 2c + 8
        (2, STEP_K),  # then those of the next step
        (2, 1),  # high half: odd inputs
        (inner_steps // 2, 2 * STEP_K),
        (4, 2),
        (TILE_N, k),
        (tiles_k, inner_steps * STEP_K),
        (tiles_n, TILE_N * k),
    )
    source = Layout(tuple(extent for extent, _ in modes), tuple(stride for _, stride in modes))
    shape = (tiles_n, tiles_k, LANES, inner_steps // 2 * 8)
    return Transform.from_layout(f"tinygemm_i{inner_steps}", source, 4, (tiles_n * TILE_N, k), shape)


def _tiles(
    packed_weight: torch.Tensor | None, scale_and_zero: torch.Tensor | None, shape: Sequence[int] | None
) -> tuple[CodesOf, torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Returns (a function from a range of rows to the rows' codes, scales fp32 [N, G], shifts fp32 [N, G], (N, K))."""
    wanted = "[N / 8, K / (16 I), 32, I / 2]"
    fields.check_tensor("packed_weight", packed_weight, (torch.int32,), 4, wanted)
    assert packed_weight is not None
    tiles_n, tiles_k, lanes, words = packed_weight.shape
    if lanes != LANES or 2 * words not in INNER_STEPS:
        raise ValueError(f"packed_weight: got shape {list(packed_weight.shape)}, want {wanted}, I = 2, 4 or 8")
    whole = tiles_n * TILE_N, tiles_k * 2 * words * STEP_K
    if shape is not None:
        check_matrix_shape("shape", shape)
    n, k = whole if shape is None else shape
    if not (whole[0] - TILE_N < n <= whole[0] and 0 < k <= whole[1]):
        raise ValueError(f"shape: got {[n, k]}, want what packed_weight's {list(whole)} pads")
    fields.check_tensor("scale_and_zero", scale_and_zero, _FLOATS, 3, "[groups, N, 2]")
    assert scale_and_zero is not None
    groups = scale_and_zero.shape[0]
    if scale_and_zero.shape[1] not in (n, whole[0]) or scale_and_zero.shape[2] != 2 or not groups or whole[1] % groups:
        raise ValueError(f"scale_and_zero: got shape {list(scale_and_zero.shape)}, want [groups, {n}, 2]")
    used = -(-k // (whole[1] // groups))  # groups that are not padding alone
    by_row = scale_and_zero[:used, :n].float().permute(2, 1, 0)

    def codes_of(start: int, stop: int) -> torch.Tensor:
        part = packed_weight[start // TILE_N : -(-stop // TILE_N)].contiguous().view(torch.uint8)
        back = tile_transform(part.shape[0], tiles_k, 2 * words).inverse()
        return fields.transform.unpack(back(part), 4)[: stop - start, :k]

    return codes_of, by_row[0], by_row[1], (n, k)


def _dtype_of(scale_and_zero: torch.Tensor | None) -> torch.dtype | None:
    assert scale_and_zero is not None
    return None if scale_and_zero.dtype == torch.float32 else scale_and_zero.dtype


def _from_plain(
    int_data: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    group_size: int | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> PackedWeight:
    fields.check_tensor("int_data", int_data, (torch.int8,), 2, "[N, K]")
    n, k = int_data.shape
    check_matrix_shape("int_data", (n, k))
    fields.check_tensor("scale", scale, _FLOATS, getattr(scale, "ndim", 0), "[N] or [N, groups]")
    assert scale is not None
    groups = scale.numel() // n
    if scale.numel() != n * groups or scale.shape[:1] != (n,):
        raise ValueError(f"scale: got shape {list(scale.shape)}, want [{n}] or [{n}, groups]")
    scales, points = fields.to_scales("scale", scale.reshape(n, groups), dtype), {}
    if zero_point is not None:
        dtypes = (*_FLOATS, torch.int8, torch.int32, torch.int64)
        fields.check_tensor("zero_point", zero_point, dtypes, getattr(zero_point, "ndim", 0), "that of scale")
    if zero_point is not None and zero_point.numel():
        if zero_point.numel() != scale.numel() or zero_point.shape[:1] != (n,):
            raise ValueError(f"zero_point: got shape {list(zero_point.shape)}, want that of scale, {list(scale.shape)}")
        codes = zero_point.reshape(n, groups).float() + symmetric_zero(8)
        points = fields.split_zeros("zero_point", codes, scales, 8)
    return pack_codes(
        lambda start, stop: int_data[start:stop].view(torch.uint8) ^ 0x80,
        scales,
        **({"zeros": None} | points),
        bits=8,
        group_size=fields.group_size_of(k, groups, group_size),
        shape=(n, k),
        device=device,
    )


# -- current tensors ---------------------------------------------------------------------------------------------------


def from_tensor(
    kind: str,
    tensors: Tensors,
    attributes: Attributes,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs a torchao layer's weight. Zero points that are not integer codes become floating shifts.

    Args:
        kind: the name of the tensor's class, one of `KINDS`.
        tensors: the parts of the weight, by name: qdata; scale and zero_point, or scale_and_zero; maybe act_pre_scale,
            which multiplies the inputs.
        attributes: the weight's attributes, by name: block_size; shape for INT4 classes; target_dtype for
            IntxUnpackedToInt8Tensor.
        dtype, device: as for `from_awq`.

    Raises:
        TypeError, ValueError: a part or attribute is missing or does not fit; the message names it.
    """
    if kind not in KINDS:
        raise ValueError(f"weight: got a {kind} of torchao, want {', '.join(KINDS)}")
    scales = "scale_and_zero" if KINDS[kind] is _tile_packed else "scale"
    for name in ("qdata", scales):
        if name not in tensors:
            raise ValueError(f"{name}: got no such tensor, want it: it is part of a {kind}")
    return KINDS[kind](tensors, attributes, dtype, device)


# -- the kinds ---------------------------------------------------------------------------------------------------------


def _int4(tensors: Tensors, attributes: Attributes, dtype: torch.dtype | None, device: Device) -> PackedWeight:
    """Packs W = q * s + z, q signed. qdata: int8 [N, K / 2], even k in the low half of a byte. scale, zero_point: [G,
    N]."""
    n, k = _shape_of(attributes)
    qdata, scale, zero_point = tensors["qdata"], tensors["scale"], tensors.get("zero_point")
    fields.check_tensor("qdata", qdata, (torch.int8, torch.uint8), 2, "[N, K / 2]")
    fields.check_shape("qdata", qdata, (n, k // 2), f"two codes a byte of {[n, k]}")
    groups, size = _grouping(attributes, (n, k))
    scales = fields.to_scales("scale", _per_group("scale", scale, (groups, n)).T, dtype)
    stored = qdata.view(torch.uint8)
    shifts = None if zero_point is None else _per_group("zero_point", zero_point, (groups, n)).float().T
    return _packed(
        lambda start, stop: fields.transform.unpack(stored[start:stop].contiguous(), 4) ^ symmetric_zero(4),
        scales,
        shifts,
        (4, size, (n, k)),
        tensors.get("act_pre_scale"),
        device,
    )


def _tile_packed(tensors: Tensors, attributes: Attributes, dtype: torch.dtype | None, device: Device) -> PackedWeight:
    """Packs W = (q - 8) * s + z. qdata: tinygemm's tiles, with N and K padded."""
    n, k = _shape_of(attributes)
    codes_of, scales, shifts, _ = _tiles(tensors["qdata"], tensors["scale_and_zero"], (n, k))
    _, size = _grouping(attributes, (n, k))
    form = (4, size, (n, k))
    rounded = fields.to_scales("scale_and_zero", scales, dtype or _dtype_of(tensors["scale_and_zero"]))
    return _packed(codes_of, rounded, shifts, form, tensors.get("act_pre_scale"), device)


def _intx(tensors: Tensors, attributes: Attributes, dtype: torch.dtype | None, device: Device) -> PackedWeight:
    """Packs integers of 1 to 8 bits. Integers of up to 4 bits become 4-bit codes, wider ones 8-bit codes."""
    target = attributes.get("target_dtype")
    name = target.get("_data") if isinstance(target, Mapping) else str(target).removeprefix("torch.")
    if name not in [f"int{bits}" for bits in range(1, 9)]:
        raise ValueError(f"target_dtype: got {target!r}, want int1 to int8")
    return _plain(tensors, attributes, dtype, device, bits=4 if int(name[3:]) <= 4 else 8)


def _float_codes(tensors: Tensors, attributes: Attributes, dtype: torch.dtype | None, device: Device) -> PackedWeight:
    """Packs W = number(q) * s, times per_tensor_scale.

    qdata: [N, K], or [N, K / 2] for two codes a byte. scale: [N, groups], or one element per square block, or swizzled.
    """
    block = attributes.get("block_size")
    if attributes.get("is_swizzled_scales"):
        qdata = tensors["qdata"]
        if type(block) is not int or block < 1:
            raise ValueError(f"block_size: got {block!r}, want an integer")
        k = qdata.shape[-1] * (2 if qdata.dtype == torch.uint8 else 1)
        tensors = {**tensors, "scale": _unblocked(tensors["scale"], qdata.shape[0], -(-k // block))}
    return float_codes.from_float_codes(tensors, _FLOAT_CODES, block=block, dtype=dtype, device=device)


def _unblocked(scale: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """Returns scales [n, groups] in order, from blocks of 128 rows and 4 groups. Row 32 j + i of a block is stored at
    [i, j]."""
    tall, wide = -(-n // 128), -(-groups // 4)
    if scale.numel() != tall * wide * 512:
        raise ValueError(f"scale: got shape {list(scale.shape)}, want {tall * wide} blocks of 512 for {[n, groups]}")
    by_block = scale.contiguous().view(torch.uint8).view(tall, wide, 32, 4, 4)
    return by_block.permute(0, 3, 2, 1, 4).reshape(128 * tall, 4 * wide)[:n, :groups].contiguous().view(scale.dtype)


def _plain(
    tensors: Tensors, attributes: Attributes, dtype: torch.dtype | None, device: Device, *, bits: int
) -> PackedWeight:
    """Packs W = (q - z) * s. qdata: int8 [N, K]. scale and zero_point have one element for each group of a row, or one
    element in all.
    """
    qdata, zero_point = tensors["qdata"], tensors.get("zero_point")
    fields.check_tensor("qdata", qdata, (torch.int8,), 2, "[N, K]")
    n, k = qdata.shape
    low = -symmetric_zero(bits)
    if bits < 8 and bool(((qdata < low) | (qdata >= -low)).any()):
        raise ValueError(f"qdata: got codes outside {low} to {-low - 1}, want those of its target_dtype")
    groups, size = _grouping(attributes, (n, k))
    scales = fields.to_scales("scale", _by_row("scale", tensors["scale"], n, groups), dtype)
    shifts = None
    if zero_point is not None:
        zeros = _by_row("zero_point", zero_point, n, groups).float()
        shifts = -zeros * scales.float()
    return _packed(
        lambda start, stop: (qdata[start:stop].to(torch.int16) - low).to(torch.uint8),
        scales,
        shifts,
        (bits, size, (n, k)),
        tensors.get("act_pre_scale"),
        device,
    )


KINDS: dict[str, Callable[[Tensors, Attributes, torch.dtype | None, Device], PackedWeight]] = {
    "Int4Tensor": _int4,
    "Int4TilePackedTo4dTensor": _tile_packed,
    "Int8Tensor": partial(_plain, bits=8),
    "IntxUnpackedToInt8Tensor": _intx,
    "Float8Tensor": _float_codes,
    "NVFP4Tensor": _float_codes,
    "MXTensor": _float_codes,
}
"""Converters by the names of the tensors' classes."""


# -- what they share ---------------------------------------------------------------------------------------------------


def _packed(
    codes_of: Callable[[int, int], torch.Tensor],
    scales: torch.Tensor,
    shifts: torch.Tensor | None,
    form: tuple[int, int | None, tuple[int, int]],
    input_scale: torch.Tensor | None,
    device: Device,
) -> PackedWeight:
    """Packs W = (q - m) * s + shift with the symmetric zero m. Shifts that are whole multiples of scales become zero
    points."""
    bits, group_size, shape = form
    zeros = None
    if shifts is not None:
        if not bool(shifts.isfinite().all()):
            raise ValueError("zero_point: got values that are not finite, want finite ones")
        wide = scales.float()
        exact = torch.where(wide == 0, 0.0, symmetric_zero(bits) - shifts / wide)
        if (
            not bool(((wide == 0) & (shifts != 0)).any())
            and bool(((exact.round() - symmetric_zero(bits)) * wide == -shifts).all())
            and "zeros" in (points := fields.split_zeros("zero_point", exact, wide, bits, 0.25))
        ):
            zeros, shifts = points["zeros"], None
    if input_scale is not None:
        if input_scale.numel() != shape[1]:
            raise ValueError(f"act_pre_scale: got shape {list(input_scale.shape)}, want [{shape[1]}]")
        input_scale = fields.to_scales("act_pre_scale", input_scale.reshape(-1), scales.dtype)
    return pack_codes(
        codes_of,
        scales,
        zeros,
        bits=bits,
        group_size=group_size,
        shape=shape,
        shifts=shifts,
        input_scale=input_scale,
        device=device,
    )


def _shape_of(attributes: Attributes) -> tuple[int, int]:
    shape = attributes.get("shape")
    if (
        not isinstance(shape, (list, tuple))
        or len(shape) != 2
        or not all(type(size) is int and size > 0 for size in shape)
    ):
        raise ValueError(f"shape: got {shape!r}, want [N, K]")
    return shape[0], shape[1]


def _grouping(attributes: Attributes, shape: tuple[int, int]) -> tuple[int, int | None]:
    """Reads the attribute block_size. Returns (number of groups along K, group size or None).

    block_size: [1, group size], [1, K], or [N, K] for one scale of the whole weight.
    """
    block = attributes.get("block_size")
    n, k = shape
    if (
        not isinstance(block, (list, tuple))
        or len(block) != 2
        or block[0] not in (1, n)
        or not isinstance(block[1], int)
    ):
        raise ValueError(f"block_size: got {block!r}, want [1, group size], [1, {k}] or [{n}, {k}]")
    if block[1] == k or block[1] == -1:
        return 1, None
    if block[0] != 1:
        raise ValueError(f"block_size: got {list(block)}, want groups of one row, or [{n}, {k}]")
    return -(-k // block[1]), fields.group_size_of(k, -(-k // block[1]), block[1])


def _per_group(name: str, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    fields.check_tensor(name, values, (*_FLOATS, torch.int8), 2, "[groups, N]")
    fields.check_shape(name, values, shape, "a row for each group, a column for each output")
    return values


def _by_row(name: str, values: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """Returns values as [N, groups]; a single value is repeated for all groups."""
    fields.check_tensor(name, values, (*_FLOATS, torch.int8, torch.int32, torch.int64), values.dim(), "any")
    if values.numel() not in (1, n * groups):
        raise ValueError(f"{name}: got shape {list(values.shape)}, want {[n, groups]}, or one number")
    return values.reshape(1, 1).expand(n, groups) if values.numel() == 1 else values.reshape(n, groups)
