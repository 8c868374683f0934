"""Making packed weights: round-to-nearest quantisation, and packing of codes that are there already.

Both go through the weight by blocks of rows, so that what lies unpacked at a time is bounded whatever the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from cute_kernels.arguments import check_flag, check_tensors, device_of
from cute_kernels.linear.weight import (
    SCALE_DTYPES,
    SCALE_LIMIT,
    TILE_BYTES,
    TILE_N,
    PackedWeight,
    check_format,
    check_permutation,
    check_scales,
    num_groups,
    padded_shape,
    per_row,
    row_blocks,
    rows_of,
    symmetric_zero,
)
from layouts import transform
from layouts.weights import hopper

CodesOf = Callable[[int, int], torch.Tensor]


def quantize_weight(
    w: torch.Tensor,
    bits: int = 4,
    group_size: int | None = 128,
    zero_point: bool = False,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Round-to-nearest quantisation of a weight, by groups of inputs.

    The range of a group always contains 0. Without a zero point the scale is the smallest that covers it with codes
    -8..7 (-128..127 for 8 bits); with one, 15 (255) steps span it and the zero point is the nearest code to 0. Scales
    are rounded up to ``dtype`` before the codes are computed, so the range still fits and |W - w| is at most half a
    scale. Groups of zeros give exact zeros.

    Args:
        w: floating [N, K] (out_features, in_features), finite; CPU or CUDA, where the work is done.
        bits: 4 or 8.
        group_size: 32, 64, 128, 256, or None or -1 for one scale per row. The last group may be shorter.
        zero_point: whether groups get a uint8 zero point; pays for groups whose values lie to one side of 0.
        dtype: of the scales and of the activations to come, bf16 or fp16; default w's, bf16 if it is neither.
        device: where the result is put, default w's.

    Raises:
        TypeError, ValueError: an argument is not as above, or a scale is beyond ``dtype``, 2**27 of bf16; the message
            names it.
    """
    check_tensors(w=w)
    if not w.is_floating_point():
        raise TypeError(f"w: got dtype {w.dtype}, want a floating one")
    if w.is_meta:
        raise ValueError("w: got a tensor without data (meta), want one on a CPU or CUDA device")
    if w.dim() != 2 or not w.numel():
        raise ValueError(f"w: got shape {list(w.shape)}, want [N, K] with N and K at least 1")
    shape = (w.shape[0], w.shape[1])
    check_options(bits, group_size, zero_point, dtype)
    check_format(bits, group_size, shape)
    group_size = per_row(group_size)
    device = device_of(device)
    if dtype is None:
        dtype = w.dtype if w.dtype in SCALE_DTYPES else torch.bfloat16
    w = w.detach()
    scales, zeros = _choose_scales(w, bits, group_size, zero_point, dtype)
    k, top = shape[1], (1 << bits) - 1
    length = group_size or k

    def codes_of(start: int, stop: int) -> torch.Tensor:
        scale = scales[start:stop, :, None].float()
        zero = symmetric_zero(bits) if zeros is None else zeros[start:stop, :, None].float()
        ratio = _grouped(w[start:stop], length) / scale
        codes = torch.where(scale > 0, ratio, 0.0).round_().add_(zero).clamp_(0, top)
        return codes.to(torch.uint8).flatten(1)[:, :k]

    return pack_codes(codes_of, scales, zeros, bits=bits, group_size=group_size, shape=shape, device=device)


def check_options(bits: Any, group_size: Any, zero_point: Any, dtype: Any) -> None:
    """Raises TypeError or ValueError unless `quantize_weight` takes these for some weight."""
    check_format(bits, group_size, (1, 1))
    check_flag("zero_point", zero_point)
    if dtype is not None and dtype not in SCALE_DTYPES:
        raise TypeError(f"dtype: got {dtype}, want None, torch.bfloat16 or torch.float16")


