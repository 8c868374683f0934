"""`NormConfig`, the configuration of a norm kernel, and its choice by row length. There are no GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

NormKind = Literal["rms", "layer"]
DTYPES = ("bf16", "fp16")
ORDERED, SCALED, BOTH = "ordered", "scaled", "ordered_scaled"
INPUTS = {(False, False): "", (True, False): ORDERED, (False, True): SCALED, (True, True): BOTH}
"""The values of `NormConfig.inputs`, by (whether results are permuted, whether results are multiplied by a scale)."""
VECTOR = 8  # elements of 16 bits in one access of 16 bytes
THREADS = (64, 128, 256, 512, 1024)
VECTORS = (1, 2, 4)
MAX_COLUMNS = 16384  # what a CTA's registers hold beside fp32 weights and a bias, without spills
USUAL_THREADS = 512  # of a CTA where that is enough: 2 or more CTAs then share an SM, which hides a row's reductions


@dataclass(frozen=True)
class NormConfig:
    """One compiled variant; a CTA takes one row and keeps it in registers.

    Attributes:
        kind: "rms" or "layer".
        dtype: the dtype of x.
        threads: the number of threads of a CTA.
        vectors: the number of vectors of 16 bytes that a thread holds.
        has_residual: whether a residual is added first and the sum is stored.
        has_bias: whether there is a bias; only for "layer".
        weight_dtype: the dtype of weight and bias: "fp32", or "own" for that of x.
        inputs: the steps that turn results into the inputs of a quantised layer, one of `INPUTS`.
    """

    kind: str
    dtype: str
    threads: int
    vectors: int
    has_residual: bool = False
    has_bias: bool = False
    weight_dtype: str = "own"
    inputs: str = ""

    warp: ClassVar[int] = 32

    @property
    def fp32_weight(self) -> bool:
        """Whether weight and bias are fp32; x may have another dtype."""
        return self.weight_dtype == "fp32"

    @property
    def columns(self) -> int:
        """The number of columns of the longest row that the kernel supports."""
        return self.threads * self.vectors * VECTOR

    @property
    def warps(self) -> int:
        return self.threads // self.warp

    @property
    def asks_early(self) -> bool:
        """Whether weights are loaded before the wait for the previous kernel. This is so if registers can hold both the
        weights and a row.
        """
        return self.vectors * (1 + self.has_bias) * (1 + self.fp32_weight) <= 4

    @property
    def ordered(self) -> bool:
        """Whether results are stored in a permuted order."""
        return self.inputs in (ORDERED, BOTH)

    @property
    def scaled(self) -> bool:
        """Whether each column of the results is multiplied by a factor."""
        return self.inputs in (SCALED, BOTH)

    @property
    def name(self) -> str:
        options = "_residual" * self.has_residual + "_bias" * self.has_bias + "_fp32w" * self.fp32_weight
        options += f"_{self.inputs}" if self.inputs else ""
        return f"norm_{self.kind}_{self.dtype}_t{self.threads}_v{self.vectors}{options}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        if self.kind not in ("rms", "layer"):
            return f"kind {self.kind!r} is not 'rms' or 'layer'"
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype!r} is not one of {', '.join(map(repr, DTYPES))}"
        if self.weight_dtype not in ("own", "fp32"):
            return f"weight_dtype {self.weight_dtype!r} is not 'own' or 'fp32'"
        if self.inputs not in INPUTS.values():
            return f"inputs {self.inputs!r} is not one of {', '.join(map(repr, INPUTS.values()))}"
        if self.threads not in THREADS or self.vectors not in VECTORS:
            return f"{self.threads} threads of {self.vectors} vectors, want one of {THREADS} and of {VECTORS}"
        if self.columns > MAX_COLUMNS:
            return f"{self.threads} threads of {self.vectors} vectors take {self.columns} columns, want {MAX_COLUMNS}"
        return "an RMSNorm has no bias" if self.has_bias and self.kind == "rms" else None


def launch_shape(n: int) -> tuple[int, int]:
    """Returns (threads of a CTA, vectors of a thread) for rows of n columns; n is a multiple of 8 up to MAX_COLUMNS.

    Chooses the fewest vectors with which `USUAL_THREADS` threads suffice, then the fewest threads. A row's time is the
    latency of its loads and of one or two reductions, whatever its length.
    """
    shapes = [(t, v) for v in VECTORS for t in THREADS if n <= t * v * VECTOR <= MAX_COLUMNS]
    return min(shapes, key=lambda shape: (shape[0] > USUAL_THREADS, shape[1] > 2, shape[1], shape[0]))
