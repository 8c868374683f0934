"""The compile-time choices of the kernel that adds up experts' results, as data. There are no GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.gemm.arguments import CompiledAs
from cute_kernels.gemm.experts.arguments import COMBINE
from cute_kernels.runtime.spec import one_of

COMBINE_THREADS = 128
COMBINE_VECTOR = 4  # columns of a thread
COMBINE_BATCH = 8  # rows that a thread asks for at a time: all of a token's in most models (8 experts a token)
OUT_DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class CombineConfig:
    """The kernel that adds up the results of a token's experts.

    Attributes:
        dtype: dtype of the output, "bf16", "fp16" or "fp32".
        source: dtype of the results that are added up.
        id_bits: bits of an expert's id, 32 or 64, if results lie in the order of assignments; 0 if results lie in the
            order of places.
        shares: dtype of the routing weights, by which results are multiplied.
    """

    dtype: str = "bf16"
    source: str = "fp32"
    id_bits: int = 0
    shares: str = "fp32"
    num_threads: ClassVar[int] = COMBINE_THREADS

    def kernel(self) -> CompiledAs:
        """Returns how the configuration's kernel is compiled."""
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
        """Returns why this configuration cannot be compiled, or None."""
        problems = [one_of(getattr(self, name), OUT_DTYPES, name) for name in ("dtype", "source", "shares")]
        return next(filter(None, problems), None) or one_of(self.id_bits, (0, 32, 64), "id_bits")
