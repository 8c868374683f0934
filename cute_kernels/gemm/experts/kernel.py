"""Grouped weight-only GEMM, one launch: the rows of each expert times its weight, routing read on the device.

The roles are those of :class:`cute_kernels.gemm.stream.kernel.StreamRoles`; places differ. Before the roles begin one
warp reads where the experts' rows begin, and counts entries (:mod:`.work`) by a scan over its lanes. It writes the
entries that the CTA takes part in to a table in shared memory. Rows of x are gathered by index as they are copied, and
results are stored in the order of the places, so that a second GEMM reads them as they lie.

Activations of an entry stay while the CTA takes its blocks. Those of the next entry are loaded with its first weights
into the other of two slots. Where there is room for one slot only, they are loaded once the last weights of the entry
before have been used. The pipeline of weights goes on meanwhile.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.tensors import matrix_shape
from cute_kernels.gemm.device_operands import operands_of
from cute_kernels.gemm.experts.schedule import MAX_EXPERTS, TABLE_BYTES, TABLE_ENTRY_BYTES
from cute_kernels.gemm.experts.work import EntrySizes, GroupedOperands, GroupedWork, reciprocal
from cute_kernels.gemm.stream.config import StreamConfig
from cute_kernels.gemm.stream.kernel import StreamActivationLoads, StreamKernel
from cute_kernels.gemm.stream.memory import clear_tail, init_barriers


class EntryLoads:
    """Loads an entry's rows of x by index, slice by slice: see `.stream.kernel.StreamActivationLoads`."""

    def __init__(self, config: StreamConfig):
        self.config = config

    @cute.jit
    def copy(self, operands, memory, work, lane):
        """Loads an entry's slice of K with the first weights that are multiplied with it, a lane for each row.

        A run begins with the first k blocks of a block and goes on with whole ones. So the loaded part of an entry is
        always its k blocks up to ``reached``. Only the last block of the run may begin later, and it has no successor.
        """
        config, pipeline = self.config, memory.pipeline
        k_block_bytes = 2 * config.block_k
        row_bytes = (
            work.shape.k * 2 - work.first_k_block * k_block_bytes
        )  # from the slice on; x ends before the padded K
        here = pipeline.producer_state()
        used = pipeline.producer_state()  # of a wait for the chunk before; at first there is none
        entry, reached, row = Int32(-1), Int32(0), Int64(0)
        for index in cutlass.range(work.num_segments, unroll=1):
            segment = work.segment(index)
            if segment.entry != entry:
                entry, reached = segment.entry, Int32(0)
                row = self.source_row(operands, segment, lane)
                if (lane == 0) & (work.shape.x_slots == 1):
                    pipeline.producer_acquire(used)
            target = memory.x + (work.x_start(segment, memory.x_slot_bytes) + lane * memory.x_pitch)
            source = operands.x + (row * work.shape.k + work.first_k_block * config.block_k) * 2
            for k_block in cutlass.range(segment.begin, segment.end, config.chunk_k_blocks, unroll=1):
                end = cutlass.min(k_block + config.chunk_k_blocks, segment.end)
                first = cutlass.max(k_block, reached) * k_block_bytes
                size = cutlass.max(cutlass.min(end * k_block_bytes, row_bytes) - first, 0)
                if lane == 0:  # alone: with nothing to bring, a lane that looks later could find the phase gone by
                    pipeline.producer_acquire(here)
                    pipeline.producer_expect(here, size * segment.rows)
                cute.arch.sync_warp()
                if (lane < segment.rows) & (size > 0):
                    ptx.bulk_copy_to_shared(target + first, source + first, size, pipeline.full_address(here))
                used = replace(here, phase=here.phase ^ 1)
                here = pipeline.next(here)
            reached = cutlass.max(reached, segment.end)

    @cute.jit
    def source_row(self, operands, segment, lane):
        """The row of x of the lane's place."""
        place = segment.first_row + cutlass.min(lane, segment.rows - 1)
        row = place
        if operands.rows != 0:
            row = Int32(ptx.load_global_words(operands.rows + Int64(place) * 4, 0, 1, constant=False)[0])
        return Int64(row)


