"""Slices of packed weights that begin at any row or input, and weights with permuted rows.

Slices serve tensor parallelism if a rank's share is not whole tiles or groups. Permuted rows serve act-order of the
next layer.

`PackedWeight.shard_n` and `shard_k` cut between tiles and groups, so they copy bytes. The functions here unpack codes
and pack them again, a block of rows at a time. Codes, scales and zero points keep their values, so a slice has exactly
the numbers of that part of the weight.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TypeVar

import torch

from cute_kernels.arguments import check_count, check_kind, check_permutation, check_tensors, shape_of
from cute_kernels.formats.weights import GROUP_SIZES, WeightFormat
from cute_kernels.gemm.packed_experts import PackedExperts, stack_experts
from cute_kernels.gemm.quantize import CodesOf, pack
from cute_kernels.gemm.weight import PackedWeight, codes_of_rows, rows_of, scales_of

Weight = TypeVar("Weight", PackedWeight, PackedExperts)


def slice_outputs(weight: Weight, start: int, stop: int) -> Weight:
    """Returns the rows (output features) from ``start`` to ``stop`` - 1 of a weight [N, K], or of the weight of each
    expert. It is for column-parallel layers.

    Args:
        weight: `PackedWeight` or `PackedExperts`.
        start, stop: 0 <= start < stop <= N.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    if isinstance(weight, PackedExperts):
        return stack_experts([slice_outputs(each, start, stop) for each in weight])
    _checked(weight, start, stop, 0)
    return _selected(weight, slice(start, stop), lambda first, last: codes_of_rows(weight, start + first, start + last))


def reorder_outputs(weight: PackedWeight, order: torch.Tensor) -> PackedWeight:
    """Permutes the rows of a weight [N, K], and so the layer's outputs: row i of the result is row order[i] of the
    weight.

    If the next layer has act-order, it then needs no permutation of its inputs. For example, permute the rows of gate
    and up by down.perm, and replace down by dataclasses.replace(down, perm=None): the MLP's results stay the same.
    Codes are moved, never changed.

    Args:
        weight: `PackedWeight`.
        order: int32 or int64 [N], each of 0 to N - 1 once, on any device; permute the layer's bias in the same way.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    check_kind("weight", weight, PackedWeight, "a PackedWeight")
    n = weight.shape[0]
    check_tensors(order=order)
    if order.dtype not in (torch.int32, torch.int64) or shape_of(order) != [n]:
        raise ValueError(f"order: got {order.dtype} {shape_of(order)}, want int32 or int64 [{n}], a row for each")
    check_permutation("order", order)
    return outputs_at(weight, order.long())


def outputs_at(weight: PackedWeight, rows: torch.Tensor) -> PackedWeight:
    """Returns the rows of a weight [N, K] at int64 indices ``rows``. It unpacks the codes of all rows: N K bytes."""
    rows, codes = rows.to(weight.device), weight.unpack_tiles(0, weight.codes.shape[0])
    return _selected(weight, rows, lambda first, last: codes[rows[first:last]])


def _selected(weight: PackedWeight, rows: slice | torch.Tensor, codes_of: CodesOf) -> PackedWeight:
    """Returns the weight's rows ``rows``. codes_of: a function from (first, last) to the codes of the selected rows
    first to last - 1, counted among the selected rows, padded inputs included.
    """
    k = weight.shape[1]
    groups = -(-k // weight.group_size) if weight.group_size else 1
    zeros = None if weight.zeros is None else rows_of(weight.zeros)[rows, :groups]
    form, zeros = weight.format.simplest(zeros)
    scales = scales_of(weight, slice(groups))[rows]
    packed = pack(form, lambda first, last: codes_of(first, last)[:, :k], scales, zeros, shape=(len(scales), k))
    # The codes are in packed order already.
    return replace(packed, perm=weight.perm, input_scale=weight.input_scale, check_values=False)


def slice_inputs(weight: Weight, start: int, stop: int) -> Weight:
    """Returns the columns (inputs) from ``start`` to ``stop`` - 1 of a weight [N, K], or of the weight of each expert.
    It is for row-parallel layers.

    The sum of all parts' products is the layer's product; bias and residual are added in one part only. A part that
    begins inside a group has smaller groups, of 64, 32 or 16 inputs. Each of them lies in one group of the whole
    weight. For example, 29568 inputs in groups of 128 are two parts of 14784 in groups of 64. The last group of a part
    may be short.

    Args:
        weight: `PackedWeight` without perm, or `PackedExperts`.
        start, stop: 0 <= start < stop <= K. If scales are in groups, start is a multiple of the smallest group size
            that the format has: 16 or 32.

    Raises:
        TypeError, ValueError: an argument is not as above, or the format has no such groups; the message names it.
    """
    if isinstance(weight, PackedExperts):
        return stack_experts([slice_inputs(each, start, stop) for each in weight])
    n, _ = _checked(weight, start, stop, 1)
    if weight.perm is not None:
        raise ValueError("weight: got one with perm (act-order), whose groups have inputs of every part, want it whole")
    size, groups = weight.group_size, torch.zeros(1, dtype=torch.long, device="cpu")
    if size is not None:
        sizes = [each for each in GROUP_SIZES if each <= size and _has_groups(weight.format, each)]
        fitting = [each for each in sizes if start % each == 0]
        if not fitting:
            raise ValueError(f"start: got {start}, want a multiple of {sizes[0]}, the smallest group of inputs")
        groups = torch.arange(start, stop, fitting[-1], device="cpu") // size
        size = fitting[-1]
    groups = groups.to(weight.device)

    def codes_of(first: int, last: int) -> torch.Tensor:
        return codes_of_rows(weight, first, last)[:, start:stop]

    zeros = None if weight.zeros is None else rows_of(weight.zeros)[:n, groups]
    scale = weight.input_scale
    form, zeros = weight.format.with_group_size(size or 0).simplest(zeros)
    scale = None if scale is None else scale[start:stop]
    return pack(form, codes_of, scales_of(weight, groups)[:n], zeros, shape=(n, stop - start), input_scale=scale)


def _has_groups(form: WeightFormat, size: int) -> bool:
    """Whether a format has a variant with groups of ``size`` inputs."""
    with contextlib.suppress(ValueError):
        return bool(form.with_group_size(size))
    return False


def _checked(weight: PackedWeight, start: int, stop: int, dim: int) -> tuple[int, int]:
    """Returns the weight's shape. Raises TypeError or ValueError unless 0 <= start < stop <= the shape's size along
    ``dim``.
    """
    check_kind("weight", weight, PackedWeight, "PackedWeight or PackedExperts")
    check_count("start", start, 0, weight.shape[dim] - 1)
    check_count("stop", stop, start + 1, weight.shape[dim])
    return weight.shape
