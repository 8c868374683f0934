"""A way to serve calls of extend attention: whether it serves one, and its launches. :mod:`.plan` says which there are.

A call's cache is read as it lies; or unpacked first, for many queries; or its keys are rows of products, for few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import COUNTER_WORDS, TILE_SCALE_BYTES, UnpackConfig
from cute_kernels.attention.extend_schedule import choose_splits, count_tiles, room_of
from cute_kernels.attention.plan import address_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import blank

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.uint8}


@dataclass(frozen=True)
class Unpacked:
    """Unpacked keys of a launch.

    Attributes:
        tokens: that a request may have. scales: tiles', if they have any.
    """

    tokens: int
    scales: torch.Tensor | None


class Keys(NamedTuple):
    """What attention over a cache is called with.

    Caches: in the dtypes that the kernels take. lengths: what :mod:`.arguments` has as seq_lens. out, lse: filled, the
    latter if given. softmax_scale: None for the plan's. options: complete ones; a block table is contiguous.
    prefix_only: 1 to leave out the queries' own tokens.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    lengths: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    softmax_scale: float | None
    options: dict[str, Any]
    prefix_only: int = 0


@dataclass(frozen=True)
class ExtendLaunch:
    """One launch of attention, and where its keys are cut the one that puts the parts together.

    Attributes:
        send: the compiled kernel, which compares every tensor that it is given with what it was compiled for; takes the
            arguments of a launch that are not the same for all of them by name, and ``options``.
        config: what it was compiled from.
        num_sms: those that a launch may use.
        max_seq_len: tokens that a request may have.
        num_splits: parts that the keys of every work tile are cut into; None where each launch chooses.
        combine: the compiled kernel that puts splits together, its arguments by name; None where there are never any.
    """

    send: Callable[..., Any]
    config: ExtendConfig
    device_index: int
    num_sms: int
    batch: int
    num_kv_heads: int
    softmax_scale: float
    max_seq_len: int
    num_splits: int | None
    combine: Callable[..., Any] | None

    def call(
        self,
        keys: Keys,
        other: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        unpacked: Unpacked | None = None,
    ) -> None:
        """other: (out, lse) of another launch that the result is merged with."""
        q, k_cache, v_cache, cu_seqlens_q, lengths, out, lse, softmax_scale, options, prefix_only = keys
        config, index = self.config, self.device_index
        splits, partials = self.splits_of(q, options["max_seq_len"]), None
        if splits > 1:
            partials = GPU.empty(*blank((splits, q.shape[0], q.shape[1], q.shape[2] + 1), torch.float32))
        heads = self.num_kv_heads, config.tile_rows, config.tile_heads
        num_tiles = count_tiles(q.shape[0], self.batch, q.shape[1], *heads) * splits
        table = options["block_table"] if config.takes_table else None
        mask = options["tree_mask"] if config.tree else None
        own = {}
        if unpacked is not None:
            own = {"max_pages": unpacked.tokens, "tile_scales": address_of(unpacked.scales)}
        self.send(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            cu_seqlens=cu_seqlens_q,
            seq_lens=lengths,
            out=out,
            lse=address_of(lse),
            other_out=address_of(other[0]),
            other_lse=address_of(other[1]),
            counter=GPU.workspace(index, GPU.stream(index), COUNTER_WORDS),
            prefix_only=prefix_only,
            softmax_scale=self.softmax_scale if softmax_scale is None else softmax_scale,
            block_table=address_of(table),
            tree_mask=address_of(mask),
            tree_words=0 if mask is None else mask.shape[1],
            num_splits=splits,
            partials=address_of(partials),
            num_ctas=min(num_tiles, self.num_sms),
            options=options,
            **own,
        )
        if splits > 1:
            assert self.combine is not None
            sinks = options["sinks"] if config.features.sinks else None
            self.combine(
                out=out, cu_seqlens=cu_seqlens_q, partials=address_of(partials), lse=address_of(lse),
                sinks=address_of(sinks), num_splits=splits,
            )  # fmt: skip

    def splits_of(self, q: torch.Tensor, max_seq_len: int | None) -> int:
        """Of a launch; max_seq_len: of its requests, if known."""
        if self.combine is None:
            return 1
        if self.num_splits is not None:
            return self.num_splits
        most = self.max_seq_len if max_seq_len is None else min(self.max_seq_len, max_seq_len)
        tile = self.config.tile_rows, self.config.tile_heads
        return choose_splits(q.shape[0], self.batch, q.shape[1], self.num_kv_heads, most, self.num_sms, *tile)


@dataclass(frozen=True)
class UnpackedLaunches:
    """Of a :class:`Way`: the cache is unpacked before its rows are attended to.

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

    def call(self, keys: Keys) -> None:
        """As that of the attention alone."""
        config, attention, max_seq_len = self.config, self.attention, keys.options["max_seq_len"]
        room = self.room(max_seq_len)
        shape = (attention.batch, attention.num_kv_heads, room, config.head_dim)
        k_rows, v_rows = (GPU.empty(*blank(shape, DTYPES[config.dtype])) for _ in range(2))
        scales = None
        if any(config.tile_scales):
            words = TILE_SCALE_BYTES // 4
            scales = GPU.empty(*blank((*shape[:2], room // config.tile_tokens, words), torch.float32))
        self.send(
            k_cache=keys.k_cache,
            v_cache=keys.v_cache,
            k_rows=k_rows,
            v_rows=v_rows,
            cu_seqlens=keys.cu_seqlens_q,
            seq_lens=keys.lengths,
            tile_scales=address_of(scales),
            block_table=address_of(keys.options["block_table"] if config.page_tokens else None),
            total_q=keys.q.shape[0],
            max_seq_len=self.tokens(max_seq_len),
            prefix_only=keys.prefix_only,
        )
        # All of it may be freed before it is read: its memory is reused in the stream's order.
        rows = keys._replace(k_cache=k_rows, v_cache=v_rows)
        attention.call(rows, unpacked=Unpacked(self.tokens(max_seq_len), scales))


@dataclass(frozen=True)
class Way:
    """Launches, and which calls they serve: ``serves(queries, max_seq_len)``, the latter of the requests if known; None
    for all. ``launches.call`` takes :class:`Keys`, and launches on the current stream."""

    launches: ExtendLaunch | UnpackedLaunches
    serves: Callable[[int, int | None], bool] | None = None
