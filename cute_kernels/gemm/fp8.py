"""Computes products in FP8: activations in E4M3 times weights whose codes E4M3 can hold exactly. A call asks for FP8
with ``activations="fp8"``.

A call is computed by one of three algorithms:

- Few rows: x is rounded to E4M3, stored in bf16, and multiplied by a 16-bit product. Loading the weights takes as long
  as such a product, so FP8 MMAs would gain nothing.
- More rows: torch's own product (`torch._scaled_mm`), if x and W have one scale per row, at most a bias is added,
  results are bf16 and not batch-invariant, and N and K are multiples of 16. torch reads codes row by row: `row_codes`
  copies a weight's codes once, if the GPU has room for the copy.
- All other calls: one launch makes rows in E4M3, and a kernel of `cute_kernels.gemm.operands` multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.weak import WeakIdKeyDictionary

from cute_kernels.gemm.activations import out_features
from cute_kernels.gemm.call import LinearCall
from cute_kernels.gemm.operands.fp8 import E4M3, quantize_activations
from cute_kernels.gemm.operands.fp8_config import x_group
from cute_kernels.gemm.operands.fp8_launch import rounded_rows, rows_for_products, scales_of
from cute_kernels.gemm.operands.fp8_schedule import fp8_schedule
from cute_kernels.gemm.plan import aligned, of_rows
from cute_kernels.gemm.product import make_product, problem_of, product_of
from cute_kernels.gemm.weight import PackedWeight, WeightTensors, is_captured, row_blocks
from cute_kernels.runtime.device import is_supported
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import blank
from cute_kernels.runtime.operator import Plan
from layouts.weights import hopper

TORCH_MULTIPLE = 16  # N and K that `torch._scaled_mm` takes are multiples of this
FEW_ROWS, FEW_BLOCK_ROWS = 64, 32  # up to so many rows 16-bit products are fastest; FP8 in blocks; H200, 2026-11-29
MEMORY_KEPT = 2  # one part in so many of a GPU's memory stays free when codes are copied, for caches
FAST_ACCUMULATION = False  # sums of some 14 bits, which over long K err by more than a result's rounding


def takes_row_codes(weight: PackedWeight | WeightTensors) -> bool:
    """Whether torch's product supports a weight."""
    form, shape = weight.format, weight.shape
    by_rows = form.codes_name == "e4m3" and not form.group_size and weight.dtype == torch.bfloat16
    return by_rows and not any(size % TORCH_MULTIPLE for size in shape)


def row_codes(weight: PackedWeight) -> torch.Tensor:
    """Returns an FP8 weight's codes row by row, float8_e4m3fn [N, K], as torch's product takes them."""
    rows = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    tiles, blocks, _ = weight.codes.shape
    for first, last in row_blocks(tiles, blocks * hopper.tile_k(weight.bits), weight.device):
        own = rows[64 * first : 64 * last]
        own.copy_(weight.unpack_tiles(first, last)[: len(own), : own.shape[1]])
    return rows.view(E4M3)


