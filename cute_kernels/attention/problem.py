"""The problem of a call: all properties of the call that its schedule depends on. Plain Python, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.formats.kv import format_of
from cute_kernels.formats.scores.features import PLAIN, Features


@dataclass(frozen=True)
class AttentionProblem:
    """The properties of a call that decide its schedule. Lengths are not among them, since the host does not know them.

    Attributes:
        batch, max_seq_len, num_q_heads, num_kv_heads: sizes of the tensors.
        head_dim: number of columns of a head of q and K.
        v_head_dim: number of columns of a head of V and out.
        k_format, v_format, q_dtype: names of the caches' formats and of q's dtype.
        q_len: number of queries of a request.
        page_tokens: number of tokens that are always contiguous in a paged cache; 0 for contiguous caches.
        features: the features of the call beyond softmax(q K^T) V.
        aligned: for caches of rows with headers, whether bulk copies of the rows begin and end on multiples of 16
            bytes.
        tokens_touch: for caches of rows with headers, whether there are no gaps between tokens, so that one copy may
            take several tokens.
        heads_touch: whether there are no gaps between the rows of a token's heads; True for head-major caches.
        num_sms: number of SMs of the GPU.
        after_append: whether the newest tokens are appended in the same call.
        appends: whether the attention kernel itself appends the newest tokens.
        tree: whether a tree mask says which new tokens a query sees.
    """

    batch: int
    max_seq_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    k_format: str
    v_format: str
    q_dtype: str
    q_len: int = 1
    page_tokens: int = 0
    features: Features = PLAIN
    aligned: bool = True
    tokens_touch: bool = True
    heads_touch: bool = True
    num_sms: int = DecodeConfig.limits.num_sms
    after_append: bool = False
    appends: bool = False
    tree: bool = False

    @classmethod
    def uniform(
        cls,
        batch: int,
        max_seq_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kv_format: str,
        q_dtype: str,
        **others: Any,
    ) -> AttentionProblem:
        """Makes a problem whose K and V have the same format and head_dim."""
        shape = (batch, max_seq_len, num_q_heads, num_kv_heads)
        return cls(*shape, head_dim, head_dim, kv_format, kv_format, q_dtype, **others)

    @classmethod
    def ragged(
        cls,
        head_dim: int,
        k_format: str,
        v_format: str,
        q_dtype: str,
        page_tokens: int = 0,
        features: Features = PLAIN,
        **others: Any,
    ) -> AttentionProblem:
        """Makes a problem of extend attention from the sizes that decide its configuration; 8 query heads share a KV
        head."""
        formats, more = (k_format, v_format, q_dtype), {"page_tokens": page_tokens, "features": features, **others}
        return cls(1, 4096, 8, 1, head_dim, head_dim, *formats, **more)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V rows of one KV head."""
        return format_of(self.k_format).row_bytes(self.head_dim) + format_of(self.v_format).row_bytes(self.v_head_dim)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Number of rows of queries that a request has for a KV head: q_len positions times the group's query heads."""
        return self.group * self.q_len
