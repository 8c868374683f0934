"""Launches over unpacked keys: what makes them, and attention over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.attention.plan import address_of
from cute_kernels.extend.config import TILE_SCALE_BYTES, UNPACK_CTAS_PER_SM, UnpackConfig
from cute_kernels.extend.schedule import MAX_UNPACKED_BYTES, room_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import blank

if TYPE_CHECKING:
    from cute_kernels.extend.plan import ExtendPlan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.uint8}


@dataclass(frozen=True)
class UnpackPlan:
    """What of both launches stays the same from call to call.

    Attributes:
        send: the compiled kernel that makes rows of 16 bits of the cache, its arguments by name; its config.
        attention: the plan of attention over them.
        least_queries: from which on these launches serve a call.
        is_asked_for: whether the call says that they do, however many bytes they take.
    """

    send: Callable[..., Any]
    config: UnpackConfig
    attention: ExtendPlan
    least_queries: int
    is_asked_for: bool

    @property
    def serves_all(self) -> bool:
        """Whether every call goes this way."""
        return self.is_asked_for and self.least_queries == 0

    def serves(self, num_queries: int, max_seq_len: int | None) -> bool:
        """Whether a launch goes this way. max_seq_len: of its requests, if known."""
        if num_queries < self.least_queries:
            return False
        return self.is_asked_for or self.num_bytes(max_seq_len) <= MAX_UNPACKED_BYTES

    def num_bytes(self, max_seq_len: int | None) -> int:
        """Of the unpacked keys and values."""
        rows = self.attention.batch * self.attention.num_kv_heads * self.room(max_seq_len)
        return 2 * rows * self.config.head_dim * self.config.element_bytes

    def tokens(self, max_seq_len: int | None) -> int:
        """That a request has at most."""
        most = self.attention.max_seq_len
        return most if max_seq_len is None else min(most, max_seq_len)

    def room(self, max_seq_len: int | None) -> int:
        """That a request has there."""
        return room_of(self.tokens(max_seq_len), self.config.head_dim)

    def call(
        self,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        cu_seqlens_q: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float | None,
        options: dict[str, Any],
        table: torch.Tensor | None,
        prefix_only: int,
    ) -> None:
        """Both launches; arguments as :meth:`ExtendPlan.call` has them. caches: as the kernels take them; table:
        contiguous."""
        config, attention, max_seq_len = self.config, self.attention, options["max_seq_len"]
        room = self.room(max_seq_len)
        shape = (attention.batch, attention.num_kv_heads, room, config.head_dim)
        k_rows, v_rows = (GPU.empty(*blank(shape, DTYPES[config.dtype])) for _ in range(2))
        scales = None
        if any(config.tile_scales):
            words = TILE_SCALE_BYTES // 4
            scales = GPU.empty(*blank((*shape[:2], room // config.tile_tokens, words), torch.float32))
        self.send(
            k_cache=caches[0],
            v_cache=caches[1],
            k_rows=k_rows,
            v_rows=v_rows,
            cu_seqlens=cu_seqlens_q,
            seq_lens=lengths,
            tile_scales=address_of(scales),
            block_table=address_of(table),
            max_pages=0 if table is None else table.shape[1],
            total_q=q.shape[0],
            max_seq_len=self.tokens(max_seq_len),
            window=attention.window,
            prefix_only=prefix_only,
            num_ctas=attention.num_sms * UNPACK_CTAS_PER_SM,
        )
        # All of it may be freed before it is read: its memory is reused in the stream's order.
        attention.call(
            q,
            k_rows,
            v_rows,
            cu_seqlens_q,
            lengths,
            out,
            lse,
            softmax_scale,
            options,
            prefix_only=prefix_only,
            unpacked=(self.tokens(max_seq_len), scales),
        )
