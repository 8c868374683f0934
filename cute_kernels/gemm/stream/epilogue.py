"""The epilogue of the memory-bound kernel: adds up the consumer warps' accumulators in shared memory, combines parts of
K through global memory, and stores the output.

Epilogue warps work while other warps load and multiply weights. If a CTA has computed a block over all of K, its
epilogue warps store the block at once. Otherwise every CTA publishes its partial result in the workspace. Several
groups of CTAs may have a part of a block. The CTAs of the last such group, the *combiners*, divide the block's outputs
among them. Each combiner waits for all partial results of its share, adds them up in a fixed order, and stores the
outputs.

A partial result has arrived when its words are no longer EMPTY (`cute_kernels.device.exchange`). Two CTAs never wait
for each other. A CTA publishes its own part of a block before it waits for other CTAs. It waits only for CTAs of its
own group and of earlier groups. A group that shares a block with a later group computes this block first. The CTAs of a
group run at the same time, since they are neighbours in the grid and CTAs start in order.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.exchange import Poll, Published, publish, reset
from cute_kernels.gemm.epilogue import VECTOR, Results
from cute_kernels.gemm.stream.config import FEW_SEGMENTS, NUM_BUFFERS, StreamConfig

VECTOR_BYTES = 4 * VECTOR
COMBINE_BATCH = 4  # partial results that a thread loads at a time; no other number was measured


class StreamEpilogue:
    """The code of the epilogue warps."""

    def __init__(self, config: StreamConfig):
        self.config = config
        self.num_threads = config.store.epilogue_warps * WARP_THREADS
        self.row_vectors = config.block_rows // VECTOR
        self.results = Results(config.dtype, config.store.activation)

    @cute.jit
    def run(self, operands, memory, work, tid, lane):
        """Reduces and stores all of a CTA's segments."""
        shape = work.shape
        # With many segments, a block is finished after the next one's part is stored: other CTAs' parts are there then.
        lag = cutlass.select_((shape.num_slices > 1) & (work.num_segments > FEW_SEGMENTS), Int32(1), Int32(0))
        for index in cutlass.range(work.num_segments + lag, unroll=1):
            if index < work.num_segments:
                segment = work.segment(index)
                held = segment.last & self.is_held(work, index, lag)
                part = self.parts_of(work, segment)[1]
                if (shape.num_slices > 1) | (not held):
                    self.wait_staged(memory, index)
                    self.store_partials(operands, memory, work, segment, index, part, held, tid)
                if not held:
                    self.release(memory, memory.results.consumer_state_of(index), lane)
            if index >= lag:
                segment = work.segment(index - lag)
                if segment.last:
                    held = self.is_held(work, index - lag, lag)
                    self.finish(operands, memory, work, segment, index - lag, held, tid)
                    if held:
                        # Warps without vectors wait, too: otherwise they could be a round of the buffers ahead.
                        self.wait_staged(memory, index - lag)
                        self.release(memory, memory.results.consumer_state_of(index - lag), lane)

    def buffer(self, index):
        """Returns the index of a segment's staging buffer."""
        return index % NUM_BUFFERS

    def wait_staged(self, memory, index):
        """Waits until a segment's results are in its buffer."""
        memory.results.consumer_wait(memory.results.consumer_state_of(index))

    def is_held(self, work, index, lag):
        """Whether a CTA keeps its own part of segment ``index``'s block in the staging buffer until it adds up its
        share. If not, its own part goes through the workspace, as other CTAs' parts do. lag: 1 if the share is added up
        one segment later, else 0.
        """
        return (lag == 0) | (index == work.num_segments - 1)

    def share(self, work, segment):
        """Returns the range (first, end) of vectors of a block that this CTA adds up and stores."""
        vectors = work.shape.m * self.row_vectors
        num_slices = work.shape.num_slices
        return vectors * work.slice_index // num_slices, vectors * (work.slice_index + 1) // num_slices

    @cute.jit
    def store_partials(self, operands, memory, work, segment, index, part, held, tid):
        """Publishes a CTA's part of a block to the combiners. If the part is ``held`` (`is_held`), outputs in the CTA's
        own share are not published."""
        first, end = self.share(work, segment)
        source = memory.staging + self.buffer(index) * self.config.buffer_bytes
        part_vectors = work.shape.m * self.row_vectors
        target = self.partials_of(operands, work, segment) + Int64(part * part_vectors) * VECTOR_BYTES
        for vector in cutlass.range(tid, part_vectors, self.num_threads, unroll=1):
            if (not held) | (vector < first) | (vector >= end):
                publish(target + Int64(vector) * VECTOR_BYTES, self.staged_sum(source, vector))

    def parts_of(self, work, segment):
        """Returns (number of parts of a block, index of this CTA's part). Parts of groups after this CTA's group are
        not counted.
        """
        before = (work.group - work.first_group(segment.block)) * work.shape.num_slices
        return before + work.shape.num_slices, before + work.slice_index

    def partials_of(self, operands, work, segment):
        """Returns the address in the workspace of a block's first partial result."""
        part_bytes = work.shape.m * self.row_vectors * VECTOR_BYTES
        return operands.workspace + Int64(segment.block * work.shape.max_parts) * part_bytes

    @cute.jit
    def release(self, memory, here, lane):
        """Releases a staging buffer to the consumer warps."""
        cute.arch.sync_warp()
        if lane == 0:
            memory.results.consumer_release(here)

    def staged_sum(self, source, vector):
        """Returns four neighbouring results of a block, added up over the ``k_warps`` sets of partial results."""
        config = self.config
        address = source + vector // self.row_vectors * config.staging_pitch + vector % self.row_vectors * 16
        slices = [ptx.load_shared_vector(address, i * config.slice_bytes, VECTOR) for i in range(config.k_warps)]
        total = [word.bitcast(Float32) for word in slices[0]]
        for words in slices[1:]:
            total = [value + word.bitcast(Float32) for value, word in zip(total, words, strict=True)]
        return total

    @cute.jit
    def finish(self, operands, memory, work, segment, index, held, tid):
        """Adds up all parts of this CTA's share of a block, and stores the outputs. Parts are added in order, but the
        CTA's own part comes last if it is ``held``.
        """
        first, end = self.share(work, segment)
        parts, part = self.parts_of(work, segment)
        own = cutlass.select_(held, part, Int32(-1))
        source = memory.staging + self.buffer(index) * self.config.buffer_bytes
        partials = self.partials_of(operands, work, segment)
        acc = cute.make_rmem_tensor(VECTOR, Float32)
        extras = cute.make_rmem_tensor(2 * VECTOR, Float32)
        stride = Int64(work.shape.m * self.row_vectors) * VECTOR_BYTES
        for vector in cutlass.range(first + tid, end, self.num_threads, unroll=1):
            target = self.target_of(work, segment, vector)
            # Bias and residual are on their way before the CTA's own accumulators are complete.
            self.results.load_extras(operands, work.shape, target, extras)
            acc.fill(0.0)
            place = partials + Int64(vector) * VECTOR_BYTES
            if (parts > 1) | (not held):
                self.gather(acc, place, stride, parts, own)
            if held:
                self.wait_staged(memory, index)
                values = self.staged_sum(source, vector)
                for i in cutlass.range_constexpr(VECTOR):
                    acc[i] = acc[i] + values[i]
            self.results.store(operands, work.shape, target, acc, extras)
            for other in cutlass.range(parts, unroll=1):
                if other != own:
                    reset(place + stride * other)

    @cute.jit
    def gather(self, acc, place, stride, parts, own):
        """Adds the published parts of a vector to ``acc``, batch by batch, except part ``own``."""
        words = cute.make_rmem_tensor(VECTOR * COMBINE_BATCH, Uint32)
        for begin in cutlass.range(0, parts, COMBINE_BATCH, unroll=1):
            source, left, own_part = place + stride * begin, parts - begin, own - begin
            batch = [Published(source + stride * i, wanted=(i < left) & (i != own_part)) for i in range(COMBINE_BATCH)]
            Poll(batch).load(words)
            for i in cutlass.range_constexpr(VECTOR * COMBINE_BATCH):
                acc[i % VECTOR] = acc[i % VECTOR] + words[i].bitcast(Float32)

    # -- what is stored -----------------------------------------------------------------------------------------------

    def target_of(self, work, segment, vector):
        """Returns where four neighbouring results of a token are stored."""
        return self.target_in(work.shape, segment.block, vector // self.row_vectors, vector, 0)

    def target_in(self, shape, block, token, vector, first_bias):
        """Returns where a vector of row ``token`` of the output is stored. first_bias: the index of the bias of output
        feature 0."""
        row = block * self.config.block_rows + vector % self.row_vectors * VECTOR
        return self.results.target(shape, token, row, first_bias + row)
