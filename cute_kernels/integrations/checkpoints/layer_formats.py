"""The formats in which checkpoints store a layer: its tensors, the tensor that marks the format, and the converter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from cute_kernels.gemm.from_codes import pack_experts
from cute_kernels.gemm.module import checked_shifts
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.quantize import with_shifts
from cute_kernels.gemm.weight import TENSOR_NAMES, PackedWeight, symmetric_zero
from cute_kernels.integrations.checkpoints.awq import from_awq
from cute_kernels.integrations.checkpoints.compressed_tensors import from_compressed_tensors, from_int_quantized
from cute_kernels.integrations.checkpoints.configuration import AUTO_ROUND, COMPRESSED, FP8, MODELOPT, Config
from cute_kernels.integrations.checkpoints.fields import check_tensor
from cute_kernels.integrations.checkpoints.float_codes import Names, from_float_codes, made_of
from cute_kernels.integrations.checkpoints.gptq import FORMATS, from_gptq, words_of_v2
from cute_kernels.integrations.checkpoints.headers import Entry
from cute_kernels.integrations.checkpoints.hqq import from_hqq
from cute_kernels.integrations.checkpoints.torchao import ACTIVATION_PARTS, PARTS, from_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensors = dict[str, torch.Tensor]
Converted = PackedWeight | PackedExperts
"""A weight, or the stacked weights of a layer's experts."""


class Options(TypedDict):
    """Further arguments of layers' converters: see `cute_kernels.integrations.checkpoints.load_safetensors`."""

    dtype: torch.dtype | None
    device: torch.device | str | None


@dataclass(frozen=True)
class LayerFormat:
    """The format in which a checkpoint stores a layer.

    Args:
        name: the format's name in errors.
        methods: values of the configuration's `quant_method` for this format.
        mark: name of the tensor by which layers of this format are recognised.
        required, optional: the names of the tensors that are read, except "bias".
        convert: a function from (the required and optional tensors by name, the layer's configuration, further options)
            to the weight.
        ignored: names of further tensors of a layer, which do not change the weight.
        dtypes: the dtypes that the mark may have, in safetensors' notation; empty for any dtype.
    """

    name: str
    methods: tuple[str, ...]
    mark: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[..., Converted]
    ignored: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


# -- converters --------------------------------------------------------------------------------------------------------


