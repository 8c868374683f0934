"""Loading of a running model from a checkpoint directory, in one call.

Memory never holds more than the model and one layer. No code of a checkpoint is run: weights are read from safetensors
only, and a model whose code is in the directory is refused.
"""

from __future__ import annotations

import math
from os import PathLike
from typing import Any

import torch

from cute_kernels.gemm.experts.module import OfExperts
from cute_kernels.gemm.module import ModelProgress, QuantizedLinear
from cute_kernels.integrations.checkpoints.activations import E4M3, Declared, Rounding
from cute_kernels.integrations.checkpoints.configuration import Config
from cute_kernels.integrations.checkpoints.files import left_in, look_into, path_of
from cute_kernels.integrations.checkpoints.headers import read_headers
from cute_kernels.integrations.checkpoints.kv_scales import KvScale, kv_scales_of, scale_keys
from cute_kernels.integrations.checkpoints.layer_formats import OWN
from cute_kernels.model_config import METHOD, record_layers
from cute_kernels.model_report import QuantizationReport, ReportedLayer
from cute_kernels.models import reported
from cute_kernels.names import ModelActivations
from cute_kernels.runtime.device import device_of


def load_model(
    path: str | PathLike[str],
    *,
    config: Config | None = None,
    model_class: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    progress: ModelProgress | None = None,
    activations: ModelActivations | None = None,
) -> Any:
    """Loads a directory's transformers model, with its quantised layers packed.

    Args:
        path: a directory with config.json and safetensors files, in a format of `load_safetensors`, or written by
            `save_pretrained` of a quantised model.
        config: the quantisation configuration, default that of the directory.
        model_class: a model class of transformers, or an Auto class; default: the class that config.json names first in
            "architectures". A model without a head ignores a head's tensors.
        dtype: dtype of activations and of all tensors that are not quantised, bf16 or fp16; default: that of
            config.json, else bf16. The layers' scales are rounded to this dtype.
        device: where the model is put, default the CPU.
        attn_implementation: as for `from_pretrained`.
        progress: called after each quantised layer with its name, the number of layers done and the number of all
            layers.
        activations: as for `load_safetensors`. A model that `save_pretrained` wrote declares the activations it had.

    Returns:
        The model, in evaluation mode, as `from_pretrained` returns it, with the directory's generation_config.json.
        ``model.kv_scales`` has the checkpoint's scales of the KV cache (`read_kv_scales`), or {} if it has none.
        ``model.quantization_report`` is the report of `load_quantized_linears`.

    Raises:
        FileNotFoundError: there is no config.json, or no safetensors file.
        ImportError: transformers is not there.
        TypeError, ValueError: as `load_quantized_linears`; or a tensor is missing or left over, or the model needs code
            from the directory. The message names it.
    """
    path = path_of(path)
    if not path.is_dir() or not (path / "config.json").exists():
        raise FileNotFoundError(f"path: got {path}, want a directory with config.json and safetensors files")
    device = device_of(device)
    entries, quantization, found = look_into(path, config, activations)
    try:
        from cute_kernels.integrations.checkpoints.skeleton import Import, class_of, dtype_of, generate_as_said
        from cute_kernels.integrations.transformers import register
    except ImportError as error:
        raise ImportError("path: making a model of a directory wants transformers: pip install transformers") from error
    settings, model_class = class_of(path, model_class)
    dtype = dtype_of(settings, dtype)
    scales = kv_scales_of(entries, path)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    register()
    if quantization.get("quant_method") == METHOD and all(form is OWN for form in found.values()):
        model = model_class.from_pretrained(path, dtype=dtype, trust_remote_code=False, **options)
        _round_saved(model, activations)
    else:
        own_options = {"dtype": dtype, "device": device, "activations": activations}
        task = Import(entries, found, quantization, own_options, progress)
        model = task.model(model_class, settings, scale_keys(entries), options)
        model.config.name_or_path = model.name_or_path = str(path)
        generate_as_said(model, path)
    if device is not None:
        model.to(device)
    model.kv_scales = scales
    return model


def _round_saved(model: torch.nn.Module, asked: ModelActivations | None) -> None:
    """Makes a saved model's layers round activations as the caller asks or, by default, as they were saved. Reports the
    layers.
    """
    done: list[ReportedLayer] = []
    for name, layer in model.named_modules():
        if isinstance(layer, (QuantizedLinear, OfExperts)):
            note = Rounding(asked, None if layer.activations is None else Declared(E4M3)).set(layer)
            before = sum(2 * math.prod(one.shape) * one.codes.shape[:-3].numel() for one in layer.parts)
            done.append(reported(name, layer, layer, before, note))
    if asked is not None:
        record_layers(model)
    vars(model)["quantization_report"] = QuantizationReport(tuple(done), left_in(model))


def read_kv_scales(path: str | PathLike[str]) -> dict[int, KvScale]:
    """Reads the scales of the KV cache from the checkpoint at ``path``, by layer; {} if it has none.

    The scales are `k_scale` and `v_scale` (ModelOpt's and vLLM's names, compressed-tensors' `kv_cache_scheme`). Each
    has one element, or one for each head. Keys are k_scale times the cached numbers.

    Raises:
        As `load_safetensors`, and ValueError for a layer that has only one of `k_scale` and `v_scale`, or a scale that
        is not positive.
    """
    path = path_of(path)
    return kv_scales_of(read_headers(path), path)
