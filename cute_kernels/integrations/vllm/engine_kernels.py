"""Kernels that served models ask for, as a list: what the wheel of compiled kernels holds beside those that ship.

The tables below are data: models that people serve, by what decides their kernels. What another model asks for, and is
not here, is named at its start (`prepare.why_not_ready`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from cute_kernels.attention.problem import DecodeProblem
from cute_kernels.integrations.vllm import attention_kernels, expert_kernels, prepare
from cute_kernels.integrations.vllm.kv_formats import Formats
from cute_kernels.kv_formats import format_of
from cute_kernels.linear.experts import ExpertsForm
from cute_kernels.linear.schedule import LinearProblem
from cute_kernels.moe.checks import MAX_TOKENS
from cute_kernels.runtime.gpu import Gpu, standing_in
from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.weight_formats import integers

GPUS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))  # what vLLM captures
DECODED = attention_kernels.batches_up_to(512)
MOST_TOKENS = 16384  # of a step
KV_FORMATS = (
    ("e4m3_tensor", "e4m3_tensor"),
    ("int8_token_head", "int8_token_head"),
    ("e4m3_token_head", "e4m3_token_head"),
    ("int4_g4", "int4_g4"),
    ("int8_token_head", "int4_g4"),
)
"""K's and V's: vLLM's 8-bit caches, and those that the pages recommend."""
PAGE_SIZE = 64  # what the plug-in prefers
DRAFTED = (0, 3)


@dataclass(frozen=True)
class Heads:
    """A model's attention on one GPU. window: of its sliding layers; None without."""

    num_heads: int
    num_kv_heads: int
    head_size: int = 128
    window: int | None = None
    sinks: bool = False
    max_model_len: int = 131072


HEADS = (
    *(Heads(32 // ranks, 8 // ranks) for ranks in (1, 2, 4, 8)),  # Llama-3 8B, Mistral, Qwen3 8B
    *(Heads(64 // ranks, 8 // ranks) for ranks in (1, 2, 4, 8)),  # Llama 70B, Qwen 72B, Qwen3 32B
    *(Heads(32 // ranks, 4 // ranks) for ranks in (1, 2, 4)),  # Qwen3-30B-A3B
    *(Heads(40 // ranks, 8 // ranks) for ranks in (1, 2, 4, 8)),  # Qwen 14B
)


@dataclass(frozen=True)
class Layers:
    """A model's linear layers [n, k]."""

    shapes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, hidden: int, middle: int, qkv: int, heads: int, ranks: int = 1) -> Layers:
        """From its widths: of the model, of its MLP, of queries, keys and values together, of all heads; a rank's."""
        return cls(
            (
                (qkv // ranks, hidden),
                (hidden, heads // ranks),
                (2 * middle // ranks, hidden),
                (hidden, middle // ranks),
            )
        )


LAYERS = (
    *(Layers.of(4096, 14336, 6144, 4096, ranks) for ranks in (1, 2)),  # Llama-3 8B
    *(Layers.of(8192, 28672, 10240, 8192, ranks) for ranks in (1, 2, 4, 8)),  # Llama 70B
    *(Layers.of(5120, 17408, 7168, 5120, ranks) for ranks in (1, 2)),  # Qwen3 14B
    *(Layers.of(5120, 25600, 10240, 8192, ranks) for ranks in (1, 2)),  # Qwen3 32B
)
WEIGHTS = ((4, 128), (8, 128))
"""Bits, and numbers that share a scale."""


@dataclass(frozen=True)
class Experts:
    """A model's experts on one GPU. middle: features between the two products; topk: experts of a token."""

    num_experts: int
    hidden: int
    middle: int
    topk: int


EXPERTS = (
    *(Experts(128, 2048, 768 // ranks, 8) for ranks in (1, 2)),  # Qwen3-30B-A3B
    *(Experts(128, 4096, 1536 // ranks, 8) for ranks in (1, 2, 4)),  # Qwen3-235B-A22B
    *(Experts(8, 4096, 14336 // ranks, 2) for ranks in (1, 2, 4, 8)),  # Mixtral 8x7B
)


def specs() -> list[KernelSpec]:
    """All of them; needs neither vLLM nor a GPU."""
    found: dict[KernelSpec, None] = {}
    found.update(dict.fromkeys(_attention()))
    found.update(dict.fromkeys(_linear()))
    found.update(dict.fromkeys(_experts()))
    return list(found)


def _attention() -> Iterator[KernelSpec]:
    for heads, (k, v), drafted in itertools.product(HEADS, KV_FORMATS, DRAFTED):
        yield from attention_specs(heads, Formats(format_of(k), format_of(v)), drafted)


def attention_specs(
    heads: Heads, formats: Formats, drafted: int, batches: tuple[int, ...] = DECODED
) -> list[KernelSpec]:
    """The kernels of a model's attention, with bf16 queries."""
    layer = SimpleNamespace(
        formats=formats,
        head_size=heads.head_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        sliding_window=heads.window,
        soft_cap=None,
        sinks=heads.sinks or None,
        transform=None,
    )
    decodes = attention_kernels.Decodes(batches, 1 + drafted, heads.max_model_len, PAGE_SIZE, torch.bfloat16)
    return attention_kernels.specs_of(layer, decodes, DecodeProblem.num_sms)


def _linear() -> Iterator[KernelSpec]:
    rows = prepare.RowCounts(CAPTURED, MOST_TOKENS).all()
    shapes = dict.fromkeys(shape for layers in LAYERS for shape in layers.shapes)
    for (n, k), (bits, group_size), gpu in itertools.product(shapes, WEIGHTS, GPUS):
        problem = LinearProblem(1, n, k, k, integers(bits, group_size), "bf16")
        for m in rows:
            yield from prepare.specs_for(problem, m, gpu)


def _experts() -> Iterator[KernelSpec]:
    for gpu in GPUS:
        with standing_in(Gpu(num_sms=lambda device: DecodeProblem.num_sms, name=lambda device, gpu=gpu: gpu)):
            for experts, (bits, group_size) in itertools.product(EXPERTS, WEIGHTS):
                yield from experts_specs(experts, bits, group_size)


def experts_specs(experts: Experts, bits: int, group_size: int) -> list[KernelSpec]:
    """The kernels of a layer of experts, with bf16 activations, on the GPU that is there."""
    form, hidden, middle = integers(bits, group_size), experts.hidden, experts.middle
    gate_up = ExpertsForm(experts.num_experts, 2 * middle, hidden, hidden, form, torch.bfloat16, 0)
    down = ExpertsForm(experts.num_experts, hidden, middle, middle, form, torch.bfloat16, 0)
    tokens = expert_kernels.tokens_of(prepare.RowCounts(CAPTURED, MOST_TOKENS).all(), MAX_TOKENS)
    return expert_kernels.specs(gate_up, down, experts.topk, tokens, torch.bfloat16, invariant=False)
