"""A whole transformers model that decodes by the kernels: attention, cache, layers, and its steps as CUDA graphs."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from cute_kernels import arguments
from cute_kernels.attention.tiles import cannot_read
from cute_kernels.formats.kv import HEAD_DIMS, check_layers, format_of, told_formats
from cute_kernels.formats.weights import weight_format
from cute_kernels.gemm import QuantizedLinear
from cute_kernels.gemm.operands.fp8_config import check_activations
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.integrations import hf_quantizer
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.transformers.attend import attention
from cute_kernels.integrations.transformers.cache import DecodeCache
from cute_kernels.integrations.transformers.cache_layer import ATTENTION_NAME
from cute_kernels.integrations.transformers.cache_options import (
    LATENT_FORMATS,
    FormatOfLayers,
    Scales,
    Transforms,
    constants_for,
    formats_of_layer,
    told,
)
from cute_kernels.integrations.transformers.columns import GRANULE, Columns
from cute_kernels.integrations.transformers.fuse import Fused, add_routers, fuse, restore_blocks
from cute_kernels.integrations.transformers.graphs import StepReplay, owner_of
from cute_kernels.integrations.transformers.known_code import (
    CACHE_ARGUMENTS,
    cache_argument,
    cache_in,
    computes_attention,
    layers_without_keys,
)
from cute_kernels.integrations.transformers.latents import (
    caches_latents,
    latents_refusal,
    replace_expansions,
    restore_expansions,
)
from cute_kernels.integrations.transformers.masks import make_mask
from cute_kernels.integrations.transformers.norms import replace_norms, restore_norms
from cute_kernels.model_layers import check_skip, compiled_from, is_dense
from cute_kernels.models import quantize_model
from cute_kernels.names import ModelActivations

_LOG = logging.getLogger(__name__)
_STATE = "_cute_kernels"
_DEFAULT_CACHES = (None, "dynamic", "hybrid")
"""Values of ``cache_implementation`` that ask for no particular cache. transformers treats "hybrid", which Gemma 2 and
3 have, as None."""


def register() -> None:
    """Makes `attn_implementation="cute_kernels"` and models saved after `quantize_model` known to transformers.

    Calling it again changes nothing.
    """
    hf_quantizer.register()
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, make_mask)


@dataclass(frozen=True)
class Acceleration:
    """A summary of the changes that `accelerate` made to a model; printed as a table.

    Attributes:
        rows: (part of the model, before, after) for each change.
        notes: the changed layers, and the unchanged ones with reasons.
    """

    model: str
    rows: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        table = [(self.model, "before", "after"), *self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, *self.notes])


def accelerate(
    model: nn.Module,
    *,
    kv_format: FormatOfLayers | None = ("int8_token_head", "int4_g4"),
    weights: str | None = None,
    activations: ModelActivations | None = None,
    skip: Sequence[str] = ("lm_head",),
    output_layer: str | None = None,
    scales: Scales | None = None,
    kv_transform: Transforms | None = None,
    max_seq_len: int | None = None,
    cuda_graphs: bool = True,
    fuse_blocks: bool = True,
    fuse_routers: bool = False,
) -> Acceleration:
    """Makes a transformers model decode with these kernels. Calls of ``model.generate(**inputs)`` need no change.

    Attention becomes ``attn_implementation="cute_kernels"``. `generate` keeps its keys and values in a `DecodeCache`
    unless a call gives another cache, or asks for none. RMS norms are one launch each. On a GPU a decode step is
    recorded as a CUDA graph and replayed. A second call on the same model changes formats, and quantises weights that
    are still dense.

    Args:
        model: a `PreTrainedModel` that generates, in bf16 or fp16, on the device where it runs; or its result of
            torch.compile.
        kv_format: the cache's format, as `DecodeCache` takes it. With the default a model's answers stay the same
            (docs/accuracy.md). None: transformers' own caches are used.
        weights: the format of Linear layers and experts, as `quantize_weight` takes it: "w4g128", "w8gchannel",
            "w4g64z" (bits, group size or one scale per row, z for zero points), "mxfp4", "nvfp4", "fp8". None leaves
            them as they are.
        activations: the activations of the layers that ``weights`` quantises, as `quantize_model` takes them. Layers
            that were loaded quantised keep their own.
        skip: layers that stay as they are, as `quantize_model` takes them.
        output_layer: the format of the layer that makes logits, written as for ``weights``; None leaves it to
            ``weights`` and ``skip``. It is the largest layer, and its rounding errors reach the logits directly:
            "w8g128" halves its bytes.
        scales: for formats with a scale beside the cache, as `DecodeCache` takes them.
        kv_transform: the transform of K and V before they are written, as `DecodeCache` takes it, such as the constants
            that `cute-kernels calibrate` finds.
        max_seq_len: the largest number of columns of a request; None: no limit.
        cuda_graphs: whether decode steps are recorded; never with CUTE_KERNELS_DEBUG=1, which checks every call.
        fuse_blocks: whether blocks of known models run in fewer launches: projections of one input as one, rotation in
            the append, SwiGLU in its product, sums in norms. Each block is first compared, on noise, with the model's
            own code.
        fuse_routers: whether `cute_kernels.gemm.experts.route` computes the routers of quantised experts whose code is
            known: Mixtral, Qwen3-MoE, gpt-oss, DeepSeek V3 and V4, GLM-4.5. Their logits stay in fp32, so a different
            expert may be chosen if logits are equal in 16 bits. Not yet timed in `generate`.

    Returns:
        A summary of what was done; it is logged as well.

    Raises:
        TypeError, ValueError: an argument is wrong, or the model cannot decode by the kernels; the message says why,
            and nothing has been changed. A weight that cannot be quantised is found later, as in `quantize_model`.
    """
    model = compiled_from(model)
    config = _checked_config(model)
    check_skip(model, skip)
    if kv_format is None and kv_transform is not None:
        raise ValueError("kv_transform: got one with kv_format None, want None: transformers' caches know of none")
    if kv_format is not None:
        kv_format = told_formats(kv_format)
        scales, kv_transform = constants_for(scales, kv_transform)
        DecodeCache(kv_format, max_seq_len, scales=scales, kv_transform=kv_transform)  # which checks them
        _check_cacheable(cast("PreTrainedModel", model), config, kv_format)
    quantisation = None if weights is None else _weight_options("weights", weights, model)
    if activations is not None and quantisation is None:
        raise ValueError(f"activations: got {activations!r} with weights None, want None, or a format of weights")
    if quantisation is not None and activations != "16bit":
        check_activations(activations, None, quantisation["format"])
        quantisation["activations"] = activations
    output = None
    if output_layer is not None:
        output = _output_name(model), _weight_options("output_layer", output_layer, model)
    before = config._attn_implementation
    cuda_graphs = cuda_graphs and not arguments.DEBUG  # whose checks wait for the device, which no recording does
    register()
    _set_attention(model, config)
    restore_blocks(model)
    rows = [("attention", str(before), ATTENTION_NAME)]
    old = getattr(model, _STATE, None)
    if isinstance(old, _State):
        old.remove()
    make_cache = None
    if kv_format is not None:
        make_cache = functools.partial(DecodeCache, kv_format, max_seq_len, scales=scales, kv_transform=kv_transform)
    state = _State(model, make_cache, cuda_graphs)
    state.install()
    is_chosen = kv_format is not None and state.wants_cache({})
    rows.append(("cache", "transformers'", told(kv_format) if is_chosen else "as before"))
    norms = replace_norms(model)
    rows.append(("RMS norms", "several launches", f"one launch each of {norms}" if norms else "as before"))
    rows.append(
        ("decode step", "launched anew", "recorded once, replayed (GPU)" if cuda_graphs and is_chosen else "as before")
    )
    notes: list[str] = []
    if quantisation is None:
        rows.append(("layers", "as loaded", "as before"))
        loaded = vars(model).get("quantization_report")
        notes = [] if loaded is None else str(loaded).splitlines()
    else:
        # Steps read the projection of latents as it is.
        left = (*skip, "kv_b_proj") if any(map(caches_latents, model.modules())) else skip
        report = vars(quantize_model(model, **quantisation, skip=left))["quantization_report"]
        total = len(report.quantized) + len(report.left)
        rows.append(("layers", f"{total} with weights", f"{len(report.quantized)} of them {weights}"))
        notes = str(report).splitlines()
    if output is not None:
        rows.append(("output layer", "as loaded", _quantise_output(model, *output)))
    fused = fuse(model, kv_format, scales) if fuse_blocks else Fused()
    if fuse_routers:
        add_routers(model, fused)
    rows.append(("blocks", "an operator a launch", f"fused: {fused}" if str(fused) else "as before"))
    notes += [f"left: {reason}" for reason in fused.reasons]
    if kv_format is not None and not is_chosen:
        said = {name: _asked(model, {}, name) for name in ("use_cache", "cache_implementation")}
        notes.append(f"generate keeps to the model's generation_config, whatever kv_format says: {said}")
    summary = Acceleration(type(model).__name__, tuple(rows), tuple(notes))
    _LOG.info("%s", summary)
    return summary


def restore(model: nn.Module) -> None:
    """Undoes `accelerate`: the model gets its own ``generate``, ``forward``, blocks and norms back. Quantised weights
    and the attention implementation stay.
    """
    model = compiled_from(model)
    restore_blocks(model)
    restore_norms(model)
    state = getattr(model, _STATE, None)
    if isinstance(state, _State):
        state.remove()


class _State:
    """The state that `accelerate` adds to a model: the model's own methods, and the memory of caches that `generate`
    has released.
    """

    def __init__(self, model: Foreign, make_cache: functools.partial[DecodeCache] | None, graphs: bool) -> None:
        self.make_cache = make_cache
        self.generate, self.forward = model.generate, model.forward
        self.own = {name: vars(model)[name] for name in ("generate", "forward") if name in vars(model)}
        self.replay = StepReplay(model.forward) if graphs and make_cache is not None else None
        self.spare: list[tuple[list[Any], Any]] = []

    @property
    def model(self) -> Any:
        """The model whose state this is."""
        return owner_of(self.generate)

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        """Returns the state for a copy of the model. The new state has the copy's own methods, and holds no memory of a
        cache.
        """
        memo[id(self)] = copied = object.__new__(_State)
        vars(copied).update(vars(self))
        copied.generate, copied.forward, copied.replay = deepcopy((self.generate, self.forward, self.replay), memo)
        copied.spare = []
        return copied

    def __reduce__(self) -> NoReturn:
        raise TypeError("model: got an accelerated model to pickle, want restore(model) before, or save_pretrained")

    def install(self) -> None:
        """Replaces the model's methods."""
        model = self.model
        setattr(model, _STATE, self)
        if self.make_cache is None:
            return
        replace_expansions(model)
        if self.replay is not None:
            model.forward = self.replay
        model.generate = _Generate(self)

    def remove(self) -> None:
        """Gives the model its own methods back."""
        model = self.model
        restore_expansions(model)
        for name in ("generate", "forward", _STATE):
            model.__dict__.pop(name, None)
        vars(model).update(self.own)

    def wants_cache(self, options: Mapping[str, Any]) -> bool:
        """Returns whether a call of ``generate`` leaves the choice of a cache to `accelerate`."""
        if cache_in(options) is not None or _asked(self.model, options, "use_cache") is False:
            return False
        return _asked(self.model, options, "cache_implementation") in _DEFAULT_CACHES

    def cache_for(self, batch: int, columns: int) -> DecodeCache:
        """Returns an empty cache. It uses the memory of a released cache if that is large enough."""
        columns = -(-columns // GRANULE) * GRANULE
        found = self.spare.copy()
        self.spare.clear()
        for layers, book in found:
            held: Columns | None = book.columns
            if held is not None and held.batch == batch and held.capacity >= columns:
                cache = DecodeCache.over(layers, book)
                break
        else:
            del found  # before new memory is taken
            assert self.make_cache is not None
            cache = self.make_cache(capacity=columns)
        weakref.finalize(cache, self.spare.append, (cache.layers, cache.book)).atexit = False
        return cache


class _Generate:
    """An accelerated model's ``generate``."""

    def __init__(self, state: _State) -> None:
        self.state = state
        functools.update_wrapper(self, state.generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generates as the model's own ``generate`` does."""
        state, model = self.state, self.state.model
        if state.wants_cache(kwargs):
            if _asked(model, kwargs, "cache_implementation") is not None:
                kwargs["cache_implementation"] = None  # transformers takes either a cache or its name
            kwargs[cache_argument(state.forward)] = state.cache_for(*_sizes(model, args, kwargs))
        if state.replay is None:
            return state.generate(*args, **kwargs)
        cache, columns = cache_in(kwargs), 0
        if is_greedy(model, kwargs):
            _, columns = _sizes(model, args, kwargs)
        with state.replay.within_generate(cache, columns):
            return state.generate(*args, **kwargs)


def is_greedy(model: Foreign, options: Mapping[str, Any]) -> bool:
    """Returns whether a call of `generate` chooses the likeliest token of each request at every step: without sampling,
    beams or drafts.
    """
    drafts = _asked(model, options, "prompt_lookup_num_tokens") or options.get("assistant_model") is not None
    chooses = _asked(model, options, "do_sample") or _asked(model, options, "num_beams") not in (None, 1)
    return not drafts and not chooses


def _asked(model: Foreign, options: Mapping[str, Any], name: str) -> Any:
    """Returns an option of a call of `generate`: the call's argument, else the value in the call's configuration, else
    the model's own value."""
    if name in options:
        return options[name]
    configs = (options.get("generation_config"), getattr(model, "generation_config", None))
    return next((value for each in configs if (value := getattr(each, name, None)) is not None), None)


def _sizes(model: Foreign, args: Sequence[object], options: Mapping[str, Any]) -> tuple[int, int]:
    """Returns (requests, columns) that a call of `generate` is expected to reach. If the call needs more columns, the
    cache grows."""

    def asked(name: str, default: int) -> int:
        return _asked(model, options, name) or default

    given = [options.get(name) for name in ("input_ids", "inputs", "inputs_embeds")] + list(args[:1])
    prompt = next((x for x in given if isinstance(x, torch.Tensor)), None)
    batch, length = (1, 1) if prompt is None else prompt.shape[:2]
    batch *= max(asked("num_beams", 1), asked("num_return_sequences", 1))
    new = asked("max_new_tokens", 0)
    return batch, length + new if new else max(asked("max_length", 0), length + 20)


def _checked_config(model: Any) -> Any:
    """Returns the configuration of the part that generates. Raises TypeError for a model that does not generate,
    ValueError for an encoder with a decoder."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config") or not hasattr(model, "generate"):
        raise TypeError(f"model: got {type(model).__name__}, want a transformers model that generates")
    config: Any = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"model: got {type(model).__name__}, an encoder and a decoder, want a decoder alone")
    return config.get_text_config(decoder=True)


def _check_cacheable(model: PreTrainedModel, config: Foreign, kv_format: object) -> None:
    """Raises TypeError or ValueError, naming the model, unless its keys and values fit a cache of this format."""
    name = type(model).__name__
    if model.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"model: got {name} in {model.dtype}, want torch.bfloat16 or torch.float16")
    devices = {str(weight.device) for weight in model.parameters()}
    if len(devices) > 1:
        raise ValueError(f"model: got {name} on {', '.join(sorted(devices))}, want it on one device")
    if others := layers_without_keys(config):
        raise ValueError(f"model: got {name} with layers of {others}, want kv_format=None for it")
    own = {type(part).__name__ for part in model.modules() if _caches_for_itself(part)}
    if own:
        kinds = ", ".join(sorted(own))
        raise ValueError(f"model: got {name}, whose {kinds} computes attention itself, want kv_format=None for it")
    if crossing := getattr(config, "cross_attention_layers", None):
        raise ValueError(f"model: got {name} with cross-attention in layers {crossing}, want kv_format=None for it")
    if _checked_latents(model, kv_format):
        return
    head_dims = _head_dims(config)
    for head_dim in head_dims - {*HEAD_DIMS}:
        wanted = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"model: got {name} with head_dim {head_dim}, want one of {wanted}, or kv_format=None")
    check_layers(kv_format, config.num_hidden_layers)
    for layer in range(config.num_hidden_layers):
        for form in map(format_of, formats_of_layer(kv_format, layer)):
            if not form.fits(model.dtype):
                raise TypeError(f"kv_format: got {form.name!r}, want the format of the model's {model.dtype}")
            reasons = [cannot_read(form, head_dim) for head_dim in head_dims]
            if reasons and all(reasons):
                raise ValueError(f"kv_format: got {form.name!r}, want a format for the model's heads: {reasons[0]}")


def _caches_for_itself(part: nn.Module) -> bool:
    """Returns whether a layer takes the cache as an argument and computes attention over it by its own operators."""
    return computes_attention(type(part)) and any(
        name in CACHE_ARGUMENTS for name in inspect.signature(part.forward).parameters
    )


def _head_dims(config: Foreign) -> set[int]:
    """Returns the head_dims that a model's configuration gives for its layers."""
    # transformers lets fields differ by layer (Gemma 4's head_dim): only the layers' configurations have them then.
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else (config,)
    found: set[int] = set()
    for each in layers:
        heads = getattr(each, "num_attention_heads", None)
        head_dim = getattr(each, "head_dim", None) or (each.hidden_size // heads if heads else None)
        if isinstance(head_dim, int) and not hasattr(each, "qk_nope_head_dim"):
            found.add(head_dim)
    return found


def _checked_latents(model: nn.Module, kv_format: object) -> bool:
    """Returns whether a model caches latents. Raises ValueError if ``kv_format`` is no format for what the model
    caches, or if `mla_decode` does not support the model's latents."""
    name = type(model).__name__
    found = [module for module in model.modules() if caches_latents(module)]
    wants_latents = isinstance(kv_format, str) and kv_format in LATENT_FORMATS
    if not found:
        if wants_latents:
            raise ValueError(f"kv_format: got {kv_format!r}, want a format of keys and values: {name} has no latents")
        return False
    for module in found:
        kind = type(module).__name__
        if (reason := latents_refusal(module)) is not None:
            raise ValueError(f"model: got {name}, whose {kind} {reason}; it caches latents, want kv_format=None for it")
        if not wants_latents:
            wanted = ", ".join(map(repr, LATENT_FORMATS))
            raise ValueError(
                f"kv_format: got {kv_format!r} for {name}, whose {kind} caches latents, want one of {wanted}, or None"
            )
    return True


def _set_attention(model: Foreign, config: Foreign) -> None:
    """Sets the attention implementation.

    Raises ValueError, and changes nothing, for a model that offers no choice of attention.
    """
    model.set_attn_implementation(ATTENTION_NAME)
    if config._attn_implementation != ATTENTION_NAME:
        raise ValueError(
            f"model: got {type(model).__name__}, which offers no choice of attention, want a model that calls "
            "transformers' AttentionInterface"
        )


def _output_name(model: Foreign) -> str:
    """Returns the qualified name of the layer that makes logits. Raises ValueError if that layer is no Linear."""
    found = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is found and (isinstance(module, QuantizedLinear) or is_dense(module)):
            return name
    raise ValueError(f"output_layer: got {type(model).__name__}, whose logits no Linear makes, want None")


def _quantise_output(model: nn.Module, name: str, options: dict[str, Any]) -> str:
    """Quantises the layer that makes logits, unless it already is. Returns the layer's format."""
    if not isinstance(model.get_submodule(name), QuantizedLinear):
        others = [other for other, _ in model.named_modules() if other != name]
        quantize_model(model, **options, skip=others)
    layer = model.get_submodule(name)
    assert isinstance(layer, QuantizedLinear)
    return layer.weight_format.key


def _weight_options(argument: str, weights: object, model: nn.Module) -> dict[str, Any]:
    """Returns the arguments of `quantize_model` for a format such as "w4g128" or "mxfp4"."""
    if not isinstance(weights, str):
        raise TypeError(f"{argument}: got {type(weights).__name__}, want a str such as 'w4g128' or 'mxfp4', or None")
    form = weight_format(weights, argument)
    dtype = cast("PreTrainedModel", model).dtype
    if DTYPES.get(dtype, form.dtypes[0]) not in form.dtypes:
        raise TypeError(f"{argument}: got {weights!r} for a model in {dtype}, want {' or '.join(form.dtypes)} for it")
    return {"format": form}
