"""The launches of attention: what a plan keeps from call to call, and the arguments of each call.

Decode attention is one launch, except for calls that go to key rows (:mod:`.few_queries`). Extend attention has three
algorithms. For many queries the cache is unpacked first; for few queries its keys are rows of MMAs; otherwise it is
read as it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cute_kernels.attention.call import Given
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import COUNTER_WORDS, TILE_SCALE_BYTES, UnpackConfig
from cute_kernels.attention.extend_schedule import choose_splits, count_tiles, room_of
from cute_kernels.runtime.gpu import GPU, forgotten
from cute_kernels.runtime.memory import blank

_kept_bounds: dict[tuple[int, int, torch.device], torch.Tensor] = {}
forgotten(_kept_bounds.clear)


def address_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def even_bounds(batch: int, q_len: int, device: torch.device) -> torch.Tensor:
    """Returns the cu_seqlens of ``batch`` requests with ``q_len`` tokens each, for a launch on the current stream.

    The tensors are made once and kept for ever, since graphs that read them outlive plans. The host waits for the copy
    to the GPU, since the next launch may be on another stream. During the capture of a graph the host cannot wait, and
    new tensors lie in the graph's memory. So a captured call for which no tensor is kept makes its own by a launch.
    """
    kept = _kept_bounds.get(sizes := (batch, q_len, device))
    if kept is None:
        captures = GPU.is_capturing()
        place = device if captures else "cpu"
        kept = torch.arange(0, (batch + 1) * q_len, q_len, dtype=torch.int32, device=place)
        if not captures:
            kept = _kept_bounds[sizes] = kept.to(device)
    return kept


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.uint8}


class Keys(NamedTuple):
    """The arguments of attention over a cache.

    Attributes:
        k_cache, v_cache: the caches, in the dtypes that the kernels take.
        lengths: the seq_lens of :mod:`.arguments`.
        out, lse: tensors for the results; lse may be None.
        softmax_scale: the scale of scores; None for the plan's own scale.
        options: all options; a block table is contiguous.
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
    """One launch of attention and, if its keys are cut into splits, the launch that combines the splits.

    Attributes:
        send: the compiled kernel, which compares every tensor with its compiled signature. It takes by name the
            arguments that change between launches, and ``options``.
        config: the configuration of the compiled kernel.
        num_sms: number of SMs that a launch may use.
        max_seq_len: number of tokens that a request may have.
        num_splits: number of parts into which the keys of every work tile are cut; None if each launch chooses it.
        combine: the compiled kernel that combines splits; it takes its arguments by name. None if keys are never split.
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
        self, keys: Keys, other: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None), **own: int
    ) -> None:
        """Launches attention and, with several splits, the combine.

        other: (out, lse) of another launch, with which the result is merged.
        own: arguments, by name, that only a launch over unpacked keys has.
        """
        q, k_cache, v_cache, cu_seqlens_q, lengths, out, lse, softmax_scale, options, prefix_only = keys
        config, index = self.config, self.device_index
        splits, partials = self.splits_of(q, options["max_seq_len"]), None
        if splits > 1:
            partials = GPU.empty(*blank((splits, q.shape[0], q.shape[1], q.shape[2] + 1), torch.float32))
        heads = self.num_kv_heads, config.tile_rows, config.tile_heads
        num_tiles = count_tiles(q.shape[0], self.batch, q.shape[1], *heads) * config.value_parts * splits
        table = options["block_table"] if config.page_tokens else None
        mask = options["tree_mask"] if config.tree else None
        self.send(
            q=q, k_cache=k_cache, v_cache=v_cache, cu_seqlens=cu_seqlens_q, seq_lens=lengths, out=out,
            lse=address_of(lse), other_out=address_of(other[0]), other_lse=address_of(other[1]),
            counter=GPU.workspace(index, GPU.stream(index), COUNTER_WORDS), prefix_only=prefix_only,
            softmax_scale=self.softmax_scale if softmax_scale is None else softmax_scale,
            block_table=address_of(table), tree_mask=address_of(mask), tree_words=0 if mask is None else mask.shape[1],
            num_splits=splits, partials=address_of(partials), num_ctas=min(num_tiles, self.num_sms), options=options,
            **own,
        )  # fmt: skip
        if splits > 1:
            assert self.combine is not None
            sinks = options["sinks"] if config.features.sinks else None
            values, row_bytes = address_of(partials), 4 * q.shape[0] * q.shape[1]
            value_bytes = row_bytes * q.shape[2]
            self.combine(
                out=out, values=values, sums=values + splits * value_bytes, value_stride=value_bytes,
                sum_stride=row_bytes, lse=address_of(lse), sinks=address_of(sinks),
                last=cu_seqlens_q.data_ptr() + 4 * self.batch, num_parts=splits,
            )  # fmt: skip

    def splits_of(self, q: torch.Tensor, max_seq_len: int | None) -> int:
        """Returns the number of splits of a launch. max_seq_len: an upper bound of the requests' lengths, or None."""
        if self.combine is None:
            return 1
        if self.num_splits is not None:
            return self.num_splits
        most = self.max_seq_len if max_seq_len is None else min(self.max_seq_len, max_seq_len)
        tile = self.config.tile_rows, self.config.tile_heads, self.config.value_parts
        return choose_splits(q.shape[0], self.batch, q.shape[1], self.num_kv_heads, most, self.num_sms, *tile)


