"""A running model of a checkpoint directory, in one call.

transformers makes the skeleton and loads what is not quantised; packed layers are read one at a time straight to where
they belong. So there is never more in memory than the model and one layer. Nothing of a checkpoint is run: weights come
from safetensors alone, and a model whose code is in the directory is refused.
"""

from __future__ import annotations

from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cute_kernels.arguments import device_of
from cute_kernels.gemm.experts.module import QuantizedMoE, QuantizedRoutedExperts
from cute_kernels.gemm.module import ModelProgress
from cute_kernels.gemm.weight import SCALE_DTYPES
from cute_kernels.integrations.checkpoints.configuration import Config, checked, read_config
from cute_kernels.integrations.checkpoints.files import Filling, path_of, read_layers
from cute_kernels.integrations.checkpoints.headers import Headers, read_headers, read_json
from cute_kernels.integrations.checkpoints.kv_scales import KvScale, kv_scales_of, scale_keys
from cute_kernels.integrations.checkpoints.layer_formats import OWN, LayerFormat, find_layers, join
from cute_kernels.model_config import METHOD, record_layers, untie_quantised

IMPORT_METHOD = "cute_kernels_import"  # what transformers knows the loading of other projects' checkpoints by
_TOKENS = 3  # of a check that a block of experts means what it did


def load_model(
    path: str | PathLike[str],
    *,
    config: Config | None = None,
    model_class: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    progress: ModelProgress | None = None,
) -> Any:
    """The transformers model of a directory with config.json and safetensors files, with its quantised layers packed.

    Args:
        path: the directory. Formats as for `load_safetensors`, and what `save_pretrained` wrote of a quantised model.
        config: the quantisation configuration, default that of the directory.
        model_class: a model's class of transformers, or an Auto class, default the one that config.json names first in
            "architectures". A model without a head passes over the tensors of one.
        dtype: of activations and of what is not quantised, bf16 or fp16; default what config.json says, else bf16. The
            layers' scales are rounded to it.
        device: where the model is put, default the CPU.
        attn_implementation: as for `from_pretrained`.
        progress: called after each quantised layer with its name, the number of layers done and that of all.

    Returns:
        The model, in evaluation mode, as `from_pretrained` returns it, with the directory's generation_config.json.
        ``model.kv_scales`` has the checkpoint's scales of the KV cache (`read_kv_scales`), {} if it has none.

    Raises:
        FileNotFoundError: there is no config.json, or no safetensors file.
        ImportError: transformers is not there.
        TypeError, ValueError: as `load_quantized_linears`; or a tensor is missing or left over, or the model wants code
            from the directory. The message names it.
    """
    path = path_of(path)
    if not path.is_dir() or not (path / "config.json").exists():
        raise FileNotFoundError(f"path: got {path}, want a directory with config.json and safetensors files")
    device = device_of(device)
    entries = read_headers(path)
    quantization = read_config(path) if config is None else checked("config", config)
    found = find_layers(entries, quantization)
    settings, model_class = _class_of(path, model_class)
    dtype = _dtype_of(settings, dtype)
    scales = kv_scales_of(entries, path)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    if attn_implementation == METHOD:  # which attention is called as well
        from cute_kernels.integrations.transformers import register  # wants transformers, which is there

        register()
    if quantization.get("quant_method") == METHOD and all(form is OWN for form in found.values()):
        from cute_kernels.integrations import hf_quantizer

        hf_quantizer.register()
        model = model_class.from_pretrained(path, dtype=dtype, trust_remote_code=False, **options)
    else:
        task = _Task(entries, found, quantization, dtype, device, progress)
        model = _load(model_class, settings, task, scale_keys(entries), options)
        model.config.name_or_path = model.name_or_path = str(path)
        _generate_as_said(model, path)
    if device is not None:
        model.to(device)
    model.kv_scales = scales
    return model


def read_kv_scales(path: str | PathLike[str]) -> dict[int, KvScale]:
    """The scales of the KV cache that the checkpoint at ``path`` has, by layer; {} if it has none.

    Those are `k_scale` and `v_scale` (ModelOpt's and vLLM's names, compressed-tensors' `kv_cache_scheme`), one number a
    tensor or one a head: a key is k_scale times what the cache holds of it.

    Raises:
        As `load_safetensors`, and ValueError for a layer that has one of the two, or a scale that is not positive.
    """
    path = path_of(path)
    return kv_scales_of(read_headers(path), path)


