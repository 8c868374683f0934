"""Barriers of tiles: kernels initialise them for as many arrivals as warps and copies come to them."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from cute_kernels.families import shipped_specs
from cute_kernels.gemm.experts.wgmma.entry_config import EntryWgmma, ring_config
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.memory import barriers_from
from simulator import stand_in
from tests.moe.machine import Pointer


def configs() -> dict[WgmmaConfig, None]:
    """Returns the shipped configurations of tiles."""
    found = (getattr(spec, "config", None) for spec in shipped_specs())
    return {one: None for one in found if isinstance(one, WgmmaConfig)}


def test_stages_wait_for_the_warps_that_share_them_and_for_the_copies_that_fill_them():
    seen = set()
    for config in configs():
        pipeline = barriers_from(config, stand_in(Pointer(0)))["pipeline"]
        # A warpgroup of entries has stages of its own; warpgroups that interleave k blocks share every n-th stage.
        entries = isinstance(config.mainloop, EntryWgmma)
        sharing = ring_config(config).consumer_warps if entries else config.consumer_warps // config.k_warpgroups
        seen.add(type(config.mainloop))
        assert (pipeline.fills, pipeline.num_stages) == (config.mainloop.copies, config.num_stages), config
        assert pipeline.releases == sharing * config.multicast, config
    assert len(seen) > 3
