"""Every compile-time choice of the weight-only GEMM of tiles, as data. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Generic, TypeVar

from cute_kernels.architecture import Limits
from cute_kernels.device.cuda import BARRIER_BYTES
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.activations.base import symbol_of
from cute_kernels.gemm.arguments import CompiledAs
from cute_kernels.gemm.wgmma.mainloops import (
    MOST_LOOPS,
    REGISTER_WGMMA,
    TMA_TILE_K,
    WARPGROUP_THREADS,
    Mainloop,
    ResidentLimbs,
    row_columns,
)
from cute_kernels.gemm.wgmma.regions import Barriers, Region
from cute_kernels.gemm.wgmma.results import STAGED, STAGING_PAD, WGMMA_N_STEP, WHOLE_K, Reduction, StagedStore
from cute_kernels.runtime.spec import one_of
from layouts.weights.hopper import STEP_K, TILE_BYTES, TILE_N, tile_k

WARPGROUP_WARPS = 4
DTYPES = ("bf16", "fp16")
MULTICASTS = (1, 2)
M_TILE_BAND = 8  # token tiles that are computed side by side, see `tiles.TileScheduler`
MOST_COMBINED = 8  # vectors of another part of K that a thread asks for at a time

M = TypeVar("M", bound=Mainloop, covariant=True)


@dataclass(frozen=True)
class WgmmaConfig(Generic[M]):
    """The compile-time choices of one compiled kernel.

    A CTA computes one tile after the other. A tile has ``block_rows`` output features and ``tile_m`` rows of x. A stage
    of the CTA's pipeline holds the codes, scales and activations of a *k block* of ``block_k`` inputs.

    Attributes:
        format: the weight's format.
        dtype: dtype of the activations, "bf16" or "fp16".
        tile_m: the N of the MMAs. It is the number of a tile's rows of x, except for limbs: see `rows`.
        row_parts: number of equal parts into which ``tile_m`` is cut. Each part has its own TMA tiles. Parts without
            rows are neither loaded nor multiplied.
        n_tiles: number of tiles of 64 output features that a warpgroup multiplies with the same activations.
        warpgroups: number of consumer warpgroups, each with ``n_tiles`` tiles.
        block_k: number of inputs in a k block.
        num_stages: number of pipeline stages.
        multicast: number of CTAs of a cluster that compute neighbouring output features of the same rows of x. Each CTA
            loads a share of the activations into the shared memory of all these CTAs. 1: no multicast.
        mainloop, reduction, store: the kernel's policies, values of `.mainloops` and `.results`.
    """

    format: WeightFormat
    dtype: str
    tile_m: int = 256
    row_parts: int = 1
    n_tiles: int = 1
    warpgroups: int = 2
    block_k: int = 64
    num_stages: int = 5
    multicast: int = 1
    mainloop: M = REGISTER_WGMMA  # pyright: ignore[reportAssignmentType]
    reduction: Reduction = WHOLE_K
    store: StagedStore = STAGED

    @property
    def group_size(self) -> int:
        """How many inputs share a scale; 0 for one scale per output feature."""
        return self.format.group_size

    @property
    def weight_name(self) -> str:
        """The part of a kernel's name for the weight's format and the dtype."""
        return self.format.symbol_name(self.dtype)

    @property
    def scales_codes(self) -> bool:
        """Whether the instruction that decodes codes also scales them (`WeightFormat.scaling_decoder`). If not, another
        instruction scales the weights, or scales are applied to the accumulators of a group.
        """
        return self.mainloop.scales_codes and self.format.scales_codes(self.dtype)

    @property
    def limbs(self) -> bool:
        """Whether the MMAs multiply x as two limbs of 8 bits."""
        return self.mainloop.limbs

    @property
    def rows(self) -> int:
        """Number of a tile's rows of x: `tile_m`, or fewer if each row takes several columns of an MMA of limbs."""
        return self.tile_m // row_columns(self.format) if self.limbs else self.tile_m

    @property
    def cluster(self) -> int:
        """Number of CTAs that compute parts of K of one tile, as a cluster."""
        return self.reduction.cluster

    @property
    def k_warpgroups(self) -> int:
        """Number of warpgroups of a CTA that interleave the k blocks of one tile."""
        return self.reduction.k_warpgroups

    @property
    def tile_k(self) -> int:
        """Number of inputs in a tile of codes."""
        return tile_k(self.format.bits)

    @property
    def block_tiles(self) -> int:
        """Number of tiles, of 64 output features each, in a CTA's block."""
        return self.n_tiles * self.warpgroups // self.k_warpgroups - self.mainloop.spare

    @property
    def last_tiles(self) -> int:
        """Number of tiles, of 64 output features each, of a CTA's last warpgroup."""
        return self.n_tiles - self.mainloop.spare

    @property
    def block_rows(self) -> int:
        """Number of output features of a CTA's tile."""
        return TILE_N * self.block_tiles

    @property
    def cluster_size(self) -> int:
        """Number of CTAs of a cluster. They divide K among them, or multicast activations."""
        return self.cluster * self.multicast

    @property
    def one_m_tile(self) -> bool:
        """Whether all rows of a dense product must fit into one tile, as for DSMEM reductions and limbs."""
        return self.reduction.dsmem or self.limbs

    @property
    def prefetched_k_blocks(self) -> int:
        """The number of k blocks of each tile whose codes are prefetched into L2 before the CTA initialises its
        barriers."""
        return self.mainloop.prefetched_k_blocks(self)

    @property
    def consumer_warps(self) -> int:
        return WARPGROUP_WARPS * self.warpgroups

    @property
    def limits(self) -> Limits:
        """The limits of the architecture that the mainloop is written for."""
        return self.mainloop.limits

    @property
    def num_threads(self) -> int:
        return self.warpgroups * WARPGROUP_THREADS + self.mainloop.more_threads

    @property
    def consumer_registers(self) -> int:
        """Number of a consumer thread's registers."""
        return self.mainloop.registers[self.warpgroups]

    @property
    def thread_acc(self) -> int:
        """Number of a thread's fp32 accumulators."""
        return self.n_tiles * self.tile_m // 2

    @property
    def thread_vectors(self) -> int:
        """Number of vectors of four accumulators that a thread has."""
        return self.thread_acc // 4

    @property
    def combine_batch(self) -> int:
        """Number of vectors of four accumulators that a thread loads at a time from another CTA's partial. It divides
        `thread_vectors`, so all batches are full."""
        return gcd(MOST_COMBINED, self.thread_vectors)

    @property
    def own_m(self) -> int:
        """Number of a tile's rows of x that each CTA of a cluster stores."""
        return self.tile_m // (1 if self.reduction.dsmem else self.cluster)

    @property
    def partial_bytes(self) -> int:
        """Bytes of a partial: the fp32 accumulators of a tile of 64 output features."""
        return 4 * TILE_N * self.tile_m

    @property
    def k_block_steps(self) -> int:
        return self.block_k // STEP_K

    @property
    def k_block_tiles(self) -> int:
        return self.block_k // self.tile_k

    @property
    def k_block_groups(self) -> int:
        """Number of scale groups that have inputs in a k block. It is 1 for a group larger than the k block, and 0 for
        scales per output feature.
        """
        return -(-self.block_k // self.group_size) if self.group_size else 0

    @property
    def part_m(self) -> int:
        """Number of a TMA tile's rows of x."""
        return self.tile_m // self.row_parts

    @property
    def loop_parts(self) -> tuple[int, ...]:
        """The numbers of row parts for which a loop is compiled. A tile with another number of row parts runs the loop
        of the next larger number.
        """
        parts = range(1, self.row_parts + 1)
        if self.row_parts <= MOST_LOOPS:
            return tuple(parts)
        return tuple(count for count in parts if count % 2 == 0 or count > self.row_parts - 2)

    def loop_m(self, present: int) -> int:
        """Returns how many rows of x the loop for ``present`` row parts multiplies."""
        return self.part_m * next(count for count in self.loop_parts if count >= present)

    @property
    def tma_tile_bytes(self) -> int:
        """Bytes of the activations of all of a tile's rows for `TMA_TILE_K` inputs."""
        return 2 * TMA_TILE_K * self.tile_m

    @property
    def x_stage_bytes(self) -> int:
        """Bytes that activations take in a stage."""
        return self.mainloop.x_stage_bytes(self)

    @property
    def x_scale_stage_bytes(self) -> int:
        """Bytes that the scales of a tile's rows of x take in a stage."""
        return self.mainloop.x_scale_stage_bytes(self)

    @property
    def code_stage_bytes(self) -> int:
        return self.block_tiles * self.k_block_tiles * TILE_BYTES

    @property
    def scale_stage_bytes(self) -> int:
        return self.block_tiles * self.k_block_groups * self.format.group_scale_bytes

    @property
    def zero_stage_bytes(self) -> int:
        return self.block_tiles * self.k_block_groups * self.format.group_zero_bytes

    @property
    def weight_stage_bytes(self) -> int:
        """Bytes that codes, scales and zero points take in a stage."""
        return self.code_stage_bytes + self.scale_stage_bytes + self.zero_stage_bytes

    @property
    def stage_bytes(self) -> int:
        return self.x_stage_bytes + self.x_scale_stage_bytes + self.weight_stage_bytes

    @property
    def chunk_m(self) -> int:
        """The largest number of tokens that a warpgroup stores at a time."""
        return min(self.store.chunk, self.own_m)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(first token, number of tokens) of each chunk of a tile. A warpgroup stores one chunk at a time."""
        starts = range(0, self.own_m, self.chunk_m)
        return [(start, min(self.chunk_m, self.own_m - start)) for start in starts]

    @property
    def staging_pitch(self) -> int:
        """Bytes from one token to the next in the fp32 staging buffer."""
        return (TILE_N + STAGING_PAD) * 4

    @property
    def staging_bytes(self) -> int:
        """Bytes of a warpgroup's staging buffer."""
        return self.chunk_m * self.staging_pitch

    @property
    def acc_bytes(self) -> int:
        """Bytes of a tile's fp32 accumulators."""
        return 4 * self.block_rows * self.tile_m

    @property
    def share_bytes(self) -> int:
        """Bytes of a warpgroup's accumulators for the rows of x that one CTA of a cluster stores."""
        return self.acc_bytes // (self.warpgroups * self.cluster)

    @property
    def stage_warps(self) -> int:
        """Number of warps that release a stage."""
        return self.consumer_warps // self.k_warpgroups * self.multicast

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of a CTA's shared memory, as its policies declare them, in order."""
        return self.mainloop.shared_memory(self)

    @property
    def barriers(self) -> tuple[Barriers, ...]:
        """Barriers of a CTA, in order."""
        mainloop = self.mainloop
        return (*mainloop.barriers(self), *self.reduction.barriers(self), *mainloop.more_barriers(self))

    @property
    def num_barriers(self) -> int:
        return sum(group.count for group in self.barriers)

    @property
    def smem_bytes(self) -> int:
        return sum(region.size for region in self.regions) + self.num_barriers * BARRIER_BYTES

    def kernel(self) -> CompiledAs:
        """Returns how the configuration's kernel is compiled."""
        return self.store.kernel() or self.mainloop.kernel()

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        return self.mainloop.kernel_name(self) + symbol_of(self.store.activation) + self.store.name

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        mainloop = self.mainloop
        choices = {
            "dtype": self.format.dtypes,
            "tile_m": mainloop.tile_m_sizes,
            "row_parts": tuple(range(1, 9)),
            "n_tiles": mainloop.n_tiles_sizes,
            "warpgroups": tuple(mainloop.registers),
            "block_k": mainloop.block_k_sizes,
            "multicast": MULTICASTS,
        }
        for field, wanted in choices.items():
            if reason := one_of(getattr(self, field), wanted, field):
                return reason
        return (
            self.composition_problem()
            or self.size_problem()
            or mainloop.problem(self)
            or self.reduction.problem(self)
            or self.store.problem(self)
            or self.memory_problem()
        )

    def composition_problem(self) -> str | None:
        """Returns why mainloop, reduction and multicast cannot be combined, or None."""
        names = [type(part).__name__ for part in (self.mainloop, self.reduction)]
        if not self.reduces:
            return f"{names[0]} does not go with {names[1]}"
        if self.multicast > 1 and not (self.mainloop.multicasts and self.reduction.multicasts):
            return f"{self.multicast} CTAs do not multicast activations to {names[0]} with {names[1]}"
        return None

    @property
    def reduces(self) -> bool:
        """Whether mainloop and reduction can be combined: the mainloop lists the reduction's type, or the reduction the
        mainloop's.
        """
        return type(self.reduction) in self.mainloop.reductions or type(self.mainloop) in self.reduction.mainloops

    def size_problem(self) -> str | None:
        """Returns why a kernel cannot have this configuration's sizes of tiles and k blocks, or None."""
        if self.group_size and self.block_k % self.group_size and self.group_size % self.block_k:
            return f"block_k {self.block_k} and group_size {self.group_size} do not divide one another"
        if self.tile_m % self.row_parts or (self.row_parts > 1 and self.part_m.bit_count() > 1):
            return f"{self.row_parts} parts of {self.tile_m} rows are not a power of two each"
        if self.part_m < WGMMA_N_STEP:
            return f"{self.row_parts} parts of {self.tile_m} rows have less than the {WGMMA_N_STEP} of an MMA"
        if self.tile_m * self.n_tiles > self.mainloop.most_acc_m:
            return f"{self.tile_m} rows of {self.n_tiles} tiles are more accumulators than a thread has registers for"
        if self.multicast > 1 and self.row_parts > 1 and not self.reduction.cuts_rows:
            return f"{self.multicast} CTAs that multicast activations want rows in one part"
        return None

    def memory_problem(self) -> str | None:
        """Returns why shared memory has no room for the pipeline, or None."""
        if self.num_stages < 2:
            return f"num_stages {self.num_stages} is not at least 2"
        return self.limits.refuses(self.num_threads, self.smem_bytes)


RESIDENT_TILE_M = ResidentLimbs.tile_m_sizes
ResidentConfig = WgmmaConfig[ResidentLimbs]
"""Tiles of few rows whose activations, as limbs, stay in shared memory."""
