"""Makes packed weights from codes and scales as checkpoints store them: `pack_weight` for a layer, `pack_experts` for
all experts.

Nothing is quantised here. Codes and scales keep their bytes, except that a group with a NaN code gets a NaN scale.
"""

from __future__ import annotations

import torch

from cute_kernels import arguments
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.formats.weights.base import spelling, with_row_scales
from cute_kernels.gemm.packed_experts import PackedExperts, filled
from cute_kernels.gemm.quantize import default_dtype, format_named, pack
from cute_kernels.gemm.weight import PackedWeight, padded_shape, row_blocks
from cute_kernels.runtime.device import device_of
from layouts.weights.hopper import TILE_N


def pack_weight(
    format: WeightFormat | str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    second: torch.Tensor | float | None = None,
    *,
    second_divides: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs given codes and scales, laid out as checkpoints store them.

    | format | codes | scales | second |
    |---|---|---|---|
    | "mxfp4" | [N, K / 2] | E8M0 [N, K / 32] | none |
    | "nvfp4" | [N, K / 2] | E4M3 [N, K / 16] | fp32, one or [N] |
    | "fp8" | E4M3 [N, K] | floating, one or [N] | none |
    | "fp8_block" | E4M3 [N, K] | floating [N / 128, K / 128] | none |
    | "fp8_block_e8m0" | E4M3 [N, K] | E8M0 [N / 128, K / 128] | none |
    | "mxfp8" | E4M3 [N, K] | E8M0 [N, K / 32] or [N / 32, K / 32] | none |

    Args:
        format: a weight format without zero points, or its name or key.
        codes: bytes, as uint8, int8 or torch's dtype of the format. Two 4-bit codes share a byte; the even input has
            the lower four bits.
        scales: [N, G] for groups, or [ceil(N / group_size), G] for square blocks, with G = ceil(K / group_size).
            Without groups: one element, [N] or [N, 1]. One-byte scales come as uint8 or in torch's dtype, and keep
            their bytes. fp32 scales may come in bf16 or fp16. A block's scale is stored once for each of its rows.
        second: scales of the second level, by which ``scales`` are multiplied: one element, [N] or [N, 1].
        second_divides: whether the weight is divided by ``second``, as compressed-tensors has it. Its reciprocal is
            rounded to fp32 once.
        dtype: dtype of the activations of later products, bf16 or fp16; default bf16 if the format takes both.
        device: where the result is put, default that of the codes.

    Returns:
        A weight [N, K]. If a group has a NaN code, the group's scale is NaN: that output feature is NaN for every x.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came and what is wanted.
    """
    form = format_named(format, dtype)
    arguments.check_numbers(codes=codes, scales=scales)
    arguments.check_flag("second_divides", second_divides)
    if form.has_zeros:
        raise ValueError(f"format: got {spelling(form)}, which has zero points, want one without")
    by_row = _bytes_of("codes", codes, form.code_dtypes)
    if by_row.dim() != 2 or not by_row.numel():
        raise ValueError(f"codes: got shape {arguments.shape_of(codes)}, want [N, K], or [N, K / 2] of 4-bit codes")
    per_byte = 8 // form.bits
    shape = (by_row.shape[0], by_row.shape[1] * per_byte)
    where = device_of(device) or codes.device
    stored = _stored_scales(form, scales, shape, dtype or default_dtype(form, torch.bfloat16)).to(by_row.device)
    form = form.fitting(stored)
    form.check_values(stored, None)

    def codes_of(start: int, stop: int) -> torch.Tensor:
        rows = by_row[start:stop]
        return rows if per_byte == 1 else torch.stack((rows & 15, rows >> 4), dim=-1).flatten(1)

    stored = _with_nan_codes(form, codes_of, stored, shape)
    rows = _second_level(form, second, shape[0], second_divides)
    stored = stored if rows is None else with_row_scales(stored, rows.to(stored.device))
    return pack(form, codes_of, stored, None, shape=shape, device=where)


def pack_experts(
    format: WeightFormat | str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    second: torch.Tensor | float | None = None,
    *,
    second_divides: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedExperts:
    """Packs all experts of a layer, each as `pack_weight` packs one weight.

    Args:
        codes, scales: as in `pack_weight`, with a dimension E in front.
        second: one element for all experts, or [E, ...]: for each expert, as in `pack_weight`.
        format, second_divides, dtype, device: as in `pack_weight`.

    Raises:
        TypeError, ValueError: as `pack_weight`, or tensors have different numbers of experts.
    """
    arguments.check_tensors(codes=codes, scales=scales)
    if codes.dim() != 3 or codes.shape[0] < 1:
        raise ValueError(
            f"codes: got shape {arguments.shape_of(codes)}, want [E, N, K], or [E, N, K / 2] of 4-bit codes"
        )
    count = codes.shape[0]
    for name, tensor in (("scales", scales), ("second", second)):
        if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[0] != count:
            raise ValueError(f"{name}: got shape {arguments.shape_of(tensor)}, want {count} experts as codes have")

    def expert(i: int) -> PackedWeight:
        own = second[i] if isinstance(second, torch.Tensor) and second.dim() else second
        ours = scales[i] if scales.dim() else scales
        return pack_weight(format, codes[i], ours, own, second_divides=second_divides, dtype=dtype, device=device)

    return filled(expert, count, zeros=False)


def _bytes_of(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    arguments.check_dtype(name, tensor, *dtypes)
    return tensor.view(torch.uint8)


def _stored_scales(
    form: WeightFormat, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Returns scales [N, G] as the format stores them for activations of ``dtype``."""
    (n, k), size = shape, form.group_size
    if form.scale_bytes == 1:
        scales = _bytes_of("scales", scales, form.given_scale_dtypes)
    elif scales.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"scales: got dtype {scales.dtype}, want torch.float32, torch.bfloat16 or torch.float16")
    else:
        scales = form.stored_scales(scales, dtype)
    if not size:
        if scales.numel() not in (1, n) or scales.dim() > 2:
            raise ValueError(f"scales: got shape {list(scales.shape)}, want one number or [{n}], one for each row")
        return scales.reshape(-1, 1).expand(n, 1).contiguous()
    groups, blocks = -(-k // size), -(-n // size)
    if tuple(scales.shape) == (n, groups):
        return scales.contiguous()
    if tuple(scales.shape) != (blocks, groups):
        wanted = f"[{n}, {groups}], or [{blocks}, {groups}] of blocks of {size} x {size}"
        raise ValueError(f"scales: got shape {list(scales.shape)}, want {wanted}, for codes of [{n}, {k}]")
    return scales.repeat_interleave(size, dim=0)[:n].contiguous()


def _with_nan_codes(form: WeightFormat, codes_of, stored: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Returns ``stored`` scales, with NaN for each group that has a NaN code. It unpacks a block of rows at a time."""
    if not form.nan_codes:
        return stored
    n, k = shape
    length = form.group_size or k
    found = stored.clone()
    for first, last in row_blocks(-(-n // TILE_N), padded_shape(shape, form.group_size)[1], stored.device):
        rows = slice(first * TILE_N, min(last * TILE_N, n))
        codes = torch.nn.functional.pad(codes_of(rows.start, rows.stop), (0, -k % length))
        found[rows] = form.with_nan_codes(codes.unflatten(1, (-1, length)), stored[rows])
    return found


def _second_level(
    form: WeightFormat, second: torch.Tensor | float | None, n: int, divides: bool
) -> torch.Tensor | None:
    """Returns the second-level scales, fp32 [N]; None if the format has none."""
    if not form.row_scales:
        if second is not None:
            raise ValueError(f"second: got scales of a second level, want None in the format {spelling(form)}")
        return None
    if second is None:
        raise ValueError(f"second: got None, want the scale of the second level of the format {spelling(form)}")
    if not isinstance(second, torch.Tensor):
        arguments.check_number("second", second)
        second = torch.tensor(second, dtype=torch.float32, device="cpu")
    arguments.check_floating(second=second)
    if second.numel() not in (1, n) or second.dim() > 2:
        raise ValueError(f"second: got shape {list(second.shape)}, want one number or [{n}], one for each row")
    rows = second.float().reshape(-1)
    found = 1 / rows if divides else rows
    wrong = rows[~(rows.isfinite() & found.isfinite())]
    if len(wrong):
        raise ValueError(f"second: got {float(wrong[0]):g}, want a finite number{', and 1 over it' if divides else ''}")
    return found.expand(n).contiguous()
