"""Decoding of latent attention (MLA) in SGLang's backend `flashmla`, over its pool in 16 bits.

SGLang keeps everything else of the backend: prompts, drafts and their verification, the pool, pages and graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_kernels import mla_decode
from cute_kernels.integrations import mla_kernels
from cute_kernels.integrations.attention_kernels import batches_up_to
from cute_kernels.integrations.mla_kernels import FORMATS, HEAD_DIM, MAX_HEADS, PAGE_SIZE, V_DIM, Decodes
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.sglang import rows
from cute_kernels.integrations.sglang.seams import IN_PLACE, SERVED, Hook, Seam, make_ready, reasons_against, say_once
from cute_kernels.integrations.sglang.versions import Interface
from cute_kernels.runtime.gpu import GPU

WHAT = "decoding of MLA with --attention-backend flashmla"


def settle(
    original: Callable[..., None], backend: Foreign, model_runner: Foreign, *more: object, **named: object
) -> None:
    """Runs the constructor of SGLang's backend, then decides whether the backend decodes by this package's kernels."""
    original(backend, model_runner, *more, **named)
    device = torch.device(model_runner.device)
    requests, pages = model_runner.req_to_token_pool.size, backend.max_context_len // PAGE_SIZE + 1  # as graphs have
    reasons = [*reasons_of(backend, model_runner), *reasons_against(device)]
    if not reasons:
        kind = FORMATS[backend.data_type], False, backend.num_local_heads
        decodes = Decodes(*kind, batches_up_to(requests), (1,), pages * PAGE_SIZE, PAGE_SIZE)
        reasons = make_ready(device, lambda: mla_kernels.specs(decodes, GPU.num_sms(device)))
    if reasons:
        say_once(f"{WHAT} is left to SGLang: {'; '.join(reasons)}")
        return
    # Kernels are chosen by a table's width: steps outside graphs have that of graphs.
    backend._eager_kv_indices_buf = torch.full((requests, pages), -1, dtype=torch.int32, device=device)
    setattr(backend, SERVED, FORMATS[backend.data_type])
    say_once(f"{WHAT} runs here")


def reasons_of(backend: Foreign, runner: Foreign) -> list[str]:
    """Returns the reasons why a backend must decode with SGLang's kernels; empty if it can decode with the kernels
    here.
    """
    dtypes, heads = (backend.data_type, backend.q_data_type), backend.num_local_heads
    wrong = {
        "hooks that were not seen to take effect": WHAT not in IN_PLACE,
        f"a cache and queries in {dtypes}": dtypes[0] not in FORMATS or dtypes[0] != dtypes[1],
        f"a pool of {(pool := type(runner.token_to_kv_pool).__name__)}": pool != "MLATokenToKVPool",
        f"{backend.kv_cache_dim} columns": (backend.kv_cache_dim, backend.kv_lora_rank) != (HEAD_DIM, V_DIM),
        f"{heads} heads": heads > MAX_HEADS,
        "decode context parallelism": backend.dcp_world_size > 1,
        "drafting models": bool(backend.is_draft_runner),
        "--enable-deterministic-inference": rows.is_deterministic(),
    }
    return [f"{what} not supported" for what, is_so in wrong.items() if is_so]


def decode(
    original: Callable[..., object],
    backend: Foreign,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: Foreign,
    forward_batch: Foreign,
    save_kv_cache: bool = True,
) -> object:
    """Decodes q [requests, heads * 576] here if `settle` decided so, else by SGLang's method. k: [requests, 1, 576], or
    None if it is already cached."""
    form = getattr(backend, SERVED, None)
    if form is None:
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool, requests = backend.token_to_kv_pool, forward_batch.batch_size
    if k is not None and save_kv_cache:
        pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
    tables = backend.cuda_graph_kv_indices, backend._eager_kv_indices_buf  # whole ones, of which a step has a part
    part = backend.forward_metadata.block_kv_indices.data_ptr()
    table = next(each for each in tables if each is not None and each.data_ptr() == part)
    out = mla_decode(
        q.view(requests, -1, layer.tp_q_head_num, layer.head_dim).contiguous(),
        pool.get_key_buffer(layer.layer_id).squeeze(1).unflatten(0, (-1, PAGE_SIZE)),
        forward_batch.seq_lens.int(),
        kv_format=form,
        block_table=table[:requests],
        softmax_scale=layer.scaling,
    )
    return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _hooks(interface: Interface) -> dict[str, Hook]:
    parameters = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")
    made = ("self", "model_runner", "skip_prefill", "kv_indptr_buf", "kv_last_page_len_buf")
    return {
        f"{interface.mla_backend}.__init__": Hook(settle, made),
        f"{interface.mla_backend}.forward_decode": Hook(decode, parameters),
    }


SEAM = Seam(WHAT, _hooks)
