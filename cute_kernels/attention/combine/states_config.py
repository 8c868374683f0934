"""The configuration of a kernel that merges attention states. There are no GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cute_kernels.formats.kv.base import Use
from cute_kernels.formats.scores.features import PLAIN, Features

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
VECTOR_BYTES = 16
NDIMS = (3, 4)  # [tokens, num_heads, head_dim] and [batch, q_len, num_heads, head_dim]


@dataclass(frozen=True)
class MergeStatesConfig:
    """One compiled variant: dtype of the outputs ("bf16", "fp16", "fp32") and their number of dimensions (3 or 4)."""

    compiled_by: ClassVar[str] = "cute_kernels.attention.compile:compile_merge_states"
    use: ClassVar[Use] = "decode"
    format_names: ClassVar[tuple[str, ...]] = ()
    features: ClassVar[Features] = PLAIN
    dtype: str
    ndim: int = 4

    num_threads: ClassVar[int] = 128  # of a CTA
    vector_bytes: ClassVar[int] = VECTOR_BYTES  # that a thread merges

    @property
    def vector_elements(self) -> int:
        return VECTOR_BYTES // (4 if self.dtype == "fp32" else 2)

    @property
    def name(self) -> str:
        return f"merge_states_{self.dtype}_{self.ndim}d"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        if self.dtype not in DTYPES.values():
            return f"dtype {self.dtype!r} is not one of {', '.join(map(repr, DTYPES.values()))}"
        return None if self.ndim in NDIMS else f"ndim {self.ndim} is not 3 or 4"
