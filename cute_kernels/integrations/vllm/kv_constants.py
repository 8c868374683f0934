"""Transforms of a calibrated cache for an engine's layers, from the file of `cute-kernels calibrate`, cut to a rank's
heads.

vLLM does not tell a layer's attention which layer it is. So transforms are set after the engine has made its caches,
before kernels are prepared and before anything is written to the caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.formats.scores.features import WIDEST_RESTORED
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import environment, kv_formats, prepare
from cute_kernels.kv_cache.config import other_rotation, row_transform_of
from cute_kernels.kv_cache.constants import CacheConstants


def give(layers: Mapping[str, Foreign], config: Foreign, device: torch.device) -> None:
    """Sets the transform of every layer of this package's attention. Does nothing if the environment names no file.

    Args:
        layers: the engine's layers by vLLM's names, which contain the layer's index.
        config: the engine's configuration.
        device: the device of the transforms' arrays.

    Raises:
        FileNotFoundError, ConstantsError, ValueError: the file or its contents do not fit the engine; the message names
            the environment's variable or the file, and the layer.
    """
    path = environment.wanted_constants()
    if path is None:
        return
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.models.utils import extract_layer_index

    constants = _read(path)
    there = config.model_config.hf_text_config.num_hidden_layers
    if constants.num_layers != there:
        raise ValueError(f"{path}: got constants of {constants.num_layers} layers, want the model's {there}")
    ranks = config.parallel_config.tensor_parallel_size
    rank = get_tensor_model_parallel_rank() if ranks > 1 else 0
    ours = {
        name: layer.impl
        for name, layer in layers.items()
        if getattr(getattr(layer, "impl", None), "takes_constants", False)
    }
    for name, impl in ours.items():
        if not kv_formats.is_own(impl.kv_cache_dtype):
            raise ValueError(
                f"{environment.CONSTANTS}: got {path} with --kv-cache-dtype {impl.kv_cache_dtype}, want auto and "
                f"{environment.KV_FORMAT}"
            )
        # A layer that reads another one's cache reads what that one has written.
        number = extract_layer_index(impl.kv_sharing_target_layer_name or name)
        if number >= there:
            raise ValueError(
                f"{path}: {name}: got constants of {there} layers, want the layer's, say of a drafting model"
            )
        transform = constants.transforms[number]
        if transform is None:
            impl.transform = None
            continue
        try:
            cut = own_heads(transform, impl.num_kv_heads, rank, ranks)
            cut.validate(impl.num_kv_heads, impl.head_size)
            _check_served(cut, impl.head_size, impl.soft_cap)
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from error
        impl.transform = kept(cut, device)


def kept(transform: CacheTransform, device: torch.device) -> CacheTransform:
    """Copies a transform to a device, outside of memory that a sleeping engine frees."""
    return prepare.outlasting(device, lambda: transform.to(device))


def own_heads(transform: CacheTransform, num_kv_heads: int, rank: int, ranks: int) -> CacheTransform:
    """Returns a layer's transform cut to the KV heads of one rank.

    Heads are distributed as in vLLM: each rank gets consecutive heads; if there are more ranks than heads, several
    ranks get the same head.

    Raises:
        ValueError: the numbers of heads and ranks do not fit the transform.
    """
    if not transform.arrays:
        return transform
    total = next(iter(transform.arrays.values())).shape[0]
    if num_kv_heads * ranks == total:
        first = rank * num_kv_heads
    elif num_kv_heads == 1 and ranks % total == 0:
        first = rank // (ranks // total)
    else:
        raise ValueError(f"got constants of {total} KV heads, want those of {ranks} ranks with {num_kv_heads} each")
    cut = {name: array[first : first + num_kv_heads].contiguous() for name, array in transform.arrays.items()}
    return replace(transform, **cut)


def kinds(kv_cache_dtype: str, num_kv_heads: int, head_size: int) -> list[CacheTransform | None]:
    """Returns one transform, on the CPU, for each set of kernels that a model's layers need."""
    path = environment.wanted_constants()
    if path is None or not kv_formats.is_own(kv_cache_dtype):
        return [kv_formats.transform_for(kv_cache_dtype, num_kv_heads, head_size)]
    return list({row_transform_of(one, shift=False): one for one in _read(path).transforms}.values())


def _read(path: Path) -> CacheConstants:
    constants = CacheConstants.load(path)
    if constants.scales:
        raise ValueError(f"{path}: got scales, which vLLM takes from its checkpoint, want transforms alone")
    return constants


def _check_served(transform: CacheTransform, head_size: int, soft_cap: float | None) -> None:
    """Raises ValueError for a transform that kernels do not support.

    There must be kernels for its rotations, and attention must be able to undo V's rotation in its own launch. Extend
    attention does not support centred keys with a soft cap.
    """
    if soft_cap is not None and transform.k_center is not None:
        raise ValueError(f"k_center: got one with a soft cap of {soft_cap}, want none (calibrate --no-center)")
    for name, width in (("k_rotation", transform.k_rotation), ("v_rotation", transform.v_rotation)):
        if (wanted := other_rotation(width, head_size)) is not None:
            raise ValueError(f"{name}: got {width}, want {wanted}")
    if transform.v_rotation > WIDEST_RESTORED:
        raise ValueError(f"v_rotation: got {transform.v_rotation}, want at most {WIDEST_RESTORED}")
