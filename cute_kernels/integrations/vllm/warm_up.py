"""Compiles, before the first request, a kernel of vLLM's that pages of another size need.

vLLM 0.26 turns positions into places of the cache by a Triton kernel that is compiled for one page size. Where its
older model runner serves (models of experts, among others), a start compiles it for pages of 16 tokens alone
(`vllm.model_executor.warmup.v1_block_table_warmup`). With any other size, given by `--block-size` to vLLM's own
backends too, the first request compiles it. Pages have 64 tokens here, so a start calls it as the runner will.
"""

from __future__ import annotations

import time

import torch

from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm.seams import logger

COMPILED_BY_VLLM = (3, 16)
TOKENS = 8  # of the step that calls it


def slot_mapping(kv_cache_spec: Foreign, vllm_config: Foreign, device: torch.device) -> None:
    """Compiles the kernel for pages of this size. If that fails it logs why, and the first request compiles it."""
    from vllm.v1.worker import block_table

    if not hasattr(block_table, "_compute_slot_mapping_kernel"):
        return  # from 0.30 on vLLM compiles the kernel for the size that there is
    if kv_cache_spec.block_size in COMPILED_BY_VLLM or vllm_config.use_v2_model_runner:
        return
    start = time.perf_counter()
    try:
        _call(kv_cache_spec, vllm_config, device)
    except Exception as error:  # an engine serves without it
        logger.warning("cute-kernels: vLLM's slot mapping is compiled by the first request: %r", error)
        return
    taken = time.perf_counter() - start
    logger.info("cute-kernels: vLLM's slot mapping for pages of %d ready after %.1f s", kv_cache_spec.block_size, taken)


def _call(kv_cache_spec: Foreign, vllm_config: Foreign, device: torch.device) -> None:
    """Calls the kernel as `GPUModelRunner` does: Triton compiles anew for a page size, and for what divides the length
    of a row."""
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    size = kv_cache_spec.block_size
    tables = MultiGroupBlockTable(
        max_num_reqs=1,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        pin_memory=False,
        device=device,
        block_sizes=[size],
        kernel_block_sizes=[size],
        max_num_blocks=[kv_cache_spec.max_num_blocks_per_req(vllm_config, vllm_config.model_config.max_model_len)],
        cp_kv_cache_interleave_size=vllm_config.parallel_config.cp_kv_cache_interleave_size,
    )
    tables.add_row(([0],), 0)
    tables.commit_block_table(1)
    starts = torch.tensor([0, TOKENS], dtype=torch.int32, device=device)
    tables.compute_slot_mapping(1, starts, torch.arange(TOKENS, dtype=torch.int64, device=device))
