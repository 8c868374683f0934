"""Launches the kernel that makes rows of x in E4M3 or in limbs, for products and for `quantize_activations`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cute_kernels.gemm.operands import fp8_config
from cute_kernels.gemm.operands.fp8_config import X_GROUP, Fp8Wgmma, RowsConfig
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.mainloops import X_SCALE_ALIGNMENT
from cute_kernels.runtime.cache import default_cache, load
from cute_kernels.runtime.device import arch_of, is_supported
from cute_kernels.runtime.gpu import GPU, per_gpu
from cute_kernels.runtime.memory import Blank, blank
from cute_kernels.runtime.native import compiler_version
from cute_kernels.runtime.plans import ALIGNMENT, MAX_PLANS

VECTOR = 8  # inputs of 16 bytes
MOST_TILE_M = max(Fp8Wgmma.tile_m_sizes)


@dataclass(frozen=True)
class ScaledRows:
    """A launch that makes rows and their scales. It is kept for all calls with the same sizes.

    Attributes:
        send: launches the compiled kernel.
        new_codes, new_scales: shapes and dtypes of the codes and the scales that the launch writes.
    """

    send: Callable[..., Any]
    new_codes: Blank
    new_scales: Blank

    @property
    def pitch(self) -> int:
        """The distance between the scales of a row's neighbouring groups, in scales. Only launches of
        `rows_for_products` have it.
        """
        return self.new_scales[0][1]

    def make(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, end: int = 0, rows: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes (codes, scales) on the current device.

        Args:
            x: bf16 or fp16 [.., k], k a multiple of 8; its address is a multiple of 16 bytes.
            scale: the scale of all of x, or None.
            end, rows: addresses, see `ROWS`.
        """
        codes, scales = GPU.empty(*self.new_codes), GPU.empty(*self.new_scales)
        given = 0 if scale is None else scale.data_ptr()
        self.send(x=x, end=end, rows=rows, given=given, out=codes.data_ptr(), scales=scales.data_ptr())
        return codes, scales


def scales_of(group_size: int, scale: torch.Tensor | None) -> str:
    """Returns `RowsConfig.scales` for a group size (0: no groups) and a given scale or None: `GIVEN`, `BY_GROUP` or
    `BY_ROW`."""
    return fp8_config.GIVEN if scale is not None else fp8_config.BY_GROUP if group_size else fp8_config.BY_ROW


@per_gpu
@lru_cache(maxsize=MAX_PLANS)
def rows_for_products(
    places: int, k_pad: int, dtype: torch.dtype, scales: str, index: int, makes: str = fp8_config.FOR_PRODUCTS
) -> ScaledRows:
    """Returns the launch that makes rows of x for products, in FP8 or in `LIMBS`.

    It writes 2-byte elements of ``dtype``: [places, 64 * k blocks] in FP8, [places, 128 * k blocks] in limbs. Scales
    are fp32 [k blocks, pitch].
    """
    groups, half_last = fp8_config.whole_k(k_pad) // X_GROUP, bool(k_pad % X_GROUP)
    # From a group's scales to the next: room for a whole last tile, loaded from a multiple of 16 bytes on.
    pitch = -(-places // X_SCALE_ALIGNMENT) * X_SCALE_ALIGNMENT + MOST_TILE_M + X_SCALE_ALIGNMENT
    sizes = {"groups": groups, "scale_groups": groups, "group_stride": pitch, "place_stride": 1}
    config = RowsConfig(DTYPES[dtype], scales, makes, half_last)
    elements = groups * (X_GROUP if makes == fp8_config.LIMBS else X_GROUP // 2)
    send = _bound(config, index, places=places, out_pieces=groups * (X_GROUP // VECTOR), **sizes)
    return ScaledRows(send, blank((places, elements), dtype), blank((groups, pitch), torch.float32))


def plain_rows(x: torch.Tensor, group_size: int, scale: torch.Tensor | None) -> ScaledRows | None:
    """Returns the launch of `quantize_activations` for x on a GPU, or None if torch has to compute it.

    torch computes x in fp32, rows with gaps, and rows that are not whole, aligned pieces of 16 bytes. It also computes
    all calls if there is no kernel for the GPU, or if the kernel is not compiled and there is no compiler.
    """
    index, k = x.get_device(), x.shape[-1]
    if x.dtype not in DTYPES or not x.numel() or k % VECTOR or not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        return None
    config = RowsConfig(DTYPES[x.dtype], scales_of(group_size, scale), fp8_config.PLAIN)
    if not is_supported(index):
        return None
    if compiler_version() is None and not default_cache().has(GemmSpec(config), arch_of(index)):
        return None
    return rows_in_order(config, x.numel() // k, k, index)


@per_gpu
@lru_cache(maxsize=MAX_PLANS)
def rows_in_order(config: RowsConfig, places: int, k: int, index: int) -> ScaledRows:
    """Returns the launch that makes rows [places, k] in x's own order, k a multiple of 8. Scales are fp32 [places,
    groups], or [places, 1] without groups."""
    kind = torch.bfloat16 if config.makes == fp8_config.ROUNDED else torch.float8_e4m3fn
    groups = -(-k // X_GROUP)
    count = groups if config.scales == fp8_config.BY_GROUP else 1
    sizes = {"groups": groups, "scale_groups": count, "group_stride": 1, "place_stride": count}
    send = _bound(config, index, places=places, out_pieces=k // VECTOR, **sizes)
    return ScaledRows(send, blank((places, k), kind), blank((places, count), torch.float32))


def rounded_rows(places: int, k: int, dtype: torch.dtype, scales: str, index: int) -> ScaledRows:
    """Returns the launch that rounds rows [places, k] of x to E4M3, and stores codes times scales in bf16. The rows are
    those of a 16-bit product, so they are whole pieces of 16 bytes."""
    return rows_in_order(RowsConfig(DTYPES[dtype], scales, fp8_config.ROUNDED), places, -(-k // VECTOR) * VECTOR, index)


def _bound(config: RowsConfig, index: int, **sizes: int) -> Callable[..., Any]:
    return fp8_config.ROWS.bound(load(GemmSpec(config), arch_of(index)), sizes)
