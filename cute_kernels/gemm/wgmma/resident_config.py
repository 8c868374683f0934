"""Configurations of tiles of few rows whose activations, as limbs, stay in shared memory. No GPU types here."""

from __future__ import annotations

from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import ResidentLimbs

RESIDENT_TILE_M = ResidentLimbs.tile_m_sizes
ResidentConfig = WgmmaConfig[ResidentLimbs]