# -- the skeleton and what is not quantised ----------------------------------------------------------------------------


def _class_of(path: Path, model_class: Any) -> tuple[Any, Any]:
    """The configuration of transformers, and the model's class, neither of them from the directory's own code."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("path: making a model of a directory wants transformers: pip install transformers") from error
    said = read_json(path / "config.json")
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


def _dtype_of(settings: Any, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        said = getattr(settings, "dtype", None) or getattr(settings.get_text_config(), "dtype", None)
        said = getattr(torch, said, None) if isinstance(said, str) else said
        return said if said in SCALE_DTYPES else torch.bfloat16
    if dtype not in SCALE_DTYPES:
        raise TypeError(f"dtype: got {dtype}, want None, torch.bfloat16 or torch.float16")
    return dtype


def _generate_as_said(model: Any, path: Path) -> None:
    """Gives a model that generates the directory's generation_config.json, or what its config.json says of it."""
    if not model.can_generate():
        return
    from_config = {"config_file_name": "config.json", "_from_model_config": True}
    options = {} if (path / "generation_config.json").is_file() else from_config
    model.generation_config = type(model.generation_config).from_pretrained(path, local_files_only=True, **options)


def _make_room(module: nn.Module) -> None:
    """Has transformers load nothing where packed tensors will be, and initialise nothing: of layers and experts
    their weights and biases.

    Code of the model that asks for the tensors meanwhile, as initialisation does, finds them on the meta device.
    """
    for part in module.modules():
        for name in part._parameters.keys() & {"weight", "bias", "gate_up_proj", "down_proj"}:
            tensor: Any = part._parameters.pop(name)
            vars(part)[name] = tensor
            if tensor is not None:
                tensor._is_hf_initialized = True


class _Task:
    """What transformers' loading is interrupted for: `make_room` before it, `fill` after it."""

    def __init__(
        self,
        entries: Headers,
        found: dict[str, LayerFormat],
        config: Config,
        dtype: torch.dtype,
        device: torch.device | None,
        progress: ModelProgress | None,
    ) -> None:
        self.entries, self.found, self.config, self.progress = entries, found, config, progress
        self.dtype, self.device = dtype, device
        self._filling: Filling | None = None
        self._blocks: dict[str, nn.Module] = {}

    def is_unused(self, key: str) -> bool:
        """Whether the model has no use for a tensor."""
        return self._filling is not None and self._filling.is_unused(key)

    def make_room(self, model: nn.Module) -> None:
        from cute_kernels.integrations.saved_names import list_experts  # wants transformers, which is there

        list_experts(model, self.found)
        self._filling = Filling(model, self.entries, self.found)
        for name in {place.module: place for place in self._filling.places.values()}:
            module = model.get_submodule(name)
            experts = getattr(module, "experts", None)
            _make_room(module if experts is None else experts)
            if experts is not None:
                self._blocks[name] = module
        untie_quantised(model)

    def fill(self, model: nn.Module) -> None:
        assert self._filling is not None
        options = {"dtype": self.dtype, "device": self.device}
        found = self._filling.found
        layers = read_layers(self.entries, found, self.config, options)
        for done, (name, layer) in enumerate(layers, start=1):
            self._filling.take(name, layer)
            if self.progress is not None:
                self.progress(name, done, len(found))
        self._filling.swap(model)
        for name, block in self._blocks.items():
            made: Any = model.get_submodule(name)
            if self.device is not None:
                made.to(self.device)
            experts = QuantizedRoutedExperts(made.gate_up.weight, made.down.weight).train(made.training)
            block.experts = experts
            if not _is_the_same(block, made):  # a block that does more keeps its own forward, around the experts
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, block)


