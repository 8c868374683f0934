"""Caches of latents: models with multi-head latent attention (DeepSeek-V3), decoded by `mla_decode`.

For each token such a model caches a latent of 512 numbers and a rotated key of 64. Before it attends, it expands the
latents to keys and values of all heads (``expand_kv``). A decode step needs no expansion ("absorption"): queries are
multiplied by the keys' projection before attention, and attention's output by the values' projection. All other passes
expand the latents, as the model does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_kernels.gemm import QuantizedLinear
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.transformers.cache_layer import CachedTokens, DecodeCacheLayer
from cute_kernels.integrations.transformers.columns import NotStaticError
from cute_kernels.integrations.transformers.known_code import method_code, model_class
from cute_kernels.integrations.transformers.norms import has_hooks
from cute_kernels.integrations.transformers.ropes import version_of
from cute_kernels.mla import mla_decode
from cute_kernels.mla.cache import append_mla
from cute_kernels.mla.formats import FORMATS, V_DIM

ROPE_DIM = 64
MAX_HEADS = 128
EXPANSION = ("deepseek_v3", "DeepseekV3Attention")
"""The class whose ``expand_kv`` is known. Models with the same code have the same projections."""


class CachedLatents(CachedTokens):
    """The `CachedTokens` of a layer with latents.

    Attributes:
        new_k, new_v: [batch, 1, new columns, 512] latents, and [batch, 1, new columns, 64] rotated keys.
        module: the attention module that asked for keys and values; None until one has asked.
    """

    module: Any = None

    def append(self) -> None:
        if self.is_appended:
            return
        latent, k_rope = (x.flatten(0, 2) for x in (self.new_k, self.new_v))
        name = self.layer.formats[0]
        append_mla(latent, k_rope, self.layer.rows[0], kv_format=name, slot_mapping=self.columns.slots)
        self.is_appended = True

    def serves(self, asked: dict[str, Any]) -> bool:
        options = ("window_size", "softcap", "sinks", "attn_bias")
        return self.module is not None and is_absorbable(self.module) and all(asked[name] is None for name in options)

    def attend(self, query: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attends as `CachedTokens.attend` does. query: [batch, heads, new columns, qk_nope_head_dim + 64]."""
        self.append()
        module = self.module
        of_keys, of_values = up_projections(module)
        plain, rotated = query.split([module.qk_nope_head_dim, ROPE_DIM], dim=-1)
        batch, heads, new, _ = query.shape
        absorbed = torch.bmm(plain.transpose(0, 1).flatten(1, 2), of_keys).view(heads, batch, new, V_DIM)
        q = torch.cat((absorbed.permute(1, 2, 0, 3), rotated.transpose(1, 2)), dim=-1)
        layer: Any = self.layer
        found = mla_decode(
            q,
            layer.rows[0],
            self.columns.seq_lens,
            kv_format=layer.formats[0],
            block_table=layer.block_table,
            softmax_scale=options["softmax_scale"],
            causal=options["causal"],
        )
        values = torch.bmm(found.permute(2, 0, 1, 3).flatten(1, 2), of_values)
        return values.view(heads, batch, new, -1).permute(1, 2, 0, 3)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K [batch, heads, columns, K's head_dim] and V [batch, heads, columns, V's head_dim] of all columns.
        The model's own ``expand_kv`` makes them."""
        if self.columns.static:
            raise NotStaticError("attention reads all keys as tensors, whose number changes")
        latents, k_rope = self.new_k, self.new_v
        old = self.columns.count - self.new
        if old:
            rows = self.columns.older_rows()
            slots = torch.arange(old, device=latents.device).expand(self.columns.batch, old) if rows is None else rows
            capacity = self.layer.rows[0].shape[1]
            slots = slots + torch.arange(self.columns.batch, device=latents.device)[:, None] * capacity
            form = FORMATS[self.layer.formats[0]]
            older = form.fetch(self.layer.rows[0], slots, V_DIM + ROPE_DIM, latents.dtype)[:, None]
            latents = torch.cat((older[..., :V_DIM], latents), dim=2)
            k_rope = torch.cat((older[..., V_DIM:], k_rope), dim=2)
        return type(self.module).expand_kv(self.module, latents, k_rope)


