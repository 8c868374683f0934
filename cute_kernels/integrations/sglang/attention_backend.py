"""The attention backend for SGLang: a step's metadata, inside and outside CUDA graphs, and a layer's attention.

The page table comes from SGLang's table of token slots. Slots of a page are adjacent, so the page's index follows from
its first slot. A captured step computes the table and the lengths inside its graph: a replay needs nothing from the
host. The scheduler may write the next step's table once the replay's first launches are done (overlap scheduling).

Requests that pad a graph have row 0 of the pool of requests and a length of 1. Here their length becomes 0, since
otherwise several of them would write the same slot of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from cute_kernels import append_and_decode, append_kv, decode_attention, extend_attention
from cute_kernels.integrations.engine_cache import paged, rows_of
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.sglang.attention_layers import formats_of, window_of
from cute_kernels.integrations.sglang.seams import share_workspaces

FILL = 1  # tokens of a request that pads a graph, as SGLang sees it
PADS = 0  # its row of the pool of requests


@dataclass(frozen=True)
class Step:
    """A step's requests.

    Attributes:
        seq_lens: int32 [requests], new tokens included.
        block_table: int32 [requests, pages].
        starts: int32 [requests + 1], each request's first new token in the step; None if each request has one new
            token.
        max_seq_len: a bound on seq_lens.
    """

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_seq_len: int
    starts: torch.Tensor | None = None


class CuteKernelsAttentionBackend(AttentionBackend):
    """Attention over a pool of K and V in this package's formats, for a model that `.attention` supports."""

    def __init__(self, runner: Foreign) -> None:
        super().__init__()
        self.formats = formats_of(runner)
        self.page_size, self.device = runner.page_size, runner.device
        self.pool = runner.token_to_kv_pool
        tokens = runner.req_to_token_pool.req_to_token
        self.max_seq_len = tokens.shape[1]
        self.first_slots = tokens[:, :: self.page_size]
        self.graph_step: Step | None = None
        self.forward_metadata: Step | None = None
        self.scales: dict[float, torch.Tensor] = {1.0: torch.ones(1, device=self.device)}
        share_workspaces(torch.device(self.device))

    # -- a step -------------------------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Foreign) -> None:
        """Prepares a step outside graphs, or a prompt whose graph does not contain attention."""
        mode, lengths, requests = forward_batch.forward_mode, forward_batch.seq_lens, forward_batch.req_pool_indices
        decodes = mode.is_decode_or_idle()
        if not (decodes or mode.is_extend_or_draft_extend_or_mixed()):
            raise NotImplementedError(f"forward_mode: got {mode}, want DECODE, EXTEND, MIXED or IDLE")
        if not len(lengths):
            self.forward_metadata = None
            return
        host = forward_batch.seq_lens_cpu
        longest = self.max_seq_len if host is None else int(host.max())
        pages = -(-longest // self.page_size)
        starts = None
        if decodes:
            lengths = lengths * (requests != PADS)
        else:
            starts = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        table = self.first_slots[:, :pages].index_select(0, requests)
        self.forward_metadata = Step(lengths.int(), table.floor_divide_(self.page_size), longest, starts)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        lengths = torch.zeros(max_bs, dtype=torch.int32, device=self.device)
        table = torch.zeros(max_bs, self.first_slots.shape[1], dtype=torch.int32, device=self.device)
        self.graph_step = Step(lengths, table, self.max_seq_len)

    def init_forward_metadata_out_graph(self, forward_batch: Foreign, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError(
                f"forward_mode: got {forward_batch.forward_mode} in a graph of its own, want DECODE; "
                "leave --cuda-graph-backend-prefill at its default"
            )
        self.forward_metadata = self._captured(forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch: Foreign) -> None:
        """Prepares a step by four launches that are part of the graph."""
        step, requests = self._captured(forward_batch.batch_size), forward_batch.req_pool_indices
        torch.mul(forward_batch.seq_lens, requests != PADS, out=step.seq_lens)
        torch.index_select(self.first_slots, 0, requests, out=step.block_table)
        step.block_table.floor_divide_(self.page_size)

    def _captured(self, requests: int) -> Step:
        assert self.graph_step is not None
        step = self.graph_step
        return Step(step.seq_lens[:requests], step.block_table[:requests], step.max_seq_len)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return FILL

    # -- a layer ------------------------------------------------------------------------------------------------------

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Foreign,
        forward_batch: Foreign,
        save_kv_cache: bool = True,
        **more: object,
    ) -> torch.Tensor:
        """Decodes q [requests, heads * head size]. k, v: [requests, KV heads, head size], or None if they are already
        cached."""
        step = self.forward_metadata
        assert step is not None
        q = rows_of(q.reshape(-1, 1, layer.tp_q_head_num, layer.qk_head_dim))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        caches = self._caches(layer)
        options: dict[str, Any] = {**self._options(layer, more), "block_table": step.block_table, "out": out}
        if save_kv_cache and k is not None:
            append_and_decode(q, k.unsqueeze(1), v.unsqueeze(1), *caches, step.seq_lens, **options)
        else:
            decode_attention(q, *caches, step.seq_lens, **options)
        return out.view(len(q), -1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Foreign,
        forward_batch: Foreign,
        save_kv_cache: bool = True,
        **more: object,
    ) -> torch.Tensor:
        """Computes attention of prompts, whole, in parts or after a cached prefix, and of decode requests batched with
        them (MIXED)."""
        step = self.forward_metadata
        assert step is not None and step.starts is not None
        caches, options = self._caches(layer), self._options(layer, more)
        if save_kv_cache and k is not None:
            written = {name: options[name] for name in ("kv_format", "k_scale", "v_scale")}
            append_kv(k, v, *caches, slot_mapping=forward_batch.out_cache_loc[: len(k)], **written)
        q = rows_of(q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim))
        out = extend_attention(
            q,
            *caches,
            step.seq_lens,
            cu_seqlens_q=step.starts,
            block_table=step.block_table,
            max_seq_len=step.max_seq_len,
            **options,
        )
        return out.view(len(q), -1)

    def _caches(self, layer: Foreign) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K's and V's pages of a layer [pages, page_size, KV heads, row], as they lie in the pool."""
        return paged(self.pool.get_kv_buffer(layer.layer_id), self.formats, self.page_size)

    def _options(self, layer: Foreign, more: dict[str, object]) -> dict[str, Any]:
        sinks = cast("torch.Tensor | None", more.pop("sinks", None))
        if given := [name for name, value in more.items() if value is not None and value is not False]:
            raise NotImplementedError(f"layer {layer.layer_id}: got {', '.join(given)}, want sinks or nothing")
        return {
            "kv_format": self.formats.name,
            "softmax_scale": float(layer.scaling),
            "window_size": window_of(layer),
            "softcap": layer.logit_cap or None,
            "sinks": None if sinks is None else sinks.float(),
            "k_scale": self._scale(layer.k_scale, self.formats.k.given_scale),
            "v_scale": self._scale(layer.v_scale, self.formats.v.given_scale),
        }

    def _scale(self, scale: torch.Tensor | float | None, wanted: str | None) -> torch.Tensor | None:
        """Returns a layer's scale of K or V: the layer's parameter, or a number from a file of scales, or 1. Returns
        None if the format has no scale (``wanted`` is None).
        """
        if wanted is None:
            return None
        if isinstance(scale, torch.Tensor):
            return scale.detach()
        number = 1.0 if scale is None else float(scale)
        if number not in self.scales:  # a step outside graphs comes before each capture
            self.scales[number] = torch.full((1,), number, device=self.device)
        return self.scales[number]
