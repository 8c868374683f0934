"""The configuration of a launch of several products. There are no GPU types here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from cute_kernels.architecture import HOPPER, Limits
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.activations.base import ActivationFunction, symbol_of
from cute_kernels.gemm.arguments import CompiledAs
from cute_kernels.gemm.layer.arguments import LAYER_PRODUCTS, MOST_PRODUCTS

TILE_N = 32  # output features of a work tile: half a tile of codes
STAGE_K = 256  # inputs of a stage
GROUP = 128  # inputs that share a scale of weights, and one of x
CODE_TILE_BYTES, CODE_TILE_K = 2048, 64  # a tile of codes: 64 features
STAGE_CODES = TILE_N * STAGE_K // 2
STAGE_SCALES = TILE_N * 2 * (STAGE_K // GROUP)
STAGE_BYTES = STAGE_CODES + STAGE_SCALES
GROUP_LIMB_BYTES = 2 * GROUP  # bytes of both limbs of a group
PART_BYTES = 4 * TILE_N  # bytes of a consumer warp's accumulators of a work tile
EARLY_BYTES = 8 << 20  # bytes of the first product's codes that are prefetched into L2 while the previous launch ends
PRODUCT_BYTES = 64  # bytes of a product's numbers in shared memory
SLOTS = 4  # numbers of work tiles on their way from a loader warp to all warps
BUFFERS = 2  # buffers of the consumer warps' sums
SET_WORDS = 3 << 13  # words of results that others wait for: enough for 8192 hidden and 28672 inner features
EXCHANGE_WORDS = 96 + 2 * SET_WORDS
FORMAT = integers(4, GROUP)  # all weights have it


@dataclass(frozen=True)
class LayerProductsConfig:
    """One compiled variant of `LayerProductsKernel`, for one row of x.

    Attributes:
        groups: number of groups of 128 inputs whose limbs fit in the shared memory reserved for them.
        num_stages: stages of the pipeline of weights; each consumer warp has equally many of them.
        activation: the gated activation of gate and up; None: SwiGLU.
        consumer_warps, loader_warps: how many warps multiply, and how many copy weights.
        window: number of stages that a loader warp has in flight. Memory completes loads in order: with a wider window,
            loads of other CTAs' results would wait for weights that are not needed yet.
        wide_window: number of stages in flight for work tiles that wait for no CTA, and for which no CTA waits.
        draw_ahead: how many stages of a work tile the first loader warp still has to load when it draws the next work
            tile.
    """

    groups: int
    num_stages: int
    activation: ActivationFunction | None = None
    limits: ClassVar[Limits] = HOPPER
    dtype: ClassVar[str] = "bf16"
    consumer_warps: ClassVar[int] = 8
    loader_warps: ClassVar[int] = 4
    num_warps: ClassVar[int] = consumer_warps + loader_warps + 1
    num_threads: ClassVar[int] = num_warps * WARP_THREADS
    window: ClassVar[int] = 8
    wide_window: ClassVar[int] = 16
    draw_ahead: ClassVar[int] = 4

    @property
    def fixed_bytes(self) -> int:
        """Bytes of shared memory besides the pipeline stages."""
        limbs = self.groups * (GROUP_LIMB_BYTES + 2 * 4)
        parts = BUFFERS * self.consumer_warps * PART_BYTES
        return limbs + parts + MOST_PRODUCTS * PRODUCT_BYTES + 4 * SLOTS + 8 * 2 * (SLOTS + BUFFERS) + 7 * 128

    @property
    def shared_bytes(self) -> int:
        return self.fixed_bytes + self.num_stages * (STAGE_BYTES + 16)

    def kernel(self) -> CompiledAs:
        """Returns the kernel class and the launch arguments."""
        return CompiledAs("cute_kernels.gemm.layer.kernel:LayerProductsKernel", LAYER_PRODUCTS)

    @property
    def name(self) -> str:
        warps = f"w{self.consumer_warps}l{self.loader_warps}f{self.window}x{self.wide_window}d{self.draw_ahead}"
        own = symbol_of(self.activation)
        return f"layer_products_{self.dtype}_m1_g{self.groups}_r{self.num_stages}_{warps}{own}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        if self.num_stages < self.wide_window or self.num_stages % self.consumer_warps:
            return f"{self.num_stages} stages are not as many for each of {self.consumer_warps} warps, two at least"
        return self.limits.refuses(self.num_threads, self.shared_bytes)


def config_for(most_k: int) -> LayerProductsConfig | None:
    """Returns the configuration for rows of up to ``most_k`` inputs, with as many pipeline stages as fit in shared
    memory. Returns None if too few stages fit."""
    empty = LayerProductsConfig(-(-most_k // GROUP), 0)
    room = (empty.limits.shared_bytes - empty.fixed_bytes) // (STAGE_BYTES + 16)
    config = replace(empty, num_stages=max(room, 0) // empty.consumer_warps * empty.consumer_warps)
    return config if config.can_implement() is None else None
