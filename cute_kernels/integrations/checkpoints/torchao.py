"""torchao layers: INT4 in tinygemm's tensor-core tiles, and plain INT8."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_kernels.arguments import check_matrix_shape
from cute_kernels.gemm.quantize import CodesOf, pack_codes
from cute_kernels.gemm.weight import PackedWeight, symmetric_zero
from cute_kernels.integrations.checkpoints import fields
from layouts.algebra import Layout
from layouts.transform import Transform

TILE_N, STEP_K, LANES = 8, 16, 32
INNER_STEPS = (2, 4, 8)


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
    """The weight of a torchao layer: INT4 from packed_weight and scale_and_zero, INT8 from int_data and scale.

    INT4 is W = (q - 8) * s + z with a floating z. Where z = (8 - zero) * s for integers, to the rounding of z in bf16,
    the zero points before that rounding are taken; else z is kept as it is.

    Args:
        packed_weight: int32 [N / 8, K / (16 I), 32, I / 2] with I = 2, 4 or 8 inner k tiles (`innerKTiles`).
        scale_and_zero: floating [G, N, 2].
        int_data: int8 [N, K], W = (q - z) * s.
        scale, zero_point: [N] or [N, G] of int_data, floating and integer; no zero_point is 0 everywhere.
        shape: (N, K), where torchao has padded them: K to a multiple of 1024, N to one of 8. Default: all there is.
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
    """From row-major 4-bit codes [N, K] to tinygemm's tiles, as `aten::_convert_weight_to_int4pack` makes them on CUDA.

    Lane 4 n + c of a tile of 8 rows holds, of row n, inputs 2c, 2c + 1, 2c + 8 and 2c + 9 of each step of 16: its B
    fragment of mma.m16n8k16. A word has two steps, the even ones of those eight inputs in its low half.
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
    """Codes by rows, scales and shifts fp32 [N, G], and (N, K)."""
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
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    fields.check_tensor("scale_and_zero", scale_and_zero, dtypes, 3, "[groups, N, 2]")
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
    floating = (torch.bfloat16, torch.float16, torch.float32)
    fields.check_tensor("scale", scale, floating, getattr(scale, "ndim", 0), "[N] or [N, groups]")
    assert scale is not None
    groups = scale.numel() // n
    if scale.numel() != n * groups or scale.shape[:1] != (n,):
        raise ValueError(f"scale: got shape {list(scale.shape)}, want [{n}] or [{n}, groups]")
    scales, points = fields.to_scales("scale", scale.reshape(n, groups), dtype), {}
    if zero_point is not None:
        dtypes = (*floating, torch.int8, torch.int32, torch.int64)
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
