"""Other libraries' layers of experts, as data: whether each is here, and the calls that stand for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from bench.linear_peers import Weights, by_name, marlin_weights, type_id, vllm_missing, vllm_roots
from bench.why_not import said_by
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.weight import PackedWeight, rows_of


class DenseExperts(NamedTuple):
    """Weights in bf16: gate and up [E, I, K], down [E, N, I]. gate and up are every other row of one tensor."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @property
    def gate_up(self) -> torch.Tensor:
        """[E, 2 I, K], rows of gate and up in turn."""
        experts, inner, k = self.gate.shape
        row, column = self.gate.stride(1) // 2, self.gate.stride(2)
        return self.gate.as_strided((experts, 2 * inner, k), (self.gate.stride(0), row, column))


class MoeWeights(NamedTuple):
    """A layer's weights, packed as here, gate_up's rows of gate and up in turn; and in bf16."""

    gate_up: PackedExperts
    down: PackedExperts
    dense: DenseExperts


@dataclass(frozen=True)
class Routed:
    """Tokens and their experts, and for the first product alone the rows as it takes them.

    x: [T, K]; ids: int32 [T, topk]; weights: fp32 [T, topk]; order: assignments by expert; counts: of each expert;
    ends: int32 [E]; rows: of x, in this order; sorted_x: [T * topk, K].
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor
    rows: torch.Tensor
    sorted_x: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routed:
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        ones = torch.ones_like(flat)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device).scatter_add_(0, flat, ones)
        rows = order // ids.shape[1]
        return Routed(x, ids, weights, order, counts, counts.cumsum(0).int(), rows, x.index_select(0, rows))


class Calls(NamedTuple):
    """A layer's work on given tokens.

    first: the first product, of rows by index; in_order: of rows that lie in the order of the places already;
    layer: all of it, from ids to sums.
    """

    first: Callable[[], torch.Tensor]
    in_order: Callable[[], torch.Tensor]
    layer: Callable[[], torch.Tensor]


Bind = Callable[[Routed], Calls]


@dataclass(frozen=True)
class MoePeer:
    """`missing` says why the peer is not here (None: it is); `prepare` packs weights once and returns its calls.

    slow_start: whether its first call compiles for a minute, of which nobody is to wait who wants the other figures.
    """

    name: str
    missing: Callable[[], str | None]
    prepare: Callable[[MoeWeights], Bind]
    slow_start: bool = False


# -- torch ------------------------------------------------------------------------------------------------------------


def _torch_missing() -> str | None:
    return None if hasattr(torch, "_grouped_mm") else f"torch {torch.__version__} has no grouped products"


def _torch(weights: MoeWeights) -> Bind:
    dense = weights.dense
    return lambda routed: Calls(
        *(partial(work, dense, routed) for work in (_torch_first, _torch_in_order, _torch_layer))
    )


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[places, N] of x [places, K] and weight [E, N, K]."""
    return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends, out_dtype=torch.bfloat16)


def _torch_first(dense: DenseExperts, routed: Routed) -> torch.Tensor:
    return _grouped_mm(routed.x.index_select(0, routed.rows), dense.gate_up, routed.ends)


def _torch_in_order(dense: DenseExperts, routed: Routed) -> torch.Tensor:
    return _grouped_mm(routed.sorted_x, dense.gate_up, routed.ends)


