"""The configuration of a kernel that combines attention over disjoint sets of keys. There are no GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.formats.kv.base import Use
from cute_kernels.formats.scores.features import PLAIN, Features

DTYPES = ("bf16", "fp16", "fp32")
NDIMS = (3, 4)  # [tokens, num_heads, head_dim] and [batch, q_len, num_heads, head_dim]


@dataclass(frozen=True)
class CombineConfig:
    """One compiled variant of the kernel that combines parts.

    Attributes:
        dtype: the result's dtype, one of `DTYPES`.
        ndim: the result's number of dimensions, one of `NDIMS`.
        states: whether the parts are two results of other calls, in ``dtype`` with natural log-sum-exps. Otherwise the
            parts are the splits' results of an extend launch, in fp32 with log2 sums.
    """

    compiled_by: ClassVar[str] = "cute_kernels.attention.compile:compile_combine"
    use: ClassVar[Use] = "extend"
    format_names: ClassVar[tuple[str, ...]] = ()
    features: ClassVar[Features] = PLAIN
    dtype: str
    ndim: int = 3
    states: bool = False

    @property
    def name(self) -> str:
        return f"merge_states_{self.dtype}_{self.ndim}d" if self.states else f"extend_combine_{self.dtype}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        dtypes, ndims = (DTYPES, NDIMS) if self.states else (DTYPES[:2], NDIMS[:1])
        if self.dtype not in dtypes:
            return f"dtype {self.dtype!r} is not one of {', '.join(map(repr, dtypes))}"
        return None if self.ndim in ndims else f"ndim {self.ndim} is not one of {', '.join(map(str, ndims))}"
