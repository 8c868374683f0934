"""The weight preprocessing of FasterTransformer and TensorRT-LLM's mixed-input GEMM, bit-exact and invertible.

Weights are signed, [.., K, N] row-major: int8, or int4 packed in int8 [.., K, N/2] with the even column in the low
nibble. Four steps prepare weights for a GEMM that loads them with ldmatrix and converts them in registers:

* **S1** `permute_rows`: reorders K rows inside tiles of 16 (int8) or 32 (int4). ldmatrix moves pairs of bytes. After
  this step it gives each thread the rows of the thread's 16-bit MMA fragment.
* **S2** `transpose`: makes the weight column-major, with the even row in the low nibble.
* **S3** `interleave_columns`: combines 64 rows of 2 (int8) or 4 (int4) neighbouring columns into one line of 128 bytes.
* **S4** `add_bias_and_interleave`: converts signed codes to biased unsigned codes, and puts the elements of a 32-bit
  register into the order that the fast conversion to fp16 reads (`layouts.decode`).

Which steps run depends on the architecture (`RECIPES`). Every step, and the composition of all steps, is a `Transform`.

Two inputs that the original code accepts silently are errors here: odd N in int4, and K that is no multiple of the
interleaved tile, for which the original code writes beyond the buffer. The docstring of `symmetric_quantize` says how
it differs from the original code, and how to reproduce the original bytes.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from layouts.algebra import Layout, as_modes, from_modes, size
from layouts.numbers import quotient
from layouts.transform import Transform, pack

ARCHITECTURES: dict[int, str] = {
    70: "volta",
    72: "volta",
    75: "interleaved",
    80: "interleaved",
    86: "interleaved",
    87: "interleaved",
    89: "interleaved",
    90: "hopper",
    100: "blackwell",
    103: "blackwell",
    120: "interleaved",
    121: "interleaved",
}
"""Compute capability (major * 10 + minor) -> recipe. 90 and above follow TensorRT-LLM; FasterTransformer ends at 89."""

RECIPES: dict[str, tuple[str, ...]] = {
    "volta": ("bias",),
    "interleaved": ("permute", "transpose", "interleave", "bias"),
    "hopper": ("permute", "transpose", "bias"),
    "blackwell": ("transpose",),
}
"""Recipe -> steps in order."""

FP8_ACTIVATION_ARCHITECTURES = (89, 90, 100, 103, 120, 121)
LINE_BITS = 1024
MMA_N = 8


# ------------------------------------------------------------------------------------------------ steps as transforms


def row_order(bits: int, activation_bits: int = 16) -> Layout:
    """Returns the layout of step S1 inside one tile: the map from new row to old row.

    ldmatrix gives a thread pairs of bytes as 16-bit numbers. So the layout puts into each thread's bytes the rows that
    the thread needs for the 16-bit MMA, or for the 8-bit MMA of FP8 activations.
    """
    _check_widths(bits, activation_bits)
    if activation_bits == 8:
        return Layout((4, 2, 4), (1, 16, 4))
    return Layout((2, 16 // bits, 4), (1, 8, 2))


def register_order(bits: int) -> Layout:
    """Returns the layout of step S4 inside one 32-bit register: the map from new to old element. Even elements come
    first.
    """
    _check_widths(bits, 16)
    per_register = 32 // bits
    return Layout((per_register // 2, 2), (2, 1))


def permute_rows_transform(k: int, n: int, bits: int, activation_bits: int = 16) -> Transform:
    """Returns step S1, the order of rows, of a [k, n] matrix.

    Raises:
        ValueError: k is no multiple of the tile of 16 (int8) or 32 (int4) rows, or n no multiple of 8.
    """
    order = row_order(bits, activation_bits)
    tile = size(order)
    _check_multiple("K", k, tile, "rows of one permuted tile")
    _check_multiple("N", n, MMA_N, "columns of one MMA")
    rows = tuple((extent, stride * n) for extent, stride in as_modes(order))
    source = from_modes(((n, 1), *rows, (k // tile, tile * n)))
    return Transform.from_layout("S1 permute_rows", source, bits, (k, n))


def transpose_transform(k: int, n: int, bits: int) -> Transform:
    """Returns step S2, the transposition of a [k, n] matrix to [n, k].

    Raises:
        ValueError: bits is 4 and k or n is odd.
    """
    _check_widths(bits, 16)
    if bits == 4:
        _check_multiple("K", k, 2, "elements in a byte")
        _check_multiple("N", n, 2, "elements in a byte")
    return Transform.from_layout("S2 transpose", Layout((k, n), (n, 1)), bits, (k, n), (n, k))


def interleave_columns_transform(k: int, n: int, bits: int, activation_bits: int = 16) -> Transform:
    """Returns step S3, which interleaves columns of the transposed matrix [n, k], so that it becomes [n / columns, k *
    columns].

    Raises:
        ValueError: k is no multiple of the tile (64 rows; 128 for FP8 activations), or n is no multiple of the number
            of interleaved columns.
    """
    _check_widths(bits, activation_bits)
    rows, columns = LINE_BITS // activation_bits, activation_bits // bits
    _check_multiple("K", k, rows, "rows of one interleaved tile")
    _check_multiple("N", n, columns, "interleaved columns")
    source = Layout((rows, columns, k // rows, n // columns), (1, k, rows, columns * k))
    return Transform.from_layout("S3 interleave_columns", source, bits, (n, k), (n // columns, k * columns))


def bias_transform(shape: tuple[int, ...], bits: int) -> Transform:
    """Returns step S4 for an array of any shape, which makes codes biased and puts them into register order.

    Raises:
        ValueError: the elements do not fill whole 32-bit registers.
    """
    order = register_order(bits)
    count, per_register = math.prod(shape), 32 // bits
    _check_multiple("K * N", count, per_register, "elements of one 32-bit register")
    source = from_modes((*as_modes(order), (count // per_register, per_register)))
    return Transform.from_layout("S4 add_bias_and_interleave", source, bits, shape, flip=1 << (bits - 1))


def steps(
    k: int, n: int, bits: int, arch: int, activation_bits: int = 16, *, experts: bool = False
) -> tuple[Transform, ...]:
    """Returns the steps of `preprocess` in order. Other arguments, and errors, are those of `preprocess`.

    Args:
        experts: whether the weight is a stack of experts (3-D), which from sm90 on uses the sm80 layout.
    """
    names = RECIPES[_recipe(bits, arch, activation_bits, experts)]
    found: list[Transform] = []
    shape: tuple[int, ...] = (k, n)
    _check_multiple("N", n, 2 if bits == 4 else 1, "elements in a byte")
    if names != RECIPES["volta"]:
        _check_multiple("K", k, size(row_order(bits, activation_bits)), "rows of one permuted tile")
        _check_multiple("N", n, MMA_N, "columns of one MMA")
    for name in names:
        if name == "permute":
            found.append(permute_rows_transform(k, n, bits, activation_bits))
        elif name == "transpose":
            found.append(transpose_transform(k, n, bits))
        elif name == "interleave":
            found.append(interleave_columns_transform(k, n, bits, activation_bits))
        else:
            found.append(bias_transform(shape, bits))
        shape = found[-1].out_shape
    return tuple(found)


@lru_cache(maxsize=256)
def transform(k: int, n: int, bits: int, arch: int, activation_bits: int = 16, *, experts: bool = False) -> Transform:
    """Returns all steps as one `Transform` [k, n] -> [k, n]; the result has the input's shape, as in the original
    code.
    """
    parts = steps(k, n, bits, arch, activation_bits, experts=experts)
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.then(part)
    fp8 = "_fp8" if activation_bits == 8 else ""
    return whole.reshaped(out_shape=(k, n)).renamed(f"fastertransformer_w{bits}{fp8}_sm{arch}")


# ------------------------------------------------------------------------------------------------- steps on weights


def permute_rows(q: torch.Tensor, bits: int, activation_bits: int = 16) -> torch.Tensor:
    """Returns the weight after step S1, in the same shape: int8 [.., K, N] or packed int4 [.., K, N/2].

    Raises:
        TypeError: q is not int8.
        ValueError: q is not 2-D or 3-D, or K or N is no multiple of the tile.
    """
    k, n = _matrix_shape(q, bits)
    return permute_rows_transform(k, n, bits, activation_bits)(q)


def transpose(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the weight after step S2: [.., K, N] of int8 becomes [.., N, K], and [.., K, N/2] of int4 becomes [.., N,
    K/2].

    Errors are those of `permute_rows`.
    """
    k, n = _matrix_shape(q, bits)
    return transpose_transform(k, n, bits)(q)


