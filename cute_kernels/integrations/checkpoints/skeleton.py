"""Makes the transformers model of a checkpoint.

transformers makes the skeleton, a model without weights, and loads the tensors that are not quantised. Packed layers
are read one at a time and put straight into their places.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn

from cute_kernels.gemm.experts.stored import NAMES
from cute_kernels.gemm.module import ModelProgress
from cute_kernels.gemm.weight import SCALE_DTYPES
from cute_kernels.integrations.checkpoints.configuration import Config
from cute_kernels.integrations.checkpoints.files import Filling
from cute_kernels.integrations.checkpoints.gpt_oss import common_settings, is_original
from cute_kernels.integrations.checkpoints.headers import Entry, Headers, read_json
from cute_kernels.integrations.checkpoints.layer_formats import LayerFormat, join
from cute_kernels.integrations.hf_quantizer import CuteKernelsConfig, register
from cute_kernels.integrations.objects import Foreign
from cute_kernels.model_config import record_layers, untie_quantised


def class_of(path: Path, model_class: Any) -> tuple[Any, Any]:
    """Returns transformers' configuration and the model's class; neither comes from code in the directory."""
    said = read_json(path / "config.json")
    if is_original(said):
        settings = transformers.GptOssConfig(**common_settings(said))
        return settings, model_class or transformers.GptOssForCausalLM
    try:
        settings = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        kind = said.get("model_type")
        raise ValueError(
            f"config.json: got model_type {kind!r}, want one that transformers has itself ({error})"
        ) from error
    names = said.get("architectures") or [None]
    found: Any = model_class or getattr(transformers, str(names[0]), None)
    if hasattr(found, "_model_mapping"):  # of an Auto class
        found = found._model_mapping.get(type(settings), None)
        named = {kind.__name__: kind for kind in (found if isinstance(found, (tuple, list)) else [found]) if kind}
        found = next((named[name] for name in names if name in named), next(iter(named.values()), None))
        if found is None:
            kind, wanted = model_class.__name__, type(settings).__name__
            raise ValueError(f"model_class: got {kind}, which has no model for {wanted}, want one that has")
        if found.config_class is settings.sub_configs.get("text_config"):
            settings = settings.get_text_config()
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        what = f"model_class: got {model_class!r}" if model_class else f"config.json: got architectures {names!r}"
        raise ValueError(f"{what}, want a model's class of transformers: give model_class")
    return settings, found


def dtype_of(settings: Foreign, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        said = getattr(settings, "dtype", None) or getattr(settings.get_text_config(), "dtype", None)
        said = getattr(torch, said, None) if isinstance(said, str) else said
        return said if said in SCALE_DTYPES else torch.bfloat16
    if dtype not in SCALE_DTYPES:
        raise TypeError(f"dtype: got {dtype}, want None, torch.bfloat16 or torch.float16")
    return dtype


_TENSORS = {"weight", "bias", *NAMES, *(f"{name}_bias" for name in NAMES)}  # of layers, experts


class Import(CuteKernelsConfig):
    """A quantisation configuration under which transformers loads the tensors that a checkpoint does not quantise.

    Args:
        entries: the checkpoint's tensors.
        found: the checkpoint's quantised layers.
        config: the checkpoint's quantisation configuration.
        options: dtype, device and activations of the layers, as in `load_safetensors`.
    """

    def __init__(
        self,
        entries: Headers,
        found: dict[str, LayerFormat],
        config: Config,
        options: dict[str, Any],
        progress: ModelProgress | None,
    ) -> None:
        super().__init__()
        self.entries, self.found, self.config = entries, found, config
        self.layer_options, self.progress = options, progress
        self.filling: Filling | None = None

    def __deepcopy__(self, _: object) -> Import:
        return self

    def prepare(self, model: nn.Module) -> None:
        """Removes from the skeleton the parameters that packed layers replace."""
        self.filling = Filling(model, self.entries, self.found)
        for name in {place.module for place in self.filling.places.values()}:
            _make_room(model.get_submodule(name))
        untie_quantised(model)

    def finish(self, model: nn.Module) -> None:
        """Reads the packed layers and puts them into the model."""
        assert self.filling is not None
        self.filling.fill(model, self.config, self.layer_options, self.progress)

    def model(self, model_class: Any, settings: Foreign, ignored: set[str], options: dict[str, Any]) -> Any:
        """Loads the model without its generation settings. ignored: tensors that do not belong to the model."""
        register()
        quantised = {
            join(name, own)
            for name, form in self.found.items()
            for own in (*form.required, *form.optional, *form.ignored, "bias")
        }
        dense = [key for key in self.entries if key not in quantised and key not in ignored]
        for key in ("quantization_config", "compression_config"):
            for each in (settings, settings.get_text_config()):
                if getattr(each, key, None) is not None:
                    delattr(each, key)
        options = options | {"config": settings, "quantization_config": self, "dtype": self.layer_options["dtype"]}
        with ExitStack() as stack:
            files = {entry.file for entry in self.entries.values()}
            handles: dict[Path, Any] = {
                file: stack.enter_context(safe_open(file, framework="pt", device="cpu")) for file in files
            }
            state = {key: _part(handles[entry.file], entry) for key in dense for entry in (self.entries[key],)}
            options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # `_check` names them
            model, info = model_class.from_pretrained(None, state_dict=state, **options)
        self._check(info)
        record_layers(model)
        return model

    def _check(self, info: dict[str, Any]) -> None:
        """Raises ValueError unless the tensors that are not quantised are exactly those that the model needs."""
        assert self.filling is not None
        unused = self.filling.is_unused
        for kind, found, wanted in (
            ("missing_keys", "no such tensor", "want it"),
            ("unexpected_keys", "a tensor that is left over", "want none: the model has no use for it"),
        ):
            if left := sorted(key for key in info[kind] if kind == "missing_keys" or not unused(key)):
                raise ValueError(f"{left[0]}: got {found}, {wanted}; {len(left)} in all")
        if info["mismatched_keys"]:
            key, found, wanted = sorted(info["mismatched_keys"])[0]
            raise ValueError(f"{key}: got shape {list(found)}, want {list(wanted)}, that of the model")


def _part(handle: safe_open, entry: Entry) -> object:
    """Reads a tensor, or some of its rows."""
    found = handle.get_slice(entry.key)
    return found if entry.rows is None else found[entry.rows[0] : entry.rows[1]]


def generate_as_said(model: Foreign, path: Path) -> None:
    """Reads the generation settings of a model, if it can generate, from generation_config.json, or else from
    config.json."""
    if not model.can_generate():
        return
    from_config = {"config_file_name": "config.json", "_from_model_config": True}
    options = {} if (path / "generation_config.json").is_file() else from_config
    model.generation_config = type(model.generation_config).from_pretrained(path, local_files_only=True, **options)


def _make_room(module: nn.Module) -> None:
    """Prevents transformers from loading and initialising the weights and biases that packed layers and experts will
    replace.

    Until then these tensors are on the meta device, where the model's code, such as its initialisation, finds them.
    """
    for part in module.modules():
        for name in part._parameters.keys() & _TENSORS:
            tensor: Any = part._parameters.pop(name)
            vars(part)[name] = tensor
            if tensor is not None:
                tensor._is_hf_initialized = True