@dataclass(frozen=True)
class UnpackedLaunch:
    """A launch that unpacks the cache, and a launch of attention over the unpacked rows.

    Attributes:
        send: the compiled kernel that unpacks the cache to rows of 16 bits; it takes its arguments by name.
        config: the configuration of that kernel.
        attention: the launch of attention over the unpacked rows.
    """

    send: Callable[..., Any]
    config: UnpackConfig
    attention: ExtendLaunch

    def num_bytes(self, max_seq_len: int | None) -> int:
        """Returns the bytes of the unpacked keys and values."""
        rows = self.attention.batch * self.attention.num_kv_heads * self.room(max_seq_len)
        return 2 * rows * self.config.head_dim * self.config.element_bytes

    def tokens(self, max_seq_len: int | None) -> int:
        """Returns an upper bound of the requests' numbers of tokens: the capacity of the cache, or ``max_seq_len`` if
        it is given and smaller.
        """
        most = self.attention.max_seq_len
        return most if max_seq_len is None else min(most, max_seq_len)

    def room(self, max_seq_len: int | None) -> int:
        """Returns the number of tokens of a request that the unpacked rows have memory for."""
        return room_of(self.tokens(max_seq_len), self.config.head_dim)

    def call(self, keys: Keys) -> None:
        """Unpacks the cache, then launches attention over the unpacked rows. keys: as for `ExtendLaunch.call`."""
        config, attention, max_seq_len = self.config, self.attention, keys.options["max_seq_len"]
        room = self.room(max_seq_len)
        shape = (attention.batch, attention.num_kv_heads, room, config.head_dim)
        k_rows, v_rows = (GPU.empty(*blank(shape, DTYPES[config.dtype])) for _ in range(2))
        scales = None
        if any(config.tile_scales):
            words = TILE_SCALE_BYTES // 4
            scales = GPU.empty(*blank((*shape[:2], room // config.tile_tokens, words), torch.float32))
        self.send(
            k_cache=keys.k_cache, v_cache=keys.v_cache, k_rows=k_rows, v_rows=v_rows, cu_seqlens=keys.cu_seqlens_q,
            seq_lens=keys.lengths, tile_scales=address_of(scales),
            block_table=address_of(keys.options["block_table"] if config.page_tokens else None),
            total_q=keys.q.shape[0], max_seq_len=self.tokens(max_seq_len), prefix_only=keys.prefix_only,
        )  # fmt: skip
        # All of it may be freed before it is read: its memory is reused in the stream's order.
        rows = keys._replace(k_cache=k_rows, v_cache=v_rows)
        attention.call(rows, max_pages=self.tokens(max_seq_len), tile_scales=address_of(scales))


@dataclass(frozen=True)
class Algorithm:
    """A launch of attention, and the condition under which it supports a call.

    supports: a function of (queries, max_seq_len) that returns whether the launch supports a call; None if it supports
    all calls. max_seq_len is an upper bound of the requests' lengths, or None. ``launch.call`` takes :class:`Keys`, and
    launches on the current stream.
    """

    launch: ExtendLaunch | UnpackedLaunch
    supports: Callable[[int, int | None], bool] | None = None


@dataclass(frozen=True)
class ExtendLaunches:
    """The launches of an extend attention call. They are kept for calls of the same shapes, dtypes, device and options;
    only the number of queries may differ.

    Attributes:
        algorithms: the algorithms in the order in which they are tried. The first that supports a call runs the call;
            the last supports all calls.
        k_view, v_view: dtypes as which the caches are passed to the kernels; None for the caches' own dtypes.
        copies_table: whether the block table is copied, because it has gaps between rows. Kernels need a contiguous
            table.
        has_cache: whether the cache has room for a token.
        newer: the launch over the queries' own tokens; None if they are in the cache.
    """

    algorithms: tuple[Algorithm, ...]
    k_view: torch.dtype | None
    v_view: torch.dtype | None
    copies_table: bool
    has_cache: bool = True
    newer: ExtendLaunch | None = None

    def launch(self, given: Given) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launches on the current stream of the plan's device, which is the current device. Returns (out or a new
        tensor, lse if asked for)."""
        q, k_cache, v_cache, seq_lens, _, softmax_scale, _, return_lse, out, options, cu_seqlens_q = given
        assert isinstance(options, dict) and cu_seqlens_q is not None
        if out is None:
            out = GPU.empty(*blank(tuple(q.shape), q.dtype))
        lse = self._new_lse(q) if return_lse else None
        if self.newer is None:
            self.call(Keys(q, k_cache, v_cache, cu_seqlens_q, seq_lens, out, lse, softmax_scale, options))
            return out, lse
        older = GPU.empty(*blank(tuple(q.shape), q.dtype)), self._new_lse(q)
        if self.has_cache:
            self.call(Keys(q, k_cache, v_cache, cu_seqlens_q, seq_lens, *older, softmax_scale, options, prefix_only=1))
        else:
            older = older[0].zero_(), older[1].fill_(-torch.inf)
        k, v = (rows.unsqueeze(0) for rows in (options["new_k"], options["new_v"]))
        self.newer.call(Keys(q, k, v, cu_seqlens_q, cu_seqlens_q, out, lse, softmax_scale, options), older)
        return out, lse

    def _new_lse(self, q: torch.Tensor) -> torch.Tensor:
        return GPU.empty(*blank(tuple(q.shape[:2]), torch.float32))

    def call(self, keys: Keys) -> None:
        """Launches attention over the cache. ``keys`` has the caches in their own dtypes; its block table may have gaps
        between rows."""
        options = keys.options
        if self.copies_table:  # the copy may be freed before it is read: its memory is reused in the stream's order
            options = options | {"block_table": options["block_table"].contiguous()}
            keys = keys._replace(options=options)
        if self.k_view is not None:
            keys = keys._replace(k_cache=keys.k_cache.view(self.k_view))
        if self.v_view is not None:
            keys = keys._replace(v_cache=keys.v_cache.view(self.v_view))
        self.launch_for(keys.q.shape[0], options["max_seq_len"]).call(keys)

    def launch_for(self, num_queries: int, max_seq_len: int | None) -> ExtendLaunch | UnpackedLaunch:
        """Returns the launch of the first algorithm that supports a call. max_seq_len: an upper bound of the requests'
        lengths, or None."""
        found = (each for each in self.algorithms if each.supports is None or each.supports(num_queries, max_seq_len))
        return next(found).launch
