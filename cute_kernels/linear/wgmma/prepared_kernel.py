"""`.kernel.WgmmaKernel` behind a launch that makes its rows of x: weights are asked for while that one is running."""

from __future__ import annotations

from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.kernel import TileRoles, WgmmaKernel
from cute_kernels.linear.wgmma.loads import TmaLoads, WeightLoads
from cute_kernels.linear.wgmma.places import DensePlaces
from cute_kernels.linear.wgmma.prepared_config import PreparedWgmma


class PreparedWgmmaKernel(WgmmaKernel):
    """One compiled variant."""

    def __init__(self, config: WgmmaConfig[PreparedWgmma]):
        super().__init__(config)
        places = DensePlaces(config)
        self.activations = TmaLoads(config, places, waits=True)
        weights = WeightLoads(config, places, asks_first=config.one_m_tile)
        self.roles = TileRoles(config, places, weights, self.activations, self.consumers, dense=True)
