"""Common parts of importers: unpacking codes from words, groups, scales and zero points. Errors name the checkpoint's
tensors.
"""

from __future__ import annotations

import torch

from cute_kernels.arguments import check_numbers, is_one_of
from cute_kernels.formats.weights.integers import check_scales
from cute_kernels.gemm.weight import GROUP_SIZES, SCALE_DTYPES, symmetric_zero
from layouts import transform

PER_CHANNEL = -1  # what quantisation configurations write for one scale per output channel
FLOATING = (torch.float16, torch.bfloat16, torch.float32)  # of scales as checkpoints have them
ZERO_TOLERANCE = 1e-3  # of a floating zero point that is to be an integer


def check_tensor(name: str, tensor: object, dtypes: tuple[torch.dtype, ...], dim: int, what: str) -> None:
    """Raises TypeError or ValueError unless ``tensor`` has data, one of ``dtypes`` and ``dim`` dimensions. The message
    gives the wanted shape as ``what``."""
    check_numbers(**{name: tensor})
    assert isinstance(tensor, torch.Tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want {' or '.join(map(str, dtypes))}")
    if tensor.dim() != dim:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, want {what}")


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, want {list(shape)}: {what}")


def check_bits(bits: int) -> int:
    """Returns the number of codes in a 32-bit word. Raises ValueError unless ``bits`` is 4 or 8."""
    if not is_one_of(bits, (4, 8)):
        raise ValueError(f"bits: got {bits!r}, want 4 or 8")
    return 32 // bits


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns uint8 codes [..., W * 32 / bits] of int32 words [..., W], the lowest bits first."""
    flat = words.contiguous().view(-1)  # of one word each, rows count as contiguous whatever their last stride
    return transform.unpack(flat.view(torch.uint8).view(*words.shape[:-1], words.shape[-1] * 4), bits)


def group_size_of(k: int, groups: int, given: int | None) -> int | None:
    """Returns the group size of ``groups`` groups along K; None for a single group.

    ``given`` is the configuration's group size, `PER_CHANNEL` for one group. If it is None, K and the number of groups
    must determine the size. Raises ValueError if ``given`` does not fit, or if several sizes or none fit.
    """
    if is_one_of(given, (PER_CHANNEL,)) or (given is None and groups == 1):
        if groups != 1:
            raise ValueError(
                f"group_size: got {given}, one scale per channel, want what the scales' {groups} groups say"
            )
        return None
    if given is not None:
        if not is_one_of(given, GROUP_SIZES) or -(-k // given) != groups:
            wanted = f"one of {', '.join(map(str, GROUP_SIZES))} or {PER_CHANNEL}, {groups} groups of K = {k}"
            raise ValueError(f"group_size: got {given!r}, want {wanted}")
        return given
    fitting = [size for size in GROUP_SIZES if -(-k // size) == groups]
    if not fitting:
        raise ValueError(
            f"scales: got {groups} groups of K = {k}, want groups of {', '.join(map(str, GROUP_SIZES))} or 1"
        )
    if len(fitting) > 1:
        raise ValueError(f"group_size: got None, want one of {fitting}, which all fit {groups} groups of K = {k}")
    if k % groups == 0 and k // groups != fitting[0]:
        raise ValueError(
            f"group_size: got None, want it said: {groups} groups of K = {k} are of {k // groups}, or of {fitting[0]} "
            "with a shorter last one"
        )
    return fitting[0]


def to_scales(name: str, scales: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Converts scales to ``dtype``, bf16 or fp16. With None, scales in bf16 or fp16 keep their dtype, and others become
    bf16.

    Raises:
        TypeError, ValueError: dtype is neither bf16 nor fp16; a scale is not finite, before or after rounding; a scale
            is larger than kernels support; or all scales are 0, as in a layer that was never filled. Some scales may be
            0.
    """
    if dtype is None:
        dtype = scales.dtype if scales.dtype in SCALE_DTYPES else torch.bfloat16
    if dtype not in SCALE_DTYPES:
        raise TypeError(f"dtype: got {dtype}, want None, torch.bfloat16 or torch.float16")
    rounded = scales.to(dtype)
    if not bool(rounded.isfinite().all()):
        raise ValueError(f"{name}: got values that are not finite in {dtype}, want finite ones")
    if scales.numel() and not bool(rounded.any()):
        raise ValueError(f"{name}: got 0 everywhere in {dtype}, a layer without values, want some scale that is not 0")
    check_scales(name, rounded)
    return rounded


def split_zeros(
    name: str, zeros: torch.Tensor, scales: torch.Tensor, bits: int, tolerance: torch.Tensor | float = ZERO_TOLERANCE
) -> dict[str, torch.Tensor]:
    """Splits floating zero points into arguments of `pack_codes`: "zeros" or "shifts".

    If every zero point is within ``tolerance`` of a code, returns these codes as "zeros", uint8. Otherwise returns
    "shifts", fp32: (m - zero) * scale, with the symmetric zero m.

    Raises:
        ValueError: a zero point is infinite or NaN.
    """
    if not bool(zeros.isfinite().all()):
        raise ValueError(f"{name}: got values that are not finite, want finite ones")
    whole = zeros.round()
    fits = ((zeros - whole).abs() <= tolerance) & (whole >= 0) & (whole < 1 << bits)
    if bool(fits.all()):
        return {"zeros": whole.to(torch.uint8)}
    return {"shifts": (symmetric_zero(bits) - zeros.float()) * scales.float()}


def perm_of(name: str, g_idx: torch.Tensor | None, k: int, groups: int, group_size: int | None) -> torch.Tensor | None:
    """Returns the permutation of the inputs that puts each group's inputs next to each other and keeps their order
    within the group. Returns None if the groups are in order already.

    Args:
        g_idx: int [K], the group of each input; None, empty or all -1 for groups in order.

    Raises:
        TypeError, ValueError: g_idx is no such tensor, names a group that does not exist, or has a group of the wrong
            size.
    """
    if g_idx is None or (isinstance(g_idx, torch.Tensor) and g_idx.numel() == 0):
        return None
    check_tensor(name, g_idx, (torch.int32, torch.int64), 1, f"[{k}]")
    check_shape(name, g_idx, (k,), "a group for each input")
    if bool((g_idx == -1).all()):
        return None
    wrong = (g_idx < 0) | (g_idx >= groups)
    if bool(wrong.any()):
        where = int(wrong.int().argmax())
        raise ValueError(f"{name}: got group {int(g_idx[where])} for input {where}, want 0 to {groups - 1}")
    length = group_size or k
    in_order = torch.arange(k, device=g_idx.device) // length
    if torch.equal(g_idx.long(), in_order):
        return None
    perm = g_idx.argsort(stable=True)
    if not torch.equal(g_idx[perm].long(), in_order):
        counts = torch.bincount(g_idx, minlength=groups)
        want = torch.bincount(in_order, minlength=groups)
        group = int((counts != want).int().argmax())
        raise ValueError(f"{name}: got {int(counts[group])} inputs in group {group}, want {int(want[group])}")
    return perm