def _load(model_class: Any, settings: Any, task: _Task, ignored: set[str], options: dict[str, Any]) -> Any:
    from safetensors import safe_open

    _register()
    quantised = {
        join(name, own)
        for name, form in task.found.items()
        for own in (*form.required, *form.optional, *form.ignored, "bias")
    }
    dense = [key for key in task.entries if key not in quantised and key not in ignored]
    for key in ("quantization_config", "compression_config"):
        for each in (settings, settings.get_text_config()):
            if getattr(each, key, None) is not None:
                delattr(each, key)
    settings.quantization_config = _config_class()(task)
    with ExitStack() as stack:
        files = {entry.file for entry in task.entries.values()}
        handles: dict[Path, Any] = {
            file: stack.enter_context(safe_open(file, framework="pt", device="cpu")) for file in files
        }
        state = {key: handles[task.entries[key].file].get_slice(key) for key in dense}
        model, info = model_class.from_pretrained(
            None, config=settings, state_dict=state, dtype=task.dtype, output_loading_info=True, **options
        )
    for kind, wanted in (("missing_keys", "want it"), ("unexpected_keys", "want none: the model has no use for it")):
        if left := sorted(key for key in info[kind] if kind == "missing_keys" or not task.is_unused(key)):
            found = "no such tensor" if kind == "missing_keys" else "a tensor that is left over"
            raise ValueError(f"{left[0]}: got {found}, {wanted}; {len(left)} in all")
    if info["mismatched_keys"]:
        raise ValueError(
            f"{sorted(map(str, info['mismatched_keys']))[0]}: got a tensor of another shape than the model's"
        )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    record_layers(model)
    return model


def _register() -> None:
    """Has transformers call a `_Task` while it loads; its own names for that are a configuration and a quantiser."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(IMPORT_METHOD, _config_class())
    AUTO_QUANTIZER_MAPPING.setdefault(IMPORT_METHOD, _quantizer_class())


_classes: dict[str, Any] = {}


def _config_class() -> Any:
    if "config" not in _classes:
        from transformers.utils.quantization_config import QuantizationConfigMixin

        class ImportConfig(QuantizationConfigMixin):
            """Carries a task through transformers, which copies configurations."""

            def __init__(self, task: _Task | None = None) -> None:
                vars(self)["quant_method"] = IMPORT_METHOD  # transformers declares its own methods
                self.task = task

            def __deepcopy__(self, _: object) -> ImportConfig:
                return self

            def to_dict(self) -> dict[str, Any]:
                return {"quant_method": IMPORT_METHOD}

            def get(self, key: str, default: object = None) -> object:  # transformers reads one of a file, a dict
                return self.to_dict().get(key, default)

        _classes["config"] = ImportConfig
    return _classes["config"]


def task_of(config: object) -> _Task:
    """What the configuration that `_config_class` makes carries."""
    task = getattr(config, "task", None)
    assert isinstance(task, _Task)
    return task


def _quantizer_class() -> Any:
    if "quantizer" not in _classes:
        from transformers.quantizers.base import HfQuantizer

        class ImportQuantizer(HfQuantizer):
            """Calls a task before and after transformers loads what is not quantised."""

            def _process_model_before_weight_loading(self, model: nn.Module, **_: object) -> nn.Module:
                task_of(self.quantization_config).make_room(model)
                return model

            def _process_model_after_weight_loading(self, model: nn.Module, **_: object) -> nn.Module:
                task_of(self.quantization_config).fill(model)
                self.remove_quantization_config(model)
                return model

            def is_serializable(self, *_: object, **__: object) -> bool:
                return True

            @property
            def is_trainable(self) -> bool:
                return True

        _classes["quantizer"] = ImportQuantizer
    return _classes["quantizer"]


# -- blocks of experts -------------------------------------------------------------------------------------------------


@torch.no_grad()
def _is_the_same(block: nn.Module, layer: QuantizedMoE) -> bool:
    """Whether the block's own forward, around the packed experts, gives what the layer gives.

    A skeleton has no weights to try (`experts.blocks.refusal`); what a block does besides its experts, such as
    scaling what they say, shows here.
    """
    weight = layer.down.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, weight.out_features, generator=generator, device="cpu", dtype=torch.float32)
    x = x.to(weight.device, weight.dtype)
    training = block.training
    block.eval()
    try:
        found, want = block(x[None].clone()), layer(x)
    except Exception:  # whatever another library's code raises: of a router that says other things than the layer takes
        return False
    finally:
        block.train(training)
    if not isinstance(found, torch.Tensor) or found.numel() != want.numel():
        return False
    off = (found.reshape(want.shape).float() - want.float()).norm(dim=1)
    return bool((off <= 0.02 * want.float().norm(dim=1)).all())
