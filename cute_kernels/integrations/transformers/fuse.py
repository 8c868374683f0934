"""Installation of `blocks` in the modules of a model that `patterns` knows.

Each block is first compared with the module's own ``forward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.transformers import patterns
from cute_kernels.integrations.transformers.blocks import AttentionBlock, Block, LayerBlock, MlpBlock, Place
from cute_kernels.integrations.transformers.cache import DecodeCache
from cute_kernels.integrations.transformers.cache_options import FormatOfLayers, Scales
from cute_kernels.integrations.transformers.known_code import cache_argument
from cute_kernels.integrations.transformers.norms import has_hooks, is_plain
from cute_kernels.integrations.transformers.patterns import recognise
from cute_kernels.integrations.transformers.ropes import ModelRope, rope_of
from cute_kernels.integrations.transformers.routers import router_blocks, weights_on_noise

TOLERANCES = {torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest relative error of a block against its module on noise, by dtype.

The check looks for a wrong function, whose error is near 1. Rotations by half-precision cosines, and cache codes that
are rounded the other way, give a few hundredths.
"""
CHECKED_TOKENS = 4


@dataclass
class Fused:
    """The result of `fuse`: for each kind of block, the number of blocks that run in fewer launches, and why all other
    blocks do not.
    """

    attention: int = 0
    mlp: int = 0
    layers: int = 0
    routers: int = 0
    reasons: dict[str, None] = field(default_factory=dict)  # in order, once each

    def __str__(self) -> str:
        counts = {"attention": self.attention, "MLP": self.mlp, "layer": self.layers, "router": self.routers}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def add_routers(model: nn.Module, fused: Fused) -> None:
    """Makes known routers of quantised experts run in one launch each, if they pass their check."""
    for block in router_blocks(model):
        fused.routers += _installed(block, partial(weights_on_noise, block), fused)


def fuse(model: nn.Module, kv_format: FormatOfLayers | None, scales: Scales | None) -> Fused:
    """Makes known blocks of a model run in fewer launches, if they pass their check.

    It must be called after norms were replaced and weights were quantised. kv_format: the cache's format; None leaves
    attention as it is.
    """
    fused = Fused()
    for owner in model.modules():
        if recognise(owner, patterns.MODELS) is not None:
            _Stack(owner, kv_format, scales, fused).fuse()
    return fused


def restore_blocks(model: nn.Module) -> None:
    """Removes the blocks. Merged layers become what they were, bit for bit."""
    for module in list(model.modules()):
        if isinstance(block := vars(module).get("forward"), Block):
            block.remove()