class LatentCacheLayer(DecodeCacheLayer):
    """One layer's latents as packed tokens [batch, capacity, row]; see the module's docstring."""

    handle_type = CachedLatents
    stored = ("k_rows",)

    @torch.inference_mode(False)  # what a call in inference mode makes, another one may write
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the rows.

        key_states: latents [batch, 1, tokens, 512]. value_states: rotated keys [batch, 1, tokens, 64].
        """
        form = FORMATS[self.formats[0]]
        wanted = {"latents": (key_states, V_DIM), "rotated keys": (value_states, ROPE_DIM)}
        for what, (states, columns) in wanted.items():
            if (states.shape[1], states.shape[3]) != (1, columns):
                found = f"{states.shape[1]} heads of {states.shape[3]} columns"
                raise ValueError(f"kv_format: got {self.formats[0]!r} for {found}, want one head of {columns}: {what}")
        if form.q_dtype != key_states.dtype:
            raise TypeError(f"kv_format: got {self.formats[0]!r}, want the format of the model's {key_states.dtype}")
        self.dtype, self.device = key_states.dtype, key_states.device
        columns = self.book.columns_for(key_states.shape[0], key_states.shape[2], self.device)
        shape = (columns.batch, columns.capacity, form.row_elements(V_DIM + ROPE_DIM))
        self.k_rows = torch.zeros(shape, dtype=form.cache_dtypes[0], device=self.device)
        self._block_table: torch.Tensor | None = None
        self.is_initialized = True

    @property
    def block_table(self) -> torch.Tensor:
        """int32 [batch, 1]: each request's rows are one page."""
        batch = self.rows[0].shape[0]
        if self._block_table is None or len(self._block_table) != batch:
            self._block_table = torch.arange(batch, dtype=torch.int32, device=self.device)[:, None]
        return self._block_table


class Expansion:
    """A function that replaces the ``expand_kv`` of an attention module. It passes packed latents on without expanding
    them.

    If the projection is quantised, the function keeps a copy of its weight in 16 bits, and renews the copy if the layer
    has changed.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._unpacked: torch.Tensor | None = None
        self._packed: list[tuple[torch.Tensor, int | None]] = []
        self.weight()

    def weight(self) -> torch.Tensor | None:
        """Returns the projection's weight [rows, 512]; None for a layer without a weight."""
        layer = self.module.kv_b_proj
        if not isinstance(layer, QuantizedLinear):
            return getattr(layer, "weight", None)
        packed = [(x, version_of(x)) for x in layer.buffers()]
        is_current = len(packed) == len(self._packed) and all(
            x is y and version == known for (x, version), (y, known) in zip(packed, self._packed, strict=True)
        )
        if self._unpacked is None or not is_current:
            self._packed = packed
            with torch.inference_mode(False), torch.no_grad():
                self._unpacked = layer.dequantize()
        return self._unpacked

    def __call__(self, kv_nope: object, k_rot: object) -> tuple[object, object]:
        if not isinstance(kv_nope, CachedLatents):
            return type(self.module).expand_kv(self.module, kv_nope, k_rot)
        kv_nope.module = self.module
        return kv_nope, k_rot


def replace_expansions(model: nn.Module) -> None:
    """Makes a model's attention read caches of latents. `latents_refusal` must have returned None for each
    attention."""
    for module in model.modules():
        if hasattr(type(module), "expand_kv"):
            vars(module)["expand_kv"] = Expansion(module)


def restore_expansions(model: nn.Module) -> None:
    """Gives a model's attention its own ``expand_kv`` back."""
    for module in model.modules():
        if isinstance(vars(module).get("expand_kv"), Expansion):
            del module.expand_kv


def caches_latents(module: nn.Module) -> bool:
    """Returns whether an attention caches latents instead of keys and values."""
    return hasattr(module, "expand_kv")


def latents_refusal(module: Foreign) -> str | None:
    """Returns why `mla_decode` cannot decode an attention's latents; None if it can."""
    known = model_class(*EXPANSION)
    if known is None or method_code(type(module), ("expand_kv",)) != method_code(known, ("expand_kv",)):
        return "expands its latents in a way that is not known"
    if (module.kv_lora_rank, module.qk_rope_head_dim) != (V_DIM, ROPE_DIM):
        found = f"{module.kv_lora_rank} and {module.qk_rope_head_dim} columns"
        return f"has latents and rotated keys of {found}, which want to be {V_DIM} and {ROPE_DIM}"
    if (heads := module.config.num_attention_heads) > MAX_HEADS:
        return f"has {heads} heads, which want to be at most {MAX_HEADS}"
    return None


def is_absorbable(module: Foreign) -> bool:
    """Returns whether keys and values are a linear projection of the latents, without bias or hooks."""
    layer = module.kv_b_proj
    return type(layer) in (nn.Linear, QuantizedLinear) and layer.bias is None and not has_hooks(layer)


def up_projections(module: Foreign) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the projections from latents to keys [heads, qk_nope_head_dim, 512] and to values [heads, 512,
    v_head_dim].

    They are views of the weight that `Expansion` keeps.
    """
    expansion = module.expand_kv
    weight = expansion.weight().view(module.config.num_attention_heads, -1, V_DIM)
    return weight[:, : module.qk_nope_head_dim], weight[:, module.qk_nope_head_dim :].transpose(1, 2)
