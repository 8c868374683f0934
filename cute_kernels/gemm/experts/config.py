"""Every compile-time choice of the small kernels around the GEMM, as data. There are no GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.arguments import CompiledAs
from cute_kernels.gemm.experts.arguments import COMBINE, GATHER, ROUTING
from cute_kernels.gemm.experts.schedule import MAX_EXPERTS

ROUTING_WARPS = 32
COMBINE_THREADS = 128
GATHER_THREADS = 256
COMBINE_VECTOR = 4  # columns of a thread
COMBINE_BATCH = 8  # rows that a thread asks for at a time
OUT_DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class RoutingConfig:
    """The kernel that sorts assignments by expert: one CTA.

    Attributes:
        id_bits: of an expert's id, 32 or 64.
    """

    id_bits: int = 32
    num_threads: ClassVar[int] = ROUTING_WARPS * WARP_THREADS

    @property
    def smem_bytes(self) -> int:
        """A count for each warp and expert, and one for each expert."""
        return 4 * MAX_EXPERTS * (ROUTING_WARPS + 1)

    def kernel(self) -> CompiledAs:
        """How it is compiled."""
        return CompiledAs(
            "cute_kernels.gemm.experts.routing:RoutingKernel", ROUTING, f"int{self.id_bits}", 1, self.id_bits // 8
        )

    @property
    def name(self) -> str:
        return f"moe_routing_i{self.id_bits}_pdl"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        return None if self.id_bits in (32, 64) else f"id_bits {self.id_bits!r} is not 32 or 64"


@dataclass(frozen=True)
class CombineConfig:
    """The kernel that adds up the results of a token's experts.

    Attributes:
        dtype: of the output, "bf16", "fp16" or "fp32".
        source: of the results that are added up.
        id_bits: of an expert's id, 32 or 64, where results lie in the order of assignments; 0 where places say how.
        shares: dtype of the weights that results are multiplied with.
    """

    dtype: str = "bf16"
    source: str = "fp32"
    id_bits: int = 0
    shares: str = "fp32"
    num_threads: ClassVar[int] = COMBINE_THREADS

    def kernel(self) -> CompiledAs:
        """How it is compiled."""
        align = 4 if self.dtype == "fp32" else 2
        return CompiledAs(
            "cute_kernels.gemm.experts.combine:CombineKernel", COMBINE, divisibility=1, assumed_align=align
        )

    @property
    def name(self) -> str:
        source = "" if self.source == "fp32" else f"_of_{self.source}"
        ids = f"_i{self.id_bits}" if self.id_bits else ""
        shares = "" if self.shares == "fp32" else f"_by_{self.shares}"
        return f"moe_combine_{self.dtype}{source}{ids}{shares}"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        for name in ("dtype", "source", "shares"):
            if getattr(self, name) not in OUT_DTYPES:
                return f"{name} {getattr(self, name)!r} is not one of {', '.join(OUT_DTYPES)}"
        return None if self.id_bits in (0, 32, 64) else f"id_bits {self.id_bits!r} is not 0, 32 or 64"


@dataclass(frozen=True)
class GatherConfig:
    """The kernel that gathers rows of x in the order of their places.

    Attributes:
        dtype: of x, "bf16" or "fp16".
        row_threads: that copy neighbouring pieces of 16 bytes of a row: a slice of the columns.
        batch: rows of which a thread asks for its piece before it stores the first.
    """

    dtype: str = "bf16"
    row_threads: int = 32
    batch: int = 4
    num_threads: ClassVar[int] = GATHER_THREADS

    @property
    def thread_rows(self) -> int:
        """Rows of a CTA that are copied at the same time."""
        return GATHER_THREADS // self.row_threads

    @property
    def block_places(self) -> int:
        """Places of a CTA."""
        return self.thread_rows * self.batch

    def kernel(self) -> CompiledAs:
        """How it is compiled."""
        return CompiledAs("cute_kernels.gemm.experts.gather:GatherKernel", GATHER)

    @property
    def name(self) -> str:
        return f"moe_gather_{self.dtype}_t{self.row_threads}b{self.batch}_pdl"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        if self.dtype not in OUT_DTYPES[:2]:
            return f"dtype {self.dtype!r} is not one of {', '.join(OUT_DTYPES[:2])}"
        if self.row_threads not in (32, 64, 128, 256):
            return f"row_threads {self.row_threads!r} is not 32, 64, 128 or 256"
        return None if self.batch in (1, 2, 4, 8) else f"batch {self.batch!r} is not 1, 2, 4 or 8"
