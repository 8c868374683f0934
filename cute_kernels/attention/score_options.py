"""What changes attention's scores between q K^T and the softmax: one object an option, in one registry.

An option says its part of a kernel's name, the tensors that a call gives it, what it does to scores in the reference,
and where its device code is. `decode_attention` has keywords for those that ship. `register` adds one from any file,
which calls then name in ``score_options``, as docs/add_score_option.md shows.

Device code is a class of :mod:`cute_kernels.attention.score_terms`, or one like them, named as "module:attribute" and
imported when a kernel is compiled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from cute_kernels.arguments import check_tensors, shape_of
from cute_kernels.attention.checks import check_contiguous, check_place

if TYPE_CHECKING:
    from cute_kernels.attention.call import AttentionCall
    from cute_kernels.attention.features import Features

_TERMS = "cute_kernels.attention.score_terms"
SIZES = ("batch", "q_len", "num_q_heads", "num_kv_heads", "head_dim", "max_seq_len")
ALIGNMENT = 4  # bytes, of a tensor's start


@dataclass(frozen=True)
class OptionTensor:
    """A tensor that a call gives an option; its address is an argument of the launch.

    Attributes:
        name: of the key in ``score_options``, and of the launch's argument.
        shape: numbers, and names of `SIZES`; contiguous.
        dtype: of its elements.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32

    def shape_of(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """In a call of ``sizes``."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)

    def check(self, tensor: torch.Tensor, q: torch.Tensor, sizes: Mapping[str, int]) -> None:
        """Raises TypeError or ValueError unless ``tensor`` is what a call of ``sizes`` wants; names what came."""
        check_tensors(**{self.name: tensor})
        check_place(self.name, tensor, q.device)
        wanted = self.shape_of(sizes)
        if tuple(tensor.shape) != wanted:
            names = ", ".join(map(str, self.shape))
            raise ValueError(f"{self.name}: got shape {shape_of(tensor)}, want {wanted}, [{names}]")
        if tensor.dtype != self.dtype:
            raise TypeError(f"{self.name}: got {tensor.dtype}, want {self.dtype}")
        check_contiguous(self.name, tensor)
        if past := tensor.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{self.name}: got a tensor that starts {past} bytes past a multiple of {ALIGNMENT}, "
                f"want it aligned to {ALIGNMENT} bytes"
            )


@dataclass(frozen=True)
class KeyBlock:
    """The scores that the reference computes at a time: of all queries, for some keys.

    Attributes:
        call: whose queries they are.
        keys_at: int64 [tokens]: positions of the keys.
        query_positions: int64 [batch, q_len]: where the queries stand in their requests.
    """

    call: AttentionCall
    keys_at: torch.Tensor
    query_positions: torch.Tensor

    @property
    def distances(self) -> torch.Tensor:
        """int64 [batch, q_len, 1, 1, tokens]: from each query on to each key."""
        return (self.keys_at - self.query_positions[:, :, None])[:, :, None, None, :]

    def by_head(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[num_q_heads] as [num_kv_heads, group, 1] that meets scores."""
        return values.to(dtype).reshape(self.call.num_kv_heads, self.call.group, 1)


class ScoreOption(ABC):
    """One option. A subclass is registered as it is: it has no state.

    Attributes:
        name: part of kernels' names, and what it is registered by; an identifier.
        term: place of its device code.
        tensors: those that a call gives in ``score_options``; none of options that have keywords of their own.
        fits_four_blocks: whether a warp that carries four blocks of queries has registers for it: it keeps nothing
            that depends on the query.
    """

    name: ClassVar[str]
    term: ClassVar[str]
    tensors: ClassVar[tuple[OptionTensor, ...]] = ()
    fits_four_blocks: ClassVar[bool] = False

    def is_in(self, features: Features) -> bool:
        """Whether a compiled variant has it."""
        return self.name in features.terms

    @abstractmethod
    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        """Scores [batch, q_len, num_kv_heads, group, tokens] in natural units, as it makes them."""

    def sample(self, sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Tensors of a call of ``sizes`` for tests, on the generator's device: standard normal."""
        shapes = {tensor.name: tensor.shape_of(sizes) for tensor in self.tensors}
        return {
            name: torch.randn(shape, generator=generator, device=generator.device) for name, shape in shapes.items()
        }


class Shift(ScoreOption):
    """softmax_scale times a number of each query: what a transformed cache's centre has taken off its scores."""

    name, term = "shift", f"{_TERMS}:ShiftTerm"
    fits_four_blocks = True

    def is_in(self, features: Features) -> bool:
        return features.shift

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        call = block.call
        if call.q_shift is None:
            return scores
        shift = call.softmax_scale * call.q_shift.to(scores.dtype)
        return scores + shift.unflatten(2, (call.num_kv_heads, call.group)).unsqueeze(-1)


class SoftCap(ScoreOption):
    """cap * tanh(score / cap)."""

    name, term = "soft_cap", f"{_TERMS}:SoftCapTerm"
    fits_four_blocks = True

    def is_in(self, features: Features) -> bool:
        return features.soft_cap

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        cap = block.call.soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)


class Alibi(ScoreOption):
    """A slope of each head times the distance from the query to the key (Press et al. 2022)."""

    name, term = "alibi", f"{_TERMS}:AlibiTerm"

    def is_in(self, features: Features) -> bool:
        return features.alibi

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        slopes = block.call.alibi_slopes
        if slopes is None:
            return scores
        return scores + block.by_head(slopes, scores.dtype) * block.distances.to(scores.dtype)


class Sinks(ScoreOption):
    """One more logit of each head in the denominator: no score changes; `reference.apply_sinks` says what does."""

    name, term = "sinks", f"{_TERMS}:SinksTerm"
    fits_four_blocks = True

    def is_in(self, features: Features) -> bool:
        return features.sinks

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        return scores


class Bias(ScoreOption):
    """A number of each request, query, head and key."""

    name, term = "bias", f"{_TERMS}:BiasTerm"

    def is_in(self, features: Features) -> bool:
        return features.bias is not None

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        call = block.call
        if call.bias is None:
            return scores
        full = call.bias.tensor.expand(call.batch, call.q_len, call.num_q_heads, call.max_seq_len)
        part = full[..., block.keys_at].to(scores.dtype)
        return scores + part.unflatten(2, (call.num_kv_heads, call.group))


class Window(ScoreOption):
    """Keys far back are not seen: no score changes, and `reference.seen_keys` says which are."""

    name, term = "window", f"{_TERMS}:WindowTerm"
    fits_four_blocks = True

    def is_in(self, features: Features) -> bool:
        return features.window

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        return scores


OPTIONS: tuple[ScoreOption, ...] = (Shift(), SoftCap(), Alibi(), Sinks(), Bias(), Window())
"""Those that ship, in the order in which scores meet them."""

_registered: dict[str, ScoreOption] = {}


def register(option: ScoreOption) -> ScoreOption:
    """Makes an option known by its name and its tensors' names; returns it. Its class again changes nothing.

    Raises:
        ValueError: its name, or a tensor's, is no identifier or another option's, or a tensor has an unknown size.
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
    """All options, in the order in which scores meet them."""
    return (*OPTIONS, *_registered.values())


def options_in(features: Features) -> list[ScoreOption]:
    """Those that a compiled variant has, in order; ValueError names one that is not registered."""
    for name in features.terms:
        if name not in _registered:
            raise ValueError(f"score_options: got {name!r}, want one of {', '.join(_registered)}")
    return [option for option in known() if option.is_in(features)]


def tensors_of(names: Iterable[str]) -> list[OptionTensor]:
    """Those that calls give registered options."""
    return [tensor for name in names for tensor in _registered[name].tensors]


def tensors_in(features: Features) -> list[OptionTensor]:
    """Those that a launch of a variant takes the addresses of, in order."""
    return [tensor for option in options_in(features) for tensor in option.tensors]


def check_mapping(given: object) -> None:
    """Raises TypeError unless ``score_options`` are a mapping."""
    if not isinstance(given, Mapping):
        raise TypeError(f"score_options: got {type(given).__name__}, want a mapping from tensors' names to tensors")


def check_given(given: Mapping[str, torch.Tensor], q: torch.Tensor, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The options that a call's ``score_options`` ask for, by name and in order.

    Raises:
        TypeError, ValueError: it is no mapping, names a tensor that no option has, lacks one of an option's, or a
            tensor is not what its option wants.
    """
    check_mapping(given)
    wanted = [tensor.name for option in _registered.values() for tensor in option.tensors]
    for name in given:
        if name not in wanted:
            raise ValueError(f"score_options: got {name!r}, want {' or '.join(map(repr, wanted)) or 'none'}")
    options = [option for option in _registered.values() if any(tensor.name in given for tensor in option.tensors)]
    for option in options:
        for tensor in option.tensors:
            if tensor.name not in given:
                raise ValueError(f"score_options: got no {tensor.name!r}, which {option.name!r} wants")
            tensor.check(given[tensor.name], q, sizes)
    return tuple(option.name for option in options)


def flattened(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a call as a registered operator takes them: names and tensors of ``score_options`` side by side."""
    given = dict(options)
    tensors = given.pop("score_options", None)
    if tensors:
        given |= {"score_names": ",".join(tensors), "score_tensors": list(tensors.values())}
    return given


def restored(options: Mapping[str, Any]) -> dict[str, Any]:
    """What `flattened` was made of; without ``score_options`` where there are none."""
    given = dict(options)
    names, tensors = given.pop("score_names", ""), given.pop("score_tensors", None)
    if tensors is not None:
        given["score_options"] = dict(zip(names.split(","), tensors, strict=True))
    return given


def modules_of(features: Features | None = None) -> tuple[str, ...]:
    """Modules outside this package that a process must have imported to compile a variant's options, or all of them."""
    return tuple(name for name in _term_modules(features) if name.partition(".")[0] != __name__.partition(".")[0])


def _term_modules(features: Features | None = None) -> tuple[str, ...]:
    options = known() if features is None else options_in(features)
    return tuple(dict.fromkeys(option.term.partition(":")[0] for option in options))


def code_of(features: Features) -> tuple[object, ...]:
    """What decides how a variant's options change scores: the options, and the places of their device code."""
    options = tuple(options_in(features))
    return *options, *(option.term for option in options)
