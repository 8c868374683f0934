"""A model's decode step as a CUDA graph: recorded once, replayed by the same call of ``forward``.

A step over a `DecodeCache` is static: it reads one token of each request and the cache's lengths, both on the device.
The step's other launches, a few hundred of transformers' own, are recorded in the same graph. The arguments and outputs
of the caller's ``forward`` do not change; outputs are copies, which no replay overwrites.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers.utils import ModelOutput

from cute_kernels.gemm.module import OfProducts
from cute_kernels.integrations.transformers.ahead import Lookahead, NextInputs, Recorded, Step, chosen_from
from cute_kernels.integrations.transformers.cache import DecodeCache
from cute_kernels.integrations.transformers.columns import Columns, NotStaticError
from cute_kernels.integrations.transformers.inputs import StepInputs
from cute_kernels.integrations.transformers.known_code import cache_in
from cute_kernels.integrations.transformers.masks import recording
from cute_kernels.integrations.transformers.merged import PartOfPair
from cute_kernels.integrations.transformers.ropes import version_of
from cute_kernels.runtime.captures import graph_of

_LOG = logging.getLogger(__name__)
_PLAIN = (type(None), bool, int, float, str)
_CACHE = object()
"""Placeholder for the caller's cache in recorded outputs. Recordings live as long as the cache's memory, and must not
keep the cache."""


Record: TypeAlias = Callable[[Callable[[], Any], torch.device], Recorded]
"""A function that records another one on a device."""


class CudaGraph:
    """A function recorded as a CUDA graph."""

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        self.graph, self.outputs = graph_of(function, device)

    def replay(self) -> None:
        """Runs the recorded function."""
        self.graph.replay()


@dataclass
class _Call:
    """A call of `generate`.

    Attributes:
        lookahead: the steps that the call begins early; None if it begins none.
        last: the step that was replayed last.
    """

    lookahead: Lookahead | None
    last: _Replayed | None = None


@dataclass(frozen=True)
class _Replayed:
    """A replayed step and its arguments. In the next step of `generate`, only the values of tensors differ.

    Attributes:
        steps: the cache's ``graphs[key]``, which holds the step. If the cache has dropped or replaced ``steps``, the
            step may not be replayed.
        names: the arguments' names, in order.
        others: arguments that are no tensors.
        tensors: (name, shape, dtype, device) of the tensors except the mask.
        has_mask: whether a mask is given.
    """

    step: Step
    cache: DecodeCache
    steps: Mapping[bool, Step | None]
    key: object
    names: tuple[str, ...]
    others: tuple[tuple[str, Any], ...]
    tensors: tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]
    has_mask: bool

    @classmethod
    def of(
        cls, step: Step, cache: DecodeCache, steps: Mapping[bool, Step | None], key: object, given: Mapping[str, Any]
    ) -> _Replayed:
        """Makes the record of a replayed step. given: the call's arguments."""
        found = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and name != "attention_mask"}
        others = tuple((name, x) for name, x in given.items() if name not in found and name != "attention_mask")
        tensors = tuple((name, x.shape, x.dtype, x.device) for name, x in found.items())
        return cls(step, cache, steps, key, tuple(given), others, tensors, given.get("attention_mask") is not None)

    def is_called(self, given: Mapping[str, Any], epoch: object) -> bool:
        """Returns whether a call with these arguments can replay this step.

        Conditions of `StepReplay._is_step` that do not change within a call of `generate` are not checked again.
        """
        columns = self.cache.columns
        if columns is None or columns.epoch is not epoch or columns.graphs.get(self.key) is not self.steps:
            return False
        if tuple(given) != self.names or columns.count >= columns.capacity or not columns.is_certain or columns.static:
            return False
        for name, value in self.others:
            if given[name] is not value:
                return False
        for name, shape, dtype, device in self.tensors:
            x = given[name]
            if not isinstance(x, torch.Tensor) or x.shape != shape or x.dtype is not dtype or x.device != device:
                return False
        mask = given.get("attention_mask")
        if self.has_mask != isinstance(mask, torch.Tensor):
            return False
        if mask is None:
            return columns.all_tokens
        return mask.shape == (columns.batch, columns.count + 1)


_THREAD = threading.local()
"""``calls`` maps a `StepReplay`'s id to the call of `generate` that the thread is in. Each thread has its own, since
two threads may share a model."""