def interleave_columns(q: torch.Tensor, bits: int, activation_bits: int = 16) -> torch.Tensor:
    """Returns the weight after step S3: int8 [.., N, K] becomes [.., N/c, c*K], packed int4 [.., N, K/2] becomes [..,
    N/c, c*K/2].

    c is 2 for int8 and 4 for int4 (2 for int4 with FP8 activations). Errors are those of `permute_rows`.
    """
    n, k = _matrix_shape(q, bits)
    return interleave_columns_transform(k, n, bits, activation_bits)(q)


def add_bias_and_interleave(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the weight after step S4, in q's shape: biased unsigned codes in register order. Errors are those of
    `permute_rows`."""
    return bias_transform(_matrix_shape(q, bits), bits)(q)


def preprocess(q: torch.Tensor, bits: int, arch: int, activation_bits: int = 16) -> torch.Tensor:
    """Returns the weight after all steps that the architecture's kernels need.

    Args:
        q: int8 [K, N] or [experts, K, N], or int4 packed as int8 [.., K, N/2].
        bits: 8 or 4.
        arch: the compute capability as major * 10 + minor, one of `ARCHITECTURES`.
        activation_bits: 16, or 8 for FP8 activations (int4 weights, sm89 and above).

    Returns:
        int8 of q's shape, on q's device.

    Raises:
        TypeError: q is not an int8 tensor.
        ValueError: rank, extents, bits, arch or activation_bits are not supported; the message names the wrong one.
    """
    k, n = _matrix_shape(q, bits)
    return transform(k, n, bits, arch, activation_bits, experts=q.ndim == 3)(q)


def restore(p: torch.Tensor, bits: int, arch: int, activation_bits: int = 16) -> torch.Tensor:
    """Undoes `preprocess`: returns the original weight. Arguments and errors are those of `preprocess`."""
    k, n = _matrix_shape(p, bits)
    return transform(k, n, bits, arch, activation_bits, experts=p.ndim == 3).inverse()(p)


# ----------------------------------------------------------------------------------------------------- quantisation


def symmetric_quantize(
    w: torch.Tensor, bits: int, scale_dtype: torch.dtype = torch.float16, *, compat: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises each column of each expert with a scale and no zero point.

    By default the scale is the smallest scale with which the whole column fits the signed range. It is rounded to
    ``scale_dtype`` *before* the codes are computed (ties to even). So ``|q * scale - w| <= scale / 2`` apart from the
    rounding of the scale, and a column of zeros gets codes of 0.

    ``compat=True`` reproduces the original code. Its scale is absmax / 128 (int8) or absmax / 8 (int4). Codes come from
    the unrounded fp32 scale, with ties away from zero. The positive maximum saturates. A column of zeros gets codes 127
    (int8) or -8 (int4), the result of converting NaN.

    Args:
        w: floating [K, N] or [experts, K, N]; finite; N even for int4.
        bits: 8 or 4.
        scale_dtype: floating dtype of the scales.

    Returns:
        int8 [.., K, N] or packed int4 [.., K, N/2], and scales [.., N].

    Raises:
        TypeError: w or scale_dtype is not floating.
        ValueError: rank, odd N for int4, values that are not finite, or a scale beyond ``scale_dtype``.
    """
    _check_quantizable(w, bits, scale_dtype)
    high = (1 << (bits - 1)) - 1
    values = w.float()
    if compat:
        exact = values.abs().amax(dim=-2) / (high + 1)
        ratio = values / exact.unsqueeze(-2)
        rounded = torch.where(ratio < 0, (ratio - 0.5).ceil(), (ratio + 0.5).floor())
        codes = rounded.nan_to_num(nan=high if bits == 8 else -high - 1).clamp(-high - 1, high)
        scale = exact.to(scale_dtype)
    else:
        exact = torch.maximum(quotient(values.amax(dim=-2), high), values.amin(dim=-2) / (-high - 1))
        scale = exact.to(scale_dtype)
        if bool(torch.isinf(scale).any()):
            raise ValueError(f"w has a column whose scale {exact.max().item():g} is beyond {scale_dtype}")
        step = scale.float().unsqueeze(-2)
        codes = torch.where(step > 0, (values / step).round().clamp(-high - 1, high), 0.0)
    q = codes.to(torch.int8)
    return (pack(q, 4).view(torch.int8) if bits == 4 else q), scale


def dequantize(q: torch.Tensor, scale: torch.Tensor, bits: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns ``q * scale`` of row-major codes [.., K, N], as `symmetric_quantize` makes them."""
    _matrix_shape(q, bits)
    codes = q
    if bits == 4:
        codes = torch.stack(((q << 4) >> 4, q >> 4), dim=-1).flatten(-2)
    return (codes.float() * scale.float().unsqueeze(-2)).to(dtype)


# ----------------------------------------------------------------------------------------------------------- checks


def _recipe(bits: int, arch: int, activation_bits: int, experts: bool) -> str:
    _check_widths(bits, activation_bits)
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch is {arch}; want one of {sorted(ARCHITECTURES)}")
    if activation_bits == 8 and arch not in FP8_ACTIVATION_ARCHITECTURES:
        raise ValueError(f"arch is {arch}; FP8 activations want one of {FP8_ACTIVATION_ARCHITECTURES}")
    return "interleaved" if experts and arch >= 90 else ARCHITECTURES[arch]


def _check_widths(bits: int, activation_bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}; want 4 or 8")
    if activation_bits not in (8, 16) or (activation_bits == 8 and bits == 8):
        raise ValueError(
            f"activation_bits is {activation_bits} with {bits}-bit weights; want 16, or 8 with 4-bit weights"
        )


def _check_multiple(label: str, extent: int, multiple: int, why: str) -> None:
    if extent < 1 or extent % multiple:
        raise ValueError(f"{label} is {extent}; want a positive multiple of {multiple} ({why})")


def _matrix_shape(q: torch.Tensor, bits: int) -> tuple[int, int]:
    _check_widths(bits, 16)
    if not isinstance(q, torch.Tensor) or q.dtype != torch.int8:
        found = q.dtype if isinstance(q, torch.Tensor) else type(q).__name__
        raise TypeError(f"q is {found}; want an int8 tensor{' of packed int4 pairs' if bits == 4 else ''}")
    if q.ndim not in (2, 3):
        raise ValueError(f"q has shape {tuple(q.shape)}; want [K, N] or [experts, K, N]")
    return q.shape[-2], q.shape[-1] * 8 // bits


def _check_quantizable(w: torch.Tensor, bits: int, scale_dtype: torch.dtype) -> None:
    _check_widths(bits, 16)
    if not isinstance(w, torch.Tensor) or not w.is_floating_point():
        raise TypeError(f"w is {w.dtype if isinstance(w, torch.Tensor) else type(w).__name__}; want a floating tensor")
    if not scale_dtype.is_floating_point:
        raise TypeError(f"scale_dtype is {scale_dtype}; want a floating dtype")
    if w.ndim not in (2, 3) or not w.shape[-2]:
        raise ValueError(f"w has shape {tuple(w.shape)}; want [K, N] or [experts, K, N] with K >= 1")
    if bits == 4 and w.shape[-1] % 2:
        raise ValueError(f"w has N = {w.shape[-1]} columns; want an even number, as two int4 share a byte")
    if not bool(torch.isfinite(w).all()):
        raise ValueError("w has NaN or infinite values; want finite weights")