def _awq(tensors: Tensors, config: Config, **options: Unpack[Options]) -> PackedWeight:
    if config.get("bits", config.get("w_bit", 4)) != 4:
        raise ValueError(f"bits: got {config.get('bits', config.get('w_bit'))}, want 4 for AWQ")
    version = config.get("version") or config.get("format") or config.get("checkpoint_format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":  # AutoAWQ's first versions wrote "GEMM"
        raise ValueError(f"version: got {version!r}, want 'gemm', how AutoAWQ packs by default")
    weight = from_awq(**tensors, group_size=config.get("group_size", config.get("q_group_size")), **options)
    if config.get("zero_point") is False:
        _check_symmetric("qzeros", weight, "zero_point is false")
    return weight


def _gptq(tensors: Tensors, config: Config, **options: Unpack[Options]) -> PackedWeight:
    stored_as, also = (config.get(key) for key in ("checkpoint_format", "format"))
    if stored_as and also and stored_as != also:
        raise ValueError(f"checkpoint_format: got {stored_as!r} and {also!r} as format, want one of them")
    stored_as = stored_as or also
    bits, group_size = config.get("bits", 4), config.get("group_size")
    read_as, qzeros = stored_as or FORMATS[0], tensors.get("qzeros")
    if read_as == FORMATS[0] and _is_of_gptqmodel(config) and qzeros is not None and qzeros.dtype == torch.int32:
        tensors, read_as = tensors | {"qzeros": words_of_v2(qzeros, bits)}, FORMATS[1]
    weight = from_gptq(**tensors, bits=bits, group_size=group_size, checkpoint_format=read_as, **options)
    if stored_as is None and not config and weight.zeros is not None:
        raise ValueError(
            "qzeros: got zero points that may be of format 'gptq' or 'gptq_v2', want a configuration that says which: "
            "give config={'quant_method': 'gptq', 'checkpoint_format': ..., 'desc_act': ...}"
        )
    if config.get("sym") is True:
        _check_symmetric("qzeros", weight, "sym is true")
    desc_act = config.get("desc_act")
    if desc_act in (None, True):
        said = "that desc_act is true" if desc_act else "nothing of the order of inputs (desc_act)"
        _check_order_is_there("g_idx", tensors, weight, said)
    if desc_act is False and weight.perm is not None:
        said = "the configuration says that desc_act is false"
        raise ValueError(f"g_idx: got inputs of a group that are not neighbours, want neighbours: {said}")
    return weight


def _is_of_gptqmodel(config: Config) -> bool:
    """Returns whether a configuration's meta says that GPTQModel wrote the checkpoint."""
    meta = config.get("meta")
    said = meta.get("quantizer") if isinstance(meta, Mapping) else None
    return any(str(each).startswith("gptqmodel") for each in (said if isinstance(said, (list, tuple)) else [said]))


def _compressed_tensors(tensors: Tensors, config: Config, **options: Any) -> PackedWeight:
    stored, make = (
        ("int-quantized", from_int_quantized) if "weight" in tensors else ("pack-quantized", from_compressed_tensors)
    )
    group: Config = config.get("group") or {}
    said = _said_of_weights(config, stored, "int")
    if said.get("strategy") == "block":
        raise ValueError("strategy: got 'block', want 'group', 'channel' or 'tensor'")
    if said.get("num_bits") is not None:
        options["bits"] = said["num_bits"]
    weight = make(**tensors, group_size=said.get("group_size"), **options)
    symmetric = said.get("symmetric")
    if symmetric is True:
        _check_symmetric("weight_zero_point", weight, "symmetric is true")
    if (symmetric is False or not group) and "weight_zero_point" not in tensors:
        wanted = "that symmetric is false" if group else "nothing of zero points (config_groups, weights, symmetric)"
        raise ValueError(f"weight_zero_point: got no such tensor, want it: the configuration says {wanted}")
    if said.get("actorder") in ("group", "dynamic"):  # two names of one order; others keep the inputs' own
        _check_order_is_there("weight_g_idx", tensors, weight, f"that actorder is {said['actorder']!r}")
    return weight


def _said_of_weights(config: Config, stored: str, kind: str) -> Config:
    """Returns the entry of compressed-tensors' configuration about a layer's weights. Checks first that the entry fits
    the stored tensors.

    stored: the format of the tensors. kind: "int" or "float".

    Raises:
        TypeError, ValueError: the configuration contradicts ``stored`` or ``kind``.
    """
    _check_no_transforms(config)
    group: Config = config.get("group") or {}
    said_format = group.get("format") or config.get("format") or stored
    if said_format not in (*COMPRESSED_FORMATS[stored], "mixed-precision", "dense"):  # the last leave it to the groups
        raise ValueError(f"format: got {said_format!r}, want {' or '.join(map(repr, COMPRESSED_FORMATS[stored]))}")
    said = group.get("weights") or {}
    if not isinstance(said, Mapping):
        raise TypeError(f"weights: got {said!r}, want a mapping")
    if said.get("type", kind) != kind:
        raise ValueError(f"type: got weights of type {said['type']!r}, want {kind!r}")
    return said


def _float_codes(names: Names, tensors: Tensors, config: Config, **options: Unpack[Options]) -> PackedWeight:
    """Converts a layer with floating codes.

    The blocks that a configuration declares for FP8 codes must match the scales; compressed-tensors' format and type
    must match the tensors.
    """
    block = config.get("weight_block_size")
    if config.get("quant_method") in COMPRESSED:
        stored = "float-quantized"
        if names.codes == "weight_packed":
            stored = "nvfp4-pack-quantized" if names.second in tensors else "mxfp4-pack-quantized"
        said = _said_of_weights(config, stored, "float")
        if said.get("symmetric") is False:
            raise ValueError("symmetric: got false, want true for weights of floats")
        block = said.get("block_structure") or said.get("group_size")
    experts, codes = config.get("expert_dtype"), tensors[names.codes]
    if experts not in (None, "fp4", "fp8"):
        raise ValueError(f"expert_dtype: got {experts!r}, want 'fp4' or 'fp8'")
    if experts == "fp8" and codes.dtype == torch.int8:  # two codes a byte
        raise ValueError(f"expert_dtype: got 'fp8' beside {names.codes} of {codes.dtype}, want 'fp4'")
    return from_float_codes(tensors, names, block=block, **options)


def _gpt_oss(
    tensors: Tensors, _: Config, *, dtype: torch.dtype | None, device: torch.device | str | None
) -> PackedExperts:
    """Converts all experts of a layer: blocks uint8 [E, N, K / 32, 16], scales uint8 [E, N, K / 32]."""
    blocks = tensors["blocks"]
    check_tensor("blocks", blocks, (torch.uint8,), 4, "[experts, N, K / 32, 16]")
    if blocks.shape[-1] != 16:
        raise ValueError(f"blocks: got shape {list(blocks.shape)}, want [experts, N, K / 32, 16]")
    found = {"blocks": blocks.flatten(-2), "scales": tensors["scales"]}
    found = {name: tensor if device is None else tensor.to(device) for name, tensor in found.items()}
    return made_of(pack_experts, found, Names("blocks", "scales"), dtype, device)


def _check_no_transforms(config: Config) -> None:
    """Raises ValueError if the checkpoint transforms inputs or weights at run time, which no kernel here does."""
    for key in ("transform_config", "rotation_config", "hadamard_config"):
        found = config.get(key)
        if found and (not isinstance(found, Mapping) or any(found.values())):
            raise ValueError(f"{key}: got transforms of inputs or weights that run with the model, want none")


def _check_symmetric(name: str, weight: PackedWeight, said: str) -> None:
    """Raises ValueError if a weight has zero points although the configuration says that it is symmetric."""
    if weight.zeros is not None:
        middle, why = symmetric_zero(weight.bits), f"the configuration says that {said}"
        raise ValueError(f"{name}: got zero points other than {middle}, want {middle} everywhere: {why}")


def _check_order_is_there(name: str, tensors: Tensors, weight: PackedWeight, said: str) -> None:
    """Raises ValueError if a weight with groups lacks the tensor ``name``, which has the group of each input.

    said: the statement of the configuration about the order of inputs, for the message.
    """
    if name not in tensors and weight.group_size is not None:
        raise ValueError(f"{name}: got no such tensor, want it: the configuration says {said}")


def _hqq(tensors: Tensors, config: Config, **options: Unpack[Options]) -> Converted:
    """Converts an HQQ layer by the settings in its own tensors. Missing settings have HQQ's defaults."""
    shape = tensors.pop("shape").tolist()
    found = {"nbits": 4, "axis": 1} | {name: config[name] for name in ("nbits", "axis") if name in config}
    found |= {name: _integer(name, tensors.pop(name)) for name in _HQQ_NUMBERS if name in tensors}
    for name in ("view_as_float", "quant_scale", "quant_zero"):
        if found.get(name):
            raise ValueError(f"{name}: got {found[name]}, want 0: codes as bytes, scales and zero points as they are")
    size = found.get("group_size")
    if size is not None and len(shape) == 2 and size == shape[1]:
        size = None
    return from_hqq(**tensors, shape=shape, bits=found["nbits"], axis=found["axis"], group_size=size, **options)


def _torchao(tensors: Tensors, config: Config, **options: Unpack[Options]) -> Converted:
    said = config.get("tensor")
    if not isinstance(said, Mapping):
        raise ValueError("weight: got no metadata in the file that says of which class it is, want torchao's")
    parts = {name.removeprefix(_TORCHAO): tensor for name, tensor in tensors.items()}
    attributes = said.get("_data")
    return from_tensor(str(said.get("_type")), parts, attributes if isinstance(attributes, Mapping) else {}, **options)


def _integer(name: str, tensor: torch.Tensor) -> int:
    if tensor.numel() != 1 or tensor.is_floating_point():
        raise ValueError(f"{name}: got {tensor.dtype} {list(tensor.shape)}, want one integer")
    return int(tensor)


def _own(tensors: Tensors, _: Config, *, dtype: torch.dtype | None, device: torch.device | str | None) -> Converted:
    stacked = tensors["codes"].dim() == 4
    shifts = None if stacked else tensors.pop("shifts", None)
    weight = PackedExperts.from_state_dict(tensors) if stacked else PackedWeight.from_state_dict(tensors)
    if shifts is not None and isinstance(weight, PackedWeight):
        weight = with_shifts(weight, checked_shifts(shifts, weight))
    if dtype not in (None, weight.dtype):
        raise TypeError(f"dtype: got {dtype}, want None or {weight.dtype}, that of the packed weight")
    return weight if device is None else weight.to(device)


def _auto_round(tensors: Tensors, config: Config, **options: Unpack[Options]) -> PackedWeight:
    """Converts an AutoRound layer, whose words are packed as AutoGPTQ's or AutoAWQ's. AutoRound's packing format says
    whether stored zero points are one less than the real ones.
    """
    _check_no_transforms(config)
    data_type = config.get("data_type", "int")
    if data_type not in ("int", "int_asym", "int_sym"):
        raise ValueError(f"data_type: got {data_type!r}, want 'int'")
    packing = config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq"
    same = {key: config[key] for key in ("bits", "group_size", "sym") if config.get(key) is not None}
    if "awq" in packing:
        tensors.pop("g_idx", None)
        return _awq(tensors, {**same, "version": "gemm"}, **options)
    if packing not in AUTO_ROUND_PACKINGS:
        raise ValueError(f"packing_format: got {packing!r}, want {', '.join(AUTO_ROUND_PACKINGS)} or one of AWQ's")
    return _gptq(tensors, {**same, "checkpoint_format": AUTO_ROUND_PACKINGS[packing], "desc_act": False}, **options)


COMPRESSED_FORMATS = {
    "pack-quantized": ("pack-quantized",),
    "int-quantized": ("int-quantized", "naive-quantized"),
    "nvfp4-pack-quantized": ("nvfp4-pack-quantized",),
    "mxfp4-pack-quantized": ("mxfp4-pack-quantized",),
    "float-quantized": ("float-quantized", "naive-quantized", "mxfp8-quantized"),
}
"""The values of compressed-tensors' `format` that are accepted for each storage of codes: packed, a byte each, or
floats.
"""

_AS_THEY_ARE = "", ":gptqmodel", ":gptqmodel:exllamav2", ":exllamav2", ":tritonv2"
_LESS_ONE = ":auto_gptq", ":auto_gptq:exllamav2", ":gptq", ":gptq:exllamav2"
AUTO_ROUND_PACKINGS = dict.fromkeys([f"auto_round{each}" for each in _AS_THEY_ARE], "gptq_v2") | dict.fromkeys(
    ["auto_gptq", "gptq", *(f"auto_round{each}" for each in _LESS_ONE)], "gptq"
)
"""GPTQ's format for each of AutoRound's packing formats: zero points as they are ("gptq_v2"), or less one ("gptq")."""

_HQQ_NUMBERS = ("nbits", "axis", "group_size", "view_as_float", "quant_scale", "quant_zero")
_HQQ_META = (
    "packing", "compute_dtype", "unpack_view_dtype", "optimize", "round_zero", "channel_wise", "stores_quant_config",
    "offload_meta", "encoded_state_dict",
)  # fmt: skip
_WORDS = ("qweight", "qzeros", "scales")
# Which stay in 16 bits.
STATIC_SCALES = "input_scale", "activation_scale"
_OF_ACTIVATIONS = (*STATIC_SCALES, "input_zero_point", "output_scale", "output_zero_point", "input_global_scale")
_TORCHAO = "_weight_"


def _floats(
    name: str, methods: tuple[str, ...], names: Names, dtypes: tuple[str, ...], ignored: tuple[str, ...] = ()
) -> LayerFormat:
    optional = (names.second,) if names.second else ()
    convert = partial(_float_codes, names)
    return LayerFormat(name, methods, names.codes, (names.codes, names.scales), optional, convert, ignored, dtypes)


GPT_OSS = LayerFormat("gpt-oss", ("mxfp4",), "blocks", ("blocks", "scales"), (), _gpt_oss, dtypes=("U8",))

LAYER_FORMATS = (
    GPT_OSS,
    LayerFormat("awq", ("awq",), "qweight", _WORDS, (), _awq),
    LayerFormat("gptq", ("gptq",), "qweight", _WORDS, ("g_idx",), _gptq),
    LayerFormat("auto-round", AUTO_ROUND, "qweight", _WORDS, ("g_idx",), _auto_round),
    LayerFormat(
        "compressed-tensors", COMPRESSED, "weight_packed", ("weight_packed", "weight_scale"),
        ("weight_shape", "weight_zero_point", "weight_g_idx"), _compressed_tensors, _OF_ACTIVATIONS,
    ),
    LayerFormat(
        "compressed-tensors", COMPRESSED, "weight", ("weight", "weight_scale"), ("weight_zero_point", "weight_g_idx"),
        _compressed_tensors, _OF_ACTIVATIONS, dtypes=("I8",),
    ),
    _floats(
        "compressed-tensors", COMPRESSED, Names("weight_packed", "weight_scale", "weight_global_scale", divides=True),
        ("U8",), ("weight_shape", *_OF_ACTIVATIONS),
    ),
    _floats("modelopt", MODELOPT, Names("weight", "weight_scale", "weight_scale_2"), ("U8",), _OF_ACTIVATIONS),
    _floats("fp8", (*COMPRESSED, *MODELOPT, *FP8), Names("weight", "weight_scale"), ("F8_E4M3",), _OF_ACTIVATIONS),
    _floats("fp8", FP8, Names("weight", "weight_scale_inv"), ("F8_E4M3",), _OF_ACTIVATIONS),
    _floats("deepseek_v4", FP8, Names("weight", "scale"), ("F8_E4M3", "I8"), _OF_ACTIVATIONS),
    LayerFormat("hqq", ("hqq",), "W_q", ("W_q", "scale", "zero", "shape"), _HQQ_NUMBERS, _hqq, _HQQ_META),
    LayerFormat(
        "torchao", ("torchao",), f"{_TORCHAO}qdata", (f"{_TORCHAO}qdata",),
        tuple(_TORCHAO + part for part in PARTS[1:]), _torchao, tuple(_TORCHAO + part for part in ACTIVATION_PARTS),
    ),
    LayerFormat(
        "cute_kernels", ("cute_kernels",), "codes", ("codes", "scales", "format"), (*TENSOR_NAMES[2:], "shifts"), _own,
        STATIC_SCALES[1:],
    ),
)  # fmt: skip
OWN = LAYER_FORMATS[-1]

FOREIGN = (
    "weight_scale", "weight_zero_point", "weight_packed", "weight_shape", "weight_g_idx", "weight_global_scale",
    "weight_scale_inv", "weight_scale_2", "qweight", "qzeros", "scales", "g_idx", "W_q", "absmax", "SCB", "quant_map",
    "bitmask", "compressed", "trellis", "codebooks", "Qidxs",
)  # fmt: skip
"""Names of tensors that only quantised layers have, in supported formats and in others."""
_FOREIGN_PARTS = ("weight:", "_weight_")  # how torchao's files name the parts of a weight, before and now
FOREIGN_DTYPES = ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "U16", "I16", "U32", "I32")
"""Dtypes that show that a layer is quantised, if its "weight" or a tensor with "_proj" in its name has one."""


