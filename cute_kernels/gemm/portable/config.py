"""Configurations of the portable weight-only GEMM. No GPU types here.

A CTA of four warps computes a tile of ``64 * n_tiles`` output features by ``tile_m``. A stage of the pipeline holds 64
inputs: of codes, scales, zero points and activations.
"""

from __future__ import annotations

from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import PortableMmaSync
from cute_kernels.gemm.wgmma.results import WorkspaceSplitK

TILE_M_SIZES = PortableMmaSync.tile_m_sizes
VECTOR_BYTES = 16  # of a cp.async
PortableConfig = WgmmaConfig[PortableMmaSync]


def portable_config(
    weight_format: WeightFormat, dtype: str, tile_m: int = 64, n_tiles: int = 2, num_stages: int = 4
) -> PortableConfig:
    """One compiled variant; arguments as the fields of `WgmmaConfig`."""
    return WgmmaConfig(
        weight_format,
        dtype,
        tile_m=tile_m,
        n_tiles=n_tiles,
        warpgroups=1,
        num_stages=num_stages,
        mainloop=PortableMmaSync(),
        reduction=WorkspaceSplitK(),
    )
