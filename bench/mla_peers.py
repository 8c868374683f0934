"""Other libraries' MLA decode, as data: whether each is here, what it refuses, how it takes our tensors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from bench.mla_workloads import SOFTMAX_SCALE, MlaInputs, MlaShape
from cute_kernels.mla.formats import V_DIM, format_of

Result = tuple[torch.Tensor, torch.Tensor]  # out [batch, q_len, num_heads, 512], lse [batch, q_len, num_heads]


@dataclass(frozen=True)
class Prepared:
    """A peer's call on one set of inputs; ``result`` turns what it returns into ours. label: how it is called."""

    call: Callable[[], Any]
    result: Callable[[Any], Result]
    label: str = ""


@dataclass(frozen=True)
class MlaPeer:
    """`missing` says why the peer is not here (None: it is); `refuses` why it has nothing for a shape."""

    name: str
    missing: Callable[[], str | None]
    refuses: Callable[[MlaShape], str | None]
    prepare: Callable[[MlaInputs], Prepared]


FLASH_MLA = "FlashMLA"
# Its own package, and the copy that vLLM's wheels bring along (on PYTHONPATH, or installed).
_FLASH_MLA_MODULES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface")
_FLASH_MLA_SPARSE_HEADS = 64  # its sparse kernels for Hopper take multiples of them


def import_flash_mla(modules: Iterable[str] = _FLASH_MLA_MODULES) -> Any:
    """The module of FlashMLA's calls; ImportError lists what became of each place."""
    reasons = []
    for name in modules:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a library of another torch fails in its own ways
            reasons.append(f"import {name}: {type(error).__name__}: {' '.join(str(error).split())[:150]}")
            continue
        if hasattr(module, "flash_mla_with_kvcache"):
            return module
        reasons.append(f"import {name}: no flash_mla_with_kvcache in it")
    raise ImportError("; ".join(reasons))


def flash_mla_peer(load: Callable[[], Any] = import_flash_mla) -> MlaPeer:
    """FlashMLA, whose module ``load`` gives or says in an ImportError why there is none; it is asked once."""
    load = functools.cache(load)

    def missing() -> str | None:
        try:
            load()
        except ImportError as error:
            return f"not installed: {error}"
        return None

    return MlaPeer(FLASH_MLA, missing, _flash_mla_refuses, lambda inputs: _prepare_flash_mla(load(), inputs))


def _flash_mla_refuses(shape: MlaShape) -> str | None:
    if shape.suite == "dense" and not format_of(shape.kv_format).is_dense:
        return "no dense decode over FP8 tokens"
    return None


def _prepare_flash_mla(module: Any, inputs: MlaInputs) -> Prepared:
    """Its schedule is made by the first call and kept, as the layers of a model do.

    Sparse decode is given queries padded to the heads that it wants, before any timing.
    """
    heads = inputs.shape.num_heads
    if inputs.shape.shared:
        return _prepare_prefill(module, inputs)
    metadata, _ = module.get_mla_metadata()
    common = {"head_dim_v": V_DIM, "tile_scheduler_metadata": metadata, "softmax_scale": SOFTMAX_SCALE}
    cache = inputs.cache.unsqueeze(2)
    if inputs.indices is None:
        given = {"q": inputs.q, "k_cache": cache, "block_table": inputs.block_table, "cache_seqlens": inputs.seq_lens}
        call = functools.partial(module.flash_mla_with_kvcache, **given, **common, causal=True)
        return Prepared(call, functools.partial(_first_heads, heads))
    missing = -heads % _FLASH_MLA_SPARSE_HEADS
    q = torch.nn.functional.pad(inputs.q, (0, 0, 0, missing)).contiguous()
    given = {"q": q, "k_cache": cache, "block_table": None, "cache_seqlens": None, "indices": inputs.indices}
    call = functools.partial(module.flash_mla_with_kvcache, **given, **common, is_fp8_kvcache=True)
    label = f"padded to {heads + missing} heads" if missing else ""
    return Prepared(call, functools.partial(_first_heads, heads), label)


def _prepare_prefill(module: Any, inputs: MlaInputs) -> Prepared:
    """Its call for the queries of one prompt, whose lse is ours, between the greatest scores and the output."""
    assert inputs.indices is not None
    kv = inputs.cache.flatten(0, 1).unsqueeze(1)
    call = functools.partial(module.flash_mla_sparse_fwd, inputs.q[:, 0], kv, inputs.indices, SOFTMAX_SCALE)
    return Prepared(call, lambda result: (result[0].unsqueeze(1), result[2].unsqueeze(1)), "flash_mla_sparse_fwd")


def _first_heads(heads: int, result: Result) -> Result:
    """FlashMLA's lse is [batch, num_heads, q_len]."""
    out, lse = result
    return out[:, :, :heads], lse.transpose(1, 2)[:, :, :heads]


PEERS = (flash_mla_peer(),)