# -- which layer is of which -------------------------------------------------------------------------------------------


def find_layers(entries: Mapping[str, Entry], config: Config) -> dict[str, LayerFormat]:
    """Finds the quantised layers of a checkpoint and their formats, by name.

    Raises:
        ValueError: a layer lacks a tensor, has an unknown one, or is of an unsupported format; or there is no
            quantised layer. The message names the tensor.
    """
    marks = {form.mark for form in LAYER_FORMATS}
    layers: dict[str, LayerFormat] = {}
    owned: dict[str, set[str]] = {}
    for key in sorted(entries):
        name, _, own = key.rpartition(".")
        owned.setdefault(name, set()).add(own)
        if own in marks and (fitting := _fitting(entries, name, own)):
            form = _format_of(entries, name, own, fitting, config)
            for wanted in form.required:
                if join(name, wanted) not in entries:
                    raise ValueError(f"{join(name, wanted)}: got no such tensor, want it beside {own} ({form.name})")
            layers[name] = form
    for name, form in layers.items():
        known = {*form.required, *form.optional, *form.ignored, "bias", "k_scale", "v_scale"}  # of the cache
        if more := sorted(owned[name] - known):
            file = entries[join(name, more[0])].file.name
            raise ValueError(
                f"{join(name, more[0])}: got a tensor that {form.name} does not have, want none beside a layer's "
                f"(in {file})"
            )
    for name in sorted(owned.keys() - layers.keys()):
        _check_not_quantised(entries, name, owned[name])
    if not layers:
        raise ValueError(
            f"path: got no quantised layer, by none of the names {', '.join(sorted(marks))}; want a checkpoint that "
            "has one, and for weights in 16 bits transformers' from_pretrained with accelerate(model, weights=...)"
        )
    return layers


