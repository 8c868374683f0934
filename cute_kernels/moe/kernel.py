"""Grouped weight-only GEMM, one launch: the rows of each expert times its weight, routing read on the device.

The kernel is :class:`cute_kernels.linear.kernel.LinearKernel`; what differs is where things are. Before the roles begin
one warp reads where the experts' rows begin, counts entries (:mod:`.work`) by a scan over its lanes, and writes those
that the CTA takes part in to a table in shared memory. Rows of x are gathered by index as they are copied, and results
are stored in the order of the places, so that a second GEMM reads them as they lie.

Activations of an entry stay while the CTA takes its blocks. Those of the next one come along with its first weights:
into the other of two slots, or, where there is room for one only, when the last weights of the entry before have been
used. The ring of weights goes on meanwhile.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.ring import advance
from cute_kernels.linear.kernel import LinearKernel
from cute_kernels.linear.work import RECIPROCAL_BITS, Work
from cute_kernels.moe.schedule import EXPERTS_PER_LANE, TABLE_BYTES, TABLE_ENTRY_BYTES
from cute_kernels.moe.work import GroupedOperands, GroupedShape, GroupedWork
from cute_kernels.sm90 import WARP_THREADS


class GroupedKernel(LinearKernel):
    """One compiled variant; `cute_kernels.linear.config.LinearConfig` says which."""

    table_bytes = TABLE_BYTES

    @cute.jit
    def __call__(  # type: ignore[override]
        self,
        x: cute.Tensor,
        codes: Int64,
        scales: Int64,
        zeros: Int64,
        bias: Int64,
        out: Int64,
        workspace: Int64,
        offsets: Int64,
        rows: Int64,
        n: Int32,
        num_tiles: Int32,
        units: Int32,
        num_slices: Int32,
        num_groups: Int32,
        num_experts: Int32,
        x_slots: Int32,
        first_entry: Int32,
        max_entries: Int32,
        max_parts: Int32,
        activation: Int32,
        out_kind: Int32,
        stream,
    ):
        """Launches over (slices of K, groups), all of which must fit on the GPU together.

        x: [.., k], k a multiple of 8. Addresses as in :class:`.work.GroupedOperands`, codes uint8 [experts, num_tiles,
        units * unit_tiles, 2048]; workspace of num_groups parts, or with slices max_entries * blocks * max_parts.
        Entries first_entry to first_entry + max_entries are computed, as far as there are. units: padded K / unit_k.
        """
        config = self.config
        k = x.shape[1]  # pyright: ignore[reportGeneralTypeIssues, reportOptionalSubscript, reportIndexIssue]
        num_blocks = cute.ceil_div(num_tiles, config.n_tiles)
        slice_units = cute.ceil_div(units, num_slices)
        shape = GroupedShape(
            m=Int32(config.max_tokens),
            n=n,
            k=k,
            num_tiles=num_tiles,
            units=units,
            slice_units=slice_units,
            slice_reciprocal=self.reciprocal(slice_units),
            num_slices=num_slices,
            base=Int32(0),
            rest=Int32(0),
            max_parts=max_parts,
            activation=activation,
            out_kind=out_kind,
            num_blocks=num_blocks,
            block_reciprocal=self.reciprocal(num_blocks),
            num_groups=num_groups,
            group_reciprocal=self.reciprocal(num_groups),
            num_experts=num_experts,
            x_slots=x_slots,
            first_entry=first_entry,
            max_entries=max_entries,
        )
        operands = GroupedOperands(
            ptx.address(x), codes, scales, zeros, bias, Int64(0), out, workspace, offsets, rows
        )  # fmt: skip
        self.kernel(operands, shape).launch(
            grid=(num_slices, num_groups, 1),
            block=(config.num_threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=config.use_pdl,
            stream=stream,
        )

    def reciprocal(self, divisor):
        """2**RECIPROCAL_BITS over a divisor, rounded up: see `RECIPROCAL_BITS`."""
        return ((Int64(1) << RECIPROCAL_BITS) + divisor - 1) // divisor

    @cute.kernel
    def kernel(self, operands, shape):
        config = self.config
        slice_index, group, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.allocate(shape)
        if warp == config.math_warps:
            if lane == 0:
                self.init_barriers(memory)
        elif warp == config.math_warps + 1:
            if const_expr(config.use_pdl):
                cute.arch.griddepcontrol_wait()
            self.make_table(operands, memory.table, shape, group, lane)
        else:
            # What is beyond K does not depend on how entries are dealt out.
            work = GroupedWork.of_entries(shape, group, slice_index, memory.table)
            self.clear_tail(memory, work, warp * WARP_THREADS + lane)
        cute.arch.sync_threads()
        num_entries = cute.arch.make_warp_uniform(Int32(ptx.load_shared(memory.table, 0)))
        own = GroupedWork.of_entries(shape.cut(num_entries), group, slice_index, memory.table)
        self.take_roles(operands, memory, own, warp, lane)

    @cute.jit
    def make_table(self, operands, table, shape, group, lane):
        """One warp counts entries, and lists those of the CTA; a lane has ``each`` neighbouring experts."""
        each = cute.ceil_div(shape.num_experts, WARP_THREADS)
        expert = lane * each
        ends = cute.make_rmem_tensor(EXPERTS_PER_LANE + 1, Int32)
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE + 1):
            # All at once; behind a lane's last expert the same end again, so no rows.
            place = cutlass.min(expert + cutlass.min(Int32(i), each), shape.num_experts)
            words = ptx.load_global_words(operands.offsets + Int64(place) * 4, 0, 1, constant=False)
            ends[i] = Int32(words[0])
        count = Int32(0)
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
            count = count + self.entries_of(ends[i + 1] - ends[i])
        before = count
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(before, 1 << step, mask_and_clamp=0)
            before = before + cutlass.select_(lane >= (1 << step), other, Int32(0))
        total = cute.arch.shuffle_sync(before, WARP_THREADS - 1)
        num_entries = cutlass.min(cutlass.max(total - shape.first_entry, 0), shape.max_entries)
        cut = shape.cut(num_entries)
        work = Work.of(cut, group, Int32(0))
        first = cut.entry_of(work.first_block)
        end = cut.entry_of(work.first_block + work.num_segments - 1) + 1
        entry = before - count - shape.first_entry
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
            rows = ends[i + 1] - ends[i]
            entries = self.entries_of(rows)
            begin, stop = cutlass.max(first - entry, 0), cutlass.min(end - entry, entries)
            for j in cutlass.range(begin, stop, unroll=1):  # pyright: ignore[reportCallIssue]
                done = j * self.config.max_tokens
                values = [expert + i, ends[i] + done, cutlass.min(rows - done, self.config.max_tokens), Int32(0)]
                address = table + (entry + j - first + 1) * TABLE_ENTRY_BYTES
                ptx.store_shared(address, 0, [Uint32(value) for value in values])
            entry = entry + entries
        if lane == 0:
            ptx.store_shared(table, 0, [Uint32(num_entries)])

    def entries_of(self, rows):
        """Entries of an expert with so many rows."""
        return (rows + (self.config.max_tokens - 1)) >> (self.config.max_tokens.bit_length() - 1)

    @cute.jit
    def copy_activations(self, operands, memory, work, lane):
        """Brings an entry's slice of K along with the first weights that meet it, a lane for each row.

        A run begins with the first units of a block and goes on with whole ones: what is there of an entry are always
        its units up to ``reached``, but for the last block of the run, which may begin later and has no successor.
        """
        config = self.config
        unit_bytes = 2 * config.unit_k
        row_bytes = work.shape.k * 2 - work.first_unit * unit_bytes  # from the slice on; x ends before the padded K
        stage, phase = Int32(0), Int32(1)
        used_stage, used_phase = Int32(0), Int32(1)  # a wait for the chunk before; at first there is none
        entry, reached, row = Int32(-1), Int32(0), Int64(0)
        for index in cutlass.range(work.num_segments, unroll=1):
            segment = work.segment(index)
            if segment.entry != entry:
                entry, reached = segment.entry, Int32(0)
                row = self.source_row(operands, segment, lane)
                if (lane == 0) & (work.shape.x_slots == 1):
                    cute.arch.mbarrier_wait(memory.empty + used_stage, used_phase)
            target = memory.x + (work.x_start(segment, memory.x_slot_bytes) + lane * memory.x_pitch)
            source = operands.x + (row * work.shape.k + work.first_unit * config.unit_k) * 2
            for unit in cutlass.range(segment.begin, segment.end, config.chunk_units, unroll=1):
                end = cutlass.min(unit + config.chunk_units, segment.end)
                first = cutlass.max(unit, reached) * unit_bytes
                size = cutlass.max(cutlass.min(end * unit_bytes, row_bytes) - first, 0)
                barrier = memory.full + stage
                if lane == 0:  # alone: with nothing to bring, a lane that looks later could find the phase gone by
                    cute.arch.mbarrier_wait(memory.empty + stage, phase)
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size * segment.rows)
                cute.arch.sync_warp()
                if (lane < segment.rows) & (size > 0):
                    ptx.bulk_copy_to_shared(target + first, source + first, size, Int32(barrier.toint()))
                used_stage, used_phase = stage, phase ^ 1
                stage, phase = advance(stage, phase, config.num_stages)
            reached = cutlass.max(reached, segment.end)

    @cute.jit
    def source_row(self, operands, segment, lane):
        """The row of x of the lane's place."""
        place = segment.first_row + cutlass.min(lane, segment.rows - 1)
        row = place
        if operands.rows != 0:
            row = Int32(ptx.load_global_words(operands.rows + Int64(place) * 4, 0, 1, constant=False)[0])
        return Int64(row)
