"""The blocks of transformers models that `fuse` knows, as tables.

Each row names a class of a model file. A module matches a row if its ``forward`` equals the class's, instruction for
instruction (`known_code`), whatever its name: Granite's attention matches Llama's row. A model with a different
structure matches nothing, and is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from torch import nn

from cute_kernels.integrations.transformers.known_code import method_code, model_class


@dataclass(frozen=True)
class Known:
    """The base of the tables' rows. A row names a class by its model file and its name."""

    file: str
    name: str


@dataclass(frozen=True)
class KnownAttention(Known):
    """Projections of one input, norms of q and k, rotation by halves, attention, and ``o_proj``.

    Attributes:
        projections: the names of the projections to q, k and v, or of one projection to all three.
        norms: the names of the norms of q and k over head_dim; None for no norms.
        options: pairs (argument of attention, attribute of the module or else of its configuration).
    """

    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    norms: tuple[str, str] | None = None
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class KnownMlp(Known):
    """A gated MLP: down_proj(activation(gate) * up)."""

    projections: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"


@dataclass(frozen=True)
class KnownLayer(Known):
    """A decoder layer: x + self_attn(norm(x)), then x + mlp(norm(x)).

    Attributes:
        before: the name of the norm before attention.
        before_mlp: the name of the norm before the MLP.
        after: the names of the norms after attention and after the MLP, before the residual sums.
        dropouts: the names of the dropouts after attention and after the MLP.
    """

    before: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after: tuple[str, str] | None = None
    dropouts: tuple[str, ...] = ()


_WINDOW = (("sliding_window", "sliding_window"),)
_SANDWICH: dict[str, Any] = {
    "before_mlp": "pre_feedforward_layernorm",
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
}

ATTENTIONS = (
    KnownAttention("llama", "LlamaAttention"),
    KnownAttention("mistral", "MistralAttention", options=_WINDOW),
    KnownAttention("mixtral", "MixtralAttention", options=_WINDOW),
    KnownAttention("qwen2", "Qwen2Attention", options=_WINDOW),
    KnownAttention("qwen3", "Qwen3Attention", options=_WINDOW, norms=("q_norm", "k_norm")),
    KnownAttention("phi3", "Phi3Attention", options=_WINDOW, projections=("qkv_proj",)),
    KnownAttention("gemma2", "Gemma2Attention", options=(*_WINDOW, ("softcap", "attn_logit_softcapping"))),
    KnownAttention("gemma3", "Gemma3Attention", options=_WINDOW, norms=("q_norm", "k_norm")),
)
MLPS = (
    KnownMlp("llama", "LlamaMLP"),
    KnownMlp("phi3", "Phi3MLP", projections=("gate_up_proj",), activation="activation_fn"),
)
LAYERS = (
    KnownLayer("llama", "LlamaDecoderLayer"),
    KnownLayer("mixtral", "MixtralDecoderLayer"),
    KnownLayer("phi3", "Phi3DecoderLayer", dropouts=("resid_attn_dropout", "resid_mlp_dropout")),
    KnownLayer("gemma2", "Gemma2DecoderLayer", **_SANDWICH),
    KnownLayer("gemma3", "Gemma3DecoderLayer", **_SANDWICH),
)
ROTARIES = (
    Known("llama", "LlamaRotaryEmbedding"),
    Known("qwen2", "Qwen2RotaryEmbedding"),
    Known("gemma2", "Gemma2RotaryEmbedding"),
    Known("gemma3", "Gemma3RotaryEmbedding"),
)
"""Rotary embeddings that rotate by the given positions, one number for each token."""
MODELS = (
    Known("llama", "LlamaModel"),
    Known("mistral", "MistralModel"),
    Known("ministral", "MinistralModel"),
    Known("mixtral", "MixtralModel"),
    Known("qwen2", "Qwen2Model"),
    Known("qwen3", "Qwen3Model"),
    Known("qwen3_moe", "Qwen3MoeModel"),
    Known("phi3", "Phi3Model"),
    Known("gemma", "GemmaModel"),
    Known("gemma2", "Gemma2Model"),
    Known("gemma3", "Gemma3TextModel"),
    Known("granite", "GraniteModel"),
    Known("deepseek_v3", "DeepseekV3Model"),
)
"""Models that run ``layers`` one after the other, then ``norm``. Each layer gets the position_ids that ``rotary_emb``
got."""

AnyKnown = TypeVar("AnyKnown", bound=Known)


def recognise(module: nn.Module, known: tuple[AnyKnown, ...]) -> AnyKnown | None:
    """Returns the row that a module matches; None for other code, or for a module with a forward of its own."""
    return None if "forward" in vars(module) else _codes(known).get(method_code(type(module)))


@cache
def _codes(known: Iterable[AnyKnown]) -> dict[Any, AnyKnown]:
    kinds = ((row, model_class(row.file, row.name)) for row in known)
    return {method_code(kind): row for row, kind in kinds if kind is not None}
