"""What each warp of a product around a deferred norm does: registers, and which CTAs make factors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.deferred_choice import shipped_configs
from cute_kernels.gemm.wgmma.cluster_reduction import Partials
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.deferred_config import FACTOR_REGISTERS, GIVES, TAKES, norm_of, with_norm
from cute_kernels.gemm.wgmma.deferred_kernel import FactorWarps, deferred_kernel
from cute_kernels.gemm.wgmma.kernel import SpareWarps, WgmmaKernel
from cute_kernels.gemm.wgmma.mainloops import WARPGROUP_THREADS
from cute_kernels.gemm.wgmma.results import Dsmem, RowExchange, WorkspaceSplitK

SM_REGISTERS = 65536
W4 = integers(4)
TILES = [
    WgmmaConfig(W4, "bf16", tile_m=64, block_k=128, num_stages=7, reduction=Dsmem(2)),
    WgmmaConfig(W4, "bf16", tile_m=64, block_k=128, num_stages=6, reduction=Dsmem(4, 2)),
    WgmmaConfig(W4, "bf16", tile_m=64, block_k=128, num_stages=6, reduction=Dsmem(2, 2)),
    WgmmaConfig(W4, "bf16", tile_m=32, n_tiles=2, warpgroups=3, block_k=128, num_stages=6, reduction=Dsmem(2, 3)),
    WgmmaConfig(W4, "bf16", tile_m=64, block_k=128, reduction=RowExchange()),
    WgmmaConfig(W4, "bf16", tile_m=80, warpgroups=1, block_k=128, reduction=WorkspaceSplitK()),
]
every_tile = pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: tiles.name)


def spare_warps_of(config: WgmmaConfig) -> SpareWarps:
    kernel = deferred_kernel(config)
    assert isinstance(kernel, WgmmaKernel)
    return kernel.roles.spare


@pytest.mark.parametrize("warpgroups", FACTOR_REGISTERS)
def test_registers_are_no_more_than_a_launch_has(warpgroups: int):
    """A warpgroup that takes more waits for what the others have given back."""
    loads, multiplies = FACTOR_REGISTERS[warpgroups]
    launched = min(SM_REGISTERS // (WARPGROUP_THREADS * (warpgroups + 1)) // 8 * 8, 240)
    assert loads % 8 == multiplies % 8 == 0
    assert loads + multiplies * warpgroups <= launched * (warpgroups + 1)


@every_tile
def test_those_who_make_factors_have_registers_for_two_rows_at_a_time(tiles: WgmmaConfig):
    gives, takes = (with_norm(tiles, kind) for kind in (GIVES, TAKES))
    assert takes.can_implement() is None
    assert spare_warps_of(gives).registers == (tiles.mainloop.producer_registers, tiles.consumer_registers)
    assert spare_warps_of(takes).registers == FACTOR_REGISTERS[tiles.warpgroups]


@every_tile
def test_a_cta_makes_factors_if_it_stores_a_tile(tiles: WgmmaConfig, run_on: Any):
    warps: Any = object.__new__(FactorWarps)
    warps.tiles = tiles
    partials = Partials(tiles)
    for rank in range(tiles.cluster):
        owned = [tile for tile in range(tiles.block_tiles) if int(partials.owner(tile)) == rank]
        stores = bool(np.all(warps.stores(SimpleNamespace(split=rank))))
        assert stores == (bool(owned) or not tiles.reduction.dsmem)


def test_every_shipped_kernel_that_takes_a_norm_has_room_for_factors_and_their_barrier():
    for config in shipped_configs():
        assert config.can_implement() is None
        norm = norm_of(config)
        if norm.kind == TAKES and not config.limbs:
            size = norm.extra_bytes(config)
            assert size == norm.factor_bytes(config) + 8 and size % 8 == 0
