"""Checks of latent attention (MLA): SGLang's backend flashmla decodes over SGLang's own pool."""

# SGLang is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cute_kernels.integrations.sglang import rows, seams
from tests.integrations.sglang.checks import check, lines

HEADS, CONTEXT, PAGE = 3, 500, 64


class _Kernel:
    """Stands in for SGLang's kernel that makes page tables of a table of slots."""

    def __getitem__(self, grid: object) -> Any:
        def fill(slots: Any, requests: Any, lengths: Any, start: None, table: torch.Tensor, *strides: int) -> None:
            for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
                pages = slots[request, :length:PAGE] // PAGE
                table[row, : len(pages)] = pages.int()

        return fill


def backend(dtype: torch.dtype = torch.bfloat16, parallel: int = 1, **given: Any) -> tuple[Any, str]:
    """SGLang's backend without flashinfer's part of it, and what the log says."""
    from sglang.srt.layers.attention import flashinfer_mla_backend, flashmla_backend
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool

    pool = MLATokenToKVPool(1024, PAGE, dtype, 512, 64, 1, "cpu", False)
    config = {"num_attention_heads": HEADS, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    runner = SimpleNamespace(
        model_config=SimpleNamespace(**config, v_head_dim=512, context_len=CONTEXT),
        req_to_token_pool=ReqToTokenPool(4, CONTEXT, "cpu", False),
        token_to_kv_pool=pool,
        kv_cache_dtype=dtype,
        dtype=torch.bfloat16,
        device="cpu",
        page_size=PAGE,
        is_draft_worker=False,
    )
    for name, value in given.items():
        setattr(runner, name, value)

    def parents(self: Any, runner: Any, *_: object) -> None:
        self.max_context_len, self.device, self.page_size = CONTEXT, "cpu", PAGE
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = SimpleNamespace(reads_are_translated=False)

    world = SimpleNamespace(attn_tp_size=1, attn_dcp_size=parallel)
    seams.say_once.cache_clear()
    with ExitStack() as stack:
        for module, name, value in (
            (flashinfer_mla_backend.FlashInferMLAAttnBackend, "__init__", parents),
            (flashmla_backend, "get_parallel", lambda: world),
            (flashmla_backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=None)),
            (rows, "is_deterministic", lambda: given.get("deterministic", False)),
            (rows, "saves_memory", lambda: False),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        said = stack.enter_context(mock.patch.object(seams, "logger"))
        made = flashmla_backend.FlashMLABackend(runner)
    (line,) = lines(said)
    return made, line


def decode(made: Any, lengths: list[int], captured: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step of requests of such lengths: (result, q, tokens of the pool as [slots, 576])."""
    from sglang.srt.layers.attention import flashmla_backend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    count, pool = len(lengths), made.token_to_kv_pool
    pool.kv_buffer[0].normal_()
    table = made.req_to_token
    for request in range(count):  # pages lie anywhere
        for page in range(CONTEXT // PAGE):
            first = (1 + (page * count + request) % 15) * PAGE
            table[request, page * PAGE : (page + 1) * PAGE] = torch.arange(first, first + PAGE)
    slots = torch.stack([table[request, length - 1] for request, length in enumerate(lengths)]).long()
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=count,
        input_ids=torch.zeros(count, dtype=torch.int64),
        req_pool_indices=torch.arange(count),
        seq_lens=torch.tensor(lengths),
        out_cache_loc=slots,
        seq_lens_sum=sum(lengths),
        seq_lens_cpu=torch.tensor(lengths),
    )
    kernels: dict[str, Any] = {
        "create_flashmla_kv_indices_triton": _Kernel(),
        "get_mla_metadata": lambda *_, **__: (None, None),
    }
    kernels["triton"] = SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    with mock.patch.multiple(flashmla_backend, get_num_kv_index_blocks_flashmla=lambda *_: 1, **kernels):
        made.init_forward_metadata(batch)
    if captured:  # a graph's table, of which the step that it was captured in saw one page
        made.cuda_graph_kv_indices = made.forward_metadata.block_kv_indices.clone()
        made.forward_metadata.block_kv_indices = made.cuda_graph_kv_indices[:count, :1]
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, head_dim=576, v_head_dim=512, scaling=0.1)
    q, k = torch.randn(count, HEADS * 576).to(pool.dtype), torch.randn(count, 1, 576).to(pool.dtype)
    with mock.patch("sglang.srt.mem_cache.memory_pool.get_parallel", lambda: SimpleNamespace(dcp_enabled=False)):
        out = made.forward_decode(q, k, k[..., :512], layer, batch)
    assert torch.equal(pool.kv_buffer[0][slots], k)
    return out, q.view(count, HEADS, 576), pool.kv_buffer[0][:, 0]


@check
def decoding_of_mla_gives_attention_over_sglangs_pool() -> None:
    made, line = backend()
    assert "decoding of MLA with --attention-backend flashmla runs here" in line
    for lengths, captured in (([70, 9, 440], False), ([1], False), ([130, 200], True)):
        out, q, tokens = decode(made, lengths, captured)
        for request, length in enumerate(lengths):
            seen = tokens[made.req_to_token[request, :length].long()].double()
            expected = (q[request].double() @ seen.T * 0.1).softmax(-1) @ seen[:, :512]
            assert (out[request].view(HEADS, 512).double() - expected).abs().max() < 2**-6, (lengths, request)
        made.cuda_graph_kv_indices = None


@check
def other_mla_backends_decode_with_sglangs_kernels_by_name() -> None:
    def left(**given: Any) -> str:
        made, line = backend(**given)
        assert getattr(made, seams.SERVED, None) is None and made._eager_kv_indices_buf is None
        return line

    assert "a cache and queries in (torch.float8_e4m3fn, torch.bfloat16)" in left(dtype=torch.float8_e4m3fn)
    assert "decode context parallelism" in left(parallel=2)
    assert "drafting models" in left(is_draft_worker=True)
    assert "--enable-deterministic-inference" in left(deterministic=True)
    assert "a pool of SimpleNamespace" in left(token_to_kv_pool=SimpleNamespace())
    with mock.patch.object(seams, "capability_of", lambda device: (8, 0)):
        assert "compute capability (8, 0)" in left()