def _fitting(entries: Mapping[str, Entry], name: str, mark: str) -> list[LayerFormat]:
    """Returns the formats that the tensor ``mark`` of a layer indicates. Formats that name the tensor's dtype win over
    formats for any dtype.

    A "weight" marks a format only together with its scales.
    """
    stored = entries[join(name, mark)].dtype
    found = [form for form in LAYER_FORMATS if form.mark == mark and (not form.dtypes or stored in form.dtypes)]
    if mark == "weight":
        found = [form for form in found if all(join(name, each) in entries for each in form.required)]
    return [form for form in found if form.dtypes] or found


def _check_not_quantised(entries: Mapping[str, Entry], name: str, owned: set[str]) -> None:
    """Raises ValueError for a layer that is quantised in an unsupported format. Without this check the layer would be
    skipped."""
    for form in LAYER_FORMATS:
        rest = [each for each in form.required if each != form.mark]
        if rest not in ([], ["scale"], ["scales"]) and "weight" not in owned and owned.issuperset(rest):
            raise ValueError(f"{join(name, form.mark)}: got no such tensor, want it beside {' and '.join(rest)}")
    found = sorted(own for own in owned if own in FOREIGN or own.startswith(_FOREIGN_PARTS))
    stored = {own: entries[join(name, own)].dtype for own in sorted(owned) if own == "weight" or "_proj" in own}
    found += [f"{own} of {dtype}" for own, dtype in stored.items() if dtype in FOREIGN_DTYPES]
    if found:
        raise ValueError(
            f"{join(name, found[0])}: got a layer that is quantised in a format that is not read, want one of "
            f"{', '.join(dict.fromkeys(form.name for form in LAYER_FORMATS))} (docs/tasks/checkpoints.md)"
        )