class StepReplay:
    """A model's ``forward`` that replays decode steps.

    Args:
        forward: the model's own ``forward``.
        record: a function that records a step. None: steps are recorded as CUDA graphs, and not on a CPU.

    Attributes:
        reason: why steps are no longer recorded, after one failed; else None.
        replays: number of steps that were replayed.
        ahead: number of replayed steps that had begun before they were asked for.
    """

    def __init__(self, forward: Callable[..., Any], record: Record | None = None) -> None:
        self.forward = forward
        self.record = record
        self.reason: str | None = None
        self.replays = 0
        self.ahead = 0
        self._names = tuple(inspect.signature(forward).parameters)
        self._state: object = None
        self._epoch = object()
        functools.update_wrapper(self, forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepReplay:
        """Returns the replay of a copy of the model, which has recorded nothing."""
        memo[id(self)] = copied = StepReplay(deepcopy(self.forward, memo), self.record)
        return copied

    @contextmanager
    def within_generate(self, cache: object = None, columns: int = 0) -> Iterator[None]:
        """Marks a call of `generate` in this thread. Whether the model and the mask's older columns are unchanged is
        then checked once, not at every step.

        Comparing the mask waits for the device. `generate` changes neither the model nor older columns; it appends a
        column of ones at every step.

        Args:
            cache: the call's cache.
            columns: the number of columns that the cache will hold, if the call takes the likeliest token at every
                step. Steps may then begin before they are asked for. If it is 0, no step begins early.
        """
        self._look_at_model()
        before = self._call
        calls = vars(_THREAD).setdefault("calls", {})
        calls[id(self)] = _Call(Lookahead(columns) if columns else None)
        try:
            yield
        finally:
            calls.pop(id(self))
            if before is not None:
                calls[id(self)] = before
            if isinstance(cache, DecodeCache) and cache.columns is not None:
                cache.columns.call_back()

    @property
    def _call(self) -> _Call | None:
        """The call of `generate` that this thread is in."""
        return vars(_THREAD).get("calls", {}).get(id(self))

    def _look_at_model(self) -> None:
        """If a weight, layer or hook of the model has changed, starts a new epoch. Steps recorded in earlier epochs are
        not replayed."""
        found = state_of(owner_of(self.forward))
        if found != self._state:
            self._state, self._epoch = found, object()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the results of the model's ``forward``, by a replay if the call is a recorded step."""
        call = self._call
        if call is not None and (last := call.last) is not None and not args and last.is_called(kwargs, self._epoch):
            if not (self.reason is not None or torch.is_grad_enabled() or torch.compiler.is_compiling()):
                return self._replay(last.step, last.cache, kwargs, call.lookahead)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        cache = cache_in(given)
        split = _split(given) if isinstance(cache, DecodeCache) and self._is_step(cache.columns, given) else None
        if split is None:
            return self.forward(*args, **kwargs)
        assert isinstance(cache, DecodeCache) and cache.columns is not None
        (key, tensors, others), columns = split, cache.columns
        if call is None:
            self._look_at_model()
        if columns.epoch is not self._epoch:
            columns.graphs.clear()
            columns.epoch = self._epoch
        mask = given.get("attention_mask")
        if mask is not None and (call is None or call.last is None):
            if not (columns.is_known(mask[:, : columns.count]) and bool(mask[:, columns.count :].all())):
                return self.forward(*args, **kwargs)
        if key not in columns.graphs:
            # The first of its kind runs as usual: what it needs is then compiled and allocated.
            columns.graphs[key] = {}
            return self.forward(*args, **kwargs)
        lookahead = None if call is None else call.lookahead
        steps, foresees = columns.graphs[key], lookahead is not None
        if foresees not in steps:
            steps[foresees] = self._record(columns, tensors, others, foresees)
        step = steps[foresees]
        if step is None:
            return self.forward(*args, **kwargs)
        if call is not None:
            call.last = _Replayed.of(step, cache, steps, key, given) if not args else None
        return self._replay(step, cache, tensors, lookahead)

    def _is_step(self, columns: Columns | None, given: Mapping[str, Any]) -> bool:
        """Returns whether a call is a decode step that can be recorded."""
        ids = given.get("input_ids")
        if self.reason is not None or columns is None or columns.static or not columns.count or not columns.is_certain:
            return False
        if not isinstance(ids, torch.Tensor) or ids.shape != (columns.batch, 1):
            return False
        if self.record is None and (not ids.is_cuda or torch.cuda.is_current_stream_capturing()):
            return False
        # Without positions a model takes them from the host's numbers, or from the mask.
        if not isinstance(given.get("position_ids"), torch.Tensor) or columns.count >= columns.capacity:
            return False
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or given.get("use_cache") is False:
            return False
        mask = given.get("attention_mask")
        if mask is None:
            return columns.all_tokens
        return isinstance(mask, torch.Tensor) and mask.shape == (columns.batch, columns.count + 1)

    def _record(
        self, columns: Columns, tensors: dict[str, torch.Tensor], others: dict[str, Any], foresees: bool
    ) -> Step | None:
        """Records a step, and returns it. Returns None if it cannot be recorded.

        foresees: whether the step also copies its inputs to the host and writes the next step's inputs, as steps that
        begin early need.
        """
        columns.call_back()
        inputs = StepInputs(tensors)
        following = NextInputs(inputs) if foresees else None
        logits: torch.Tensor | None = None

        def step() -> Any:
            nonlocal logits
            with recording(columns):
                if following is not None:
                    inputs.note()
                outputs = self.forward(**inputs.tensors, **others, attention_mask=None)
                columns.before.add_(1)
                logits = chosen_from(outputs, inputs)
                if following is not None and logits is not None:
                    following.make(logits)
            return _mapped(outputs, lambda value: _CACHE if isinstance(value, DecodeCache) else value)

        lens, device = columns.seq_lens.clone(), columns.seq_lens.device
        columns.before.fill_(columns.count)
        try:
            _run_aside(step, device)
            columns.seq_lens.copy_(lens)  # the row that it wrote is written again by the replay
            recorded = (self.record or CudaGraph)(step, device)
            columns.seq_lens.copy_(lens)
        except NotStaticError as error:  # of this batch
            columns.seq_lens.copy_(lens)
            _LOG.info("decode steps of this batch run without a CUDA graph: %s", error)
            return None
        except Exception as error:
            columns.seq_lens.copy_(lens)
            self.reason = f"{type(error).__name__}: {error}"
            _LOG.warning("decode steps run without a CUDA graph: %s", self.reason)
            return None
        return Step(inputs, recorded, None if logits is None else following)

    def _replay(
        self, step: Step, cache: DecodeCache, tensors: Mapping[str, torch.Tensor], lookahead: Lookahead | None
    ) -> Any:
        assert cache.columns is not None
        columns, copies = cache.columns, []
        was_begun = lookahead is not None and lookahead.take(step, columns, tensors)
        if was_begun:

            def copied(value: torch.Tensor) -> torch.Tensor:
                copy = torch.empty_like(value)  # of the current stream, all of whose work `take` has waited for
                copies.append((copy, value))
                return copy

            outputs = _own(cache, step.recorded.outputs, copied)
        else:
            columns.call_back()
            if lookahead is not None and step.following is not None:
                lookahead.place(step.following)
            step.inputs.place(tensors)
            columns.place_before()
            step.recorded.replay()
            outputs = _own(cache, step.recorded.outputs, torch.clone)
        cache.advance()
        self.replays += 1
        self.ahead += was_begun
        if lookahead is not None:
            lookahead.go_on(step, columns, copies)
        return outputs


def owner_of(method: Callable[..., Any]) -> Any:
    """Returns the model that a method belongs to, even if the method is wrapped."""
    return inspect.unwrap(method, stop=lambda inner: hasattr(inner, "__self__")).__self__


def state_of(model: nn.Module) -> Any:
    """Returns the state of a model that must be unchanged when a recorded step is replayed.

    The state consists of the modules, their modes, settings and numbers of hooks, the addresses of their tensors, and
    the versions of their buffers. A version shows whether a buffer, such as a rotation's frequencies, was written.
    """
    return tuple(
        (
            id(module),
            module.training,
            (module.batch_invariant, module.activations) if isinstance(module, OfProducts) else None,
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            tuple(x.data_ptr() for x in _tensors_of(module) if x is not None),
            tuple(version_of(x) for x in module._buffers.values() if x is not None),
        )
        for module in model.modules()
    )


def _tensors_of(module: nn.Module) -> Iterable[torch.Tensor | None]:
    if isinstance(module, PartOfPair):
        return module.pair[0]._buffers.values()
    return (*module._parameters.values(), *module._buffers.values())


def _split(given: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]] | None:
    """Returns (key of a recording, tensors, other arguments) of a step's arguments without the mask.

    Returns None for arguments that cannot be recorded.
    """
    parts: list[Any] = []
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in given.items():
        if name == "attention_mask":
            continue
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            parts.append((name, value.shape, value.dtype, value.device))
        elif isinstance(value, _PLAIN):
            others[name] = value
            parts.append((name, type(value), value))
        elif isinstance(value, DecodeCache):
            others[name] = value
        else:
            return None
    return frozenset(parts), tensors, others


