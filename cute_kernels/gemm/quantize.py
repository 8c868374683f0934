"""Makes packed weights, by round-to-nearest quantisation or from given codes.

Rows are unpacked one block at a time, so the memory for unpacked rows does not grow with the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from cute_kernels.arguments import check_flag, check_kind, check_numbers, check_permutation
from cute_kernels.formats.weights import GROUP_SIZES, WeightFormat, integers, shifted, weight_format
from cute_kernels.formats.weights.base import spelling, with_row_scales
from cute_kernels.formats.weights.integers import SCALE_DTYPES, check_scales
from cute_kernels.gemm.packed import Packed
from cute_kernels.gemm.weight import (
    TILE_BYTES,
    TILE_N,
    PackedWeight,
    check_format,
    codes_of_rows,
    num_groups,
    padded_shape,
    per_row,
    row_blocks,
    rows_of,
    scales_of,
    symmetric_zero,
)
from cute_kernels.runtime.device import device_of
from layouts import transform
from layouts.weights import hopper

CodesOf = Callable[[int, int], torch.Tensor]
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # of activations, as formats and configurations name them


def quantize_weight(
    w: torch.Tensor,
    bits: int = 4,
    group_size: int | None = 128,
    zero_point: bool = False,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | str | None = None,
    format: WeightFormat | str | None = None,
) -> PackedWeight:
    """Quantises a weight by rounding to nearest, by groups of inputs. For integer formats, the range of a group always
    contains 0. Without a zero point, the scale is the smallest with which codes -8..7 (-128..127 for 8 bits) cover the
    range. With a zero point, 15 (255) steps of the scale span the range, and the zero point is the code nearest to 0.
    Scales are rounded up to ``dtype`` before codes are computed, so |W - w| is at most half a scale. Groups of zeros
    give exact zeros. Other formats have their own rules.

    Args:
        w: floating [N, K] (out_features, in_features), finite; CPU or CUDA, where the work is done.
        bits: 4 or 8.
        group_size: 16, 32, 64, 128, 256, or None or -1 for one scale per row. The last group may be shorter.
        zero_point: whether each group gets a uint8 zero point. It is more exact for groups whose values lie to one side
            of 0.
        dtype: dtype of the scales, and of the activations of later products: bf16 or fp16. Default: w's dtype if it is
            one of the two, else bf16.
        device: where the result is put, default w's.
        format: a weight format, its name ("mxfp4", "nvfp4", "fp8", "fp8_block", "mxfp8") or its key. It replaces bits,
            group_size and zero_point, which must then not be given.

    Raises:
        TypeError, ValueError: an argument is not as above, or the format cannot hold a group's scale (of integers,
            2**27 and more in bf16); the message names it.
    """
    check_numbers(w=w)
    if not w.is_floating_point():
        raise TypeError(f"w: got dtype {w.dtype}, want a floating one")
    if w.dim() != 2 or not w.numel():
        raise ValueError(f"w: got shape {list(w.shape)}, want [N, K] with N and K at least 1")
    chosen = chosen_format(bits, group_size, zero_point, dtype, format)
    device = device_of(device)
    if dtype is None:
        dtype = default_dtype(chosen, w.dtype)
    w = w.detach()
    shape = (w.shape[0], w.shape[1])
    length = chosen.group_size or shape[1]
    of_rows = chosen.choose_row_scales(w) if chosen.row_scales else None
    if of_rows is not None:
        w = w.float() / of_rows.unsqueeze(-1)
    scales, zeros = _choose_scales(w, chosen, length, dtype)

    def codes_of(start: int, stop: int) -> torch.Tensor:
        points = None if zeros is None else zeros[start:stop]
        codes = chosen.choose_codes(_grouped(w[start:stop], length), scales[start:stop], points)
        return codes.flatten(1)[:, : shape[1]]

    chosen, zeros = chosen.fitting(scales).simplest(zeros)
    stored = scales if of_rows is None else with_row_scales(scales, of_rows)
    return pack(chosen, codes_of, stored, zeros, shape=shape, device=device)


def chosen_format(
    bits: int, group_size: int | None, zero_point: bool, dtype: torch.dtype | None, wanted: WeightFormat | str | None
) -> WeightFormat:
    """Returns the format that the arguments of `quantize_weight` select.

    Raises:
        TypeError, ValueError: there is no such format, or the arguments select two formats.
    """
    check_options(bits, group_size, zero_point, dtype)
    if wanted is None:
        return integers(bits, per_row(group_size), zero_point)
    found = format_named(wanted, dtype)
    if (bits, group_size, zero_point) != (4, 128, False):
        raise ValueError(f"format: got {spelling(found)} together with bits, group_size or zero_point, want it alone")
    return found


def format_named(wanted: WeightFormat | str, dtype: torch.dtype | None) -> WeightFormat:
    """Returns the weight format ``wanted``, which is given as a format, a name or a key. dtype: dtype of activations
    that the format must support, or None.

    Raises:
        TypeError, ValueError: there is no such format, or it does not take such activations.
    """
    check_kind("format", wanted, (WeightFormat, str), "a WeightFormat, its name or its key")
    found = weight_format(wanted) if isinstance(wanted, str) else wanted
    if dtype is not None and DTYPES.get(dtype) not in found.dtypes:
        raise TypeError(
            f"dtype: got {dtype}, want {' or '.join(found.dtypes)} for a weight in the format {spelling(found)}"
        )
    return found


def default_dtype(chosen: WeightFormat, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of activations for a weight that is made from a tensor of ``dtype``: ``dtype`` itself if the
    format supports it, else the first dtype that the format supports.
    """
    if DTYPES.get(dtype) in chosen.dtypes:
        return dtype
    return next(found for found, name in DTYPES.items() if name in chosen.dtypes)


