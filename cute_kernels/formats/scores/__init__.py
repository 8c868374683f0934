"""Score options, which change attention's scores between q K^T and the softmax. Each is one object, and `register` adds
options from any file (docs/add_score_option.md).

`decode_attention` and `extend_attention` have keywords for the shipped options. Calls name all other options in
``score_options``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from cute_kernels.formats.scores.base import SIZES as SIZES
from cute_kernels.formats.scores.base import Features
from cute_kernels.formats.scores.base import KeyBlock as KeyBlock
from cute_kernels.formats.scores.base import OptionTensor as OptionTensor
from cute_kernels.formats.scores.base import ScoreOption as ScoreOption
from cute_kernels.formats.scores.shipped import Alibi, Bias, Shift, Sinks, SoftCap, Window

OPTIONS: tuple[ScoreOption, ...] = (Shift(), SoftCap(), Alibi(), Sinks(), Bias(), Window())
"""The shipped options, in the order in which they act on scores."""

_registered: dict[str, ScoreOption] = {}


def register(option: ScoreOption) -> ScoreOption:
    """Registers an option by its name and its tensors' names, and returns the option. Registering an option of the same
    class again changes nothing.

    Raises:
        ValueError: its name, or a tensor's name, is no identifier or belongs to another option; or a tensor has an
            unknown size.
    """
    if type(_registered.get(option.name)) is type(option):
        return _registered[option.name]
    taken = {each.name for each in known()} | {tensor.name for each in known() for tensor in each.tensors}
    for name in dict.fromkeys((option.name, *(tensor.name for tensor in option.tensors))):
        if not name.isidentifier() or name in taken:
            raise ValueError(f"name: got {name!r}, want an identifier that no option and no option's tensor has")
    for size in (size for tensor in option.tensors for size in tensor.shape):
        if isinstance(size, str) and size not in SIZES:
            raise ValueError(f"shape: got {size!r}, want a number or one of {', '.join(SIZES)}")
    _registered[option.name] = option
    return option


def known() -> tuple[ScoreOption, ...]:
    """Returns all options, in the order in which they are applied to scores."""
    return (*OPTIONS, *_registered.values())


def options_in(features: Features) -> list[ScoreOption]:
    """Returns the options of a compiled variant, in order. Raises ValueError for one that is not registered."""
    for name in features.terms:
        if name not in _registered:
            raise ValueError(f"score_options: got {name!r}, want one of {', '.join(_registered)}")
    return [option for option in known() if option.is_in(features)]


def tensors_of(names: Iterable[str]) -> list[OptionTensor]:
    """Returns the tensors that a call passes to the named options."""
    return [tensor for name in names for tensor in _registered[name].tensors]


def tensors_in(features: Features) -> list[OptionTensor]:
    """Returns the tensors whose addresses a launch of a variant needs, in order."""
    return [tensor for option in options_in(features) for tensor in option.tensors]


def check_mapping(given: object) -> None:
    """Raises TypeError unless ``score_options`` are a mapping."""
    if not isinstance(given, Mapping):
        raise TypeError(f"score_options: got {type(given).__name__}, want a mapping from tensors' names to tensors")


def check_given(given: Mapping[str, torch.Tensor], q: torch.Tensor, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the options that a call's ``score_options`` name, in the order in which they are applied.

    Raises:
        TypeError, ValueError: ``given`` is no mapping, names a tensor that no option has, or lacks a tensor of a named
            option; or a tensor does not fit.
    """
    check_mapping(given)
    wanted = [tensor.name for option in _registered.values() for tensor in option.tensors]
    for name in given:
        if name not in wanted:
            known = " or ".join(map(repr, wanted)) or "none: no option is registered"
            raise ValueError(f"score_options: got {name!r}, want {known}")
    options = [option for option in _registered.values() if any(tensor.name in given for tensor in option.tensors)]
    for option in options:
        for tensor in option.tensors:
            if tensor.name not in given:
                raise ValueError(f"score_options: got no {tensor.name!r}, which {option.name!r} wants")
            tensor.check(given[tensor.name], q, sizes)
    return tuple(option.name for option in options)


def flattened(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call's options as a registered operator takes them: the names in ``score_options``, joined by commas,
    and a list of their tensors."""
    given = dict(options)
    tensors = given.pop("score_options", None)
    if tensors:
        given |= {"score_names": ",".join(tensors), "score_tensors": list(tensors.values())}
    return given


def restored(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call's options from the result of `flattened`. There is no key ``score_options`` if the call had
    none."""
    given = dict(options)
    names, tensors = given.pop("score_names", ""), given.pop("score_tensors", None)
    if tensors is not None:
        given["score_options"] = dict(zip(names.split(","), tensors, strict=True))
    return given


def modules_of(features: Features | None = None) -> tuple[str, ...]:
    """Returns the modules outside this package that a process must import to compile a variant's options. Without
    features, returns those of all options."""
    options = known() if features is None else options_in(features)
    names = dict.fromkeys(option.term.partition(":")[0] for option in options)
    return tuple(name for name in names if name.partition(".")[0] != __name__.partition(".")[0])


def code_of(features: Features) -> tuple[object, ...]:
    """Returns the parts of a kernel's key for a variant's options: the options, and the modules of their device
    code."""
    options = tuple(options_in(features))
    return *options, *(option.term for option in options)
