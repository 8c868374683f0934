"""The work tiles of a CTA: each is 128 rows of queries of one request that share a KV head.

A work tile's keys may be cut into splits, which different CTAs process. :mod:`.combine.kernel` combines the splits'
results.

Queries are ragged: only the device knows how many queries a request has. A slot is a place for a work tile's queries.
If `cu` queries of other requests lie before request b, its first slot is ``cu * group / 128 + b``, rounded down. So a
CTA finds the request of a slot by a search, without a sum over requests. At most one slot of a request stays empty. A
ticket counter hands out slots to CTAs. The last queries of a request come first, since they see most keys. The CTA that
draws the last ticket makes the counter EMPTY again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.device import ptx
from cute_kernels.device.cuda import EMPTY_WORD, WARP_THREADS
from cute_kernels.device.division import Divisor
from cute_kernels.device.lists import Lists
from cute_kernels.formats.scores.terms import ScoreTerms

END = -1  # the request of a slot that says that there is no more work
# The bits of `Work.part`: from 0 on a KV head's number, 15 that of a part of V's columns, from 16 on a split's.
SPLIT_SHIFT, PART_SHIFT = 16, 15


@dataclass(frozen=True)
class ExtendSizes:
    """Run-time integers of a launch.

    Attributes:
        total_q: number of queries of all requests.
        batch, num_q_heads, max_seq_len: sizes of the tensors.
        group: number of query heads of a KV head.
        kv_heads: number of work tiles that cover all KV heads and all parts of V's columns.
        splits: number of parts into which each work tile's keys are cut.
        num_slots: number of slots. The work tiles of a slot have the same queries.
        num_tiles: number of work tiles of all slots, KV heads and splits.
        window: number of keys that a query sees, its own key included.
    """

    total_q: Int32
    batch: Int32
    num_q_heads: Int32
    max_seq_len: Int32
    group: Divisor
    kv_heads: Divisor
    splits: Divisor
    num_slots: Int32
    num_tiles: Int32
    window: Int32


@dataclass(frozen=True)
class Work:
    """A work tile; run-time integers.

    Attributes:
        request: index of the request; END after the last work tile.
        part: three indices in a word: the KV head (`head`), the part of V's columns (`value_part`) and the split of the
            keys (`split`).
        first_row: index of the work tile's first row among the request's rows. A row's index is query * group + head of
            the group.
        num_rows: number of rows of the request.
        q_start: index of the request's first query among all queries.
        before: position of the request's first query; negative if the request has more queries than tokens.
        kv_start, kv_stop: the request's keys are its tokens 0 to kv_stop - 1. With ragged keys, token 0 is token
            kv_start of the whole tensor; else kv_start is 0.
    """

    request: Int32
    part: Int32
    first_row: Int32
    num_rows: Int32
    q_start: Int32
    before: Int32
    kv_start: Int32
    kv_stop: Int32

    def words(self) -> list[Uint32]:
        """Returns the work tile as words, which are published to the consumers."""
        places = (self.request, self.part, self.first_row, self.num_rows)
        return [Uint32(value) for value in (*places, self.q_start, self.before, self.kv_start, self.kv_stop)]

    @staticmethod
    def of_words(words) -> Work:
        """Makes a work tile of ``words``, which must be the same in all lanes of a warp."""
        return Work(*(cute.arch.make_warp_uniform(Int32(word)) for word in words))

    @property
    def head(self):
        return self.part & ((1 << PART_SHIFT) - 1)

    @property
    def value_part(self):
        return self.part >> PART_SHIFT & 1

    def of_head(self, tile_heads: int, index) -> Work:
        """Returns the part of a work tile that belongs to the ``index``-th of its ``tile_heads`` KV heads.

        The `head` of the given work tile counts sets of ``tile_heads`` KV heads; the result's `head` counts KV heads.
        """
        if tile_heads == 1:
            return self
        return replace(self, part=self.part + self.head * (tile_heads - 1) + index)

    @property
    def split(self):
        return self.part >> SPLIT_SHIFT


@dataclass(frozen=True)
class Lengths:
    """Addresses of the lengths of a launch, all int32.

    Attributes:
        cu_seqlens_q: [batch + 1].
        seq_lens: [batch]; for ragged keys [batch + 1], where each request's keys begin.
        counter: the ticket counter of work tiles; None for a launch without one.
        prefix_only: 1 if the queries' own tokens are left to another launch, else 0.
        lists: the blocks that KV heads read, or None.
    """

    cu_seqlens_q: Int64
    seq_lens: Int64
    counter: Int64 | None
    prefix_only: Int32
    lists: Lists | None = None


@dataclass(frozen=True)
class Span:
    """The keys that a work tile sees; run-time integers.

    Attributes:
        first_position, last_position: positions of the work tile's first and last query. They are negative if the
            request has more queries than keys.
        begin, end: the keys are in blocks of tokens ``begin`` to ``end`` - 1.
    """

    first_position: Int32
    last_position: Int32
    begin: Int32
    end: Int32


def tokens_of(kv_len, queries, max_seq_len, prefix_only) -> tuple[Any, Any]:
    """Returns (position of a request's first query, end of the tokens that a launch reads). kv_len: the request's
    length as it was loaded; this function clamps it.

    prefix_only: 1 if the queries' own tokens are left to another launch, else 0. If 1, the cache needs no room for
    these tokens.
    """
    most = max_seq_len + cutlass.select_(prefix_only != 0, queries, Int32(0))
    kv_len = cutlass.min(cutlass.max(kv_len, 0), most)
    before = kv_len - queries
    return before, cutlass.select_(prefix_only != 0, cutlass.max(before, 0), kv_len)


class Worker:
    """Finds work tiles, and the keys that their queries see, for a configuration and its score options."""

    def __init__(self, config: ExtendConfig, terms: ScoreTerms):
        self.terms = terms
        self.tokens, self.ragged, self.tree = config.tile_tokens, config.ragged, config.tree
        self.rows, self.value_parts = config.tile_rows, config.value_parts
        self.features = config.features

    def slot_of(self, shape: ExtendSizes, cu_seqlens, request):
        """Returns the slot of a request's first work tile."""
        before = self.load(cu_seqlens, request)
        return cutlass.min(cutlass.max(before, 0), shape.total_q) * shape.group.value // self.rows + request

    def load(self, address, index):
        return Int32(ptx.load_global_words(address + Int64(index) * 4, 0, 1)[0])

    def length_of(self, lengths: Lengths, request, head):
        """Returns the length of a request. With lists, returns the number of tokens in a KV head's list instead."""
        length = self.load(lengths.seq_lens, request)
        if lengths.lists is None:
            return length
        lists = lengths.lists.of_row(request, head)
        return lists.tokens(lists.ask_count(), length)

    @cute.jit
    def find(self, shape: ExtendSizes, lengths: Lengths, tile: Int32, lane: Int32):
        """Returns the fields of `Work` for work tile ``tile``. The work tile is empty if first_row is negative, or at
        least num_rows.
        """
        cu_seqlens = lengths.cu_seqlens_q
        outer, head = shape.kv_heads.divide_int(tile)
        columns = Int32(0)
        if const_expr(self.value_parts > 1):  # innermost: they read the same keys
            head, columns = head // self.value_parts, head % self.value_parts
        rank, split = shape.splits.divide_int(outer)
        slot = shape.num_slots - 1 - rank
        low, size = Int32(0), shape.batch
        while size > 1:
            step = (size + (WARP_THREADS - 1)) // WARP_THREADS
            index = low + lane * step
            before = Int32(0)
            if lane * step < size:
                before = cutlass.select_(self.slot_of(shape, cu_seqlens, index) <= slot, Int32(1), Int32(0))
            votes = Uint32(cute.arch.vote_ballot_sync(before != 0))
            found = cutlass.max(cute.arch.popc(votes).to(Int32) - 1, 0) * step
            low = low + found
            size = cutlass.min(step, size - found)
        q_start = cutlass.min(cutlass.max(self.load(cu_seqlens, low), 0), shape.total_q)
        q_end = cutlass.min(cutlass.max(self.load(cu_seqlens, low + 1), q_start), shape.total_q)
        first_row = (slot - (q_start * shape.group.value // self.rows + low)) * self.rows
        rows = (q_end - q_start) * shape.group.value
        kv_start, kv_len = Int32(0), self.length_of(lengths, low, head)
        if const_expr(self.ragged):
            kv_start = cutlass.min(cutlass.max(kv_len, 0), shape.max_seq_len)
            kv_len = cutlass.min(self.load(lengths.seq_lens, low + 1), shape.max_seq_len) - kv_start
        before, kv_stop = tokens_of(kv_len, q_end - q_start, shape.max_seq_len, lengths.prefix_only)
        part = head + columns * (1 << PART_SHIFT) + split * (1 << SPLIT_SHIFT)
        return low, part, first_row, rows, q_start, before, kv_start, kv_stop

    @cute.jit
    def draw(self, shape: ExtendSizes, counter: Int64, lane: Int32):
        """Draws the CTA's next work tile, and returns its index. The index is num_tiles or more if no tile is left."""
        ticket = Int32(0)
        if lane == 0:
            # EMPTY is -1, so the first ticket is 0. CTAs draw num_tiles tickets in all: each began with a tile of its
            # own number, and draws one ticket that leads to no tile.
            ticket = ptx.atomic_add(counter, Int32(1)) + 1
            if ticket == shape.num_tiles - 1:
                ptx.store_global(counter, [Uint32(EMPTY_WORD)])
        return cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(ticket, 0)

    def span(self, shape: ExtendSizes, work: Work) -> Span:
        """Returns the keys that some query of a work tile sees, as blocks of tokens."""
        first, _ = shape.group.divide_int(work.first_row)
        last, _ = shape.group.divide_int(cutlass.min(work.first_row + self.rows, work.num_rows) - 1)
        first_position, last_position = work.before + first, work.before + last
        stop, start = work.kv_stop, Int32(0)
        if const_expr(self.features.causal):
            stop = cutlass.min(cutlass.max(last_position + 1, 0), stop)
        if (seen := self.terms.reach(shape, 1)) is not None:
            start = cutlass.max(first_position + 1 - seen, 0)
        end = (stop + (self.tokens - 1)) // self.tokens
        begin = cutlass.min(start // self.tokens, end)
        before, _ = shape.splits.divide_int((end - begin) * work.split)
        after, _ = shape.splits.divide_int((end - begin) * (work.split + 1))
        return Span(first_position, last_position, begin + before, begin + after)

    def is_masked(self, work: Work, span: Span, block):
        """Returns whether causality, the tree mask or lengths may hide some key of a block from some query. Score
        options are not considered.
        """
        stop = work.kv_stop
        if self.features.causal:
            stop = cutlass.min(span.first_position + 1, stop)
        if self.tree:
            stop = cutlass.min(work.before, stop)
        return (block + 1) * self.tokens > stop

    def first_valid(self, shape: ExtendSizes, work: Work):
        """Returns the first token that some query of the request sees. Rows before this token, and from kv_stop on, may
        hold anything."""
        seen = self.terms.reach(shape, 1)
        return Int32(0) if seen is None else cutlass.max(work.before + 1 - seen, 0)
