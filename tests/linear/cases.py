"""Weights of known codes, and what they stand for in plain fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.formats.weights import WeightFormat, integers
from cute_kernels.formats.weights.base import with_row_scales
from cute_kernels.gemm.activations import activation_named
from cute_kernels.gemm.normed import DeferredParts, NormedRows, left_to_next
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.product import Product
from cute_kernels.gemm.quantize import DTYPES, pack_codes
from cute_kernels.gemm.weight import TILE_N, PackedWeight, padded_shape
from layouts import transform
from layouts.weights import hopper

GROUPS = (32, 64, 128, 256, None)


def random_weight(form: WeightFormat, dtype: torch.dtype, n: int, k: int, seed: int = 0) -> PackedWeight:
    """A weight of whole tiles and groups with random codes, scales from 0.5 to 1.5 as far as there are, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << form.bits, (n, k), dtype=torch.uint8, generator=generator)
    for code in form.nan_codes:
        codes[codes == code] = form.pad_code
    groups = (n // TILE_N, k // form.group_size if form.group_size else 1, TILE_N)
    scales = form.stored_scales(torch.rand(groups, generator=generator) + 0.5, dtype)
    if form.row_scales:  # powers of two, which round nothing
        of_rows = 2.0 ** torch.randint(-3, 4, (n // TILE_N, TILE_N), generator=generator)
        scales = with_row_scales(scales.transpose(1, 2), of_rows).transpose(1, 2).contiguous()
    zeros = torch.randint(0, 1 << form.bits, groups, dtype=torch.uint8, generator=generator)
    blob = hopper.pack(transform.pack(codes, form.bits), form.bits)
    return PackedWeight(blob, scales, zeros if form.has_zeros else None, form, (n, k))


def activated(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    """The reference of an activation by name, or y where there is none."""
    found = activation_named(activation)
    return y if found is None else found.of_rows(y)


@dataclass(frozen=True)
class Known:
    """codes uint8 [N, K], scales [N, G], zeros uint8 [N, G] or None; group_of [K]: the group of each input."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_size: int | None
    group_of: torch.Tensor

    @property
    def dense(self) -> torch.Tensor:
        """W [N, K] in fp64, where (code - zero) * scale is exact."""
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros[:, self.group_of].double()
        return (self.codes.double() - zeros) * self.scales[:, self.group_of].double()

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1])

    def problem(self, m: int) -> LinearProblem:
        """A product with ``m`` rows of x of the scales' dtype."""
        return problem_of(m, *self.shape, self.bits, self.scales.dtype, self.group_size, self.zeros is not None)

    def pack(self, **options) -> PackedWeight:
        return pack_codes(
            lambda start, stop: self.codes[start:stop],
            self.scales,
            self.zeros,
            bits=self.bits,
            group_size=self.group_size,
            shape=self.shape,
            **options,
        )


def known(
    n: int,
    k: int,
    bits: int = 4,
    group_size: int | None = 32,
    zero_point: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Known:
    """Random codes, scales of about 0.01 and zero points; inputs in order."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-k // group_size) if group_size else 1
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    scales = (0.005 + 0.01 * torch.rand(n, groups, generator=generator)).to(dtype)
    zeros = torch.randint(0, 1 << bits, (n, groups), dtype=torch.uint8, generator=generator) if zero_point else None
    group_of = torch.arange(k) // (group_size or k)
    return Known(codes, scales, zeros, bits, group_size, group_of)


def problem_of(
    m: int,
    n: int,
    k: int,
    bits: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    group_size: int | None = 128,
    zero_point: bool = False,
) -> LinearProblem:
    """A product of ``m`` rows of x with a weight [n, k] of a format."""
    return LinearProblem(
        m, n, k, padded_shape((n, k), group_size)[1], integers(bits, group_size or 0, zero_point), DTYPES[dtype]
    )


def with_parts(rows: NormedRows, parts: DeferredParts) -> NormedRows:
    """Rows as if a product had left these parts of their norm."""
    return left_to_next(rows.rows, rows.norm, rows.norm_eps, rows.norm_offset, parts)


def launch_product(product: Product, x: torch.Tensor, weight: Any, out: torch.Tensor, **options: Any) -> None:
    """Launches a dense product that writes ``out``. options: activation; bias and residual, tensors."""
    send = product.bound(weight.shape[0], options.get("activation"), out.dtype)
    given = {"codes": weight.codes, "scales": weight.scales, "zeros": weight.zeros}
    send(x=x, **given, bias=options.get("bias"), residual=options.get("residual"), out=out)
