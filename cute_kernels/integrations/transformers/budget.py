"""The choice of a format for each layer of a model's cache, within a budget of bytes.

Windows of text are read once with exact K and V. Their last tokens are then read again with the cache of one layer in
one format. The KL divergence between both predictions of the next token is the layer's loss in this format. Losses of
layers nearly add up, so a knapsack over the losses finds the formats. The chosen mix is measured once more, and
compared with each format in all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from cute_kernels.formats.kv import KvFormat, LayerFormats, format_of, format_pair
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.integrations.transformers.attend import attention
from cute_kernels.integrations.transformers.cache_options import told
from cute_kernels.integrations.transformers.calibrate import (
    Batch,
    CacheMoments,
    attending,
    calibrate_cache,
    gather_moments,
    inputs_of,
)
from cute_kernels.integrations.transformers.known_code import cache_argument, layers_without_keys
from cute_kernels.kv_cache.constants import CacheConstants, Scales
from cute_kernels.model_layers import compiled_from
from cute_kernels.names import KvFormatName

Pair = tuple[KvFormatName, KvFormatName]
_TAIL = 64  # tokens of each window that are read again
_COLUMNS = 32  # that share a scale in the INT4 candidates, where a head has as many


@dataclass(frozen=True)
class Needle:
    """A prompt whose end has a question and its answer; the answer also occurs earlier in the prompt.

    Attributes:
        tokens: int64 [tokens], the prompt.
        asked: number of tokens of the question.
        answer: number of tokens of the answer, which are the last.
    """

    tokens: torch.Tensor
    asked: int
    answer: int


@dataclass(frozen=True)
class _Read:
    """The formats and constants by which one layer's cache is read."""

    formats: tuple[KvFormat, KvFormat]
    transform: CacheTransform | None
    scales: Scales

    def __call__(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V [batch, heads, tokens, columns] as they are read from the cache."""
        transform = self.transform or CacheTransform()
        written = transform.keys(k.transpose(1, 2)), transform.values(v.transpose(1, 2))
        k_read, v_read = (
            form.dequantize(form.quantize(x, scale), x.shape[-1], x.dtype, scale)
            for form, x, scale in zip(self.formats, written, self.scales, strict=True)
        )
        return transform.original_keys(k_read).transpose(1, 2), transform.restore(v_read).transpose(1, 2)


class _ReadLayer(DynamicLayer):
    """A cache layer of transformers that returns ``read(K, V)`` instead of the exact K and V. Model layers that share
    the cache get the same K and V.
    """

    read: _Read | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Any:
        k, v = super().update(key_states, value_states, *args, **kwargs)
        return (k, v) if self.read is None else self.read(k, v)


@dataclass(frozen=True)
class _Probe:
    """A text whose beginning has exact K and V in ``cache``, and the model's exact predictions for the tokens after it.

    Attributes:
        tokens: int64 [batch, tokens], the tokens after the beginning.
        exact: fp32 log probabilities [batch, scored, vocabulary] of the last tokens.
    """

    cache: Cache
    tokens: torch.Tensor
    exact: torch.Tensor


class Probes:
    """Texts that a model has read once with exact K and V, to be read again in other formats.

    Args:
        model: a transformers model that generates.
        batches: the model's inputs, ``input_ids`` [batch, columns] without padding; the last columns are read again.
        needles: prompts with their answers.

    Raises:
        ValueError: there is nothing to read, or a batch has padding or too few columns.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[Batch], needles: Sequence[Needle] = ()) -> None:
        self._model = cast("PreTrainedModel", compiled_from(model))
        self._texts = [self._probe(*_window(batch)) for batch in map(inputs_of, batches)]
        self._needles = [self._probe(one.tokens[None], one.asked + one.answer, one.answer) for one in needles]
        if not self._texts:
            raise ValueError("batches: got none, want at least one")

    @torch.no_grad()
    def _probe(self, tokens: torch.Tensor, tail: int, scored: int) -> _Probe:
        tokens = tokens.to(self._model.device)
        cache = Cache(layer_class_to_replicate=_ReadLayer)
        with attending(self._model, attention):
            self._forward(tokens[:, :-tail], cache, 1)
            exact = self._forward(tokens[:, -tail:], cache, scored + 1)
        cache.crop(-tail)
        return _Probe(cache, tokens[:, -tail:], exact)

    def _forward(self, tokens: torch.Tensor, cache: Cache, kept: int) -> torch.Tensor:
        given = {cache_argument(self._model.forward): cache, "logits_to_keep": kept}
        return self._model(tokens, use_cache=True, **given).logits[:, :-1].float().log_softmax(-1)

    @torch.no_grad()
    def _again(self, probe: _Probe, reads: Mapping[int, _Read | None]) -> torch.Tensor:
        """Computes the log probabilities at the positions of ``probe.exact`` again. reads: the layers whose caches are
        read in other formats."""
        for layer, own in enumerate(cast("list[_ReadLayer]", probe.cache.layers)):
            own.read = reads.get(layer)
        with attending(self._model, attention):
            found = self._forward(probe.tokens, probe.cache, probe.exact.shape[1] + 1)
        probe.cache.crop(-probe.tokens.shape[1])
        return found

    def loss(self, reads: Mapping[int, _Read | None]) -> tuple[float, float]:
        """Returns (KL divergence of the next token in nats, share of positions whose likeliest token does not
        change).
        """
        divergence, agreed = [], []
        for probe in self._texts:
            found = self._again(probe, reads)
            divergence.append((probe.exact.exp() * (probe.exact - found)).sum(-1).flatten())
            agreed.append((probe.exact.argmax(-1) == found.argmax(-1)).flatten())
        return float(torch.cat(divergence).double().mean()), float(torch.cat(agreed).double().mean())

    def needles(self, reads: Mapping[int, _Read | None]) -> tuple[int, int]:
        """Returns (number of needles found with these caches, number found with exact K and V)."""
        found = of = 0
        for probe in self._needles:
            told = probe.tokens[:, -probe.exact.shape[1] :]
            if bool((probe.exact.argmax(-1) == told).all()):
                of += 1
                found += bool((self._again(probe, reads).argmax(-1) == told).all())
        return found, of