_kept_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The result of `row_codes` for each weight, by the tensor of its codes; None for a weight that may not be copied."""


def has_room(codes: torch.Tensor) -> bool:
    """Whether half of a device's memory stays free after a copy of ``codes``. It is False while a CUDA graph is
    captured."""
    free, total = (0, 0) if is_captured(codes) else torch.cuda.mem_get_info(codes.device)
    return free - codes.nbytes > total / MEMORY_KEPT


def kept_row_codes(weight: PackedWeight | WeightTensors, may_copy: Callable[[], bool]) -> torch.Tensor | None:
    """Returns `row_codes` of a weight. The first call for a weight calls ``may_copy``; if it returns True, the row
    codes are made and kept, else None is kept. While a CUDA graph is captured nothing is kept, since the copy would
    only be made when the graph runs.
    """
    found = _kept_rows.get(weight.codes, may_copy)
    if found is may_copy:
        plain = PackedWeight(*weight[:5], check_values=False) if isinstance(weight, WeightTensors) else weight
        found = row_codes(plain) if may_copy() else None
        if not is_captured(weight.codes):
            _kept_rows[weight.codes] = found
    return found


def forget_row_codes(codes: torch.Tensor) -> None:
    """Forgets the row codes of a weight whose codes have changed."""
    _kept_rows.pop(codes, None)


def make_plan(call: LinearCall) -> Plan[[LinearCall], torch.Tensor] | None:
    """Returns the plan of a checked call; None for a call without rows."""
    if call.size[0] == 0:
        return None
    index = call.x.get_device()
    few = has_few_rows(call) and is_supported(index)
    return _torch_plan(index) if by_torch(call) and not few else _own_plan(call, index, in_16_bits=few)


def has_few_rows(call: LinearCall) -> bool:
    """Whether a call is computed as a 16-bit product of rounded x: with few rows it is the fastest.

    The 16-bit product is not exact enough in two cases: x is fp16, which cannot hold every number that codes stand for,
    or a given scale of x and the weight's group scales would both be rounded to bf16. Batch-invariant calls never use
    it, since this rule depends on the number of rows.
    """
    form = call.weight.format
    most = FEW_BLOCK_ROWS if x_group(form) else FEW_ROWS
    exact = call.x.dtype == torch.bfloat16 and (call.activation_scale is None or not form.group_size)
    return call.size[0] <= most and exact and not call.batch_invariant


def _own_plan(call: LinearCall, index: int, *, in_16_bits: bool) -> Plan[[LinearCall], torch.Tensor]:
    """Returns the plan of our kernels: one launch that rounds rows of x, then the product."""
    m, n, k = call.size
    form, dtype = call.weight.format, call.x.dtype
    problem = problem_of(m, n, k, form, dtype, index, call.batch_invariant, call.activation)
    scales = scales_of(x_group(form), call.activation_scale)
    if in_16_bits:
        product, numbers = product_of(problem, index), {}
        rows = rounded_rows(m, k, dtype, scales, index)
    else:
        product = make_product(fp8_schedule(problem), m, index)
        rows = rows_for_products(m, problem.k_pad, dtype, scales, index)
        numbers = {"x_scale_pitch": rows.pitch}
    out_dtype = call.result_dtype
    send = product.bound(n, call.activation, out_dtype, **numbers)
    new_out = blank((m, out_features(n, call.activation)), out_dtype)

    def multiply(scale, x, codes, scales, zeros, bias, residual, *_: object) -> torch.Tensor:
        made, x_scales = rows.make(aligned(x), scale)
        out = GPU.empty(*new_out)
        of_weight = {"codes": codes, "scales": scales, "zeros": zeros}
        send(x=made, x_scales=x_scales, **of_weight, bias=bias, residual=residual, out=out)
        return out

    def launch(call: LinearCall) -> torch.Tensor:
        return of_rows(call, partial(multiply, call.activation_scale))

    return Plan(index, launch, (product,))


def by_torch(call: LinearCall) -> bool:
    """Whether torch's product (`torch._scaled_mm`) computes a checked call."""
    plain = call.residual is call.activation is None and not call.batch_invariant
    bf16 = call.x.dtype == call.result_dtype == torch.bfloat16
    return takes_row_codes(call.weight) and plain and bf16


def _torch_plan(index: int) -> Plan[[LinearCall], torch.Tensor]:
    """Returns the plan of torch's product. If a weight's codes may not be copied, the plan computes the call by our own
    product."""
    is_ours, own = is_supported(index), list[Plan[[LinearCall], torch.Tensor]]()

    def launch(given: LinearCall) -> torch.Tensor:
        weight, held = given.weight, given.weight.codes
        codes = kept_row_codes(weight, lambda: not is_ours or has_room(held))
        if codes is None and not own:  # made of this call: a plan keeps no tensors of the first one
            own.append(_own_plan(given, index, in_16_bits=False))
        return own[0].launch(given) if codes is None else _launch_torch(given, codes)

    return Plan(index, launch)


def _launch_torch(call: LinearCall, row_codes: torch.Tensor) -> torch.Tensor:
    def product(x, codes, scales, zeros, bias, residual, form, n, k, activation, out_dtype, batch_invariant):
        rows, x_scales = quantize_activations(x, scale=call.activation_scale)
        of_features = scales.view(torch.float32).view(1, -1)[:, :n]
        return torch._scaled_mm(
            rows, row_codes.t(), x_scales, of_features.contiguous(), bias, out_dtype=out_dtype,
            use_fast_accum=FAST_ACCUMULATION,
        )  # fmt: skip

    return of_rows(call, product)
