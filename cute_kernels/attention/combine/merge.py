"""Combines the warps' accumulators into the output: in shared memory, then over the splits of a row through global
memory.

A split's result needs no fence and no counter: its words are flags as well. Between launches the workspace holds
``EMPTY`` in every word. A split stores its partial result over these words and is done. The last splits of the row, the
*combiners*, poll until no word is EMPTY, add up in a fixed order, and put EMPTY back. So one store and one load lie
between a split's result and the combined output. (NCCL's LL protocol also has data that announces itself.)

EMPTY is a NaN that no arithmetic yields: the hardware's own NaN is 0x7fffffff. A combiner waits for CTAs of lower
index, and for other combiners of its row; combiners store their own results before they wait. CTAs of a grid start in
the order of their index. So every CTA that a combiner waits for has started, or will start because the GPU has room for
it: docs/design/forward_progress.md.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.barriers import sync_consumers
from cute_kernels.attention.decode_config import (
    CTAS_SHIFT,
    KEEP_PARTIALS,
    MERGE_PAD,
    PAIR_BYTES,
    RECIPROCAL_BITS,
    WRITE_LSE,
    DecodeConfig,
)
from cute_kernels.attention.policies import BLOCK_QUERIES
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.exchange import Poll, Published, publish, reset
from cute_kernels.device.hadamard import Hadamard
from cute_kernels.device.lanes import lane_sum
from cute_kernels.device.loads import load_float, load_floats
from cute_kernels.device.softmax import COLUMN_LANES, LOWEST, weights_of
from cute_kernels.formats.scores.terms import load_shift

COMBINE_BATCH = 4  # partial results of a vector that a thread loads at a time; no other number was measured
# Partial results that a thread loads at a time, of several vectors, and the most vectors. Two vectors at a time halve
# the combine (docs/design/history/decode_attention.md).
MOST_LOADED = 8
MOST_VECTORS = 2
GROUP_BYTES = 32  # of shared memory for a thread's maximum, sum and four values, aligned to vectors


@dataclass(frozen=True)
class Share:
    """A CTA's share of combining a row; run-time integers. A vector is four columns of one query head's output. The
    integers say which vectors the CTA adds up over all splits, and how its threads divide the vectors.
    """

    first: Int32  # vector
    count: Int32
    groups_log2: Int32  # threads per vector, each for some of the splits
    num_splits: Int32  # splits that have tokens
    split: Int32  # this CTA's


class Merger:
    """Merges the accumulators of a CTA's warps, then the partial results of its row's splits, into the output. It is
    the last phase of a CTA.
    """

    def __init__(self, config: DecodeConfig, value_reader):
        self.config = config
        self.value_reader = value_reader
        self.vectors_per_row = config.v_head_dim // 4
        self.hadamard = Hadamard(config.features.v_rotation, config.v_head_dim, self.vectors_per_row)
        self.late_shift = config.features.shift and not config.features.soft_cap
        self.num_rows = config.num_rows  # query heads that a CTA has room for
        self.num_vectors = self.num_rows * config.v_head_dim // 4  # of 4 columns
        self.pitch = 4 * (config.v_head_dim + MERGE_PAD)  # bytes between query heads in the merge buffer
        self.stats_offset = config.mainloop.num_slices * self.num_rows * self.pitch

    @cute.jit
    def finish(self, work, state, results, ring, warp, lane, slice_index):
        """Merges the results of the CTA's warps for a unit. Stores the output if the unit is the row's only split.
        Otherwise publishes the vectors of the partial result that other CTAs combine."""
        address = self.address_in(ring)
        tid = warp * WARP_THREADS + lane
        self.publish_warp(state, address, warp, lane, slice_index)
        sync_consumers(self.config)
        keep = (results.mode & KEEP_PARTIALS) != 0
        if work.num_parts == 1:
            for index in cutlass.range(tid, self.num_vectors, self.config.num_threads, unroll=1):
                sink = self.load_sink(work, results, index)
                maximum, total, value = self.merge_slices(address, index)
                self.store_output(work, results, index, maximum, total, value, sink)
                if keep:
                    self.store_partial(work, results, index, maximum, total, value)
        else:
            share = self.share_of(work, results)
            for index in cutlass.range(tid, self.num_vectors, self.config.num_threads, unroll=1):
                if (index < share.first) | (index >= share.first + share.count) | keep:
                    maximum, total, value = self.merge_slices(address, index)
                    self.store_partial(work, results, index, maximum, total, value)

    @cute.jit
    def finish_row(self, work, results, ring, warp, lane):
        """Combines the CTA's share of its last row, if the row has several splits and the CTA has a share. In this
        method the CTA waits for other CTAs, which may wait for its units. So the CTA must have finished all of its
        units.

        work: the CTA's last unit, which is finished.
        """
        if (work.num_parts > 1) & (work.part < work.num_parts):
            share = self.share_of(work, results)
            if share.first >= 0:
                keep = (results.mode & KEEP_PARTIALS) != 0
                self.combine(work, results, share, self.address_in(ring), warp * WARP_THREADS + lane, keep)

    def address_in(self, ring):
        """Returns the shared address of the merge buffer."""
        return ring.toint() + self.config.merge_offset

    def share_of(self, work, results) -> Share:
        """Returns the CTA's share of a row that has several splits. The share's ``first`` is negative if the CTA is no
        combiner.
        """
        active = work.num_parts
        able = active
        if self.config.units:
            # Where a row's splits are neighbouring tiles, the first one's CTA may have other rows to do.
            able = active - cutlass.select_(work.stride == self.config.tile_tokens, Int32(1), Int32(0))
        combiners_log2 = cutlass.min(self.combiners_log2(able), results.mode >> CTAS_SHIFT)
        count = self.num_vectors >> combiners_log2
        rank = work.part - (active - (Int32(1) << combiners_log2))
        first = cutlass.select_(rank >= 0, rank * count, Int32(-self.num_vectors))
        # As many threads to a vector as there are, if that is more than one.
        groups_log2 = cutlass.max(combiners_log2 - self.direct_log2, 0)
        return Share(first=first, count=count, groups_log2=groups_log2, num_splits=active, split=work.part)

    @property
    def direct_log2(self) -> int:
        """log2 of the smallest number of combiners with which no CTA has more vectors to combine than threads."""
        return (-(-self.num_vectors // self.config.num_threads) - 1).bit_length()

    @property
    def most_combiners_log2(self) -> int:
        """log2 of the largest number of CTAs that can combine a row. A CTA combines all columns of its query heads. If
        V's rotation has to be undone, the CTA's vectors also have to fill whole warps.
        """
        halves = 1 if self.config.features.v_rotation > 1 and self.vectors_per_row < WARP_THREADS else 0
        return (self.num_rows & -self.num_rows).bit_length() - 1 - halves

    def combiners_log2(self, active):
        """Returns log2 of the number of combiners of a row with ``active`` splits. It is the smallest with which a
        thread combines one vector and loads all of its splits in one batch, if the row can have so many combiners."""
        result = Int32(0)
        for log2 in range(1, self.most_combiners_log2 + 1):
            # Half as many leave a thread with several vectors, or with more splits than it loads at a time.
            groups_log2 = log2 - 1 - self.direct_log2
            wanted = active > 1 if groups_log2 < 0 else active > COMBINE_BATCH << groups_log2
            result = cutlass.select_(wanted & (active >= 1 << log2), Int32(log2), result)
        return result

    # -- within the CTA -------------------------------------------------------------------------------------------

    @cute.jit
    def publish_warp(self, state, address, warp, lane, slice_index):
        """Writes a warp's unnormalised outputs, and their (maximum, sum) pairs, to the merge buffer."""
        columns, softmax = range(self.config.columns), state.softmax
        totals = [lane_sum(softmax.totals[column], COLUMN_LANES) for column in columns]
        values = self.value_reader.outputs(state.values)
        sync_consumers(self.config)  # every warp has read its last tile
        row = warp % self.config.num_roles * self.config.warp_queries + 2 * (lane % 4)
        base = address + (slice_index * self.num_rows + row) * self.pitch
        for column, first, run in values:
            for i in cutlass.range_constexpr(0, len(run), 4):
                ptx.store_shared(base + first * 4, _row_of(column) * self.pitch + 4 * i, run[i : i + 4])
        if lane < 4:
            stats = self.stats_address(address, row) + slice_index * PAIR_BYTES
            for column in columns:
                pair = [softmax.references[column], totals[column]]
                ptx.store_shared(stats, self.config.mainloop.num_slices * PAIR_BYTES * _row_of(column), pair)

    def merge_slices(self, address, index):
        """Adds up one vector over the CTA's slices. Returns (maximum, sum, values)."""
        row, d = self.vector(index)
        place, stats = address + row * self.pitch + d * 4, self.stats_address(address, row)
        slices = self.config.mainloop.num_slices
        words = 2 if slices % 2 else 4  # of one load: a pair, or those of two slices
        numbers = []
        for first in range(0, 2 * slices, words):
            numbers += _floats(ptx.load_shared_vector(stats, 4 * first, words))
        pairs = [numbers[2 * i : 2 * i + 2] for i in range(slices)]
        values = [_floats(ptx.load_shared_vector(place, i * self.num_rows * self.pitch, 4)) for i in range(slices)]
        return _merge(pairs, values)

    def stats_address(self, address, row):
        """Returns where the (maximum, sum) pairs of a query head's slices lie, after the outputs."""
        return address + self.stats_offset + row * (self.config.mainloop.num_slices * PAIR_BYTES)

    def vector(self, index):
        """Returns (row, first column) of a vector of the CTA's outputs."""
        vectors = self.config.v_head_dim // 4
        return index // vectors, index % vectors * 4

    # -- over the splits of a row ---------------------------------------------------------------------------------

    @cute.jit
    def combine(self, work, results, share, address, tid, keep):
        """Adds up this CTA's share of the row over all splits and stores it."""
        if share.groups_log2 == 0:
            threads, vectors = self.config.num_threads, self.vectors_at_once
            for v in cutlass.range(tid, share.count, vectors * threads, unroll=1):
                exist = [v + i * threads < share.count for i in range(vectors)]
                indices = [share.first + cutlass.min(v + i * threads, share.count - 1) for i in range(vectors)]
                sinks = [self.load_sink(work, results, index) for index in indices]
                found = self.gather(work, results, share, address, indices, exist, Int32(0))
                for i in cutlass.range_constexpr(vectors):
                    if exist[i]:
                        sums = [found[6 * i + word] for word in range(6)]
                        self.store_output(work, results, indices[i], sums[0], sums[1], sums[2:], sinks[i])
                        if not keep:
                            self.clear(work, results, share, indices[i], Int32(0))
        else:
            self.combine_in_groups(work, results, share, address, tid, keep)

    @cute.jit
    def combine_in_groups(self, work, results, share, address, tid, keep):
        """Adds up this CTA's share and stores it, if there are more threads than vectors. Threads form groups. Each
        group adds up some of the splits; then the sums of all groups are added up through shared memory.
        """
        step = self.config.num_threads >> share.groups_log2
        group, member = tid // step, tid % step
        index = share.first + member
        sink = self.load_sink(work, results, cutlass.min(index, self.num_vectors - 1))
        inside = cutlass.min(index, share.first + share.count - 1)
        sums = self.gather(work, results, share, address, [inside], [member < share.count], group)
        sync_consumers(self.config)  # all have read the slices, whose place the groups' sums take
        place = address + (group * step + member) * GROUP_BYTES
        if member < share.count:
            ptx.store_shared(place, 0, [sums[i] for i in range(4)])
            ptx.store_shared(place, 16, [sums[4], sums[5]])
        sync_consumers(self.config)
        if tid < share.count:
            for other in cutlass.range(1, Int32(1) << share.groups_log2, 1, unroll=1):
                source = place + other * step * GROUP_BYTES
                head = _floats(ptx.load_shared_vector(source, 0, 4))
                tail = _floats(ptx.load_shared_vector(source, 16, 2))
                self.add(sums, [head[0:2]], [[*head[2:4], *tail]])
            self.store_output(work, results, index, sums[0], sums[1], [sums[2 + c] for c in range(4)], sink)
        if (member < share.count) & (not keep):
            self.clear(work, results, share, index, group)

    def add(self, sums, pairs, vectors, first: int = 0):
        """Merges partial results into the running result (maximum, sum, four values) at ``sums[first : first + 6]``."""
        own = [sums[first + i] for i in range(6)]
        merged = _merge([own[:2], *pairs], [own[2:], *vectors])
        for i, value in enumerate((merged[0], merged[1], *merged[2])):
            sums[first + i] = value

    @property
    def vectors_at_once(self) -> int:
        """The number of vectors for which a thread waits at a time, if it combines several vectors."""
        return min(MOST_VECTORS, -(-self.num_vectors // self.config.num_threads))

    @cute.jit
    def gather(self, work, results, share, address, indices, exist, group):
        """Adds up the vectors ``indices`` over splits ``group``, ``group + 2**groups_log2`` and so on. Group 0 also
        adds the CTA's own results. Vectors that do not ``exist`` are not read. Returns (maximum, sum, four values) of
        each vector, one after the other.
        """
        sums = cute.make_rmem_tensor(6 * len(indices), Float32)
        sums.fill(0.0)
        sources, valid = [], []
        for i in cutlass.range_constexpr(len(indices)):
            sums[6 * i] = Float32(LOWEST)
            if (group == 0) & exist[i]:
                own = self.merge_slices(address, indices[i])
                sums[6 * i] = own[0]
                sums[6 * i + 1] = own[1]
                for c in cutlass.range_constexpr(4):
                    sums[6 * i + 2 + c] = own[2][c]
            row, d = self.vector(indices[i])
            query_row, _, is_query = work.query_row(self.config, row)
            sources.append((self.partial_address(work, results, query_row, 0) + d * 4, self.stats_of(d)))
            valid.append(exist[i] & is_query)
        splits = min(COMBINE_BATCH, MOST_LOADED // len(indices))
        for begin in cutlass.range(group, share.num_splits, Int32(splits) << share.groups_log2, unroll=1):
            self.gather_batch(work, share, sources, valid, splits, begin, sums)
        return sums

    @cute.jit
    def gather_batch(self, work, share, sources, valid, splits: cutlass.Constexpr, begin, sums):
        """Waits for each vector's partial results from up to ``splits`` splits of other CTAs, and adds them to
        ``sums``."""
        words = cute.make_rmem_tensor(6 * splits * len(sources), Uint32)
        published = []
        for i in cutlass.range_constexpr(len(sources)):
            source, stats = sources[i]
            for number in cutlass.range_constexpr(splits):
                split, wanted = self.batch_split(share, begin, number)
                place = source + self.partial_offset(work, split)
                wanted = wanted & valid[i]
                published += [Published(place + stats, words=2, wanted=wanted), Published(place, wanted=wanted)]
        Poll(published).load(words)
        for i in cutlass.range_constexpr(len(sources)):
            pairs, vectors = [], []
            for number in cutlass.range_constexpr(splits):
                wanted = self.batch_split(share, begin, number)[1] & valid[i]
                first = 6 * (i * splits + number)
                values = [words[first + w].bitcast(Float32) for w in range(6)]
                pairs.append([cutlass.select_(wanted, values[0], Float32(LOWEST)), values[1]])
                vectors.append(values[2:])
            self.add(sums, pairs, vectors, 6 * i)

    @cute.jit
    def clear(self, work, results, share, index, group):
        """Resets the words of the workspace that this thread has gathered to EMPTY. It is called after the stores of
        the output have been issued.
        """
        row, d = self.vector(index)
        query_row, _, valid = work.query_row(self.config, row)
        if valid:
            source = self.partial_address(work, results, query_row, 0) + d * 4
            for split in cutlass.range(group, share.num_splits, Int32(1) << share.groups_log2, unroll=1):
                if split != share.split:
                    place = source + self.partial_offset(work, split)
                    reset(place)
                    reset(place + self.stats_of(d), 2)

    def batch_split(self, share, begin, i: int):
        """Returns (the i-th split of a batch, whether another CTA has published a result of that split)."""
        split = begin + (Int32(i) << share.groups_log2)
        return split, (split < share.num_splits) & (split != share.split)

    def partial_address(self, work, results, query_row, part):
        """Returns the workspace's address of a part's partial result for one query."""
        return results.workspace + work.partial_row(query_row, part) * (4 * self.config.partial_words)

    def partial_offset(self, work, part):
        """Returns the bytes in the workspace from part 0's partial result to the partial result of ``part``."""
        shape = work.place.shape
        return Int64(part) * (shape.q_len * shape.num_q_heads * (4 * self.config.partial_words))

    def stats_of(self, d):
        """Returns the bytes from a vector of a partial result to the vector's own copy of (maximum, sum). Only the
        vector's thread reads that copy."""
        return self.config.v_head_dim * 4 + d // 4 * PAIR_BYTES - d * 4

    # -- stores ---------------------------------------------------------------------------------------------------

    def load_sink(self, work, results, index):
        """Loads the sink of a vector's query head; 0 without sinks. Called before the wait for the vector."""
        if not self.config.features.sinks:
            return Float32(0.0)
        _, head, valid = work.query_row(self.config, self.vector(index)[0])
        return load_float(results.sinks + Int64(cutlass.select_(valid, head, Int32(0))) * 4)

    @cute.jit
    def store_output(self, work, results, index, maximum, total, value, sink):
        row, d = self.vector(index)
        query_row, head, valid = work.query_row(self.config, row)
        if const_expr(self.config.features.v_rotation > 1):
            # Whole warps are here, a lane with the vector that its number says: rows are in neighbouring lanes.
            value = list(value)
            self.hadamard.apply(value, cute.arch.lane_idx())
        if valid:
            if const_expr(self.config.features.v_factor):
                shape = work.place.shape
                kv_head = (head * shape.group_reciprocal) >> RECIPROCAL_BITS
                place = results.out_factor + Int64(kv_head * self.config.v_head_dim + d) * 4
                value = [v * factor for v, factor in zip(value, load_floats(place, 0, 4), strict=True)]
            if const_expr(self.late_shift):
                # All scores of the query lack the same: so does their maximum.
                base, softmax_scale = results.shifts
                shift = load_shift(base, work.output_row(query_row))
                maximum = ptx.fma(shift, softmax_scale * ptx.LOG2_E, maximum)
            # A query that sees no key has a sum of 0: output 0, log-sum-exp -inf.
            denominator = total
            if const_expr(self.config.features.sinks):
                denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -maximum))
            scale = cutlass.select_(total > 0.0, ptx.reciprocal(denominator), Float32(0.0))
            pack = {"bf16": ptx.pack_bf16x2, "fp16": ptx.pack_f16x2}[self.config.q_dtype]
            words = [pack(value[c] * scale, value[c + 1] * scale) for c in (0, 2)]
            output_row = work.output_row(query_row)
            ptx.store_global(results.out + (output_row * self.config.v_head_dim + d) * 2, words)
            if (d == 0) & ((results.mode & WRITE_LSE) != 0):
                ptx.store_global(results.lse + output_row * 4, [(maximum + ptx.log2(total)) * ptx.LN_2])

    @cute.jit
    def store_partial(self, work, results, index, maximum, total, value):
        row, d = self.vector(index)
        query_row, _, valid = work.query_row(self.config, row)
        if valid:
            place = self.partial_address(work, results, query_row, work.part) + d * 4
            publish(place, value)
            publish(place + self.stats_of(d), [maximum, total])


def _row_of(column: int) -> int:
    """Returns the query head of an accumulator column, relative to the lane's first query head, 2 * (lane % 4)."""
    return column // 2 * BLOCK_QUERIES + column % 2


def _floats(words):
    return [word.bitcast(Float32) for word in words]


def _merge(pairs, vectors):
    """Merges partial results in order: the (maximum, sum) ``pairs`` of their softmax, and their unnormalised outputs
    ``vectors``. Returns (maximum, sum, values)."""
    maximum, weights = weights_of([reference for reference, _ in pairs])
    total = Float32(0.0)
    value = [Float32(0.0)] * len(vectors[0])
    for (_, its_total), vector, weight in zip(pairs, vectors, weights, strict=True):
        total = total + weight * its_total
        value = [v + weight * part for v, part in zip(value, vector, strict=True)]
    return maximum, total, value
