"""The configurations of two products around a deferred RMSNorm. The first product computes sums of squares, the second
one applies the norm. There are no GPU types here.

The second product computes y = (h w r) W^T from rows h. w is the norm's weight; r = (mean(h^2) + eps)^-0.5 is one
number for each row. So y = r ((h w) W^T). The first product makes h, and also writes h w and sums of squares of h. The
second product multiplies its accumulators by r. There is no launch between the two products.

Only the store policy differs from that of a product without a norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from cute_kernels.device.cuda import BARRIER_BYTES
from cute_kernels.gemm.arguments import GIVES_NORM, TAKES_NORM, CompiledAs
from cute_kernels.gemm.wgmma.mainloops import WARPGROUP_THREADS, RegisterWgmma, ResidentLimbs, ScaledSums
from cute_kernels.gemm.wgmma.results import Dsmem, RowExchange, StagedStore, WholeK, WorkspaceSplitK
from cute_kernels.runtime.spec import one_of
from layouts.weights.hopper import TILE_N

if TYPE_CHECKING:
    from cute_kernels.gemm.wgmma.config import WgmmaConfig

DeferredKind = Literal["gives", "takes"]
GIVES: DeferredKind = "gives"  # stores rows, rows times the norm's weight, and sums of their squares
TAKES: DeferredKind = "takes"  # reads rows times the norm's weight, and sums of squares

SQUARES_N = TILE_N  # features of a row whose squares are one sum
SQUARES_VECTOR = 4  # sums in 16 bytes: rows of sums are whole vectors
STEP_N = SQUARES_N * SQUARES_VECTOR  # rows have a multiple of so many features
ROW_BYTES = 2 * TILE_N  # bytes of a token's results of a tile in 16 bits
CHUNK_BUFFERS = 2  # buffers of a warpgroup's residual, as `.residual` has them
FACTOR_BYTES = 4  # bytes of a row's factor r
IN_FLIGHT = 4  # vectors of a row's sums that a thread asks for at a time
FEW_ROWS = 8  # rows of a tile in limbs
MOST_OWN_M = 128  # rows of a CTA whose factors are made while others multiply
ROW_LANES = 8  # threads that add up a row's sums of squares; of rows in limbs twice as many
FACTOR_WARPS = 2  # producer warps that copy nothing: they make factors
SUMMED_ROWS = 16  # rows whose sums they ask for at a time: two a thread
# Registers of a producer and of a consumer thread where factors are made, by the number of warpgroups: all that the CTA
# has.
FACTOR_REGISTERS = {1: (56, 240), 2: (56, 224), 3: (56, 152)}


@dataclass(frozen=True)
class DeferredNorm(StagedStore):
    """The store policy of a product before or after a deferred norm. Each CTA has one work tile.

    Attributes:
        kind: `GIVES` for the product before the norm, `TAKES` for the one after it.
    """

    reductions: ClassVar[dict[type, tuple[type, ...]]] = {
        **dict.fromkeys((RegisterWgmma, ScaledSums), (WholeK, WorkspaceSplitK, RowExchange, Dsmem)),
        ResidentLimbs: (Dsmem,),
    }
    """The reductions that a norm can be deferred with, by type of mainloop."""

    kind: DeferredKind = GIVES

    @property
    def name(self) -> str:
        return f"_{self.kind}_norm"

    def kernel(self) -> CompiledAs:
        arguments = GIVES_NORM if self.kind == GIVES else TAKES_NORM
        return CompiledAs("cute_kernels.gemm.wgmma.deferred_kernel:deferred_kernel", arguments)

    def row_lanes(self, config: WgmmaConfig[Any]) -> int:
        """Returns how many threads add up a row's sums of squares."""
        return 2 * ROW_LANES if config.limbs else ROW_LANES

    def rows_at_once(self, config: WgmmaConfig[Any]) -> int:
        """Returns how many rows' sums of squares are added up at a time."""
        return WARPGROUP_THREADS // self.row_lanes(config) if config.limbs else SUMMED_ROWS

    def most_inputs(self, config: WgmmaConfig[Any]) -> int | None:
        """Returns the largest K that a product with limbs after the norm supports, since it loads all sums of a row at
        once. Returns None for all other products, which have no limit.
        """
        return self.row_lanes(config) * IN_FLIGHT * STEP_N if config.limbs and self.kind == TAKES else None

    def stored_tiles(self, config: WgmmaConfig[Any]) -> int:
        """Returns the largest number of tiles of 64 features that a warpgroup stores."""
        return -(-config.n_tiles // (config.cluster if config.reduction.dsmem else 1))

    def extra_offset(self, config: WgmmaConfig[Any]) -> int:
        """Returns the offset in bytes of a warpgroup's additional memory in its staging buffer. This memory comes after
        two chunks of the residual.
        """
        return CHUNK_BUFFERS * config.chunk_m * ROW_BYTES

    def extra_bytes(self, config: WgmmaConfig[Any]) -> int:
        """Returns the bytes of a warpgroup's additional memory. In the product before the norm, it holds the norm's
        weights of each stored tile. In the product after the norm, it holds a factor for each row and an mbarrier."""
        if self.kind == GIVES:
            return self.stored_tiles(config) * ROW_BYTES
        return self.factor_bytes(config) + BARRIER_BYTES

    def factor_bytes(self, config: WgmmaConfig[Any]) -> int:
        """Returns the bytes of the rows' factors. The number of rows is rounded up to a multiple of `rows_at_once`. If
        all warpgroups share the factors, an mbarrier lies after them."""
        at_once = self.rows_at_once(config)
        return FACTOR_BYTES * (-(-config.own_m // at_once) * at_once)

    def problem(self, config: WgmmaConfig[Any]) -> str | None:
        if reason := one_of(self.kind, (GIVES, TAKES), "kind") or super().problem(config):
            return reason
        if config.dtype != "bf16":
            return (
                f"a norm is deferred in bf16, not {config.dtype}: a row times a norm's weight may be too large for it"
            )
        parts = (type(config.mainloop), type(config.reduction))
        if parts[1] not in self.reductions.get(parts[0], ()):
            return f"a norm is not deferred by {', '.join(part.__name__ for part in parts)}"
        if config.limbs and config.tile_m > FEW_ROWS:
            return f"a norm is deferred in limbs of {FEW_ROWS} rows"
        if config.multicast > 1:
            return f"a norm is not deferred by {config.multicast} CTAs that multicast activations"
        if config.own_m > MOST_OWN_M:
            return f"a norm is deferred for at most {MOST_OWN_M} rows that a CTA stores, not {config.own_m}"
        extra, tiles = self.extra_bytes(config), self.stored_tiles(config)
        if self.extra_offset(config) + extra > config.staging_bytes:
            return f"{extra} bytes do not fit beside the residual into {config.staging_bytes} of staging"
        if self.kind == GIVES and tiles * len(config.chunks) > CHUNK_BUFFERS:
            return f"{tiles} tiles of {len(config.chunks)} chunks have no buffers of their own"
        return None


def norm_of(config: WgmmaConfig[Any]) -> DeferredNorm:
    """Returns a configuration's store, which has to be a `DeferredNorm`."""
    assert isinstance(config.store, DeferredNorm)
    return config.store


def with_norm(config: WgmmaConfig[Any], kind: DeferredKind) -> WgmmaConfig[Any]:
    """Returns ``config`` with a `DeferredNorm` of a kind as its store."""
    return replace(config, store=DeferredNorm(config.store.chunk, config.store.activation, kind))