def _format_of(
    entries: Mapping[str, Entry], name: str, mark: str, fitting: list[LayerFormat], config: Config
) -> LayerFormat:
    method = config.get("quant_method")
    named = [form for form in fitting if method in form.methods]
    if named or fitting == [OWN]:  # which says by itself what it is
        return (named or fitting)[0]
    if method is not None:
        names = ", ".join(form.name for form in fitting)
        raise ValueError(
            f"quant_method: got {method!r}, want one of {names} for layers with {mark} such as {name or 'this'}"
        )
    if mark != "qweight":
        return fitting[0]
    # AWQ packs along N, GPTQ along K: only GPTQ's words have as many columns as the scales.
    scales = entries.get(join(name, "scales"))
    along_k = scales is not None and entries[join(name, mark)].shape[-1:] == scales.shape[-1:]
    return next(form for form in fitting if form.name == ("gptq" if along_k else "awq"))


def is_stacked(entries: Mapping[str, Entry], name: str, form: LayerFormat) -> bool:
    """Returns whether a layer's weight holds all experts. Only this package's and gpt-oss's formats do."""
    return form in (OWN, GPT_OSS) and len(entries[join(name, form.mark)].shape) == 4


def said_of(entries: Mapping[str, Entry], name: str) -> dict[str, Any]:
    """Returns {"tensor": description} for a layer of torchao; {} for other layers. The description of the layer's
    weight is JSON in the files' metadata.
    """
    text = getattr(entries, "metadata", {}).get(join(name, "weight"))
    if text is None:
        return {}
    try:
        return {"tensor": json.loads(text)}
    except ValueError as error:
        raise ValueError(f"weight: got metadata that is no JSON ({error}), want torchao's") from error


def join(name: str, own: str) -> str:
    """Returns the full name of a layer's tensor."""
    return f"{name}.{own}" if name else own