def check_options(bits: object, group_size: object, zero_point: object, dtype: object) -> None:
    """Raises TypeError or ValueError unless `quantize_weight` takes these options for some weight."""
    check_format(bits, group_size, (1, 1))
    check_flag("zero_point", zero_point)
    if dtype is not None and dtype not in SCALE_DTYPES:
        raise TypeError(f"dtype: got {dtype}, want None, torch.bfloat16 or torch.float16")


def _choose_scales(
    w: torch.Tensor, chosen: WeightFormat, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns scales [N, groups] for activations of ``dtype``, and uint8 zero points of the same shape or None. It
    processes a block of rows at a time.
    """
    n, k = w.shape
    found = []
    for first, last in row_blocks(-(-n // TILE_N), k, w.device):
        grouped = _grouped(w[first * TILE_N : last * TILE_N], length)
        if not bool(grouped.isfinite().all()):
            raise ValueError("w: got NaN or infinite values (in fp32), want finite ones")
        found.append(chosen.choose_scales(grouped, dtype))
    zeros = torch.cat([points for _, points in found]) if chosen.has_zeros else None
    return torch.cat([scales for scales, _ in found]), zeros


def _grouped(w: torch.Tensor, length: int) -> torch.Tensor:
    """Returns w [rows, K] as fp32 [rows, groups, length]. A short last group is padded with zeros, which do not change
    its scale, since every group's range contains 0.
    """
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
    shifts: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs given codes of integers into a weight; importers of checkpoints call it.

    Args:
        codes_of: a function from (start, stop) to the unsigned codes of rows start to stop - 1: uint8 [stop - start, K]
            below 2**bits, inputs in the order of x, before ``perm``. It is called once for each block of rows; start is
            a multiple of 64.
        scales: bf16 (below 2**27) or fp16 [N, G], with G groups of K; the last group may be short.
        zeros: uint8 [N, G] below 2**bits, or None. They are dropped if all are the symmetric zero.
        bits, group_size, shape, perm, input_scale: as in `PackedWeight`; group i has the packed positions from
            i * group_size on.
        shifts: floating [N, G], instead of zeros: W = (code - m) * scale + shift, with m the symmetric zero. The weight
            has floating zero points, rounded to the dtype of the scales. With one scale per row they are stored in
            groups of 256 inputs.
        device: where the result is put, default that of the scales.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    check_format(bits, group_size, shape)
    if shifts is not None:
        size = per_row(group_size) or GROUP_SIZES[-1]
        chosen, groups = shifted(bits, size), -(-shape[1] // size)
        stored = chosen.pairs(scales, shifts, scales.dtype).expand(-1, groups).contiguous()
        chosen.check_values(stored, None)
        return pack(chosen, codes_of, stored, None, shape=shape, perm=perm, input_scale=input_scale, device=device)
    check_scales("scales", scales)
    chosen, zeros = integers(bits, per_row(group_size)).simplest(zeros)
    return pack(chosen, codes_of, scales, zeros, shape=shape, perm=perm, input_scale=input_scale, device=device)


def pack(
    chosen: WeightFormat,
    codes_of: CodesOf,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    shape: tuple[int, int],
    perm: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs codes of any format. All functions that make weights call it. zeros: given if, and only if, the format has
    zero points."""
    n, k = shape
    bits, group_size = chosen.bits, chosen.group_size or None
    groups = -(-k // group_size) if group_size else 1
    for name, tensor, more in (("scales", scales, chosen.more_groups), ("zeros", zeros, 0)):
        if tensor is not None and tuple(tensor.shape) != (n, groups + more):
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, want {[n, groups + more]}")
    if perm is not None:
        check_permutation("perm", perm)
    where = device_of(device) or scales.device
    tile_scales = _tiled(scales, shape, group_size, chosen.more_groups).to(where)
    tile_zeros = None if zeros is None else _tiled(zeros, shape, group_size)
    n_pad, k_pad = padded_shape(shape, group_size)
    tiles = n_pad // TILE_N
    codes = torch.empty(tiles, k_pad // hopper.tile_k(bits), TILE_BYTES, dtype=torch.uint8, device=where)
    for first, last in row_blocks(tiles, k_pad, scales.device):
        rows = codes_of(first * TILE_N, min(last * TILE_N, n))
        if perm is not None:
            rows = rows[:, perm.to(rows.device).long()]
        if rows.shape != ((last - first) * TILE_N, k_pad):
            filled = _pad_codes(tile_zeros, first, last, k_pad, chosen.pad_code, rows.device)
            filled[: rows.shape[0], :k] = rows
            rows = filled
        codes[first:last] = hopper.pack(transform.pack(rows, bits), bits)
    dtype = chosen.activation_dtype(scales.dtype)
    fields: dict[str, Any] = {
        "zeros": tile_zeros,
        "perm": None if perm is None else perm.to(torch.int32),
        "input_scale": None if input_scale is None else input_scale.to(dtype).contiguous(),
    }
    fields = {name: None if tensor is None else tensor.to(where) for name, tensor in fields.items()}
    return PackedWeight(codes, tile_scales, format=chosen, shape=shape, **fields, check_values=False)


def with_shifts(weight: PackedWeight, shifts: torch.Tensor) -> PackedWeight:
    """Returns a weight of integers with a shift added to each group of inputs. The result has floating zero points.
    shifts: floating [N, G]."""
    n, k = weight.shape
    groups, where = shifts.shape[1], weight.device
    scales = scales_of(weight, slice(groups))[:n]
    shifts = shifts.float().to(where)
    if weight.zeros is not None:
        shifts = shifts + (symmetric_zero(weight.bits) - rows_of(weight.zeros)[:n, :groups].float()) * scales.float()

    def codes_of(start: int, stop: int) -> torch.Tensor:
        return codes_of_rows(weight, start, stop)[:, :k]

    options: dict[str, Any] = {"bits": weight.bits, "group_size": weight.group_size, "shape": (n, k)}
    packed = pack_codes(codes_of, scales, None, **options, shifts=shifts)
    # The codes are in packed order already.
    return replace(packed, perm=weight.perm, input_scale=weight.input_scale, check_values=False)


def interleave_weights(gate: PackedWeight, up: PackedWeight) -> PackedWeight:
    """Makes one weight [2 N, K] for "swiglu": rows of gate become even rows, rows of up become odd rows.

    Use it for checkpoints that store gate and up separately. Codes are moved, never changed.

    Raises:
        TypeError: one of them is no PackedWeight.
        ValueError: the two differ in shape, format (zero points aside), dtype, device, perm or input_scale.
    """
    for name, weight in (("gate", gate), ("up", up)):
        check_kind(name, weight, PackedWeight, "a PackedWeight")
    for name, theirs, ours in differences(up, gate):
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
        return in_turn(*(codes_of_rows(each, start // 2, stop // 2)[:, :k] for each in (gate, up)))

    zeros, chosen = None, wider(gate.format, up.format)
    if gate.zeros is not None or up.zeros is not None:
        points = (points_of(each, like=gate.scales) for each in (gate, up))
        zeros = in_turn(*(rows_of(each)[:n, :groups] for each in points))
    chosen, zeros = chosen.simplest(zeros)
    scales = in_turn(*(scales_of(each, slice(groups))[:n] for each in (gate, up)))
    packed = pack(chosen, codes_of, scales, zeros, shape=(2 * n, k))
    # The codes are in packed order already.
    return replace(packed, perm=gate.perm, input_scale=gate.input_scale, check_values=False)


def differences(weight: Packed, first: Packed) -> Iterator[tuple[str, Any, Any]]:
    """Yields (field, value in ``weight``, value in ``first``) for each difference that prevents combining the two
    weights into one.

    It compares shape, the format's options, dtype and device. Weights of integers can be combined whether they have
    zero points or not. So can weights of two formats if one format includes the other.
    """
    options = weight.format.options.keys()
    for name in ("shape", *(options if options == first.format.options.keys() else ("format",)), "dtype", "device"):
        theirs, ours = getattr(weight, name), getattr(first, name)
        if theirs != ours and not (name == "format" and (theirs.includes(ours) or ours.includes(theirs))):
            yield name, theirs, ours


def wider(first: WeightFormat, other: WeightFormat) -> WeightFormat:
    """Returns the format of a weight that combines weights of two formats: ``other`` if it includes ``first``, else
    ``first``.
    """
    return other if other.includes(first) else first


def points_of(weight: PackedWeight, like: torch.Tensor) -> torch.Tensor:
    """Returns the zero points of a weight of integers. If the weight has none, returns symmetric zero points, shaped as
    ``like``."""
    if weight.zeros is not None:
        return weight.zeros
    return torch.full_like(like, symmetric_zero(weight.bits), dtype=torch.uint8)


def _tiled(values: torch.Tensor, shape: tuple[int, int], group_size: int | None, more: int = 0) -> torch.Tensor:
    """Returns values [N, groups + more] as tiles [N_pad / 64, G + more, 64]; padded rows and groups are 0. more: the
    last columns, which follow the padded groups."""
    n_pad, groups = padded_shape(shape, group_size)[0], num_groups(shape, group_size)
    own = values.shape[1] - more
    values = torch.cat((pad(values[:, :own], (0, groups - own)), values[:, own:]), dim=1)
    return pad(values, (0, 0, 0, n_pad - values.shape[0])).unflatten(0, (-1, TILE_N)).transpose(1, 2).contiguous()


def _pad_codes(
    zeros: torch.Tensor | None, first: int, last: int, k_pad: int, pad_code: int, device: torch.device
) -> torch.Tensor:
    """Returns padding codes uint8 [rows, K_pad] for tiles ``first`` to ``last`` - 1. The codes stand for 0 if the
    format can represent 0.
    """
    rows = (last - first) * TILE_N
    if zeros is None:
        return torch.full((rows, k_pad), pad_code, dtype=torch.uint8, device=device)
    by_row = rows_of(zeros[first:last]).to(device)
    return by_row.repeat_interleave(k_pad // by_row.shape[1], dim=1)
