"""Recognises the code that a transformers class runs. Names are not enough, since model files copy each other's
classes.

Two methods are the same if their instructions are equal, and the model-file functions that they call are the same.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from types import CodeType
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from cute_kernels.integrations.objects import Foreign

_MODEL_FILES = "transformers.models."
CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of a forward pass's argument for its cache: since transformers 5.24, and before. Later releases still accept
the older name."""
_KEY_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_ATTENTION_FUNCTIONS = ("attention_interface", "eager_attention_forward")
"""Names of transformers' attention functions in model files."""


def model_class(file: str, name: str) -> type | None:
    """Returns a class of a model file.

    Returns None if this release of transformers has no such class, or if the class or its ``forward`` was replaced.
    """
    home = f"{_MODEL_FILES}{file}.modeling_{file}"
    try:
        kind = getattr(importlib.import_module(home), name, None)
    except ImportError:
        return None
    own = [kind, _method(kind, "forward")] if isinstance(kind, type) else []
    return kind if own and all(getattr(each, "__module__", None) == home for each in own) else None


def cache_argument(forward: Callable[..., Any]) -> str:
    """Returns the name of a forward pass's argument for its cache."""
    taken = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in taken), CACHE_ARGUMENTS[-1])


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Returns the cache among a forward pass's arguments, given by name; None if there is none."""
    return next((arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


def layers_without_keys(config: Foreign) -> str:
    """Returns the kinds of a model's layers that cache other states than keys and values; empty for none."""
    return ", ".join(sorted({*(getattr(config, "layer_types", None) or ())} - _KEY_LAYERS))


@cache
def computes_attention(kind: type) -> bool:
    """Returns whether a class computes attention by its own operators and ignores ``attn_implementation``.

    Such a class takes ``attention_mask``, calls a softmax, and does not call transformers' attention functions. One
    model may have classes of both kinds: GIT's image encoder calls transformers' functions, its text layers do not. The
    result may be True for a class that is no attention.
    """
    if issubclass(kind, PreTrainedModel) or "attention_mask" not in _parameters(_method(kind, "forward")):
        return False
    methods = [inspect.unwrap(f) for owner in kind.__mro__ for f in vars(owner).values() if inspect.isfunction(f)]
    called = {name for method in methods for name in method.__code__.co_names}
    return "softmax" in called and "ALL_ATTENTION_FUNCTIONS" not in called


@cache
def passes_masks_on(kind: type) -> bool:
    """Returns whether a class's forward only passes ``attention_mask`` on, unchanged, to submodules or attention
    functions."""
    forward = _method(kind, "forward")
    if "attention_mask" not in _parameters(forward):
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # nobody can tell
        return False
    given = [
        value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _is_part(call.func)
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
    ]
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "attention_mask"]
    return all(any(node is value for value in given) for node in read)


@torch.compiler.assume_constant_result
def supports_sdpa(config: type) -> bool:
    """Returns whether SDPA is supported by all model classes that may ask for a mask with this configuration class.

    Unknown classes are assumed to support it. torch.compile can call this while it traces, since the answer is a
    constant.
    """
    return all(kind._supports_sdpa for kind in _models_asking_with(config))


@torch.compiler.assume_constant_result
def may_add_masks(config: type) -> bool:
    """Returns whether a model that asks for a mask with this configuration class may add the mask to scores or change
    it.

    Only a model that does not support SDPA may do so, in one of two cases:

    - A module class fails `passes_masks_on`. Classes are searched in the model's file, and in the files of the models
      that it can contain.
    - The model can contain models of any class.

    torch.compile can call this while it traces, when no module is known, since the answer is a constant.
    """
    asking = [kind for kind in _models_asking_with(config) if not kind._supports_sdpa]
    held = {part for kind in asking for part in _configs_below(kind.config_class)}
    kinds = {*asking, *(kind for part in held for kind in _models_of(part))}
    return AutoConfig in held or not all(passes_masks_on(part) for kind in kinds for part in _beside(kind))


def _models_asking_with(config: type) -> list[type[PreTrainedModel]]:
    """Returns the loaded model classes of a configuration class, and of configuration classes that contain it.

    Some models of text and images ask for masks with the configuration of their text part.
    """
    found = _models_of(config)
    own = {kind.config_class for kind in found}
    return found + [kind for kind in _loaded_models() if own & _configs_below(kind.config_class)]


def _models_of(config: type) -> list[type[PreTrainedModel]]:
    """Returns the loaded model classes of a configuration class, or of its nearest base class that has any."""
    loaded = list(_loaded_models())
    for base in config.__mro__:
        if base is not PreTrainedConfig and (found := [kind for kind in loaded if kind.config_class is base]):
            return found
    return []


def _loaded_models() -> Iterator[type[PreTrainedModel]]:
    """Yields all loaded model classes of transformers."""
    pending, found = [PreTrainedModel], set[type]()
    while pending:
        for kind in pending.pop().__subclasses__():
            if kind not in found:
                found.add(kind)
                pending.append(kind)
                yield kind


def _configs_below(config: object) -> set[type]:
    """Returns the configuration classes that a configuration class holds, directly or not."""
    found, pending = set[type](), [config]
    while pending:
        held = set((getattr(pending.pop(), "sub_configs", None) or {}).values()) - found
        found |= held
        pending += held
    return found


def _beside(kind: type) -> Iterator[type]:
    """Yields the module classes, models excepted, in the file of a model class."""
    for part in list(vars(sys.modules[kind.__module__]).values()):
        if isinstance(part, type) and issubclass(part, torch.nn.Module) and not issubclass(part, PreTrainedModel):
            yield part


def _is_part(called: ast.expr) -> bool:
    """Returns whether a call goes to one of a module's parts, or to an attention function."""
    if isinstance(called, ast.Name):
        return called.id in _ATTENTION_FUNCTIONS
    return isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self"


def _parameters(function: object) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def method_code(kind: type, names: Iterable[str] = ("forward",)) -> Any:
    """Returns the code of a class's methods ``names``, inherited ones included; None if it has none of them.

    Decorators are ignored.
    """
    found = tuple(
        _code_of(inspect.unwrap(method)) for name in names if hasattr(method := _method(kind, name), "__code__")
    )
    return found or None


def _method(kind: type, name: str) -> Any:
    method = getattr(kind, name, None)
    return inspect.unwrap(method) if callable(method) else None


@cache
def _code_of(function: Callable[..., Any], depth: int = 3) -> Any:
    code = function.__code__
    called = []
    if depth:
        for name in code.co_names:
            other = function.__globals__.get(name)
            other = inspect.unwrap(other) if callable(other) and not isinstance(other, type) else None
            if hasattr(other, "__code__") and str(getattr(other, "__module__", "")).startswith(_MODEL_FILES):
                called.append((name, _code_of(other, depth - 1)))
    return _instructions(code, function.__doc__), tuple(called)


def _instructions(code: CodeType, doc: str | None = None) -> Any:
    constants = tuple(
        _instructions(value) if isinstance(value, CodeType) else value
        for value in code.co_consts
        if value is None or value != doc
    )
    return code.co_code, constants, code.co_names
