"""Checks of attention whose tokens GPUs share out: every GPU a thread, which gives what it has to the others."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cute_kernels import merge_states
from cute_kernels.integrations.vllm import attention_ranks
from tests.integrations.vllm.checks import check
from tests.integrations.vllm.steps import BATCHES, Layer, builder, causal_attention, flash_attention, step


def can_merge() -> bool:
    """Whether this vLLM has what merges partial results."""
    return importlib.util.find_spec("vllm.v1.attention.ops.dcp") is not None


class Group:
    """vLLM's group of the GPUs, as far as it is asked."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.of_thread = world_size, threading.local()
        self.given: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=600)

    @property
    def rank_in_group(self) -> int:
        return self.of_thread.rank

    def exchanged(self, own: Any) -> list[Any]:
        self.given[self.rank_in_group] = own
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def all_gather(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.exchanged(own), dim=dim)


def merge(out: torch.Tensor, lse: torch.Tensor, group: Any, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's function gives: attention over all tokens, of this GPU's heads."""
    assert return_lse and out.shape[:2] == lse.shape
    whole = functools.reduce(lambda left, right: merge_states(*left, *right), group.exchanged((out, lse)))
    own, sums = (part.chunk(group.world_size, dim=1)[group.rank_in_group].contiguous() for part in whole)
    return own, sums


@contextmanager
def gpus(count: int, interleave: int) -> Iterator[Group]:
    group = Group(count)
    ranks = lambda config: attention_ranks.Ranks(count, group.rank_in_group, interleave, merge)  # noqa: E731
    from vllm.v1.attention.backends import fa_utils

    with (
        mock.patch("vllm.distributed.parallel_state.get_dcp_group", lambda: group),
        mock.patch("cute_kernels.integrations.vllm.attention_metadata.ranks_of", ranks),
        mock.patch.object(fa_utils, "flash_attn_varlen_func", flash_attention, create=True),
        mock.patch.object(fa_utils, "get_flash_attn_version", lambda **_: 3),
    ):
        yield group


def place(position: int, table: list[int], page: int, ranks: attention_ranks.Ranks) -> int:
    """The slot of a request's token in a GPU's cache, as vLLM's kernel has it; -1 in those of the others."""
    block, offset = divmod(position, page * ranks.count)
    stripe, within = divmod(offset, ranks.interleave)
    if stripe % ranks.count != ranks.rank:
        return -1
    return table[block] * page + stripe // ranks.count * ranks.interleave + within


def serve(layer: Layer, group: Group, drawn: list[torch.Tensor], rank: int) -> torch.Tensor:
    """The outputs of all tokens of BATCHES, of one GPU's heads."""
    from cute_kernels.integrations.vllm import kv_formats

    group.of_thread.rank = rank
    make = builder()
    impl, ranks = layer.make("cpu"), make.ranks
    impl.ranks = ranks
    cache = torch.zeros(
        4 * layer.pages, kv_formats.page_bytes(impl.formats, layer.dim, layer.page, 1), dtype=torch.uint8
    )
    scales = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.015))
    table = torch.randperm(4 * layer.pages, generator=torch.Generator().manual_seed(3)).view(4, -1).int()
    q, k, v = drawn[0].chunk(group.world_size, dim=2)[rank], *drawn[1:]
    given, done = [], [0] * 4
    for batch in BATCHES:
        lengths = [done[request] + count for request, count in batch]
        common = step([count for _, count in batch], lengths, layer.pages, layer.page)
        common.block_table_tensor = table[[request for request, _ in batch]]
        common.dcp_local_seq_lens = ranks.own_lengths(common.seq_lens)
        places = [(request, done[request] + new) for request, count in batch for new in range(count)]
        slots = [place(position, table[request].tolist(), layer.page, ranks) for request, position in places]
        common.slot_mapping = torch.tensor(slots)
        new = [torch.stack([x[request, position] for request, position in places]) for x in (q, k, v)]
        output = torch.full_like(new[0], torch.nan)
        impl.forward(scales, *new, cache, make.build(0, common), output)
        given.append(output)
        for request, count in batch:
            done[request] += count
    return torch.cat(given)


@check
def gpus_that_share_out_tokens_attend_over_all_of_them() -> None:
    if not can_merge():
        return
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 128, heads, 64, generator=generator).half() for heads in (4, 1, 1))
    done, expected = [0] * 4, []
    for request, count in (each for batch in BATCHES for each in batch):
        end = done[request] = done[request] + count
        expected.append(causal_attention(q[request, end - count : end], k[request, :end], v[request, :end], 0.125))
    for kv, form, bound, count, interleave in (
        ("auto", "fp16", 2e-3, 2, 1),
        ("fp8", "", 0.15, 2, 16),
        ("auto", "int8_token_head,int4_g4", 0.5, 4, 1),
    ):
        layer = Layer(kv, form, heads=4 // count, kv_heads=1, dim=64)
        with gpus(count, interleave) as group, ThreadPoolExecutor(count) as threads:
            parts = list(threads.map(functools.partial(serve, layer, group, [q, k, v]), range(count)))
        error = float((torch.cat(parts, dim=1).double() - torch.cat(expected)).abs().max())
        assert error < bound, (str(layer), count, error)
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


@check
def what_cannot_be_merged_is_refused_by_name() -> None:
    def reasons(extends: bool = True, slides: bool = False, invariant: bool = False, **changed: Any) -> list[str]:
        fields = {
            "parallel_config": SimpleNamespace(decode_context_parallel_size=2),
            "model_config": SimpleNamespace(hf_text_config=SimpleNamespace()),
            "speculative_config": None,
        }
        found = attention_ranks.reasons_against(SimpleNamespace(**fields | changed), extends, slides, invariant)
        return [what.partition(" with ")[2] for what, is_so in found.items() if is_so]

    if not can_merge():
        assert reasons() == ["this vLLM"]
        return
    assert reasons() == []
    assert reasons(slides=True)[0].startswith("sliding windows") and reasons(invariant=True) == ["VLLM_BATCH_INVARIANT"]
    assert reasons(speculative_config=1) == ["speculative decoding"] and len(reasons(extends=False)) == 1
    alone = SimpleNamespace(decode_context_parallel_size=1)
    assert reasons(parallel_config=alone, speculative_config=1) == []
    shares = SimpleNamespace(hf_text_config=SimpleNamespace(num_kv_shared_layers=4))
    assert reasons(model_config=shares) == ["layers that read another layer's cache"]


@check
def kernels_of_gpus_that_share_out_tokens_have_queries_of_all_heads() -> None:
    from cute_kernels.integrations import attention_kernels
    from cute_kernels.integrations.engine_cache import formats_named

    layer = attention_kernels.EngineLayer(formats_named("e4m3_tensor", "X"), 128, 4, 1)
    decodes = attention_kernels.Decodes((1, 2), 1, 4096, 64, torch.bfloat16, ranks=2)
    names = [type(spec).__name__ for spec in attention_kernels.specs_of(layer, decodes, 132)]
    assert names.count("AppendSpec") == 2 and "StepSpec" not in names and "AttentionSpec" in names, names
