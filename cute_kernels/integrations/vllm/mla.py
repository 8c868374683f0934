"""Latent attention (MLA) of vLLM. This package's kernels replace those of vLLM's backends for decoding, over whole
contexts and over chosen tokens.

vLLM's backends FLASHMLA, FLASH_ATTN_MLA and FLASHMLA_SPARSE still do everything else: they process prompts, write the
cache and make metadata. Each backend's implementation of a layer is replaced by a subclass that decodes with this
module, for the number of heads that the GPU has. FlashMLA's kernels for chosen tokens need 64 or 128 heads, so vLLM
pads the heads for them.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

from cute_kernels import mla_decode, sparse_mla_decode
from cute_kernels.integrations import mla_kernels
from cute_kernels.integrations.attention_kernels import batches_up_to
from cute_kernels.integrations.mla_kernels import FORMATS, HEAD_DIM, MAX_HEADS, PAGE_SIZE, V_DIM, Decodes
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import prepare
from cute_kernels.integrations.vllm.plugin import note_served
from cute_kernels.integrations.vllm.seams import refusal, say_once
from cute_kernels.integrations.vllm.versions import Interface
from cute_kernels.runtime.gpu import GPU

MAX_Q_LEN = 16  # of `mla_decode`
EACH_ROW = 256  # up to so many new tokens of a step, neighbours may have other kernels
SCALED = "mla_fp8"  # DeepSeek-V3.2's tokens of 656 bytes, vLLM's fp8_ds_mla


class Decoding:
    """Replaces the decoding of a backend's implementation. It decodes over whole contexts, in 16-bit caches with pages
    of 64 tokens. Layers with FP8 caches keep the backend's own decoding.
    """

    serves_some: ClassVar[bool] = False
    """Whether some layer of the backend decodes here, so that its pages should have 64 tokens."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        self.serves = False
        dtype = _model_dtype()
        reason = reason_against(self, "16-bit" if self.kv_cache_dtype in ("auto", "float16", "bfloat16") else None)
        reason = reason or _reason_of_pages()
        if reason is None and dtype in FORMATS:
            reason = _make_ready(_dense_decodes(FORMATS[dtype], _heads_of(self)))
        self.serves = _outcome(f"mla {FORMATS.get(dtype)} {self.num_heads}", reason)
        type(self).serves_some |= self.serves

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Foreign,
        layer: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decodes q [tokens, heads, 576], or the tuple of its latent and RoPE columns.

        Returns [tokens, heads, 512] and, if contexts are split among GPUs, the log-sum-exps of scores, fp32 [tokens,
        heads].
        """
        decode, requests = attn_metadata.decode, attn_metadata.num_decodes
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        q_len = queries.shape[0] // max(requests, 1)
        # FLASH_ATTN_MLA decodes short prompts too, of any lengths.
        uniform = q_len == max(getattr(decode, "max_query_len", q_len), 1) and q_len * requests == queries.shape[0]
        # A GPU's part of a context says nothing of where several new tokens of a request stand.
        longest = MAX_Q_LEN if self.dcp_world_size == 1 else 1
        if not (self.serves and uniform and q_len <= longest and kv_c_and_k_pe_cache.shape[1] % PAGE_SIZE == 0):
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        queries = queries.unflatten(0, (requests, q_len)).contiguous()
        options: dict[str, Any] = {
            "kv_format": FORMATS[kv_c_and_k_pe_cache.dtype],
            "block_table": decode.block_table,
            "softmax_scale": self.scale,
        }
        if self.dcp_world_size == 1:
            return mla_decode(queries, kv_c_and_k_pe_cache, decode.seq_lens, **options).flatten(0, 1), None
        out, lse = mla_decode(queries, kv_c_and_k_pe_cache, decode.seq_lens, return_lse=True, **options)
        return out.flatten(0, 1), lse.flatten(0, 1)


class CuteKernelsSparseMlaImpl(FlashMLASparseImpl):
    """Decoding over tokens that an indexer chose, in FP8 (656 bytes) or bf16, for up to 128 heads."""

    gives_lse: ClassVar[bool] = True
    """`Interface.mla_gives_lse` of the installed vLLM, which reads the log-sum-exps only if contexts are split."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        self.serves = False
        form = SCALED if self.kv_cache_dtype == "fp8_ds_mla" else "mla_bf16"
        reason = reason_against(self, form, cut=False)
        if reason is None:
            reason = _make_ready(_sparse_decodes(form, self.num_heads, self.topk_indices_buffer.shape[1]))
        self.serves = _outcome(f"mla chosen {form} {self.num_heads}", reason)

    def _fp8_flash_mla_kernel(
        self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, topk_indices: torch.Tensor, kernel_metadata: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decodes q [batch, q_len, heads, 576]. topk_indices: int32 [batch, q_len, topk] slots, -1 for none."""
        if not self.serves:
            return super()._fp8_flash_mla_kernel(q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata)
        cache = kv_c_and_k_pe_cache.view(torch.uint8)
        out = sparse_mla_decode(
            q.contiguous(), cache, topk_indices.contiguous(), kv_format=SCALED, softmax_scale=self.softmax_scale
        )
        return out, None

    def _bf16_flash_mla_kernel(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        topk_length: torch.Tensor | None = None,
        actual_num_heads: int | None = None,
        **given: torch.Tensor,
    ) -> Any:
        """Decodes the first actual_num_heads heads (None: all) of q [tokens, heads, 576].

        kv_c_and_k_pe_cache: the cache, or a workspace of rows. given: vLLM's tensor for the result. It is not used, as
        vLLM copies the returned tensor.
        """
        if not self.serves:
            more = () if actual_num_heads is None else (actual_num_heads,)
            return super()._bf16_flash_mla_kernel(q, kv_c_and_k_pe_cache, topk_indices, topk_length, *more, **given)
        q = q[:, :actual_num_heads]
        rows = kv_c_and_k_pe_cache.view(-1, 1, kv_c_and_k_pe_cache.shape[-1])  # slots are rows: pages of one token
        out = sparse_mla_decode(
            q.unsqueeze(1).contiguous(),
            rows,
            topk_indices.view(q.shape[0], 1, -1),
            kv_format="mla_bf16",
            softmax_scale=self.softmax_scale,
            topk_length=topk_length,
        )
        return (out.squeeze(1), None) if self.gives_lse else out.squeeze(1)


def _heads_of(impl: Foreign) -> int:
    """Returns the number of heads of a launch. If contexts are split among GPUs, this is the number of heads of all
    these GPUs.
    """
    return impl.num_heads * impl.dcp_world_size


def _reason_of_pages() -> str | None:
    """Returns why the page size on the command line makes a layer keep its backend's kernels; None if it does not.

    If no size is given, vLLM asks the backend for one after the layers are made.
    """
    caches = getattr(get_current_vllm_config_or_none(), "cache_config", None)
    block = caches.block_size if caches is not None and caches.user_specified_block_size else PAGE_SIZE
    return None if block % PAGE_SIZE == 0 else f"pages of {block} tokens; --block-size 64 is supported"


def _prefer_pages(backend: Foreign, made: type[Decoding]) -> None:
    """Makes a backend prefer pages of 64 tokens, if some of its layers decode with this module."""
    original = backend.get_preferred_block_size

    def preferred(default: int) -> int:
        return max(original(default), PAGE_SIZE if made.serves_some else 0)

    backend.get_preferred_block_size = staticmethod(preferred)


def reason_against(impl: Foreign, form: str | None, cut: bool = True) -> str | None:
    """Returns why a layer keeps its backend's kernels; None if it can decode with this module.

    form: the format of the layer's cache; None for an unsupported cache. cut: whether contexts may be split among GPUs.
    """
    if (left := prepare.why_left("mla")) is not None:
        return left
    wrong = {
        f"{impl.kv_cache_dtype} caches": form is None,
        f"{impl.head_size} columns": impl.head_size != HEAD_DIM or impl.kv_lora_rank != V_DIM,
        f"{_heads_of(impl)} heads": _heads_of(impl) > MAX_HEADS,
        "decode context parallelism": impl.dcp_world_size > 1 and not cut,
        "VLLM_BATCH_INVARIANT": bool(envs.VLLM_BATCH_INVARIANT),
    }
    return refusal(wrong)


def _model_dtype() -> torch.dtype:
    config = get_current_vllm_config_or_none()
    return torch.bfloat16 if config is None else config.model_config.dtype


def _dense_decodes(form: str, num_heads: int) -> Decodes | None:
    config = get_current_vllm_config_or_none()
    if config is None:
        return None
    speculation = config.speculative_config
    drafted = 0 if speculation is None else speculation.num_speculative_tokens or 0
    q_lens = tuple(dict.fromkeys((1, 1 + drafted, MAX_Q_LEN)))
    batches = batches_up_to(config.scheduler_config.max_num_seqs)
    return Decodes(form, False, num_heads, batches, q_lens, config.model_config.max_model_len, PAGE_SIZE)


def _sparse_decodes(form: str, num_heads: int, topk: int) -> Decodes | None:
    rows = tuple(sorted({*range(1, EACH_ROW + 1), *prepare.engine_rows().all()}))
    page_size = PAGE_SIZE if form == SCALED else 1
    return Decodes(form, True, num_heads, rows, (1,), topk, page_size)


@functools.cache
def _make_ready(decodes: Decodes | None) -> str | None:
    """Loads the kernels of a kind of layer, once. Returns why they are not ready; None if they are."""
    if decodes is None:
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return prepare.make_ready(device, lambda: mla_kernels.specs(decodes, GPU.num_sms(device)))


def _outcome(what: str, reason: str | None) -> bool:
    """Returns whether a layer decodes with this module, and logs the outcome once for all equal layers."""
    if reason is None:
        note_served(what)
    say_once(f"{what} runs here" if reason is None else f"{what} is left to vLLM: {reason}")
    return reason is None


# -- the seam ---------------------------------------------------------------------------------------------------------


def replace(interface: Interface) -> str:
    """Replaces the implementations that vLLM's MLA backends return with the implementations of this module. Returns a
    line for the log.
    """
    CuteKernelsSparseMlaImpl.gives_lse = interface.mla_gives_lse
    for module, name in interface.mla_backends:
        try:
            backend = getattr(importlib.import_module(module), name)
        except ImportError:  # a build without its kernels, which vLLM never chooses
            continue
        original = backend.get_impl_cls()
        if issubclass(original, (Decoding, CuteKernelsSparseMlaImpl)):
            continue
        made = CuteKernelsSparseMlaImpl
        if original is not FlashMLASparseImpl:
            made = type(f"CuteKernels{original.__name__}", (Decoding, original), {})
            _prefer_pages(backend, made)
        backend.get_impl_cls = staticmethod(lambda implementation=made: implementation)
    return "decoding of MLA by FLASHMLA and FLASH_ATTN_MLA (16-bit caches, pages of 64), and FLASHMLA_SPARSE runs here"
