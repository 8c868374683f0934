"""Writes docs/figures/kernel_*.svg, a picture of each kernel family: `python -m tools.kernel_figures`.

The pictures are data. Every box and barrier names the code that it shows; tests/test_kernel_figures.py finds each name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.kernel_drawing import Arrow, Barrier, Box, Figure, Lane, draw

FOLDER = Path(__file__).resolve().parent.parent / "docs/figures"

# One line a box, an arrow, a barrier, as in a table.
# fmt: off
# ruff: noqa: E501

WGMMA = Figure(
    "gemm_wgmma",
    "GEMM by warpgroup MMAs: WgmmaKernel, one work tile",
    (
        Lane("global memory", "memory", (
            Box("x", "16 bits [m, K]"),
            Box("W", "codes, scales, zero points, in the order of k blocks"),
        )),
        Lane("producer warps, 24 to 56 registers a thread", "role", (
            Box("activation loads, 1 warp", "TMA, 128-byte swizzle; multicast in a cluster", ("gemm/wgmma/loads.py:TmaLoads",)),
            Box("weight loads, 1 warp", "bulk copies, and all barriers; asks for the first k block early", ("gemm/wgmma/loads.py:WeightLoads", "gemm/wgmma/kernel.py:weight_warp")),
            Box("spare, 2 warps", "idle, or factors of a deferred norm", ("gemm/wgmma/kernel.py:SpareWarps", "gemm/wgmma/deferred_kernel.py:FactorWarps")),
        )),
        Lane("shared memory", "shared", (
            Box("stages of x", "num_stages of [tile_m, block_k]: operand B of the MMAs", ("gemm/wgmma/mainloops.py:x",)),
            Box("stages of W", "num_stages of codes, scales, zeros of one k block", ("gemm/wgmma/mainloops.py:codes", "gemm/wgmma/mainloops.py:scales")),
            Box("staging, partials", "results of a warpgroup; partial sums of other CTAs", ("gemm/wgmma/results.py:staging", "gemm/wgmma/results.py:partials")),
        )),
        Lane("consumer warpgroups", "role", (
            Box("2 or 4 warpgroups: mainloop, reduction, store", "A: codes of 64 output features a tile, decoded in registers. B: x. Accumulators fp32: out^T = W X^T.\nWhile one warpgroup decodes, the MMAs of the other run.", ("gemm/wgmma/consumers.py:Consumers", "gemm/wgmma/register_mainloop.py:RegisterMainloop", "gemm/wgmma/reduction.py:WorkspaceReduction", "gemm/wgmma/epilogue.py:TileEpilogue")),
        )),
        Lane("results", "result", (
            Box("output", "bias, activation, residual applied"),
            Box("workspace", "parts of K cut across CTAs, EMPTY between launches", ("device/exchange.py:Published",)),
            Box("other CTAs of the cluster", "parts of K by DSMEM", ("gemm/wgmma/cluster_reduction.py:ClusterReduction",)),
        )),
    ),
    (
        Arrow("x", "activation loads, 1 warp"),
        Arrow("W", "weight loads, 1 warp"),
        Arrow("activation loads, 1 warp", "stages of x", "full"),
        Arrow("weight loads, 1 warp", "stages of W", "full"),
        Arrow("stages of x", "2 or 4 warpgroups: mainloop, reduction, store", "wait full"),
        Arrow("stages of W", "2 or 4 warpgroups: mainloop, reduction, store", "wait full"),
        Arrow("2 or 4 warpgroups: mainloop, reduction, store", "stages of x", "empty"),
        Arrow("2 or 4 warpgroups: mainloop, reduction, store", "stages of W", "empty"),
        Arrow("2 or 4 warpgroups: mainloop, reduction, store", "staging, partials", "stage"),
        Arrow("2 or 4 warpgroups: mainloop, reduction, store", "output"),
        Arrow("2 or 4 warpgroups: mainloop, reduction, store", "workspace"),
        Arrow("2 or 4 warpgroups: mainloop, reduction, store", "other CTAs of the cluster"),
    ),
    (
        Barrier("full", "num_stages", "2 arrivals (both loads) and the bytes of their copies", "consumer warps", ("gemm/wgmma/mainloops.py:full",)),
        Barrier("empty", "num_stages", "one lane of each consumer warp that reads the stage, of every CTA that shares x", "both loads", ("gemm/wgmma/mainloops.py:empty",)),
        Barrier("partial_barriers", "a tile that the CTA stores", "1 arrival and the bytes of all other CTAs' partial sums", "the warpgroup that stores it (DSMEM only)", ("gemm/wgmma/results.py:partial_barriers",)),
        Barrier("BEGIN (8)", "the CTA", "all threads; the weight warp arrives and does not wait", "all other warps", ("gemm/wgmma/kernel.py:BEGIN",)),
    ),
    "Experts of many rows run the same kernel with ExpertTiles. ResidentKernel has one producer warp and no stages of x: consumers make int8 limbs once.",
)

LINEAR = Figure(
    "gemm_few_rows",
    "GEMM of few rows: StreamKernel streams weights at the rate of the memory",
    (
        Lane("global memory", "memory", (
            Box("W", "equal ranges of k blocks for each group of CTAs (stream-K)"),
            Box("x", "a slice of K of all rows, 16 bits"),
        )),
        Lane("producer warps", "role", (
            Box("weight loads, 1 warp", "one lane: bulk copies of chunk_k_blocks k blocks", ("gemm/stream/kernel.py:copy_weights",)),
            Box("activation loads, 1 warp", "a lane a row, beside the first weights that need it", ("gemm/stream/kernel.py:SliceLoads",)),
        )),
        Lane("shared memory", "shared", (
            Box("stages", "num_stages chunks of codes, scales, zeros", ("gemm/stream/memory.py:stages",)),
            Box("x slice", "stays for all blocks of the CTA", ("gemm/stream/memory.py:x",)),
            Box("staging", "NUM_BUFFERS (2) of a block's results, fp32", ("gemm/stream/memory.py:staging",)),
        )),
        Lane("consumer warps", "role", (
            Box("4 x k_warps warps", "decode 16 bytes a thread into A of mma.sync m16n8k16; scales meet the accumulators of a group", ("gemm/stream/kernel.py:multiply", "gemm/stream/config.py:consumer_warps"), 2),
            Box("epilogue_warps (4)", "add up warps, then CTAs; bias, activation, residual", ("gemm/stream/epilogue.py:StreamEpilogue", "gemm/stream/config.py:epilogue_warps")),
        )),
        Lane("results", "result", (
            Box("output", ""),
            Box("workspace", "partial sums of a block that several CTAs share; who polls resets", ("device/exchange.py:Poll",)),
        )),
    ),
    (
        Arrow("W", "weight loads, 1 warp"),
        Arrow("x", "activation loads, 1 warp"),
        Arrow("weight loads, 1 warp", "stages", "full"),
        Arrow("activation loads, 1 warp", "x slice", "full of the stage"),
        Arrow("stages", "4 x k_warps warps", "wait full"),
        Arrow("4 x k_warps warps", "stages", "empty"),
        Arrow("x slice", "4 x k_warps warps"),
        Arrow("4 x k_warps warps", "staging", "staged"),
        Arrow("staging", "epilogue_warps (4)", "wait staged"),
        Arrow("epilogue_warps (4)", "staging", "drained"),
        Arrow("epilogue_warps (4)", "output"),
        Arrow("epilogue_warps (4)", "workspace"),
    ),
    (
        Barrier("pipeline, full", "num_stages", "2 arrivals (both producer warps) and the bytes of their copies", "consumer warps", ("device/pipeline.py:Pipeline", "gemm/stream/memory.py:pipeline")),
        Barrier("pipeline, empty", "num_stages", "one lane of each consumer warp", "both producer warps", ("gemm/stream/config.py:stage_warps",)),
        Barrier("results, full (staged)", "NUM_BUFFERS", "one lane of each consumer warp", "epilogue warps", ("gemm/stream/memory.py:results",)),
        Barrier("results, empty (drained)", "NUM_BUFFERS", "one lane of each epilogue warp", "consumer warps", ("gemm/stream/memory.py:drained",)),
    ),
    "Experts have kernels of their own.",
)

LAYER = Figure(
    "layer_products",
    "All products of a layer in one launch: LayerProductsKernel, persistent CTAs",
    (
        Lane("global memory", "memory", (
            Box("weights of up to 4 products", "int4, groups of 128; work tiles of 32 features, in the order of the products"),
            Box("x, and results of the product before", "words that are no longer EMPTY; two sets, used by launches in turn", ("gemm/layer/exchange.py:Exchange",)),
        )),
        Lane("loader warps", "role", (
            Box("loader_warps (4)", "the first draws work tiles from a counter; all copy stages of 32 features x 256 inputs and wait for nothing but room", ("gemm/layer/loads.py:Loader", "gemm/layer/config.py:loader_warps")),
        )),
        Lane("shared memory", "shared", (
            Box("weight stages", "num_stages; at most window are asked for at a time", ("gemm/layer/memory.py:stages", "gemm/layer/config.py:window")),
            Box("work tile numbers", "SLOTS (4)", ("gemm/layer/config.py:SLOTS",)),
            Box("limbs of x", "made once a product and CTA", ("gemm/layer/memory.py:limbs",)),
            Box("parts", "BUFFERS (2) of the consumers' sums", ("gemm/layer/memory.py:parts", "gemm/layer/config.py:BUFFERS")),
        )),
        Lane("consumer warps", "role", (
            Box("consumer_warps (8)", "poll for x, make limbs of it, multiply stages of their own by MMAs of bytes", ("gemm/layer/multiply.py:Multiplier", "gemm/layer/rows.py:Row"), 3),
            Box("store warp, 1", "adds the 8 sums; norm, activation, residual", ("gemm/layer/store.py:Storer",)),
        )),
        Lane("results", "result", (
            Box("output", ""),
            Box("results for the next product", "each word tells that it is there: no counter, no fence"),
        )),
    ),
    (
        Arrow("weights of up to 4 products", "loader_warps (4)"),
        Arrow("loader_warps (4)", "weight stages", "full"),
        Arrow("loader_warps (4)", "work tile numbers", "full"),
        Arrow("weight stages", "consumer_warps (8)", "wait full"),
        Arrow("consumer_warps (8)", "weight stages", "empty"),
        Arrow("work tile numbers", "consumer_warps (8)"),
        Arrow("consumer_warps (8)", "limbs of x", "write, read"),
        Arrow("consumer_warps (8)", "parts", "full"),
        Arrow("parts", "store warp, 1", "wait full"),
        Arrow("store warp, 1", "results for the next product"),
        Arrow("store warp, 1", "output"),
    ),
    (
        Barrier("weights, full", "num_stages", "1 arrival and the bytes of a stage", "the consumer warp that owns the stage", ("gemm/layer/memory.py:weights",)),
        Barrier("weights, empty", "num_stages", "1, lane 0 of that consumer warp", "the loader warp that fills it", ("gemm/layer/memory.py:weights",)),
        Barrier("tiles", "SLOTS", "full: 1, the first loader; empty: every warp of the CTA", "all warps; the first loader", ("gemm/layer/memory.py:tiles",)),
        Barrier("results", "BUFFERS", "full: the consumer warps; empty: 1, the store warp", "the store warp; the consumer warps", ("gemm/layer/memory.py:results",)),
        Barrier("words of results", "global memory", "a word that is not EMPTY", "consumer warps of the next product", ("gemm/layer/exchange.py:load_results",)),
    ),
    "docs/design/forward_progress.md says why every launch ends.",
)

EXPERTS = Figure(
    "experts",
    "Experts with few rows each: RangeKernel",
    (
        Lane("global memory", "memory", (
            Box("weights of all experts", "codes, scales"),
            Box("routing", "sorted: offsets and rows; else topk_ids as the router leaves them", ("gemm/experts/ranges/routing.py:SortedRouting", "gemm/experts/ranges/routing.py:AssignedRouting")),
            Box("x", "rows of tokens, 16 bits"),
        )),
        Lane("producer warp", "role", (
            Box("weight loads, 1 warp", "makes the barriers, then brings the whole blocks of its work range", ("gemm/experts/ranges/kernel.py:copy_blocks",)),
            Box("every warp", "finds the CTA's work range by itself: equal numbers of blocks, entries counted by shuffles", ("gemm/experts/ranges/finder.py:ExpertFinder", "gemm/experts/ranges/work.py:BlockRange"), 2),
        )),
        Lane("shared memory", "shared", (
            Box("stages", "num_stages of codes and scales", ("gemm/stream/memory.py:stages",)),
            Box("limbs", "int8, of one or two entries (x_slots), with a scale for 128 inputs", ("gemm/experts/ranges/schedule.py:x_slots", "gemm/experts/ranges/kernel.py:LimbPlaces")),
            Box("staging", "NUM_BUFFERS (2) of a block's results", ("gemm/stream/memory.py:staging",)),
        )),
        Lane("consumer warps", "role", (
            Box("4 x k_warps warps", "make limbs of an entry's rows, multiply stages in turn by wgmma of bytes", ("gemm/experts/ranges/kernel.py:make_limbs", "gemm/experts/ranges/kernel.py:multiply_blocks"), 2),
            Box("epilogue_warps", "add up warpgroups, store", ("gemm/experts/ranges/kernel.py:store_blocks",)),
        )),
        Lane("results", "result", (
            Box("rows of assignments", "no partial results: a CTA has whole blocks"),
            Box("combine: the next launch", "adds a token's experts in a fixed order", ("gemm/experts/combine.py:CombineKernel",)),
        )),
    ),
    (
        Arrow("weights of all experts", "weight loads, 1 warp"),
        Arrow("routing", "every warp"),
        Arrow("x", "every warp"),
        Arrow("weight loads, 1 warp", "stages", "full"),
        Arrow("every warp", "limbs", "consumers write"),
        Arrow("stages", "4 x k_warps warps", "wait full"),
        Arrow("4 x k_warps warps", "stages", "empty"),
        Arrow("limbs", "4 x k_warps warps"),
        Arrow("4 x k_warps warps", "staging", "staged"),
        Arrow("staging", "epilogue_warps", "wait staged"),
        Arrow("epilogue_warps", "staging", "drained"),
        Arrow("epilogue_warps", "rows of assignments"),
        Arrow("epilogue_warps", "combine: the next launch"),
    ),
    (
        Barrier("pipeline, full", "num_stages", "1 arrival and the bytes of a stage", "the warpgroup that takes it", ("gemm/stream/memory.py:pipeline",)),
        Barrier("pipeline, empty", "num_stages", "one lane of each of that warpgroup's 4 warps", "the weight warp", ("gemm/experts/ranges/config.py:stage_warps",)),
        Barrier("results", "NUM_BUFFERS", "staged: consumer warps; drained: epilogue warps", "epilogue warps; consumer warps", ("gemm/stream/memory.py:results",)),
        Barrier("MEETING (1)", "consumers", "all consumer warps: limbs are written", "consumer warps", ("gemm/experts/ranges/kernel.py:MEETING",)),
        Barrier("CONSUMERS (2), EPILOGUE (3)", "the CTA", "the weight warp (arrives only): barriers are there", "consumers; epilogue warps", ("gemm/experts/ranges/kernel.py:EPILOGUE",)),
    ),
    "Experts with many rows: WgmmaKernel with ExpertTiles. Experts of other formats with few rows: EntryKernel.",
)

DECODE = Figure(
    "decode_attention",
    "Decode attention: DecodeKernel, one CTA of a split or a range",
    (
        Lane("global memory", "memory", (
            Box("K and V caches", "rows as they lie: contiguous or pages"),
            Box("q, lengths, block table", ""),
        )),
        Lane("producer warps", "role", (
            Box("filling_warps (1 to 4)", "bulk copies, tensor maps or cp.async of words; page numbers a tile ahead; the first one makes the barriers", ("attention/decode_config.py:filling_warps", "attention/loads/ring.py:RingFiller", "attention/loads/copies.py:TileCopier"), 2),
            Box("warps up to cta_threads", "nothing: lend registers", ("attention/decode_config.py:lends_registers",)),
        )),
        Lane("shared memory", "shared", (
            Box("ring", "num_stages tiles of K and V, raw rows", ("attention/decode_config.py:ring_bytes",), 2),
            Box("queries", "B operands, where warps share them", ("attention/decode_config.py:query_bytes",)),
            Box("merge", "beside the ring where a CTA may have several requests and there is room; else in its place", ("attention/decode_config.py:merge_bytes",)),
        )),
        Lane("consumer warps", "role", (
            Box("num_heads x num_query_blocks x num_slices warps", "each: a KV head, blocks of 8 queries, a slice of each tile's tokens. mma.sync: K Q^T, then P V; scores and output stay in registers", ("attention/mainloops/warp.py:WarpMainloop", "attention/policies.py:WarpMma", "attention/mainloops/logits.py:Logits", "attention/readers/__init__.py:make_readers")),
        )),
        Lane("results", "result", (
            Box("out, lse", "of rows with one split"),
            Box("workspace", "partial results of splits, EMPTY between launches; the last splits of a row poll, add in order, reset", ("attention/combine/merge.py:Merger", "device/exchange.py:EMPTY_WORD"), 2),
        )),
    ),
    (
        Arrow("K and V caches", "filling_warps (1 to 4)"),
        Arrow("q, lengths, block table", "filling_warps (1 to 4)"),
        Arrow("filling_warps (1 to 4)", "ring", "full"),
        Arrow("ring", "num_heads x num_query_blocks x num_slices warps", "wait full"),
        Arrow("num_heads x num_query_blocks x num_slices warps", "ring", "empty"),
        Arrow("queries", "num_heads x num_query_blocks x num_slices warps"),
        Arrow("num_heads x num_query_blocks x num_slices warps", "merge"),
        Arrow("num_heads x num_query_blocks x num_slices warps", "out, lse"),
        Arrow("num_heads x num_query_blocks x num_slices warps", "workspace"),
    ),
    (
        Barrier("pipeline, full", "num_stages", "1 with the bytes of the tile; with copies by words one of every producer thread", "consumer warps", ("device/pipeline.py:Pipeline",)),
        Barrier("pipeline, empty", "num_stages", "num_warps: lane 0 of each consumer warp", "producer warps", ("attention/decode_config.py:num_warps",)),
        Barrier("READY (1)", "the CTA", "producer warps: barriers are initialised", "consumers", ("attention/barriers.py:await_ready",)),
        Barrier("CONSUMERS (2)", "consumers", "all of them: the merge begins", "consumers", ("attention/barriers.py:sync_consumers",)),
        Barrier("PRODUCERS (3)", "producers", "all of them, if more than one: at the start, at partial tiles", "producers", ("attention/barriers.py:sync_producers",)),
        Barrier("MERGED (4)", "the CTA", "consumers and producers: a request's results in the ring's place are read", "both", ("attention/barriers.py:sync_merged", "attention/barriers.py:await_merged")),
        Barrier("ROWS_WRITTEN (10)", "the CTA", "consumers: a step's new rows lie in the cache", "producers (append in the same launch)", ("attention/barriers.py:await_rows",)),
    ),
)

EXTEND = Figure(
    "extend_attention",
    "Extend attention: ExtendKernel, persistent CTAs",
    (
        Lane("global memory", "memory", (
            Box("K", "pages, one row after the other, or unpacked by a launch before", ("attention/extend_policies.py:CachedKeys", "attention/extend_policies.py:RaggedKeys", "attention/extend_policies.py:UnpackedKeys")),
            Box("work tile counter", "slots of 128 rows (positions x heads of a group)"),
            Box("V", "as K"),
        )),
        Lane("producer warps", "role", (
            Box("K: half of the filling_warps", "TMA of 16-bit rows, or decode rows of codes to 16 bits", ("attention/extend_config.py:filling_warps", "attention/loads/tma.py:TmaTileProducer", "attention/loads/rows.py:RowProducer")),
            Box("first producer", "draws the next work tile, tells the others", ("attention/extend_kernel.py:publish",)),
            Box("V: the other half", "as K", ("attention/extend_config.py:decoded",)),
        )),
        Lane("shared memory", "shared", (
            Box("tiles of K", "num_stages of 128 keys, 128-byte swizzle", ("attention/extend_config.py:tile_bytes",)),
            Box("work", "WORK_SLOTS (2) of a work tile's numbers", ("attention/extend_policies.py:WORK_SLOTS",)),
            Box("tiles of V", "num_stages of 128 values", ("attention/extend_policies.py:num_stages",)),
            Box("queries", "64 rows of each warpgroup, which copies them itself", ("attention/extend_config.py:query_bytes",)),
        )),
        Lane("consumer warpgroups", "role", (
            Box("2 warpgroups, 64 rows of queries each", "scores of block b and values of block b - 1 issued together; the softmax of b runs behind them; the warpgroups issue in turn", ("attention/mainloops/tiles.py:Consumer", "attention/mainloops/tile_softmax.py:Softmax")),
        )),
        Lane("results", "result", (
            Box("out, lse", ""),
            Box("parts of split keys", "fp32, added up by the combining launch", ("attention/combine/kernel.py:CombineKernel",)),
        )),
    ),
    (
        Arrow("K", "K: half of the filling_warps"),
        Arrow("work tile counter", "first producer"),
        Arrow("V", "V: the other half"),
        Arrow("K: half of the filling_warps", "tiles of K", "full"),
        Arrow("first producer", "work", "full"),
        Arrow("V: the other half", "tiles of V", "full"),
        Arrow("tiles of K", "2 warpgroups, 64 rows of queries each", "wait full"),
        Arrow("2 warpgroups, 64 rows of queries each", "tiles of K", "empty"),
        Arrow("work", "2 warpgroups, 64 rows of queries each", "wait full"),
        Arrow("2 warpgroups, 64 rows of queries each", "work", "empty"),
        Arrow("tiles of V", "2 warpgroups, 64 rows of queries each", "wait full"),
        Arrow("2 warpgroups, 64 rows of queries each", "tiles of V", "empty"),
        Arrow("2 warpgroups, 64 rows of queries each", "queries", "copy"),
        Arrow("2 warpgroups, 64 rows of queries each", "out, lse"),
        Arrow("2 warpgroups, 64 rows of queries each", "parts of split keys"),
    ),
    (
        Barrier("K's and V's, full", "num_stages each", "tile_fillers: a warp that decodes, or 1 with a TMA tile's bytes", "consumers", ("attention/extend_config.py:tile_fillers",)),
        Barrier("K's and V's, empty", "num_stages each", "8, lane 0 of each consumer warp", "producers", ("device/pipeline.py:Pipeline",)),
        Barrier("work, full", "WORK_SLOTS", "1, lane 0 of the first producer", "consumers, producers", ("attention/extend_policies.py:WORK_SLOTS",)),
        Barrier("work, empty", "WORK_SLOTS", "8 consumer warps and the filling_warps", "the first producer", ("attention/extend_policies.py:WORK_SLOTS",)),
        Barrier("FIRST_WARPGROUP (1, 2)", "a warpgroup", "its warps", "its warps: shared memory of their own", ("attention/mainloops/warpgroup_barriers.py:FIRST_WARPGROUP",)),
        Barrier("FIRST_TURN (3, 4)", "consumers", "the other warpgroup has issued its products", "a warpgroup", ("attention/mainloops/warpgroup_barriers.py:FIRST_TURN",)),
    ),
    "With few queries a request the sides change (key_rows): keys are the 64 rows of the MMAs, queries their 40 or 72 columns; K and V of a stage share a barrier.",
)

APPEND = Figure(
    "append",
    "Append: AppendKernel, teams of lanes that own whole rows",
    (
        Lane("global memory", "memory", (
            Box("q", "new tokens, 16 bits; norm, bias"),
            Box("k", "the same; lengths, pages or slots"),
            Box("v", "bias; lengths, pages or slots"),
        )),
        Lane("teams of lanes", "role", (
            Box("teams of q heads", "bias, norm, RoPE, transform", ("kv_cache/kernel.py:process_q",)),
            Box("teams of k heads", "the same, then quantise", ("kv_cache/kernel.py:process_k",)),
            Box("teams of v heads", "bias, transform, quantise", ("kv_cache/kernel.py:process_v",)),
        )),
        Lane("registers of a team", "shared", (
            Box("rows of q", "Q_ROWS_IN_FLIGHT are asked for before the first is worked on; angles of the token", ("kv_cache/config.py:Q_ROWS_IN_FLIGHT", "kv_cache/config.py:RowPrologue")),
            Box("rows of k", "ROWS_IN_FLIGHT; angles are made while rows and page numbers are on their way", ("kv_cache/config.py:ROWS_IN_FLIGHT",)),
            Box("rows of v", "ROWS_IN_FLIGHT", ("kv_cache/config.py:ROWS_IN_FLIGHT",)),
        )),
        Lane("results", "result", (
            Box("q, rotated", "written even where a token has no place", ("kv_cache/kernel.py:turn_q",)),
            Box("rows of K", "codes and headers; none where there is no page", ("kv_cache/kernel.py:write",)),
            Box("rows of V", "as K", ("kv_cache/kernel.py:write",)),
        )),
    ),
    (
        Arrow("q", "teams of q heads"),
        Arrow("k", "teams of k heads"),
        Arrow("v", "teams of v heads"),
        Arrow("teams of q heads", "rows of q"),
        Arrow("teams of k heads", "rows of k"),
        Arrow("teams of v heads", "rows of v"),
        Arrow("rows of q", "q, rotated"),
        Arrow("rows of k", "rows of K"),
        Arrow("rows of v", "rows of V"),
    ),
    (
        Barrier("none between teams", "", "a team is a power of two of a warp's lanes, and a CTA has teams of one kind", "", ("kv_cache/config.py:team_lanes", "kv_cache/config.py:lane_columns")),
        Barrier("griddepcontrol", "the launch", "leads: attention starts beside the append, and waits for its end before it reads new tokens", "producers of attention", ("kv_cache/config.py:leads", "attention/decode_config.py:after_append")),
    ),
    "append_and_decode may do all of it within the decode kernel, for one new token a request: kv_cache/step_rows.py.",
)

MLA = Figure(
    "mla",
    "MLA decode, 64 heads a CTA: MlaKernel",
    (
        Lane("global memory", "memory", (
            Box("cache", "FP8 tokens with scales, or 16 bits"),
            Box("indices or block table", ""),
            Box("q", "64 heads of a row"),
        )),
        Lane("producer warpgroups", "role", (
            Box("1 or 2 warpgroups, or 1 TMA thread", "gather tokens, decode to bf16 (Decode, Crossover), copy (Copies) or TMA (TmaTiles). With crossover two CTAs decode half a tile each and send it by DSMEM", ("mla/policies.py:Decode", "mla/policies.py:Crossover", "mla/policies.py:Copies", "mla/policies.py:TmaTiles", "mla/loads/fp8.py:Fp8Load")),
        )),
        Lane("shared memory", "shared", (
            Box("queries", "64 heads", ("mla/shared_memory.py:queries",)),
            Box("tiles", "2 of 64 tokens x head_dim, 16 bits; whole or in two parts", ("mla/config.py:NUM_STAGES", "mla/policies.py:SplitTiles"), 2),
            Box("weights", "64 x 64, 16 bits, by warpgroup 0", ("mla/shared_memory.py:weights",)),
        )),
        Lane("consumer warpgroups", "role", (
            Box("warpgroup 0", "scores, softmax, left 256 columns of the output; stores the weights", ("mla/mainloops/serial.py:score_block",)),
            Box("warpgroup 1", "right 256 columns of the output", ("mla/mainloops/serial.py:value_block",)),
        )),
        Lane("results", "result", (
            Box("out, lse", ""),
            Box("partial results", "stream-K: resumed by another CTA; else a second launch, or a cooperative combine", ("mla/stream_k.py:PartialExchange", "mla/combine/second_launch.py:CombineKernel", "mla/combine/cooperative.py:CooperativeCombine"), 2),
        )),
    ),
    (
        Arrow("cache", "1 or 2 warpgroups, or 1 TMA thread"),
        Arrow("indices or block table", "1 or 2 warpgroups, or 1 TMA thread"),
        Arrow("1 or 2 warpgroups, or 1 TMA thread", "tiles", "full"),
        Arrow("tiles", "warpgroup 0", "wait full"),
        Arrow("warpgroup 0", "tiles", "empty"),
        Arrow("tiles", "warpgroup 1", "wait full"),
        Arrow("warpgroup 1", "tiles", "empty"),
        Arrow("weights", "warpgroup 1"),
        Arrow("queries", "warpgroup 0"),
        Arrow("warpgroup 0", "out, lse"),
        Arrow("warpgroup 1", "partial results"),
    ),
    (
        Barrier("full", "2 tiles x tile_parts", "full_arrivals of the load, and the bytes of asynchronous copies", "consumer warps", ("mla/policies.py:full_arrivals",)),
        Barrier("empty", "2 tiles x tile_parts", "empty_arrivals: the consumer warps that read the part, of both CTAs of a pair", "producer warps", ("mla/config.py:empty_arrivals",)),
        Barrier("queries_full", "1", "1 and the bytes of the queries", "consumer warps", ("mla/shared_memory.py:queries_full",)),
        Barrier("CONSUMERS_READY (1), PRODUCERS_READY (8)", "the CTA", "the warp that made the barriers", "consumers; producers", ("mla/barriers.py:CONSUMERS_READY",)),
    ),
    "Mainloops: serial, stepped (weights of 16 tokens at a time), delayed PV (the right half one block behind).",
)

FEW_HEADS = Figure(
    "mla_few_heads",
    "MLA decode, up to 32 heads a CTA: FewHeadsKernel",
    (
        Lane("global memory", "memory", (
            Box("FP8 tokens", "656 bytes each, as they lie"),
            Box("q", "8, 16 or 32 heads"),
        )),
        Lane("producer warps", "role", (
            Box("4 producer warps", "16 tokens of every block each, cp.async of whole rows; indices ahead blocks earlier", ("mla/few_heads/producer.py:Producer", "mla/few_heads/config.py:PRODUCER_WARPS")),
        )),
        Lane("shared memory", "shared", (
            Box("ring", "stages of 64 raw tokens", ("mla/few_heads/shared_memory.py:ring",)),
            Box("weights and factors", "WEIGHT_BUFFERS of a block, a tile's apart: fp16", ("mla/few_heads/config.py:WEIGHT_BUFFERS",)),
            Box("queries", "B operands, fp16 and bf16", ("mla/few_heads/queries.py:Queries",)),
        )),
        Lane("consumer warps", "role", (
            Box("4 score warps", "16 tokens each: S^T = K Q^T, softmax, weights times the tokens' scales", ("mla/few_heads/score_loop.py:ScoreLoop", "mla/few_heads/config.py:SCORE_WARPS")),
            Box("8 value warps", "64 columns of the output each: O^T += V^T W^T, codes read transposed", ("mla/few_heads/value_loop.py:ValueLoop", "mla/few_heads/config.py:VALUE_WARPS")),
        )),
        Lane("results", "result", (
            Box("out, lse", ""),
            Box("cluster combine, or a second launch", "parts of a row", ("mla/few_heads/cluster_combine.py:ClusterCombine",)),
        )),
    ),
    (
        Arrow("FP8 tokens", "4 producer warps"),
        Arrow("4 producer warps", "ring", "full"),
        Arrow("ring", "4 score warps", "wait full"),
        Arrow("4 score warps", "ring", "empty"),
        Arrow("4 score warps", "weights and factors", "weighed"),
        Arrow("weights and factors", "8 value warps", "wait weighed"),
        Arrow("8 value warps", "queries", "prepare"),
        Arrow("8 value warps", "out, lse"),
        Arrow("8 value warps", "cluster combine, or a second launch"),
    ),
    (
        Barrier("full", "stages", "33 of each of the 4 producer warps: every lane's copies, and a lane for the flags", "score and value warps", ("mla/few_heads/shared_memory.py:full",)),
        Barrier("empty", "stages", "12, a lane of each score and value warp", "producer warps", ("mla/few_heads/config.py:CONSUMER_WARPS",)),
        Barrier("weighed", "WEIGHT_BUFFERS", "4, a lane of each score warp", "value warps", ("mla/few_heads/shared_memory.py:weighed",)),
        Barrier("added", "WEIGHT_BUFFERS", "8, a lane of each value warp", "score warps", ("mla/few_heads/shared_memory.py:added",)),
        Barrier("RAISING (3), EXCHANGING (4)", "score warps", "all 4: maxima and limits are exchanged", "score warps", ("mla/few_heads/shared_memory.py:RAISING",)),
    ),
)

NORM = Figure(
    "norm",
    "Norms: NormKernel, a CTA a row",
    (
        Lane("global memory", "memory", (
            Box("weight, bias, order, factors", "do not depend on the launch before"),
            Box("x, residual", "one row"),
        )),
        Lane("all warps", "role", (
            Box("before the wait", "ask for the weights (asks_early), let the next launch begin", ("norm/config.py:asks_early",)),
            Box("after the wait", "load the row, add the residual, sum squares, scale", ("norm/kernel.py:row_sum",)),
        )),
        Lane("on chip", "shared", (
            Box("registers", "vectors of 8 numbers a thread: the row is read once", ("norm/config.py:vectors",), 2),
            Box("shared memory", "a sum of each warp, added in one order; a permuted row (act-order)", ("norm/kernel.py:publish", "norm/inputs.py:LayerInputs")),
        )),
        Lane("results", "result", (
            Box("out", "normed, permuted, scaled as the next layer takes it"),
            Box("residual sum", "for the next norm"),
        )),
    ),
    (
        Arrow("weight, bias, order, factors", "before the wait"),
        Arrow("x, residual", "after the wait"),
        Arrow("before the wait", "registers"),
        Arrow("after the wait", "registers"),
        Arrow("after the wait", "shared memory"),
        Arrow("registers", "out"),
        Arrow("registers", "residual sum"),
    ),
    (
        Barrier("griddepcontrol_wait", "the launch", "the launch before has ended", "all threads", ("norm/kernel.py:NormKernel",)),
        Barrier("barrier", "the CTA", "all threads: the warps' sums are there", "all threads", ("norm/kernel.py:load_sums",)),
    ),
)

ROUTER = Figure(
    "router",
    "Routers: RouterKernel, a CTA has 1 to 8 experts",
    (
        Lane("global memory", "memory", (
            Box("router's weight", "the CTA's rows; does not depend on the launch before"),
            Box("hidden states", "up to 64 tokens"),
        )),
        Lane("all 8 warps", "role", (
            Box("sums of products", "8 elements a lane at a time, fp32; over lanes by shuffles", ("gemm/experts/router/kernel.py:RouterKernel",)),
        )),
        Lane("shared memory", "shared", (
            Box("partial sums", "of each warp, added in one order", ("gemm/experts/router/kernel.py:RouterKernel",)),
        )),
        Lane("workspace", "shared", (
            Box("logits", "words of all CTAs, EMPTY between launches", ("device/exchange.py:Published",)),
        )),
        Lane("first CTAs", "role", (
            Box("a warp for each token", "polls logits, resets them to EMPTY, chooses: one round of redux for each expert", ("device/exchange.py:Poll", "gemm/experts/router/selection.py:Selection")),
        )),
        Lane("results", "result", (
            Box("ids and weights", "of each token"),
        )),
    ),
    (
        Arrow("router's weight", "sums of products"),
        Arrow("hidden states", "sums of products"),
        Arrow("sums of products", "partial sums"),
        Arrow("partial sums", "logits", "publish"),
        Arrow("logits", "a warp for each token", "poll"),
        Arrow("a warp for each token", "ids and weights"),
    ),
    (
        Barrier("griddepcontrol_wait", "the launch", "the launch before has ended", "all threads, before hidden states", ("gemm/experts/router/kernel.py:RouterKernel",)),
        Barrier("sync_threads", "the CTA", "all threads: the warps' sums are there", "all threads", ("gemm/experts/router/kernel.py:RouterKernel",)),
    ),
)

# fmt: on
FIGURES = (WGMMA, LINEAR, LAYER, EXPERTS, DECODE, EXTEND, APPEND, MLA, FEW_HEADS, NORM, ROUTER)


def path_of(figure: Figure) -> Path:
    return FOLDER / f"kernel_{figure.name}.svg"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    for figure in FIGURES:
        path_of(figure).write_text(draw(figure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
