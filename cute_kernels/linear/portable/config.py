"""Every compile-time choice of the portable weight-only GEMM, as data. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.linear.config import X_PAD
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.sm90 import WARP_THREADS
from layouts.weights.hopper import TILE_N

TILE_M_SIZES = (16, 32, 64)
VECTOR_BYTES = 16  # of a cp.async
MAX_SHARED_BYTES = 99 * 1024  # of a CTA on sm_86, sm_89 and sm_120, which have the least of all


@dataclass(frozen=True)
class PortableConfig(WgmmaConfig):
    """One compiled variant: a CTA of four warps computes a tile of ``64 * n_tiles`` output features by ``tile_m``.

    Each warp has 16 rows of each tile of 64 features and all tokens. A stage of the pipeline holds 64 inputs: of codes,
    scales, zero points and activations. The fields are those of `WgmmaConfig`, of which one warpgroup, k blocks of 64
    inputs and K that may be cut are all there is.
    """

    tile_m: int = 64
    n_tiles: int = 2
    warpgroups: int = 1
    block_k: int = 64
    group_steps: int = 1
    num_stages: int = 4
    splits_k: bool = True

    @property
    def num_threads(self) -> int:
        return self.consumer_warps * WARP_THREADS

    @property
    def scales_codes(self) -> bool:
        return False  # codes are decoded as the kernel for few rows does it

    @property
    def m_fragments(self) -> int:
        """MMAs that share an A operand."""
        return self.tile_m // 8

    @property
    def x_pitch(self) -> int:
        """Bytes from a token to the next: an odd number of vectors, so that ldmatrix reads without conflicts."""
        return 2 * self.block_k + X_PAD

    @property
    def x_stage_bytes(self) -> int:
        return self.tile_m * self.x_pitch

    @property
    def stages_bytes(self) -> int:
        return self.num_stages * self.stage_bytes

    @property
    def smem_bytes(self) -> int:
        """The pipeline; results go through the same memory when all products are done."""
        return max(self.stages_bytes, self.staging_bytes)

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        weight = self.format.symbol_name(self.dtype)
        return f"linear_portable_{weight}_m{self.tile_m}n{TILE_N * self.n_tiles}r{self.num_stages}"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        choices = {
            "dtype": self.format.dtypes,
            "tile_m": TILE_M_SIZES,
            "row_parts": (1,),
            "n_tiles": (1, 2),
            "warpgroups": (1,),
            "block_k": (64,),
            "group_steps": (1,),
            "splits_k": (True,),
        }
        for field, wanted in choices.items():
            found = getattr(self, field)
            if found not in wanted:
                return f"{field} {found!r} is not one of {', '.join(map(str, wanted))}"
        if self.num_stages < 2:
            return f"num_stages {self.num_stages} is not at least 2"
        if self.smem_bytes > MAX_SHARED_BYTES:
            return f"{self.smem_bytes} bytes of shared memory exceed the {MAX_SHARED_BYTES} of the smallest GPUs"
        return None
