"""Launches over unpacked keys: what makes them, and attention over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.attention.extend.policies import TILE_SCALE_BYTES, UnpackConfig
from cute_kernels.attention.extend.schedule import room_of
from cute_kernels.attention.extend.ways import ExtendLaunch, Unpacked
from cute_kernels.attention.plan import address_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import blank

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.uint8}


@dataclass(frozen=True)
class UnpackedLaunches:
    """Of a :class:`.ways.Way`: the cache is unpacked before its rows are attended to.

    Attributes:
        send: the compiled kernel that makes rows of 16 bits of the cache, its arguments by name. config: what it is.
        attention: over them.
    """

    send: Callable[..., Any]
    config: UnpackConfig
    attention: ExtendLaunch

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
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float | None,
        options: dict[str, Any],
        *,
        prefix_only: int = 0,
    ) -> None:
        """As :class:`.ways.Launches` has it."""
        config, attention, max_seq_len = self.config, self.attention, options["max_seq_len"]
        room = self.room(max_seq_len)
        shape = (attention.batch, attention.num_kv_heads, room, config.head_dim)
        k_rows, v_rows = (GPU.empty(*blank(shape, DTYPES[config.dtype])) for _ in range(2))
        scales = None
        if any(config.tile_scales):
            words = TILE_SCALE_BYTES // 4
            scales = GPU.empty(*blank((*shape[:2], room // config.tile_tokens, words), torch.float32))
        self.send(
            k_cache=k_cache,
            v_cache=v_cache,
            k_rows=k_rows,
            v_rows=v_rows,
            cu_seqlens=cu_seqlens_q,
            seq_lens=lengths,
            tile_scales=address_of(scales),
            block_table=address_of(options["block_table"] if config.page_tokens else None),
            total_q=q.shape[0],
            max_seq_len=self.tokens(max_seq_len),
            prefix_only=prefix_only,
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
            unpacked=Unpacked(self.tokens(max_seq_len), scales),
        )
