"""Configurations of tiles of few rows whose activations, as limbs, stay in shared memory. No GPU types here."""

from __future__ import annotations

from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.mainloops import ResidentLimbs
from cute_kernels.linear.wgmma.results import EarlyDsmem

RESIDENT_TILE_M = ResidentLimbs.tile_m_sizes
EARLY_CLUSTER = EarlyDsmem.cluster  # CTAs of those that send early
ResidentConfig = WgmmaConfig[ResidentLimbs]
