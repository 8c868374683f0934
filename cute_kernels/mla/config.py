"""Compile-time choices of the sparse MLA decode kernel, and what follows from them. No GPU types here."""

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
FACTOR_BYTES = BLOCK_HEADS * 4
FLAG_BYTES = BLOCK_TOKENS // GROUP_TOKENS * 4  # a word of 8 bits for every 8 tokens of a block
SCORE_REGISTERS, VALUE_REGISTERS, GATHER_REGISTERS = 208, 168, 128  # per thread; 512 for the three
SCALES = ("fp32", "power_of_2")


@dataclass(frozen=True)
class SparseConfig:
    """One variant of sparse decode over the 656-byte FP8 cache.

    scales: "fp32" takes any scale a cache may hold; "power_of_2" is right for powers of 2 up to 2**7 only.
    """

    scales: str = "fp32"

    @property
    def name(self) -> str:
        """C identifier of the variant."""
        return f"mla_sparse_fp8_{self.scales}"

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        stages = NUM_STAGES * (TILE_BYTES + FLAG_BYTES + 2 * BARRIER_BYTES)
        return stages + QUERY_BYTES + WEIGHT_BYTES + FACTOR_BYTES

    def can_implement(self) -> str | None:
        """Why the configuration cannot be compiled, or None."""
        if self.scales not in SCALES:
            return f"scales is {self.scales!r}; want one of {SCALES}"
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
