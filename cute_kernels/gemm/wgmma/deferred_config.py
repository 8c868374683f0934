"""Products around a deferred RMSNorm: one produces what the norm needs, the next one applies it. There are no GPU types
here.

y = (h w r) W^T, where h are rows, w the norm's weight and r = (mean(h^2) + eps)^-0.5 a number for each row. r commutes
with the product: y = r ((h w) W^T). So the product that makes h also writes h w and sums of squares of h, and the next
one multiplies its accumulators by r. No launch lies between them.

The tiles' configuration and kernel stay what they are without a norm: the norm is a value around them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cute_kernels.device.cuda import BARRIER_BYTES
from cute_kernels.gemm.arguments import GIVES_NORM, TAKES_NORM, CompiledAs
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import WARPGROUP_THREADS, RegisterWgmma, ResidentLimbs
from cute_kernels.gemm.wgmma.results import (
    Dsmem,
    InterleavedDsmem,
    RowExchange,
    WholeK,
    WorkspaceSplitK,
    one_of,
)
from layouts.weights.hopper import TILE_N

DeferredKind = Literal["gives", "takes"]
GIVES: DeferredKind = "gives"  # rows, rows times the norm's weight, and sums of their squares
TAKES: DeferredKind = "takes"  # rows times the norm's weight, and sums of squares

SQUARES_N = TILE_N  # features of a row whose squares are one sum
SQUARES_VECTOR = 4  # sums of 16 bytes: rows of sums are whole vectors
STEP_N = SQUARES_N * SQUARES_VECTOR  # so rows are a multiple of this
ROW_BYTES = 2 * TILE_N  # of a token's results of a tile in 16 bits
CHUNK_BUFFERS = 2  # of a warpgroup's residual, as `.residual` has them
FACTOR_BYTES = 4  # of a row: r
IN_FLIGHT = 4  # vectors of a row's sums that a thread asks for at a time
FEW_ROWS = 8  # of a tile in limbs
MOST_OWN_M = 128  # rows of a CTA whose factors are made while others multiply
ROW_LANES = 8  # threads that add up a row's sums of squares; of rows in limbs twice as many
FACTOR_WARPS = 2  # producer warps that copy nothing: they make factors
SUMMED_ROWS = 16  # rows whose sums they ask for at a time: two a thread
# Registers of a thread that loads and of one that multiplies, by the number of warpgroups, where factors are made:
# all that an SM has.
FACTOR_REGISTERS = {1: (56, 240), 2: (56, 224), 3: (56, 152)}


@dataclass(frozen=True)
class DeferredNormConfig:
    """One compiled variant: a configuration of tiles, and which side of a deferred norm its products are on.

    Attributes:
        tiles: of the product. Each CTA has one work tile.
        kind: `GIVES` or `TAKES`.
    """

    reductions: ClassVar[dict[type, tuple[type, ...]]] = {
        RegisterWgmma: (WholeK, WorkspaceSplitK, RowExchange, Dsmem, InterleavedDsmem),
        ResidentLimbs: (Dsmem, InterleavedDsmem),
    }
    """By the mainloop, those that it goes with."""

    tiles: WgmmaConfig[Any]
    kind: DeferredKind

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return self.tiles.dtype

    @property
    def limits(self):
        """The limits of the architectures that the mainloop is written for."""
        return self.tiles.limits

    def kernel(self) -> CompiledAs:
        """What it is compiled as."""
        arguments = GIVES_NORM if self.kind == GIVES else TAKES_NORM
        return CompiledAs("cute_kernels.gemm.wgmma.deferred_kernel:deferred_kernel", arguments)

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        return f"{self.tiles.name}_{self.kind}_norm"

    @property
    def in_limbs(self) -> bool:
        """Whether CTAs make limbs of x, during which sums of squares may be loaded."""
        return self.tiles.limbs

    @property
    def row_lanes(self) -> int:
        """Threads that add up a row's sums of squares."""
        return 2 * ROW_LANES if self.in_limbs else ROW_LANES

    @property
    def rows_at_once(self) -> int:
        """Rows whose sums are added up at a time."""
        return WARPGROUP_THREADS // self.row_lanes if self.in_limbs else SUMMED_ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """(registers of a thread that loads, registers of one that multiplies)."""
        if self.kind == TAKES:
            return FACTOR_REGISTERS[self.tiles.warpgroups]
        return self.tiles.producer_registers, self.tiles.consumer_registers

    @property
    def most_inputs(self) -> int | None:
        """The most inputs of rows in limbs, whose sums are loaded all at once; None for any number."""
        return self.row_lanes * IN_FLIGHT * STEP_N if self.in_limbs else None

    @property
    def stored_tiles(self) -> int:
        """Tiles of 64 features that a warpgroup stores, at most."""
        cluster = self.tiles.cluster if self.tiles.dsmem_reduction else 1
        return -(-self.tiles.n_tiles // cluster)

    @property
    def extra_offset(self) -> int:
        """The offset of a warpgroup's additional memory in its staging buffer, behind two chunks of a residual."""
        return CHUNK_BUFFERS * self.tiles.chunk_m * ROW_BYTES

    @property
    def extra_bytes(self) -> int:
        """Bytes of that memory: the norm's weights of each tile that is stored, or a factor for each row."""
        return self.stored_tiles * ROW_BYTES if self.kind == GIVES else self.factor_bytes + BARRIER_BYTES

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors of whole rounds of rows. An mbarrier lies behind those that all warpgroups share."""
        return FACTOR_BYTES * (-(-self.tiles.own_m // self.rows_at_once) * self.rows_at_once)

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        tiles = self.tiles
        if reason := one_of(self.kind, (GIVES, TAKES), "kind") or tiles.can_implement():
            return reason
        if tiles.dtype != "bf16":
            return f"a norm is deferred in bf16, not {tiles.dtype}: a row times a norm's weight may be too large for it"
        parts = (type(tiles.mainloop), type(tiles.reduction), type(tiles.store))
        if parts[1] not in self.reductions.get(parts[0], ()):
            return f"a norm is not deferred by {', '.join(part.__name__ for part in parts)}"
        if self.in_limbs and (tiles.mainloop.factors or tiles.tile_m > FEW_ROWS):
            return f"a norm is deferred in limbs of {FEW_ROWS} rows that meet no factors"
        if tiles.multicast > 1:
            return f"a norm is not deferred by {tiles.multicast} CTAs that multicast activations"
        if tiles.own_m > MOST_OWN_M:
            return f"a norm is deferred for at most {MOST_OWN_M} rows that a CTA stores, not {tiles.own_m}"
        if self.extra_offset + self.extra_bytes > tiles.staging_bytes:
            return f"{self.extra_bytes} bytes do not fit beside the residual into {tiles.staging_bytes} of staging"
        if self.kind == GIVES and self.stored_tiles * len(tiles.chunks) > CHUNK_BUFFERS:
            return f"{self.stored_tiles} tiles of {len(tiles.chunks)} chunks have no buffers of their own"
        return None
