"""Compile-time choices of tiles of few rows whose activations, as digits, stay in shared memory. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.linear.wgmma.config import (
    DIGIT_GROUP,
    DTYPES,
    MMA_TOKENS,
    PUSH_CLUSTERS,
    ROW_DIGIT_BYTES,
    ROW_SCALE_BYTES,
    TURNS,
    WARPGROUP_THREADS,
    WgmmaConfig,
)
from cute_kernels.sm90 import BARRIER_BYTES, MAX_SHARED_BYTES, WARP_THREADS

RESIDENT_TOKENS = (MMA_TOKENS, 2 * MMA_TOKENS)
RESIDENT_WARPGROUPS = (2, 4)
EARLY_CLUSTER = 2  # CTAs of those that send early
# As `config.PREFETCHED_UNITS`, by the tiles of a block and whether warps load x. What TMA brings of x comes behind it.
RESIDENT_PREFETCHED_UNITS = {(1, True): 4, (1, False): 2, (2, False): 2, (4, True): 1, (4, False): 1}


@dataclass(frozen=True)
class ResidentConfig(WgmmaConfig):
    """A variant that makes digits of x itself, once, before the first weights have come.

    Stages hold weights only, so nothing of x comes through the ring, and one warp copies. Multiplying warps keep the
    registers that they are launched with. Tiles are of eight or sixteen rows, and a CTA of a cluster has one part of K
    of one of them, which it pushes.

    Attributes:
        boxes: units of x that there is room for, each both digits of 128 inputs of a tile's rows.
        loads: whether multiplying warps load the rows there are; if not, x, whose rows are whole boxes, comes by TMA,
            which takes long to fill in rows that x does not have.
        spare: tiles of 64 features that the last warpgroup has fewer than the others, so that blocks of an odd number
            of them are as many as there are SMs.
        sends_early: whether each unit begins with the tiles that the other CTA of the cluster stores, whose sums leave
            while the last unit of its own is multiplied. See `.resident_early`.
    """

    boxes: int = 64
    loads: bool = False
    spare: int = 0
    sends_early: bool = False

    @property
    def makes_digits_before(self) -> bool:
        return False

    @property
    def prefetched_units(self) -> int:
        return RESIDENT_PREFETCHED_UNITS.get((self.block_tiles, self.loads), 0)

    @property
    def block_tiles(self) -> int:
        return super().block_tiles - self.spare

    @property
    def last_tiles(self) -> int:
        return self.m_tiles - self.spare

    @property
    def num_threads(self) -> int:
        return self.warpgroups * WARPGROUP_THREADS + WARP_THREADS

    @property
    def stage_copies(self) -> int:
        return 1

    @property
    def num_barriers(self) -> int:
        tiles = (self.m_tiles - 1) * self.num_stages if self.sends_early else 0
        return super().num_barriers + 1 + tiles  # of x, and of a stage's tiles but the first

    @property
    def x_stage_bytes(self) -> int:
        return 0

    @property
    def x_scale_stage_bytes(self) -> int:
        return 0

    @property
    def group_box_bytes(self) -> int:
        """Both digits of 128 inputs of a tile's rows."""
        return ROW_DIGIT_BYTES * self.tokens

    @property
    def x_scale_bytes(self) -> int:
        return self.boxes * ROW_SCALE_BYTES * self.tokens

    @property
    def smem_bytes(self) -> int:
        ring = self.num_stages * self.weight_stage_bytes
        sums = self.warpgroups * self.staging_bytes + self.parts_bytes
        resident = self.boxes * self.group_box_bytes + self.x_scale_bytes
        return ring + sums + resident + self.num_barriers * BARRIER_BYTES

    @property
    def name(self) -> str:
        spare = f"less{self.spare}" if self.spare else ""
        early = "early" if self.sends_early else ""
        return f"{super().name}_resident{self.boxes}{spare}{early}{'loads' if self.loads else ''}"

    def can_implement(self) -> str | None:
        choices = {
            "bits": (4,),
            "dtype": DTYPES,
            "tokens": RESIDENT_TOKENS,
            "row_parts": (1,),
            "m_tiles": (1, 2, 3, 4),
            "warpgroups": RESIDENT_WARPGROUPS,
            "unit_k": (DIGIT_GROUP,),
            "cluster": PUSH_CLUSTERS,
            "pushes": (True,),
            "turns": TURNS,
            "sharing": (1,),
            "digits": (True,),
            "zero_point": (False,),
            "synchronous": (False,),
            "bulk_stores": (False,),
            "cuts_rows": (False,),
            "spare": range(self.m_tiles),
        }
        for field, wanted in choices.items():
            found = getattr(self, field)
            if found not in wanted:
                return f"{field} {found!r} is not one of {', '.join(map(str, wanted))}"
        if not self.group_size or self.group_size % DIGIT_GROUP:
            return f"digits want groups of a multiple of {DIGIT_GROUP} inputs, not {self.group_size}"
        if problem := self.turns_problem():
            return problem
        if problem := self.early_problem():
            return problem
        if self.boxes % (2 * self.turns):
            # Else a chunk of K would end with another's turn than that which the ring goes on with.
            return f"room for {self.boxes} units is not two halves of whole rounds of {self.turns} turns"
        if self.smem_bytes > MAX_SHARED_BYTES:
            return f"{self.smem_bytes} bytes of shared memory exceed the {MAX_SHARED_BYTES} of an SM"
        return None

    def early_problem(self) -> str | None:
        """Why parts cannot be sent early as the configuration says, or None."""
        if self.sends_early and (self.ahead or self.turns > 1):
            return "warpgroups that send early take every unit, and none ahead"
        if self.sends_early and (self.cluster != EARLY_CLUSTER or self.m_tiles % EARLY_CLUSTER):
            return f"{self.m_tiles} tiles of a warpgroup are not shared out among {EARLY_CLUSTER} CTAs to send early"
        return None
