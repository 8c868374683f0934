"""The part of a checkpoint's configuration about quantised layers: where it is, and which settings apply to a layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cute_kernels.integrations.checkpoints.headers import read_json

Config = Mapping[str, Any]

KEYS = ("quantization_config", "compression_config")  # the latter of llm-compressor's first releases
FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
"""Files beside config.json that have the configuration: AutoGPTQ's and GPTQModel's, AutoAWQ's, AutoRound's."""
MODELOPT_FILE = "hf_quant_config.json"  # whose "quantization" has what config.json would say
AUTO_ROUND = ("auto-round", "intel/auto-round")
COMPRESSED = ("compressed-tensors", "compressed_tensors")
MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_mixed")
FP8 = ("fp8", "fbgemm_fp8")  # DeepSeek's, vLLM's and transformers' own


def checked(name: str, config: object) -> Config:
    """Returns the configuration, with a nested "quantization_config" merged into it. Raises TypeError if the
    configuration is no mapping."""
    if not isinstance(config, Mapping):
        raise TypeError(f"{name}: got {type(config).__name__}, want the quantisation configuration, a mapping")
    inner = config.get("quantization_config")
    if isinstance(inner, Mapping):  # which transformers wraps beside one of sparsity
        outer = {key: value for key, value in config.items() if key != "quantization_config"}
        return {**outer, **inner}
    return config


def read_config(path: Path) -> Config:
    """Reads the quantisation configuration in a checkpoint's directory; {} if there is none.

    In config.json it may be nested: some models have it in "text_config" or deeper.

    Raises:
        TypeError, ValueError: config.json has several configurations that differ, or a configuration that is no
            mapping.
    """
    directory = path if path.is_dir() else path.parent
    file = directory / "config.json"
    if file.exists():
        found = list(_all_configs(read_json(file), ""))
        if any(config != found[0][1] for _, config in found):
            places = ", ".join(place for place, _ in found)
            raise ValueError(
                f"config.json: got quantisation configurations that differ in {places}, want one: give config"
            )
        if found:
            return {**_of_experts(read_json(file)), **found[0][1]}
    for name in FILES:
        if (directory / name).exists():
            return checked(name, read_json(directory / name))
    if (directory / MODELOPT_FILE).exists():
        said = checked(MODELOPT_FILE, read_json(directory / MODELOPT_FILE).get("quantization"))
        return {"quant_method": MODELOPT[0], **said}
    return {}


def _of_experts(settings: Config) -> dict[str, Any]:
    """Returns the entry "expert_dtype" of DeepSeek V4, which config.json has outside of the quantisation configuration;
    {} if there is none. V4.1 has it inside the quantisation configuration.
    """
    of_text = settings.get("text_config")
    said = settings.get("expert_dtype", of_text.get("expert_dtype") if isinstance(of_text, Mapping) else None)
    return {} if said is None else {"expert_dtype": said}


def _all_configs(settings: object, prefix: str) -> Iterator[tuple[str, Config]]:
    """Yields (dotted key, configuration) of each quantisation configuration in ``settings``, the outermost first."""
    if not isinstance(settings, Mapping):
        return
    for key in KEYS:
        if settings.get(key):
            yield prefix + key, checked(f"config.json, {prefix}{key}", settings[key])
    for key, value in settings.items():
        if key not in KEYS:
            yield from _all_configs(value, f"{prefix}{key}.")


# -- what goes for one layer -------------------------------------------------------------------------------------------


def config_of(config: Config, name: str) -> dict[str, Any]:
    """Returns the configuration of a layer: the common settings, overridden by those of patterns that match its name.

    Patterns are GPTQModel's "dynamic", AutoRound's "extra_config" and compressed-tensors' "config_groups". The layer's
    group in "config_groups" becomes the result's entry "group". An entry of ModelOpt's "quantized_layers" holds for all
    layers below its name, since stacked experts have one entry. ModelOpt's own "config_groups" are ignored: they have
    fewer settings, and call dynamic activations static.

    Raises:
        TypeError, ValueError: a pattern is malformed, or no group has the layer.
    """
    config = {**config, **_dynamic_of(config, name)}
    if config.get("quant_method") in AUTO_ROUND:
        config |= _extra_of(config, name)
    if config.get("config_groups") and config.get("quant_method") not in MODELOPT:
        config["group"] = _group_of(config, name)
    mixed = _mappings("quantized_layers", config)
    while name and name not in mixed:
        name = name.rpartition(".")[0]
    return {**config, **mixed.get(name, {})}


def block_in(said: object) -> tuple[int, int]:
    """Returns (rows, inputs) of a block of weights that share a scale. ``inputs`` is 0 if there are no blocks. said:
    the entry of the configuration, such as [128, 128], "128x128", or 32 for 32 inputs of one row.
    """
    rows, inputs = [1, 0, *map(int, re.findall(r"-?\d+", str(said)))][-2:]
    return max(rows, 1), max(inputs, 0)


def _dynamic_of(config: Config, name: str) -> Config:
    """Returns the settings of the first pattern in GPTQModel's "dynamic" that matches the beginning of a layer's name;
    {} if none does. Patterns with "-:" never match: they mark layers that are not quantised."""
    dynamic = _mappings("dynamic", config)
    for pattern, own in dynamic.items():
        if _compiled("dynamic", pattern, "+:").match(name):
            return own
    return {}


def _extra_of(config: Config, name: str) -> Config:
    """Returns the settings in AutoRound's "extra_config" for a layer's name, or else for the first pattern that is
    found in the name; {} if there are none."""
    extra = _mappings("extra_config", config)
    if name in extra:
        return extra[name]
    for pattern, own in extra.items():
        try:
            found = re.search(pattern, name)
        except re.error:
            continue  # as AutoRound does
        if found and own:
            return own
    return {}


def _mappings(key: str, config: Config) -> Mapping[str, Config]:
    found = config.get(key) or {}
    if not isinstance(found, Mapping) or not all(isinstance(own, Mapping) for own in found.values()):
        raise TypeError(f"{key}: got {found!r}, want values for each pattern of names")
    return found


def _compiled(key: str, pattern: str, prefix: str) -> re.Pattern[str]:
    """Compiles the regular expression that follows ``prefix``."""
    try:
        return re.compile(pattern.removeprefix(prefix))
    except re.error as error:
        raise ValueError(f"{key}: got {pattern!r} ({error}), want a regular expression") from error


def _group_of(config: Config, name: str) -> Config:
    """Returns a quantised layer's group in a compressed-tensors configuration.

    A group's targets are names, patterns that follow "re:", or classes; a name wins over a pattern, a pattern over a
    class. Every layer is treated as a Linear.
    """
    groups = config["config_groups"]
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise TypeError(f"config_groups: got {groups!r}, want groups of layers by name, each a mapping")
    ranked = []
    for group in groups.values():
        targets = group.get("targets") or ["Linear"]
        if not isinstance(targets, (list, tuple)) or not all(isinstance(target, str) for target in targets):
            raise TypeError(f"config_groups: got targets {targets!r}, want a list of names")
        ranked += [(rank, group) for target in targets if (rank := _rank(target, name)) is not None]
    if not ranked:
        raise ValueError(
            "config_groups: got none whose targets are this layer's name or Linear, want the layer's group"
        )
    return min(ranked, key=lambda item: item[0])[1]


def _rank(target: str, name: str) -> int | None:
    """Returns how specific a matching target is, 0 for the most specific; None if the target does not match."""
    if target.startswith("re:"):
        return 1 if _compiled("config_groups", target, "re:").match(name) else None
    return 0 if target == name else 2 if target == "Linear" else None