def _choose_scales(
    w: torch.Tensor, bits: int, group_size: int | None, zero_point: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales [N, groups] in ``dtype``, and uint8 zero points alike or None."""
    n, k = w.shape
    length, middle, top = group_size or k, symmetric_zero(bits), (1 << bits) - 1
    lows, highs = [], []
    for first, last in row_blocks(-(-n // TILE_N), k):
        grouped = _grouped(w[first * TILE_N : last * TILE_N], length)
        lows.append(grouped.amin(dim=-1).clamp(max=0))
        highs.append(grouped.amax(dim=-1).clamp(min=0))
    low, high = torch.cat(lows), torch.cat(highs)
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise ValueError("w: got NaN or infinite values (in fp32), want finite ones")
    # Divided before they are subtracted: high - low may be beyond fp32.
    if zero_point:
        exact = _quotient(high, top) - _quotient(low, top)
    else:
        exact = torch.maximum(_quotient(high, middle - 1), _quotient(low, -middle))
    scales = _round_up(exact, dtype)
    if bool(scales.isinf().any()) and dtype != torch.bfloat16:
        raise ValueError(f"w: got a group that wants scale {exact.max().item():g}, beyond {dtype}: want a wider dtype")
    if dtype == torch.bfloat16 and bool((scales >= SCALE_LIMIT).any()):
        raise ValueError(f"w: got a group that wants scale {exact.max().item():g}, want one below 2**27 in bf16")
    if not zero_point:
        return scales, None
    zeros = torch.where(scales > 0, (-low / scales.float()).round().clamp(0, top), float(middle))
    return scales, zeros.to(torch.uint8)


def _quotient(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Rounded once on any device: CUDA multiplies by a rounded 1 / divisor, if that is a number and not a tensor."""
    return values / values.new_tensor(divisor)


def _round_up(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest numbers in a 16-bit ``dtype`` that are not below ``values``, fp32 and not negative."""
    rounded = values.to(dtype)
    return (rounded.view(torch.int16) + (rounded.float() < values)).view(dtype)


def _grouped(w: torch.Tensor, length: int) -> torch.Tensor:
    """fp32 [rows, groups, length] of [rows, K]; a short last group is filled with zeros, which no range minds."""
    w = w.float()
    missing = -w.shape[1] % length
    return (pad(w, (0, missing)) if missing else w).unflatten(1, (-1, length))


def pack_codes(
    codes_of: CodesOf,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    group_size: int | None,
    shape: tuple[int, int],
    perm: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """The packed weight of given codes; what importers of checkpoints end in.

    Args:
        codes_of: (start, stop) -> unsigned codes of rows start to stop, uint8 [stop - start, K] below 2**bits, inputs
            in their own order. Called once for each block of rows, start a multiple of 64.
        scales: bf16, below 2**27, or fp16 [N, G], G the groups of K, the last maybe a short one.
        zeros: uint8 [N, G] below 2**bits, or None; kept only if some zero is not the symmetric one.
        bits, group_size, shape, perm, input_scale: as in `PackedWeight`; group i has the packed positions from
            i * group_size on.
        device: where the result is put, default that of the scales.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    check_format(bits, group_size, shape)
    group_size = per_row(group_size)
    n, k = shape
    groups = -(-k // group_size) if group_size else 1
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None and tuple(tensor.shape) != (n, groups):
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, want {[n, groups]}")
    check_scales("scales", scales)
    middle = symmetric_zero(bits)
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    if perm is not None:
        check_permutation("perm", perm)
    where = device_of(device) or scales.device
    tile_scales = _tiled(scales, shape, group_size).to(where)
    tile_zeros = None if zeros is None else _tiled(zeros, shape, group_size)
    n_pad, k_pad = padded_shape(shape, group_size)
    tiles = n_pad // TILE_N
    codes = torch.empty(tiles, k_pad // hopper.tile_k(bits), TILE_BYTES, dtype=torch.uint8, device=where)
    for first, last in row_blocks(tiles, k_pad):
        rows = codes_of(first * TILE_N, min(last * TILE_N, n))
        if perm is not None:
            rows = rows[:, perm.to(rows.device).long()]
        if rows.shape != ((last - first) * TILE_N, k_pad):
            filled = _zero_codes(tile_zeros, first, last, k_pad, middle, rows.device)
            filled[: rows.shape[0], :k] = rows
            rows = filled
        codes[first:last] = hopper.pack(transform.pack(rows, bits), bits)
    fields: dict[str, Any] = {
        "zeros": tile_zeros,
        "perm": None if perm is None else perm.to(torch.int32),
        "input_scale": None if input_scale is None else input_scale.to(scales.dtype).contiguous(),
    }
    fields = {name: None if tensor is None else tensor.to(where) for name, tensor in fields.items()}
    form: dict[str, Any] = {"bits": bits, "group_size": group_size, "shape": shape}
    return PackedWeight(codes, tile_scales, **form, **fields, check_values=False)


def interleave_weights(gate: PackedWeight, up: PackedWeight) -> PackedWeight:
    """One weight [2 N, K]: even rows are gate's and odd rows are up's, as the activation "swiglu" wants them.

    For checkpoints that have the two apart. Codes are moved, never changed.

    Raises:
        TypeError: one of them is no PackedWeight.
        ValueError: the two differ in shape, bits, group size, dtype, device, perm or input_scale.
    """
    for name, weight in (("gate", gate), ("up", up)):
        if not isinstance(weight, PackedWeight):
            raise TypeError(f"{name}: got {type(weight).__name__}, want a PackedWeight")
    for name in ("shape", "bits", "group_size", "dtype", "device"):
        ours, theirs = getattr(gate, name), getattr(up, name)
        if ours != theirs:
            raise ValueError(f"up: got {name} {theirs}, want {ours}, that of gate")
    for name in ("perm", "input_scale"):
        ours, theirs = getattr(gate, name), getattr(up, name)
        if (ours is None) != (theirs is None) or (ours is not None and not torch.equal(ours, theirs)):
            raise ValueError(f"up: got another {name} than gate has, want the same: they share their inputs")
    n, k = gate.shape
    groups = -(-k // gate.group_size) if gate.group_size else 1

    def in_turn(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.stack((one, other), dim=1).flatten(0, 1)

    def codes_of(start: int, stop: int) -> torch.Tensor:
        first, last = start // 2, stop // 2
        tile = first // TILE_N
        rows = slice(first - tile * TILE_N, last - tile * TILE_N)
        return in_turn(*(each.unpack_tiles(tile, -(-last // TILE_N))[rows, :k] for each in (gate, up)))

    zeros = None
    if gate.zeros is not None or up.zeros is not None:
        middle = torch.full_like(gate.scales, symmetric_zero(gate.bits), dtype=torch.uint8)
        tiled = (middle if each.zeros is None else each.zeros for each in (gate, up))
        zeros = in_turn(*(rows_of(each)[:n, :groups] for each in tiled))
    packed = pack_codes(
        codes_of,
        in_turn(rows_of(gate.scales)[:n, :groups], rows_of(up.scales)[:n, :groups]),
        zeros,
        bits=gate.bits,
        group_size=gate.group_size,
        shape=(2 * n, k),
    )
    # The codes are in packed order already.
    return replace(packed, perm=gate.perm, input_scale=gate.input_scale, check_values=False)


def _tiled(values: torch.Tensor, shape: tuple[int, int], group_size: int | None) -> torch.Tensor:
    """[N_pad / 64, G, 64] of [N, groups], new rows and groups 0."""
    n_pad, groups = padded_shape(shape, group_size)[0], num_groups(shape, group_size)
    more = (0, groups - values.shape[1], 0, n_pad - values.shape[0])
    return pad(values, more).unflatten(0, (-1, TILE_N)).transpose(1, 2).contiguous()


def _zero_codes(
    zeros: torch.Tensor | None, first: int, last: int, k_pad: int, middle: int, device: torch.device
) -> torch.Tensor:
    """Codes of tiles ``first`` to ``last`` that all stand for 0: uint8 [rows, K_pad]."""
    rows = (last - first) * TILE_N
    if zeros is None:
        return torch.full((rows, k_pad), middle, dtype=torch.uint8, device=device)
    by_row = rows_of(zeros[first:last]).to(device)
    return by_row.repeat_interleave(k_pad // by_row.shape[1], dim=1)
