"""Attention of vLLM with a request's tokens split among GPUs (decode context parallelism, DCP).

Each of n GPUs has the queries, and the new keys and values, of its own heads. Its cache has every n-th token of the KV
heads that the n GPUs share. Each GPU attends over its cache with the queries of all n GPUs; vLLM's own collectives
merge the partial results.

A new token belongs to one cache, so decoding reads the caches after the append. A continued prompt reads its older
tokens from the caches. Every GPU has all new tokens of the prompt, and FlashAttention computes attention among them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from cute_kernels import decode_attention, extend_attention, merge_states
from cute_kernels.integrations.objects import Foreign

Partial: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The result of attention over some keys [tokens, heads, head_size], and its log-sum-exps fp32 [tokens, heads]."""


def reasons_against(config: Foreign, extends: bool, slides: bool, invariant: bool) -> dict[str, bool]:
    """Returns the properties that DCP does not support: {property: whether the layer or engine has it}.

    extends: whether extend attention reads the caches. slides: whether the layer has a window.
    """
    if config.parallel_config.decode_context_parallel_size == 1:
        return {}
    text = getattr(config.model_config, "hf_text_config", None)
    wrong = {
        "this vLLM": importlib.util.find_spec("vllm.v1.attention.ops.dcp") is None,
        "a cache that extend attention does not read": not extends,
        "sliding windows, which would hide other tokens than every n-th": slides,
        "speculative decoding": config.speculative_config is not None,
        "VLLM_BATCH_INVARIANT": invariant,
        "layers that read another layer's cache": bool(getattr(text, "num_kv_shared_layers", 0)),
    }
    return {f"decode context parallelism with {what}": is_so for what, is_so in wrong.items()}


@dataclass(frozen=True)
class Ranks:
    """The GPUs that split requests' tokens among each other.

    Attributes:
        count: the number of these GPUs.
        rank: the index of this GPU.
        interleave: number of consecutive tokens that go to one GPU.
        merge: vLLM's function that merges the GPUs' partial results.
    """

    count: int
    rank: int
    interleave: int
    merge: Callable[..., Partial]

    def own_lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """Returns, for each request, how many of its first ``lengths`` tokens are in this GPU's cache."""
        from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

        return get_dcp_local_seq_lens(lengths, self.count, self.rank, self.interleave)

    def decode(self, call: Foreign, query: torch.Tensor, out: torch.Tensor) -> None:
        """Decodes requests with one new token each. The token is already in one of the caches.

        call: the layer's step. query, out: [requests, heads, head_size].
        """
        lengths, table = (x[: len(query)] for x in (call.metadata.seq_lens, call.metadata.block_table))

        def over_own(queries: torch.Tensor) -> Partial:
            options = {**call.options, "block_table": table, "return_lse": True}
            found = decode_attention(queries.unsqueeze(1), call.k_cache, call.v_cache, lengths, **options)
            return found[0].squeeze(1), found[1].squeeze(1)

        out.copy_(self._attend(query, over_own)[0])

    def extend(
        self,
        call: Foreign,
        piece: Foreign,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attends over the tokens that the caches had before the step, and over the piece's own tokens.

        query, key, value, out: [tokens, heads, head_size].
        """
        options = {**call.options, "block_table": piece.block_table, "max_seq_len": piece.max_seq_len}
        options |= {"cu_seqlens_q": piece.starts, "causal": False, "return_lse": True}

        def over_own(queries: torch.Tensor) -> Partial:
            return extend_attention(queries, call.k_cache, call.v_cache, piece.seq_lens, **options)

        _, lse = call.flash(piece, query, key, value, out, piece)
        out.copy_(merge_states(*self._attend(query, over_own), out, lse.contiguous())[0])

    def _attend(self, query: torch.Tensor, over_own: Callable[[torch.Tensor], Partial]) -> Partial:
        """Returns attention of this GPU's queries [tokens, heads, head_size] over all GPUs' caches.

        over_own: a function that computes attention of all heads' queries over this GPU's cache.
        """
        from vllm.distributed.parallel_state import get_dcp_group

        group = get_dcp_group()
        return self.merge(*over_own(group.all_gather(query.contiguous(), dim=1)), group, return_lse=True)


def ranks_of(config: Foreign) -> Ranks | None:
    """Returns the GPUs among which an engine splits tokens; None if the engine does not split tokens."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size == 1:
        return None
    from vllm.distributed.parallel_state import get_dcp_group
    from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

    merge = dcp_a2a_lse_reduce if parallel.dcp_comm_backend == "a2a" else cp_lse_ag_out_rs
    count, interleave = parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size
    return Ranks(count, get_dcp_group().rank_in_group, interleave, merge)
