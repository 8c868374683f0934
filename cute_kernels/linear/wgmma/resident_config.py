"""Compile-time choices of tiles of few rows whose activations, as limbs, stay in shared memory. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.linear.wgmma.config import (
    DSMEM_CLUSTERS,
    DTYPES,
    K_WARPGROUPS,
    LIMB_GROUP,
    ROW_LIMB_BYTES,
    ROW_SCALE_BYTES,
    WARPGROUP_THREADS,
    WGMMA_N_STEP,
    WgmmaConfig,
)
from cute_kernels.sm90 import BARRIER_BYTES, MAX_SHARED_BYTES, WARP_THREADS

RESIDENT_TILE_M = (WGMMA_N_STEP, 2 * WGMMA_N_STEP)
RESIDENT_WARPGROUPS = (2, 4)
EARLY_CLUSTER = 2  # CTAs of those that send early
# As `config.PREFETCHED_K_BLOCKS`, by the tiles of a block and whether warps load x. What TMA brings of x comes behind
# it.
RESIDENT_PREFETCHED_K_BLOCKS = {(1, True): 4, (1, False): 2, (2, False): 2, (4, True): 1, (4, False): 1}


@dataclass(frozen=True)
class ResidentConfig(WgmmaConfig):
    """A variant that makes limbs of x itself, once, before the first weights have come.

    Stages hold weights only, so nothing of x comes through the pipeline, and one warp copies. Consumer warps keep the
    registers that they are launched with. Tiles are of eight or sixteen rows, and a CTA of a cluster has one part of K
    of one of them, which it pushes.

    Attributes:
        TMA tiles: k blocks of x that there is room for, each both limbs of 128 inputs of a tile's rows.
        loads: whether consumer warps load the rows there are; if not, x, whose rows are whole TMA tiles, comes by TMA,
            which takes long to fill in rows that x does not have.
        spare: tiles of 64 features that the last warpgroup has fewer than the others, so that blocks of an odd number
            of them are as many as there are SMs.
        publishes_early: whether each k block begins with the tiles that the other CTA of the cluster stores, whose
            accumulators leave while the last k block of its own is multiplied. See `.resident_early`.
    """

    resident_k_blocks: int = 64
    loads: bool = False
    spare: int = 0
    publishes_early: bool = False

    @property
    def makes_limbs_before(self) -> bool:
        return False

    @property
    def prefetched_k_blocks(self) -> int:
        return RESIDENT_PREFETCHED_K_BLOCKS.get((self.block_tiles, self.loads), 0)

    @property
    def block_tiles(self) -> int:
        return super().block_tiles - self.spare

    @property
    def last_tiles(self) -> int:
        return self.n_tiles - self.spare

    @property
    def num_threads(self) -> int:
        return self.warpgroups * WARPGROUP_THREADS + WARP_THREADS

    @property
    def stage_copies(self) -> int:
        return 1

    @property
    def num_barriers(self) -> int:
        tiles = (self.n_tiles - 1) * self.num_stages if self.publishes_early else 0
        return super().num_barriers + 1 + tiles  # of x, and of a stage's tiles but the first

    @property
    def x_stage_bytes(self) -> int:
        return 0

    @property
    def x_scale_stage_bytes(self) -> int:
        return 0

    @property
    def k_block_limb_bytes(self) -> int:
        """Both limbs of 128 inputs of a tile's rows."""
        return ROW_LIMB_BYTES * self.tile_m

    @property
    def x_scale_bytes(self) -> int:
        return self.resident_k_blocks * ROW_SCALE_BYTES * self.tile_m

    @property
    def smem_bytes(self) -> int:
        stages = self.num_stages * self.weight_stage_bytes
        acc = self.warpgroups * self.staging_bytes + self.partials_bytes
        resident = self.resident_k_blocks * self.k_block_limb_bytes + self.x_scale_bytes
        return stages + acc + resident + self.num_barriers * BARRIER_BYTES

    @property
    def name(self) -> str:
        spare = f"less{self.spare}" if self.spare else ""
        early = "early" if self.publishes_early else ""
        return f"{super().name}_resident{self.resident_k_blocks}{spare}{early}{'loads' if self.loads else ''}"

    def can_implement(self) -> str | None:
        choices = {
            "dtype": DTYPES,
            "tile_m": RESIDENT_TILE_M,
            "row_parts": (1,),
            "n_tiles": (1, 2, 3, 4),
            "warpgroups": RESIDENT_WARPGROUPS,
            "block_k": (LIMB_GROUP,),
            "cluster": DSMEM_CLUSTERS,
            "dsmem_reduction": (True,),
            "k_warpgroups": K_WARPGROUPS,
            "multicast": (1,),
            "limbs": (True,),
            "synchronous": (False,),
            "bulk_stores": (False,),
            "cuts_rows": (False,),
            "spare": range(self.n_tiles),
        }
        for field, wanted in choices.items():
            found = getattr(self, field)
            if found not in wanted:
                return f"{field} {found!r} is not one of {', '.join(map(str, wanted))}"
        if not self.format.takes_limbs:
            return f"limbs want 4-bit integers without zero points, not {self.format.key}"
        if not self.group_size or self.group_size % LIMB_GROUP:
            return f"limbs want groups of a multiple of {LIMB_GROUP} inputs, not {self.group_size}"
        if problem := self.k_warpgroups_problem():
            return problem
        if problem := self.early_problem():
            return problem
        if self.resident_k_blocks % (2 * self.k_warpgroups):
            # Else a chunk of K would end with another's turn than that which the pipeline goes on with.
            return f"room for {self.resident_k_blocks} k blocks is not two halves of rounds of {self.k_warpgroups}"
        if self.smem_bytes > MAX_SHARED_BYTES:
            return f"{self.smem_bytes} bytes of shared memory exceed the {MAX_SHARED_BYTES} of an SM"
        return None

    def early_problem(self) -> str | None:
        """Why parts cannot be sent early as the configuration says, or None."""
        if self.publishes_early and (self.ahead or self.k_warpgroups > 1):
            return "warpgroups that send early take every k block, and none ahead"
        if self.publishes_early and (self.cluster != EARLY_CLUSTER or self.n_tiles % EARLY_CLUSTER):
            return f"{self.n_tiles} tiles of a warpgroup are not shared out among {EARLY_CLUSTER} CTAs to send early"
        return None