@dataclass(frozen=True)
class _Stack:
    """Fuses the decoder layers of ``owner``, a module of the model that matches `patterns.MODELS`. Counts installed
    blocks in ``fused``."""

    owner: Foreign
    kv_format: FormatOfLayers | None
    scales: Scales | None
    fused: Fused

    def fuse(self) -> None:
        layers: list[Any] = list(self.owner.layers)
        for number, (layer, following) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
            self._fuse_attention(layer)
            self._fuse_mlp(layer)
            known = recognise(layer, patterns.LAYERS)
            if known is not None and is_plain(getattr(layer, known.before_mlp)):
                norm = self.owner.norm if following is None else getattr(following, known.before, None)
                results = partial(self._passes, layer.self_attn)
                block = LayerBlock(layer, known, Place(self.owner, number, norm, following))
                self.fused.layers += _installed(block, results, self.fused)

    def _fuse_attention(self, layer: Foreign) -> None:
        attention = getattr(layer, "self_attn", None)
        if self.kv_format is None or attention is None:
            return
        known, rope = recognise(attention, patterns.ATTENTIONS), self._rope_of(attention)
        if known is None or rope is None:
            what = "is none of those that are known" if known is None else f"has {self._unknown_rope()}"
            self.fused.reasons[f"{type(attention).__name__} {what}"] = None
            return
        results = partial(self._passes, attention)
        self.fused.attention += _installed(AttentionBlock(attention, known, rope), results, self.fused)

    def _fuse_mlp(self, layer: Foreign) -> None:
        mlp = getattr(layer, "mlp", None)
        known = None if mlp is None else recognise(mlp, patterns.MLPS)
        if mlp is None or known is None or any(has_hooks(getattr(mlp, name)) for name in known.projections):
            return
        block = MlpBlock(mlp, known)
        if block.pair is not None:
            self.fused.mlp += _installed(block, lambda own: [own(self._noise(CHECKED_TOKENS))], self.fused)

    def _rope_of(self, attention: Foreign) -> ModelRope | None:
        rotary = getattr(self.owner, "rotary_emb", None)
        if rotary is None or recognise(rotary, patterns.ROTARIES) is None:
            return None
        return rope_of(rotary, self._layer_type(attention))

    def _unknown_rope(self) -> str:
        rotary = getattr(self.owner, "rotary_emb", None)
        for name, x in () if rotary is None else rotary.named_buffers():
            if name.endswith("inv_freq") and x.dtype != torch.float32:
                return f"rotary frequencies in {x.dtype}, want float32: from_pretrained(dtype=...) does not round them"
        return "a rotary embedding that is none of those that are known"

    def _layer_type(self, attention: Foreign) -> str | None:
        """Returns the name of a layer's rotary embedding if the model has several; else None."""
        own = getattr(attention, "layer_type", None)
        return own if own is not None and hasattr(self.owner.rotary_emb, f"{own}_inv_freq") else None

    # -- the check's inputs ------------------------------------------------------------------------------------------

    def _noise(self, tokens: int, seed: int = 0) -> torch.Tensor:
        """Returns noise as a block's inputs, [2, tokens, hidden_size]."""
        weight = next(self.owner.parameters())
        generator = torch.Generator().manual_seed(seed)
        shape = (2, tokens, self.owner.config.hidden_size)
        noise = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        return noise.to(weight.device, weight.dtype)

    def _passes(self, attention: Foreign, run: Callable[..., Any]) -> list[torch.Tensor]:
        """Returns the results of ``run``, a layer or its attention, for a prompt of `CHECKED_TOKENS` tokens and for a
        decode step after the prompt.

        There are two requests: one at the first positions, the other at the last positions of the model.
        """
        cache = None if self.kv_format is None else DecodeCache(self.kv_format, scales=self.scales)
        layer_type = self._layer_type(attention)
        taken = cache_argument(attention.forward)
        last = max(self.owner.config.max_position_embeddings - CHECKED_TOKENS - 1, 0)
        found = []
        for seed, tokens in enumerate((CHECKED_TOKENS, 1)):
            x = self._noise(tokens, seed)
            starts = torch.tensor([[0], [last]], device=x.device) + seed * CHECKED_TOKENS
            positions = starts + torch.arange(tokens, device=x.device)
            embeddings = self.owner.rotary_emb(x, positions, *(() if layer_type is None else (layer_type,)))
            given = {"position_ids": positions, "position_embeddings": embeddings, taken: cache}
            result = run(hidden_states=x, attention_mask=None, **given)
            found.append(result[0] if isinstance(result, tuple) else result)
        return found


def _installed(block: Block, results: Callable[[Any], list[torch.Tensor]], fused: Fused) -> bool:
    """Installs a block if its results equal those of the module's own ``forward`` up to `TOLERANCES`. Returns whether
    it is installed.

    results: a function that computes the results of a ``forward``. It uses the same inputs at each call.
    """
    name = type(block.module).__name__
    try:
        with torch.no_grad(), _evaluating(block.module):
            wanted = results(block.own)
            block.install()
            for got, want in zip(results(block.module), wanted, strict=True):
                error = float((got.double() - want.double()).norm() / want.double().norm())
                if not error <= TOLERANCES[want.dtype]:
                    raise ArithmeticError(f"a relative error of {error:.2g} on noise")
    except Exception as error:  # whatever it is, the model's own code is there
        block.remove()
        fused.reasons[f"{name}: {type(error).__name__}: {error}"] = None
        return False
    return True


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode
