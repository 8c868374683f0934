"""Compile-time choices of the MLA decode kernels, and what follows from them. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.sm90 import BARRIER_BYTES, MAX_SHARED_BYTES, WARP_THREADS

HEAD_DIM = 576  # columns of a key
V_HEAD_DIM = 512  # columns of a value: the first ones of the key
BLOCK_HEADS = 64  # rows of a CTA: M of a warpgroup's MMA
BLOCK_TOKENS = 64
GROUP_TOKENS = 8  # that a gathering warp fetches at a time: rows of a swizzle atom
WARPGROUP_WARPS = 4
NUM_WARPGROUPS = 3  # scores and left half of the output; right half; gathering
NUM_THREADS = NUM_WARPGROUPS * WARPGROUP_WARPS * WARP_THREADS
GATHER_WARPS = WARPGROUP_WARPS
WARP_GROUPS = BLOCK_TOKENS // GROUP_TOKENS // GATHER_WARPS  # groups of tokens that a gathering warp fetches of a block
MULTIPLYING_WARPS = 2 * WARPGROUP_WARPS
NUM_STAGES = 2
TILE_BYTES = BLOCK_TOKENS * HEAD_DIM * 2
QUERY_BYTES = BLOCK_HEADS * HEAD_DIM * 2
WEIGHT_BYTES = BLOCK_HEADS * BLOCK_TOKENS * 2
ROW_VALUE_BYTES = BLOCK_HEADS * 4  # of a number a row
STATS_BYTES = 8  # maximum (in powers of 2) and sum of a partial result
FLAG_BYTES = BLOCK_TOKENS // GROUP_TOKENS * 4  # a word of 8 bits for every 8 tokens of a block
LAUNCH_REGISTERS = 168  # a thread; what the warpgroups have in the end is at most this in sum as well
SERIAL_REGISTERS, CROSSOVER_REGISTERS, SEESAW_REGISTERS = (208, 160, 128), (208, 160, 136), (192, 192, 120)
TOKEN_BYTES = {"mla_fp8": 656, "mla_bf16": 1152}
TOKENS = ("sparse", "paged")
FORMS = ("mla_fp8", "mla_bf16")
SCALES = ("fp32", "power_of_2")
FENCES = ("writer", "reader")
PREFETCH_BY = ("line", "bulk")
MAX_PREFETCH = 16
SERVED_PREFETCH = 4  # blocks


@dataclass(frozen=True)
class MlaConfig:
    """One variant of MLA decode.

    tokens: "sparse": those that indices name; "paged": the first ones of every request, by its pages.
    form: name of the cache's format.
    scales: of FP8 caches: "fp32" takes any scale a cache may hold; "power_of_2" only powers of 2 up to 2**7.
    fence: who makes stores of a tile visible to wgmma: those that write it, before they say so, or those that multiply
        it, after they have heard. Copies that nobody waits for leave it to the latter.
    seesaw: the multiplying warpgroups take turns at the softmax, not the first alone; the halves of a tile are then
        filled and given back one by one.
    crossover: two CTAs with different heads of a row decode half of the tokens each and send them to each other. The
        number of blocks of 64 heads of a row must be even.
    prefetch: how many blocks ahead tokens are brought into L2, 0 for not at all.
    prefetch_by: "line": an instruction of a warp for 32 lines of 128 bytes; "bulk": a bulk prefetch a token.
    """

    tokens: str = "sparse"
    form: str = "mla_fp8"
    scales: str = "fp32"
    fence: str = "writer"
    seesaw: bool = False
    crossover: bool = False
    prefetch: int = 0
    prefetch_by: str = "line"

    @property
    def name(self) -> str:
        """C identifier of the variant."""
        fp8 = f"_{self.scales}_{self.fence}" if self.form == "mla_fp8" else ""
        order = f"{'_seesaw' * self.seesaw}{'_crossover' * self.crossover}"
        ahead = f"_prefetch{self.prefetch}{self.prefetch_by}" if self.prefetch else ""
        return f"{self.form}_{self.tokens}{fp8}{order}{ahead}"

    @property
    def cluster(self) -> int:
        """CTAs that share the decoding of a row's tokens."""
        return 2 if self.crossover else 1

    @property
    def warp_groups(self) -> int:
        """Groups of tokens that a gathering warp fetches of a block."""
        return WARP_GROUPS // self.cluster

    @property
    def num_halves(self) -> int:
        """In how many pieces a tile is filled and given back: left columns with the RoPE columns, right columns."""
        return 2 if self.seesaw else 1

    @property
    def empty_arrivals(self) -> tuple[int, ...]:
        """How many times the barrier of a tile, or of each half, is arrived at when it is given back.

        The left half of the seesaw's tiles holds weights that both warpgroups read.
        """
        if self.seesaw:
            return MULTIPLYING_WARPS, WARPGROUP_WARPS
        return (MULTIPLYING_WARPS * self.cluster,)

    @property
    def copies(self) -> bool:
        """Whether tiles are copies of the cache's bytes."""
        return self.form == "mla_bf16"

    @property
    def full_arrivals(self) -> int:
        """How many times a barrier of a tile is arrived at when the tile is full."""
        return GATHER_WARPS * (WARP_THREADS + 1 if self.copies else 1)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread of each warpgroup."""
        if self.seesaw:
            return SEESAW_REGISTERS
        return CROSSOVER_REGISTERS if self.crossover else SERIAL_REGISTERS

    @property
    def weight_bytes(self) -> int:
        """Shared memory of weights that have a place of their own."""
        return 0 if self.seesaw else WEIGHT_BYTES

    @property
    def row_value_slots(self) -> int:
        """How many numbers a row the multiplying warpgroups pass to each other through a place of its own."""
        return 3 if self.seesaw else 1

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        stages = NUM_STAGES * (TILE_BYTES + FLAG_BYTES + 2 * self.num_halves * BARRIER_BYTES)
        return stages + QUERY_BYTES + self.weight_bytes + self.row_value_slots * ROW_VALUE_BYTES

    def can_implement(self) -> str | None:
        """Why the configuration cannot be compiled, or None."""
        choices = {"tokens": TOKENS, "form": FORMS, "scales": SCALES, "fence": FENCES, "prefetch_by": PREFETCH_BY}
        for name, wanted in choices.items():
            if getattr(self, name) not in wanted:
                return f"{name} is {getattr(self, name)!r}; want one of {wanted}"
        if self.copies and self.fence != "reader":
            return f"fence is {self.fence!r}; tiles that are copied want 'reader'"
        if self.copies and self.crossover:
            return "crossover is True; tiles that are copied are each CTA's own"
        if self.crossover and (self.seesaw or self.fence != "reader"):
            return f"seesaw is {self.seesaw}, fence is {self.fence!r}; crossover wants False and 'reader'"
        if not 0 <= self.prefetch <= MAX_PREFETCH:
            return f"prefetch is {self.prefetch}; want 0 to {MAX_PREFETCH} blocks"
        if self.smem_bytes > MAX_SHARED_BYTES:
            return f"{self.smem_bytes} bytes of shared memory; a CTA has {MAX_SHARED_BYTES}"
        return None


@dataclass(frozen=True)
class CombineConfig:
    """The kernel that adds up the parts of split rows."""

    num_threads: int = V_HEAD_DIM // 4  # a vector of 4 columns each

    @property
    def name(self) -> str:
        """C identifier of the variant."""
        return f"mla_combine_{self.num_threads}"


def served_config(tokens: str, form: str) -> MlaConfig:
    """The variant that calls are served by; `MlaConfig.can_implement` says where there is none."""
    fence = "writer" if form == "mla_fp8" else "reader"
    # As measured: chosen tokens of FP8 gain by prefetching, whole contexts lose half of their rate by it.
    prefetch = SERVED_PREFETCH if (tokens, form) == ("sparse", "mla_fp8") else 0
    return MlaConfig(tokens, form, fence=fence, prefetch=prefetch)