class ExpertStream:
    """The entries of all experts, which the device counts: see `cute_kernels.gemm.stream.kernel.StreamScheduling`."""

    table_bytes = TABLE_BYTES

    def __init__(self, config: StreamConfig):
        self.config = config
        self.loads: StreamActivationLoads = EntryLoads(config)

    def operands(self, given) -> GroupedOperands:
        return operands_of(GroupedOperands, given, residual=Int64(0))

    def sizes(self, given) -> EntrySizes:
        num_blocks = cute.ceil_div(given.num_tiles, self.config.n_tiles)
        slice_k_blocks = cute.ceil_div(given.k_blocks, given.num_slices)
        return EntrySizes(
            m=Int32(1) << given.entry_shift,
            n=given.n,
            k=matrix_shape(given.x)[1],
            num_tiles=given.num_tiles,
            k_blocks=given.k_blocks,
            slice_k_blocks=slice_k_blocks,
            slice_reciprocal=reciprocal(slice_k_blocks),
            num_slices=given.num_slices,
            base=Int32(0),
            rest=Int32(0),
            max_parts=given.max_parts,
            activation=given.activation,
            out_kind=given.out_kind,
            num_blocks=num_blocks,
            entry_k_blocks=num_blocks * slice_k_blocks,
            block_reciprocal=reciprocal(num_blocks),
            num_groups=given.num_groups,
            group_reciprocal=reciprocal(given.num_groups),
            num_experts=given.num_experts,
            entry_shift=given.entry_shift,
            x_slots=given.x_slots,
            first_entry=given.first_entry,
            max_entries=given.max_entries,
            slack=given.slack,
            waits=given.waits,
            grain=Int32(1),
        )

    @cute.jit
    def begin(self, operands, shape, memory, group, slice_index, warp, lane):
        """Begins as `StreamScheduling` says: a warp initialises barriers while others count entries; all list those of
        the CTA."""
        config = self.config
        if const_expr(config.use_pdl):
            if shape.waits != 0:
                cute.arch.griddepcontrol_wait()
        thread = warp * WARP_THREADS + lane
        ends = self.load_ends(operands, shape, thread)
        if warp == config.consumer_warps:
            if lane == 0:
                init_barriers(memory)
        else:
            # What is beyond K does not depend on how entries are dealt out.
            work = GroupedWork.of_entries(shape, group, slice_index, memory.table)
            clear_tail(config, memory, work, thread)
        count, before = self.count_entries(shape, ends, lane)
        if lane == WARP_THREADS - 1:
            ptx.store_shared(memory.staging + warp * 4, 0, [Uint32(before + count)])  # which nobody else needs yet
        cute.arch.sync_threads()
        earlier, total = self.sum_warps(memory.staging, warp, lane)
        num_entries = cutlass.min(cutlass.max(total - shape.first_entry, 0), shape.max_entries)
        own = GroupedWork.of_entries(shape.cut(num_entries), group, slice_index, memory.table)
        self.list_entries(own, ends, thread, earlier + before - shape.first_entry)
        cute.arch.sync_threads()
        return own

    @property
    def thread_experts(self) -> int:
        """The number of neighbouring experts whose entries a thread counts; all threads together count those of all
        experts."""
        return -(-MAX_EXPERTS // self.config.num_threads)

    def load_ends(self, operands, shape, thread) -> list[Any]:
        """Loads where the first of a thread's experts begins, and where each of them ends."""
        expert = thread * self.thread_experts
        # After the last expert the same end again, so no rows.
        places = [cutlass.min(expert + i, shape.num_experts) for i in range(self.thread_experts + 1)]
        addresses = [operands.offsets + Int64(place) * 4 for place in places]
        return [Int32(ptx.load_global_words(address, 0, 1, constant=False)[0]) for address in addresses]

    def count_entries(self, shape, ends, lane) -> tuple[Any, Any]:
        """Entries of a thread's experts, and of those of the lanes before it."""
        count = Int32(0)
        for begin, end in pairwise(ends):
            count = count + shape.entries_of(end - begin)
        before = count
        for step in range(5):
            other = cute.arch.shuffle_sync_up(before, 1 << step, mask_and_clamp=0)
            before = before + cutlass.select_(lane >= (1 << step), other, Int32(0))
        return count, before - count

    @cute.jit
    def sum_warps(self, counts, warp, lane):
        """Entries that the warps before this one have counted, and all of them; counts: one of each warp."""
        count = Int32(0)
        if lane < self.config.num_threads // WARP_THREADS:
            count = Int32(ptx.load_shared(counts + lane * 4, 0))
        earlier = ptx.warp_sum(cutlass.select_(lane < warp, count, Int32(0)))
        return earlier, cute.arch.make_warp_uniform(ptx.warp_sum(count))

    @cute.jit
    def list_entries(self, work, ends, thread, entry):
        """Writes those of a thread's entries that the CTA takes part in to its table; entry: number of the first."""
        most = work.shape.m
        end = work.end_entry - work.own_entry
        entry = entry - work.own_entry  # among the CTA's
        for i in cutlass.range_constexpr(self.thread_experts):
            rows = ends[i + 1] - ends[i]
            entries = work.shape.entries_of(rows)
            first, stop = cutlass.max(-entry, 0), cutlass.min(end - entry, entries)
            for j in cutlass.range(first, stop, 1, unroll=1):
                done = j * most
                values = [thread * self.thread_experts + i, ends[i] + done, cutlass.min(rows - done, most), Int32(0)]
                address = work.table + (entry + j) * TABLE_ENTRY_BYTES
                ptx.store_shared(address, 0, [Uint32(value) for value in values])
            entry = entry + entries


def grouped_kernel(config: StreamConfig) -> StreamKernel:
    """Takes `GROUPED` of `cute_kernels.gemm.experts.arguments`."""
    return StreamKernel(config, ExpertStream(config))
