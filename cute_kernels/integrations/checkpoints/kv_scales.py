"""The KV cache scales with which a checkpoint was calibrated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cute_kernels.integrations.checkpoints.headers import Entry, read_json

# ModelOpt and compressed-tensors put them on the attention (Nemotron-H's mixer) or on a projection; the latter's first
# releases on the projections' outputs.
_KEY = re.compile(
    r"(?:^|\.)layers\.(\d+)\.(?:[a-z_]+\.)*?(?:attn|attention|self_attn|mixer)\."
    r"(?:(?:(?:[kv]|qkv)_proj\.)?(?P<which>[kv])_scale|(?P<projection>[kv])_proj\.output_scale|(?P<both>kv_scale))$"
)
# Layers of encoders, and those that predict further tokens, have numbers of their own and no part of the model's cache.
_OTHERS = re.compile(r"vision|visual|audio|encoder|mtp")
_FORMATS = {("float", 8): "e4m3", ("int", 8): "int8"}


@dataclass(frozen=True)
class KvScale:
    """The scales of a layer's cache: keys are k times the cached numbers, values are v times the cached numbers.

    Args:
        k, v: fp32, [1] or [kv heads].
        stored_as: "e4m3" or "int8", the format that the checkpoint declares; None if it declares none.
    """

    k: torch.Tensor
    v: torch.Tensor
    stored_as: str | None


def scale_keys(entries: Mapping[str, Entry]) -> set[str]:
    """Returns the names of tensors that are scales of a cache, or of an attention's queries and probabilities."""
    extra = re.compile(r"(?:attn|attention|self_attn)\.(?:[a-z_]*_)?(?:q|prob|k|v|kv)_(?:scale|zero_point)$")
    return {key for key in entries if _KEY.search(key) or extra.search(key)}


def kv_scales_of(entries: Mapping[str, Entry], path: Path) -> dict[int, KvScale]:
    """Reads the scales of a checkpoint's cache by layer. Raises ValueError if a layer has a scale for only one of k and
    v, or a scale that is not positive."""
    keys: dict[int, dict[str, str]] = {}
    for key in sorted(entries):
        if (found := _KEY.search(key)) and not _OTHERS.search(key):
            for which in found["which"] or found["projection"] or "kv":
                keys.setdefault(int(found[1]), {})[which] = key
    if not keys:
        return {}
    from safetensors import safe_open

    stored_as = _stored_as(path)
    scales: dict[int, KvScale] = {}
    for layer, own in sorted(keys.items()):
        read: dict[str, torch.Tensor] = {}
        for which in ("k", "v"):
            if which not in own:
                raise ValueError(f"{next(iter(own.values()))}: got it without the other of k and v, want both")
            with safe_open(entries[own[which]].file, framework="pt", device="cpu") as file:
                tensor = file.get_tensor(own[which]).float().reshape(-1)
            if not bool(((tensor > 0) & tensor.isfinite()).all()):
                raise ValueError(f"{own[which]}: got {tensor.tolist()[:4]}, want positive numbers")
            read[which] = tensor
        scales[layer] = KvScale(read["k"], read["v"], stored_as)
    return scales


def _stored_as(path: Path) -> str | None:
    """Returns the cache format that a checkpoint declares: in ModelOpt's file, or else in kv_cache_scheme."""
    from cute_kernels.integrations.checkpoints.configuration import read_config

    file = (path if path.is_dir() else path.parent) / "hf_quant_config.json"
    scheme = None if file.exists() else read_config(path).get("kv_cache_scheme")
    if file.exists():
        said = read_json(file).get("quantization")
        algorithm = said.get("kv_cache_quant_algo") if isinstance(said, Mapping) else None
        return {"FP8": "e4m3", "INT8": "int8"}.get(str(algorithm).upper())
    if not isinstance(scheme, Mapping):
        return None
    if scheme.get("symmetric", True) is not True:
        raise ValueError("kv_cache_scheme: got zero points (symmetric is false), want a symmetric scheme")
    kind: Any = scheme.get("type"), scheme.get("num_bits")
    if kind not in _FORMATS:
        raise ValueError(f"kv_cache_scheme: got {kind[1]!r} bits of type {kind[0]!r}, want 8 of 'float' or 'int'")
    return _FORMATS[kind]
