"""Barriers of tiles: kernels initialise them for as many arrivals as the policies of a configuration declare."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from cute_kernels.families import shipped_specs
from cute_kernels.gemm.experts.wgmma.entry_config import EntryWgmma
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.memory import barriers_from
from simulator import stand_in
from tests.moe.machine import Pointer


def configs() -> dict[WgmmaConfig, None]:
    """Returns the shipped configurations of tiles. Those of entries are two rings: `tests/moe/test_entry_tiles.py`."""
    found = (getattr(spec, "config", None) for spec in shipped_specs())
    return {one: None for one in found if isinstance(one, WgmmaConfig) and not isinstance(one.mainloop, EntryWgmma)}


def test_barriers_wait_for_as_many_arrivals_as_policies_declare():
    seen = set()
    for config in configs():
        pipeline = barriers_from(config, stand_in(Pointer(0)))["pipeline"]
        declared = {group.name: group for group in config.barriers}
        seen.add(type(config.mainloop))
        assert (pipeline.fills, declared["full"].count) == (declared["full"].arrivals, config.num_stages), config
        assert (pipeline.releases, declared["empty"].count) == (declared["empty"].arrivals, config.num_stages), config
    assert len(seen) > 2
