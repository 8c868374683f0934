"""Weight-only GEMM of tiles around a deferred norm: `.kernel` and `.resident_kernel`, whose results leave as
`.deferred_norm` says."""

from __future__ import annotations

from cute_kernels.linear.wgmma.deferred_config import GIVES, DeferredNormConfig
from cute_kernels.linear.wgmma.deferred_norm import GivingOperands, TakingOperands, make_store
from cute_kernels.linear.wgmma.kernel import ALL_WARPS, WgmmaKernel
from cute_kernels.linear.wgmma.resident_kernel import ResidentKernel, for_reductions
from cute_kernels.linear.work import operands_of


class DeferredNormKernel:
    """One compiled variant; :class:`DeferredNormConfig` says which."""

    def __init__(self, config: DeferredNormConfig):
        operands = GivingOperands if config.kind == GIVES else TakingOperands
        self.product = WgmmaKernel(config.tiles, for_reductions(make_store(config)), operands, ALL_WARPS)

    def launch(self, given, stream):
        """Launches ``num_ctas`` CTAs; ``given`` has the arguments of `.deferred_compile`."""
        self.product.launch(given, stream)


class DeferredResidentKernel:
    """The same of few rows, whose limbs each CTA makes."""

    def __init__(self, config: DeferredNormConfig):
        self.operands = GivingOperands if config.kind == GIVES else TakingOperands
        self.resident = ResidentKernel(config.tiles, make_store(config))

    def launch(self, given, stream):
        """Of at most a tile of rows of x; ``given`` has the arguments of `.deferred_compile`."""
        self.resident.launch_over(given, operands_of(self.operands, given), stream)