@functools.cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which all steps run before they are recorded. There is only one: cuBLAS keeps 34 MB for
    each stream it has run on."""
    return torch.cuda.Stream(device)


def _run_aside(function: Callable[[], Any], device: torch.device) -> None:
    """Runs a function once before it is recorded, on a stream of its own, as CUDA graphs need."""
    if device.type != "cuda":
        function()
        return
    stream = _aside(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream(device).wait_stream(stream)


def _own(cache: DecodeCache, outputs: object, copied: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copies a step's outputs, so that no replay overwrites them, and puts the caller's cache into the copies."""

    def own(value: object) -> object:
        return copied(value) if isinstance(value, torch.Tensor) else cache if value is _CACHE else value

    return _mapped(outputs, own)


def _mapped(outputs: object, function: Callable[[Any], Any]) -> Any:
    """Returns a model's outputs with a function applied to each tensor and other value."""
    if isinstance(outputs, torch.Tensor) or outputs is _CACHE:  # before what takes longer to ask
        return function(outputs)
    if isinstance(outputs, ModelOutput):
        # As its constructor makes it, which takes as long as all else that a replay does on the host.
        values = {name: _mapped(value, function) for name, value in outputs.items()}
        made = type(outputs).__new__(type(outputs))
        vars(made).update(vars(outputs) | values)
        for name, value in values.items():
            OrderedDict.__setitem__(made, name, value)
        return made
    if isinstance(outputs, Mapping):
        return type(outputs)(**{name: _mapped(value, function) for name, value in outputs.items()})
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(_mapped(value, function) for value in outputs)
    return function(outputs)