def _window(batch: Mapping[str, Any]) -> tuple[torch.Tensor, int, int]:
    """Returns a batch's tokens, the number of last tokens that are read again, and how many of these are scored."""
    tokens, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError("batches: got one with padding, want windows of text, each as long as the others of its batch")
    if tokens.shape[1] < 4:
        raise ValueError(f"batches: got one of {tokens.shape[1]} columns, want at least 4")
    tail = min(_TAIL, tokens.shape[1] // 2)
    return tokens, tail, tail - 1


@contextmanager
def _in_fp32(model: PreTrainedModel) -> Iterator[None]:
    """Makes a model compute in fp32 within the context. In 16 bits, the model's own rounding changes tokens more than a
    format does.

    A model with packed weights, or one that `accelerate` changed, is not converted.
    """
    is_packed = not all(weight.is_floating_point() for weight in model.parameters())
    is_ours = any(type(part).__module__.startswith("cute_kernels.") for part in model.modules())
    tensors = [] if is_packed or is_ours or "_cute_kernels" in vars(model) else [*model.parameters(), *model.buffers()]
    rounded = [(x, x.dtype) for x in tensors if x.dtype in (torch.bfloat16, torch.float16)]
    try:
        for x, _ in rounded:
            x.data = x.data.float()
        yield
    finally:
        for x, dtype in rounded:
            x.data = x.data.to(dtype)


def candidates_for(head_dim: int, dtype: torch.dtype) -> tuple[Pair, ...]:
    """Returns the candidates of a layer: 16 bits; K and V in INT8; K in INT8 and V in INT4; K and V in INT4.

    head_dim: number of columns of the model's heads. In INT4, 32 columns share a scale, or all columns of a smaller
    head. dtype: the model's dtype.
    """
    dense: KvFormatName = "fp16" if dtype == torch.float16 else "bf16"
    four = cast("KvFormatName", f"int4_g{1 << max(0, min(3, int(math.log2(max(head_dim // _COLUMNS, 1)))))}")
    return (dense, dense), ("int8_token_head", "int8_token_head"), ("int8_token_head", four), (four, four)


def choose_formats(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    budget: float,
    *,
    candidates: Sequence[KvFormatName | Pair] | None = None,
    needles: Sequence[Needle] = (),
    moments: CacheMoments | None = None,
    say: Callable[[str], None] | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> tuple[LayerFormats, CacheConstants]:
    """Chooses a format for each layer of a model's cache: those with the smallest loss within a budget of bytes.

    Args:
        model: as `calibrate_cache` takes it.
        batches: windows of text like those that the model will read: ``input_ids`` [batch, columns], no padding.
        budget: bytes of a token's K and V in all layers, as a fraction of their bytes in BF16, such as 0.42.
        candidates: the formats that a layer may have: names, or pairs of K's and V's names; default: `candidates_for`.
        needles: prompts whose answers are looked for as well, with the formats that are chosen.
        moments: the result of `gather_moments` on the batches; default: they are gathered here.
        say: a function that is called with a line of text after each layer.
        calibration: further arguments of `calibrate_cache`, by name: ``center``, ``factors``, ``values`` and so on.

    Returns:
        (formats, constants). The formats' ``report`` has KL, agreement, needles, bytes and every layer's losses.

    Raises:
        ValueError: no candidate fits the budget, a candidate stores keys in blocks, or the model has layers that
            cache other states than keys and values; or `calibrate_cache` refuses an argument.
    """
    if not isinstance(budget, (int, float)) or not 0 < budget <= 1:
        raise ValueError(f"budget: got {budget!r}, want a share of BF16's bytes, above 0 and at most 1")
    if others := layers_without_keys(model.config.get_text_config(decoder=True)):
        raise ValueError(f"model: got {type(model).__name__} with layers of {others}, want keys and values in all")
    moments = gather_moments(model, batches) if moments is None else moments
    shapes = [one.sizes or (0, 0, 0) for one in moments.layers]  # 0: those that read another layer's cache
    head_dim = next(dim for _, dim, _ in shapes if dim)
    pairs = [format_pair(one) for one in candidates or candidates_for(head_dim, model.dtype)]
    sizes, most = _sizes(pairs, shapes, budget)
    known = [calibrate_cache(model, batches, pair, moments=moments, **(calibration or {})) for pair in pairs]
    reads = [
        [_read(*one, layer, model.dtype) if shape[0] else None for one in zip(pairs, known, strict=True)]
        for layer, shape in enumerate(shapes)
    ]
    names, losses = [told(pair) for pair in pairs], []
    with _in_fp32(model):
        probes = Probes(model, batches, needles)
        for layer, candidate_reads in enumerate(reads):
            losses.append([0.0 if one is None else max(0.0, probes.loss({layer: one})[0]) for one in candidate_reads])
            if say is not None:
                found = ", ".join(f"{name} {loss:.1e}" for name, loss in zip(names, losses[-1], strict=True))
                say(f"layer {layer + 1} of {len(reads)}: KL {found}")
        whole = {name: (i,) * len(reads) for i, name in enumerate(names)} | {"mix": least_loss(losses, sizes, most)}
        measured: dict[str, dict[str, Any]] = {}
        for name, chosen in whole.items():
            kl, agreement = probes.loss({layer: reads[layer][i] for layer, i in enumerate(chosen)})
            size = sum(layer_sizes[i] for layer_sizes, i in zip(sizes, chosen, strict=True))
            share = size / _dense_bytes(shapes)
            measured[name] = {"bytes_per_token": size, "share": share, "kl": kl, "agreement": agreement}
        fitting = [name for name, one in measured.items() if one["bytes_per_token"] <= most]
        best = min(fitting, key=lambda name: (measured[name]["kl"], name != "mix"))  # of equal ones as it was measured
        hits, of = probes.needles({layer: reads[layer][i] for layer, i in enumerate(whole[best])})
    report = {
        "budget": budget,
        "chosen": best,
        **measured[best],
        "needles": {"found": hits, "of": of},
        "step_ms": None,  # `cute-kernels calibrate` measures it on a GPU
        "all_layers": measured,
        "layer_losses": {name: [row[i] for row in losses] for i, name in enumerate(names)},
    }
    formats = LayerFormats(tuple(pairs[i] for i in whole[best]), report)
    return formats, _merged(known, whole[best], formats)


def least_loss(losses: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], most: int) -> tuple[int, ...]:
    """Returns the index of a candidate for each layer: the choice with the smallest sum of losses among those whose
    sizes add up to at most ``most``.

    Raises ValueError if even the smallest candidates exceed ``most``.

    Examples:
        >>> least_loss([[0.0, 1.0], [0.0, 5.0]], [[4, 2], [4, 2]], 6)
        (1, 0)
    """
    reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by bytes: loss, and what was chosen
    for layer_losses, layer_sizes in zip(losses, sizes, strict=True):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (loss, chosen) in reached.items():
            for i, (more, size) in enumerate(zip(layer_losses, layer_sizes, strict=True)):
                total, one = used + size, (loss + more, (*chosen, i))
                if total <= most and (total not in found or one < found[total]):
                    found[total] = one
        reached, best = {}, math.inf
        for total in sorted(found):  # what nothing smaller beats
            if found[total][0] < best:
                reached[total], best = found[total], found[total][0]
    if not reached:
        raise ValueError(f"sizes: got at least {sum(min(layer) for layer in sizes)} bytes, want at most {most}")
    return min(reached.values())[1]


def _dense_bytes(shapes: Sequence[tuple[int, int, int]]) -> int:
    return sum(2 * heads * (k + v) for heads, k, v in shapes)


def _sizes(pairs: Sequence[Pair], shapes: Sequence[tuple[int, int, int]], budget: float) -> tuple[list[list[int]], int]:
    """Returns (sizes, most). sizes[layer][candidate]: bytes of a token's rows in that layer. most: bytes that a token
    may take in all layers together.

    Raises ValueError for too small a budget, and for candidates whose keys lie in blocks.
    """
    for pair in pairs:
        if any(format_of(name).in_blocks for name in pair):
            raise ValueError(f"candidates: got {told(pair)}, whose keys lie in blocks, want formats of rows")
    sizes = [
        [heads * sum(format_of(name).row_bytes(dim) for name, dim in zip(pair, dims, strict=True)) for pair in pairs]
        for heads, *dims in shapes
    ]
    dense = _dense_bytes(shapes)
    least = sum(map(min, sizes)) / dense
    if least > budget:
        raise ValueError(
            f"budget: got {budget:g}, want at least {math.ceil(1000 * least) / 1000:g}, what the smallest of "
            f"{', '.join(map(told, pairs))} takes in every layer"
        )
    return sizes, int(budget * dense * (1 + 1e-9))


def _read(pair: Pair, constants: CacheConstants, layer: int, dtype: torch.dtype) -> _Read | None:
    """Returns the `_Read` of a layer's cache in K's and V's formats; None for formats that keep a model's K and V of
    this dtype exactly."""
    k_format, v_format = map(format_of, pair)
    if all(not form.is_coded and form.cache_dtype == dtype for form in (k_format, v_format)):
        return None
    scales = constants.scales[layer] if constants.scales else (None, None)
    return _Read((k_format, v_format), constants.transforms[layer], scales)


def _merged(known: Sequence[CacheConstants], chosen: Sequence[int], formats: LayerFormats) -> CacheConstants:
    """Joins constants of all layers: for each layer, the constants of the candidate that was chosen for it."""
    transforms = tuple(known[i].transforms[layer] for layer, i in enumerate(chosen))
    scales = tuple(known[i].scales[layer] if known[i].scales else (None, None) for layer, i in enumerate(chosen))
    given = scales if any(scale is not None for pair in scales for scale in pair) else ()
    return CacheConstants(transforms, given, dict(known[0].about) | {"kv_format": told(formats)})
