"""The calls of the bulk kernels, and their registered operators."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.arguments import (
    check_aligned,
    check_apart,
    check_contiguous,
    check_dtype,
    check_place,
    check_shape,
    check_tensors,
    is_one_of,
    shape_of,
)
from cute_kernels.attention.checks import check_given_scale
from cute_kernels.attention.reference import shaped_scale
from cute_kernels.formats.kv import HEAD_DIMS, KvFormat, format_of
from cute_kernels.formats.kv.transforms import CacheTransform, check_transform, transform_of
from cute_kernels.kv_cache.arguments import bulk_arguments
from cute_kernels.kv_cache.compile import BulkSpec
from cute_kernels.kv_cache.config import BulkConfig, divisor_of, other_rotation, row_alignment, row_transform_of
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.operator import Operator, route

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MAX_ROWS = 2**31 - 2**16  # rounded up to whole CTAs, they fit 32 bits


class Quantize(NamedTuple):
    """The arguments of :func:`cute_kernels.kv_cache.quantize_kv`. half: the part of the transform that applies to x, a
    result of `half_of`, or None.
    """

    x: torch.Tensor
    kv_format: str
    scale: torch.Tensor | None = None
    out: torch.Tensor | None = None
    half: CacheTransform | None = None

    def numbers(self) -> torch.Tensor:
        """Returns the numbers to quantise: x, transformed if there is a ``half``."""
        if self.half is None:
            return self.x
        check_half(self.half, self.x)
        return self.half.keys(self.x.float())  # rounded once, by the format


class Dequantize(NamedTuple):
    """The arguments of :func:`cute_kernels.kv_cache.dequantize_kv`."""

    rows: torch.Tensor
    kv_format: str
    head_dim: int
    dtype: torch.dtype
    scale: torch.Tensor | None = None
    out: torch.Tensor | None = None


def quantize(call: Quantize) -> torch.Tensor:
    """Checks and runs a call of `cute_kernels.kv_cache.quantize_kv`."""
    return route(cuda=_launch_quantize, cpu=_quantize_here, operator=_quantize_through_operator, x=call.x)(call)


def _quantize_through_operator(call: Quantize) -> torch.Tensor:
    return _copied(call.out, _quantize_operator(call.numbers(), call.kv_format, call.scale))


def half_of(transform: CacheTransform | None, operand: str | None) -> CacheTransform | None:
    """Returns the part of a transform that applies to ``operand`` ("k" or "v"), as a transform of K. Returns None if
    the part changes nothing.

    Raises:
        TypeError, ValueError: only one of transform and operand is given, or one of them is invalid.
    """
    check_transform("transform", transform)
    if operand not in ("k", "v"):
        raise ValueError(f"operand: got {operand!r}, want 'k' or 'v' with a transform: which of its parts is x's")
    if transform is None:
        return None
    if operand == "v":
        return transform_of(k_factor=transform.v_factor, k_rotation=transform.v_rotation)
    of_k = ("k_center", "k_factor", "q_factor", "k_rotation")
    return transform_of(**{name: getattr(transform, name) for name in of_k})


def check_half(half: CacheTransform, x: torch.Tensor) -> None:
    """Raises ValueError unless ``half`` fits numbers x [..., heads, head_dim]. half: a result of `half_of`."""
    for array in half.arrays.values():
        if array.shape != x.shape[-2:]:
            raise ValueError(f"transform: got constants {shape_of(array)}, want {list(x.shape[-2:])}, x's heads")
        if array.device != x.device:
            raise ValueError(f"transform: got one on {array.device}, want it on {x.device}, where x is")
    if x.shape[-1] % half.k_rotation:
        raise ValueError(
            f"transform: got a rotation of {half.k_rotation} columns, want one that divides head_dim {x.shape[-1]}"
        )


def dequantize(call: Dequantize) -> torch.Tensor:
    """Checks and runs a call of `cute_kernels.kv_cache.dequantize_kv`."""
    path = route(cuda=_launch_dequantize, cpu=_dequantize_here, operator=_dequantize_through_operator, rows=call.rows)
    return path(call)


def _dequantize_through_operator(call: Dequantize) -> torch.Tensor:
    return _copied(call.out, _dequantize_operator(*call[:-1]))


def _check_numbers(x: torch.Tensor, kv_format: str, scale: torch.Tensor | None) -> KvFormat:
    form = format_of(kv_format)
    check_tensors(x=x)
    check_dtype("x", x, *DTYPES)
    check_shape("x", x, "...", "num_kv_heads", "head_dim")
    if x.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"x: got head_dim {x.shape[-1]}, want one of {', '.join(map(str, HEAD_DIMS))}")
    _check_blocks("x", x)
    _check_scale(form, scale, x, x.shape[-1])
    return form


def _check_rows(call: Dequantize) -> KvFormat:
    rows, kv_format, head_dim, dtype, scale, _ = call
    form = format_of(kv_format)
    check_tensors(rows=rows)
    if not is_one_of(head_dim, HEAD_DIMS):
        raise ValueError(f"head_dim: got {head_dim!r}, want one of {', '.join(map(str, HEAD_DIMS))}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype: got {dtype!r}, want one of {', '.join(map(str, DTYPES))}")
    check_dtype("rows", rows, *form.cache_dtypes, why=f" for {kv_format}")
    row, why = form.row_elements(head_dim), f" for {kv_format} at head_dim {head_dim}"
    check_shape("rows", rows, "...", "num_kv_heads", row, why=why)
    _check_blocks("rows", rows)
    _check_scale(form, scale, rows, head_dim)
    return form


def _check_scale(form: KvFormat, scale: torch.Tensor | None, beside: torch.Tensor, head_dim: int) -> None:
    check_given_scale("scale", scale, form, beside.shape[-2], head_dim)
    if scale is not None:
        check_place("scale", scale, beside.device, "what it scales")
        check_contiguous("scale", scale)


def _check_blocks(name: str, tensor: torch.Tensor) -> None:
    if row_blocks(tensor) is None:
        raise ValueError(
            f"{name}: got strides {tensor.stride()} for shape {shape_of(tensor)}, want rows contiguous, in blocks of "
            "dense rows that are evenly spaced"
        )


def row_blocks(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Returns how a tensor's rows lie in memory, as dense blocks: (rows of a block, elements from one block to the
    next).

    A row is the last dimension of the tensor, at one index of all other dimensions. A contiguous tensor is one block.
    Returns None unless all blocks are equally large and equally far apart.
    """
    *outer, (size, stride) = zip(tensor.shape, tensor.stride(), strict=True)
    if not tensor.numel():
        return max(tensor.numel(), 1), 0
    if stride != 1 and size > 1:
        return None
    inner = 1
    outer = [(count, step) for count, step in outer if count > 1]
    while outer and outer[-1][1] == inner * size:
        inner *= outer.pop()[0]
    if not outer:
        return inner, inner * size
    block = expected = outer[-1][1]
    for count, step in reversed(outer):
        if step != expected or step < inner * size:
            return None
        expected *= count
    return inner, block


def _result(
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    **read: torch.Tensor | None,
) -> torch.Tensor:
    """Checks ``out`` and returns it. If ``out`` is None, returns a new tensor of the first of ``dtypes``."""
    if out is None:
        return torch.empty(shape, dtype=dtypes[0], device=device)
    check_tensors(out=out)
    check_dtype("out", out, *dtypes)
    check_shape("out", out, *shape)
    check_place("out", out, device, "what is read")
    _check_blocks("out", out)
    check_apart("out", out, read)
    return out


def _copied(out: torch.Tensor | None, result: torch.Tensor, **read: torch.Tensor | None) -> torch.Tensor:
    return result if out is None else _result(out, result.shape, (result.dtype,), result.device, **read).copy_(result)


def _quantize_here(call: Quantize) -> torch.Tensor:
    x, kv_format, scale, out, _ = call
    form = _check_numbers(x, kv_format, scale)
    rows = form.quantize(call.numbers(), shaped_scale(form, scale))
    if out is None:
        return x.clone() if rows is x else rows  # an operator's result is its own
    _result(out, rows.shape, form.cache_dtypes, x.device, x=x, scale=scale)
    if rows.element_size() == 1:
        out.view(torch.uint8).copy_(rows.view(torch.uint8))
        return out
    return out.copy_(rows)


def _dequantize_here(call: Dequantize) -> torch.Tensor:
    rows, _, head_dim, dtype, scale, out = call
    form = _check_rows(call)
    x = form.dequantize(rows, head_dim, dtype, shaped_scale(form, scale))
    return _copied(out, x.clone() if x is rows and out is None else x, rows=rows, scale=scale)


def _launch_quantize(call: Quantize) -> torch.Tensor:
    x, kv_format, scale, out, half = call
    form = _check_numbers(x, kv_format, scale)
    if form.in_blocks:  # by the format itself: the kernels take rows one by one
        return _quantize_here(call)
    if half is not None:
        check_half(half, x)
        if (wanted := other_rotation(half.k_rotation, x.shape[-1])) is not None:
            raise ValueError(f"transform: got a rotation of {half.k_rotation} columns, want {wanted}")
    shape = (*x.shape[:-1], form.row_elements(x.shape[-1]))
    rows = _result(out, shape, form.cache_dtypes, x.device, x=x, scale=scale)
    _launch("quantize", kv_format, x, rows, scale, ("x", "out"), half)
    return rows


def _launch_dequantize(call: Dequantize) -> torch.Tensor:
    rows, kv_format, head_dim, dtype, scale, out = call
    if _check_rows(call).in_blocks:
        return _dequantize_here(call)
    x = _result(out, (*rows.shape[:-1], head_dim), (dtype,), rows.device, rows=rows, scale=scale)
    _launch("dequantize", kv_format, x, rows, scale, ("out", "rows"))
    return x


def _launch(
    direction: str,
    kv_format: str,
    x: torch.Tensor,
    rows: torch.Tensor,
    scale: torch.Tensor | None,
    names: tuple[str, str],
    half: CacheTransform | None = None,
) -> None:
    if not x.numel():
        return
    num_heads, head_dim = x.shape[-2:]
    num_rows = x.numel() // head_dim
    if num_rows > MAX_ROWS:
        raise ValueError(f"{names[0]}: got {num_rows} rows, want at most {MAX_ROWS}")
    parts = None if half is None else row_transform_of(half, shift=False)
    config = BulkConfig(direction, kv_format, DTYPES[x.dtype], head_dim, parts)
    blocks: dict[str, int] = {}
    for of, name, tensor, form in (("number", names[0], x, None), ("cache", names[1], rows, kv_format)):
        unit = 16 if form is None else row_alignment(form, head_dim, config.lanes)
        inner, stride = row_blocks(tensor) or (1, 0)
        check_aligned(name, tensor, unit)
        if stride * tensor.element_size() % unit and inner < num_rows:
            raise ValueError(f"{name}: got a tensor that does not have blocks on multiples of {unit} bytes, want it to")
        blocks |= {f"{of}_rows": inner, f"{of}_stride": stride * tensor.element_size()}
        blocks[f"{of}_divisor"] = divisor_of(inner)
    index = x.get_device()
    given: dict[str, torch.Tensor | int] = {"rows": rows.data_ptr()}
    given["scale"] = 0 if scale is None else scale.data_ptr()
    given |= {"num_heads": num_heads, "head_divisor": divisor_of(num_heads)}
    given |= {"numbers": x.as_strided((1, head_dim), (head_dim, 1)), "num_rows": num_rows, **blocks}
    if half is not None:
        given["center"], given["factor"] = half.addresses[:2]
    send = bulk_arguments(parts is not None).bound(load(BulkSpec(config), arch_of(index)), {})
    with GPU.guard(index):
        send(**given)


# -- the operators ----------------------------------------------------------------------------------------------------


def _quantize_on_meta(x, kv_format, scale):
    form = format_of(kv_format)
    return x.new_empty((*x.shape[:-1], form.row_elements(x.shape[-1])), dtype=form.cache_dtype)


def _dequantize_on_meta(rows, kv_format, head_dim, dtype, scale):
    return rows.new_empty((*rows.shape[:-1], head_dim), dtype=dtype)


_quantize_operator = Operator(
    "quantize_kv(Tensor x, str kv_format, Tensor? scale) -> Tensor",
    cpu=lambda *given: _quantize_here(Quantize(*given)),
    cuda=lambda *given: _launch_quantize(Quantize(*given)),
    meta=_quantize_on_meta,
)
_dequantize_operator = Operator(
    "dequantize_kv(Tensor rows, str kv_format, int head_dim, ScalarType dtype, Tensor? scale) -> Tensor",
    cpu=lambda *given: _dequantize_here(Dequantize(*given)),
    cuda=lambda *given: _launch_dequantize(Dequantize(*given)),
    meta=_dequantize_on_meta,
)