def _torch_layer(dense: DenseExperts, routed: Routed) -> torch.Tensor:
    topk = routed.ids.shape[1]
    again = Routed.of(routed.x, routed.ids, routed.weights, dense.gate.shape[0])
    both = _grouped_mm(again.sorted_x, dense.gate_up, again.ends)
    hidden = functional.silu(both[:, ::2]) * both[:, 1::2]
    results = _grouped_mm(hidden, dense.down, again.ends) * again.weights.flatten()[again.order, None]
    out = torch.zeros((routed.x.shape[0], results.shape[1]), dtype=torch.float32, device=results.device)
    return out.index_add_(0, again.order // topk, results).to(torch.bfloat16)


# -- vLLM's Marlin for experts, from its build -------------------------------------------------------------------------


@functools.cache
def _marlin_missing() -> str | None:
    """Loads vLLM's extensions and says why it cannot."""
    reason = vllm_missing()  # weights are packed, and gates applied, by operators of the other extension
    if reason is not None:
        return reason
    found = [path for root in vllm_roots() for path in sorted(root.glob("_moe_C*.so"))]
    try:
        for library in found:
            torch.ops.load_library(str(library))
    except OSError as error:
        return f"not loadable: {said_by(error)}"
    names = ("moe_wna16_marlin_gemm", "moe_align_block_size")
    missing = [name for name in names if not hasattr(torch.ops._moe_C, name)]
    return f"no operator {', '.join(missing)} in vllm/_moe_C*.so" if missing else None


MARLIN_BLOCKS = (8, 16, 32, 48, 64)  # rows of a block that its kernel has
MARLIN_FILL = 0.9  # of a block, below which vLLM takes the next smaller one
MARLIN_CTAS = 4  # an SM, at most, each of which has a word of the workspace


@dataclass(frozen=True)
class MarlinProduct:
    """One product's weights in Marlin's order, and a workspace. n, k: of an expert."""

    codes: torch.Tensor
    scales: torch.Tensor
    workspace: torch.Tensor
    bits: int
    n: int
    k: int

    @staticmethod
    def of(experts: PackedExperts, gate_and_up: bool = False) -> MarlinProduct:
        """gate_and_up: rows of gate and up in turn become all of gate before all of up."""
        n, k = experts.shape
        parts = [_marlin_expert(expert, gate_and_up) for expert in experts]
        codes, scales = zip(*parts, strict=True)
        num_sms = torch.cuda.get_device_properties(experts.device).multi_processor_count
        workspace = torch.zeros(MARLIN_CTAS * num_sms, dtype=torch.int32, device=experts.device)
        return MarlinProduct(torch.stack(codes), torch.stack(scales), workspace, experts.bits, n, k)

    def __call__(
        self, x: torch.Tensor, blocks: MarlinBlocks, weights: torch.Tensor, topk: int, weighted: bool
    ) -> torch.Tensor:
        """[assignments, n]; an assignment takes row assignment / topk of x [rows, k]. weights: fp32, of each."""
        out = torch.empty((x.shape[0] * topk, self.n), dtype=x.dtype, device=x.device)
        by_name(
            torch.ops._moe_C.moe_wna16_marlin_gemm.default,
            a=x,
            c_or_none=out,
            b_q_weight=self.codes,
            b_scales=self.scales,
            workspace=self.workspace,
            sorted_token_ids=blocks.assignments,
            expert_ids=blocks.experts,
            num_tokens_past_padded=blocks.used,
            topk_weights=weights,
            moe_block_size=blocks.rows,
            top_k=topk,
            mul_topk_weights=weighted,
            b_type_id=type_id(self.bits),
            size_m=x.shape[0],
            size_n=self.n,
            size_k=self.k,
            is_full_k=True,
            use_atomic_add=False,
            use_fp32_reduce=True,
            is_zp_float=False,
            thread_k=-1,
            thread_n=-1,
            blocks_per_sm=-1,
        )
        return out


def _marlin_expert(expert: PackedWeight, gate_and_up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    n, k = expert.shape
    codes, scales = expert.unpack_tiles(0, expert.codes.shape[0])[:n, :k], rows_of(expert.scales)[:n]
    if gate_and_up:
        codes, scales = (torch.cat((tensor[::2], tensor[1::2])) for tensor in (codes, scales))
    return marlin_weights(Weights(codes.contiguous(), scales.contiguous(), expert.bits))


@dataclass(frozen=True)
class MarlinBlocks:
    """Assignments by expert, in blocks of ``rows``, each expert's last one filled up with what is no assignment.

    assignments: int32; experts: int32, of each block; used: int32 [1], the number of assignments, filling included.
    """

    rows: int
    assignments: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor

    @staticmethod
    def of(ids: torch.Tensor, num_experts: int) -> MarlinBlocks:
        """ids: int32 [T, topk]. As vLLM's fused_marlin_moe chooses and allocates."""
        count = ids.numel()
        rows = next((rows for rows in MARLIN_BLOCKS if count / num_experts / rows < MARLIN_FILL), MARLIN_BLOCKS[-1])
        most = min(count + num_experts * (rows - 1), count * rows)
        assignments, experts, used = (
            torch.empty(size, dtype=torch.int32, device=ids.device) for size in (most, -(-most // rows), 1)
        )
        by_name(
            torch.ops._moe_C.moe_align_block_size.default,
            topk_ids=ids,
            num_experts=num_experts,
            block_size=rows,
            sorted_token_ids=assignments,
            experts_ids=experts,
            num_tokens_post_pad=used,
        )
        return MarlinBlocks(rows, assignments, experts, used)


def _marlin(weights: MoeWeights) -> Bind:
    gate_up, down = MarlinProduct.of(weights.gate_up, gate_and_up=True), MarlinProduct.of(weights.down)
    return lambda routed: _marlin_calls(gate_up, down, routed)


def _marlin_calls(gate_up: MarlinProduct, down: MarlinProduct, routed: Routed) -> Calls:
    (tokens, topk), num_experts = routed.ids.shape, gate_up.codes.shape[0]
    blocks = MarlinBlocks.of(routed.ids, num_experts)
    in_order = MarlinBlocks.of(routed.ids.flatten()[routed.order][:, None], num_experts)

    def layer() -> torch.Tensor:
        mine = MarlinBlocks.of(routed.ids, num_experts)
        both = gate_up(routed.x, mine, routed.weights, topk, weighted=False)
        hidden = torch.empty((tokens * topk, down.k), dtype=both.dtype, device=both.device)
        torch.ops._C.silu_and_mul(hidden, both)
        results = down(hidden, mine, routed.weights, 1, weighted=True)
        return results.view(tokens, topk, -1).sum(dim=1)

    return Calls(
        partial(gate_up, routed.x, blocks, routed.weights, topk, weighted=False),
        partial(gate_up, routed.sorted_x, in_order, routed.weights, 1, weighted=False),
        layer,
    )


PEERS = (
    MoePeer("torch grouped bf16", _torch_missing, _torch),
    MoePeer("Marlin MoE", _marlin_missing, _marlin, slow_start=True),  # code for this GPU is made from PTX
)
