"""Blocks of a model in fewer launches. They replace the ``forward`` of modules that `patterns` knows.

| module | its own launches | launches here |
|---|---|---|
| attention | three projections, norms of q and k, rotation, append | one projection, all else in `append_and_decode` |
| MLP | two projections, activation, product, one projection | one with the "swiglu" epilogue, one |
| layer | norm, sum, norm, sum | each sum and its norm in one launch, or in the products around them (`deferral`) |
| from attention to the next one | four products | one launch if there is a kernel for all of them (`Ending`) |

At every call, each block checks that its module is still as it was recognised: it has the same layers, no hooks on
modules that the block does not call, no gradients and no training. Otherwise the call goes to the module's own
``forward``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers.activations import ACT2FN

from cute_kernels import NormedRows
from cute_kernels.attention.checks import MAX_Q_LEN
from cute_kernels.gemm import QuantizedLinear
from cute_kernels.gemm.layer.call import LayerRows
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.transformers.attend import attention
from cute_kernels.integrations.transformers.cache import DecodeCache
from cute_kernels.integrations.transformers.cache_layer import ATTENTION_NAME, Prologue
from cute_kernels.integrations.transformers.deferral import Ending, Normed, Product, Rows, Sum, shaped, tensor_of
from cute_kernels.integrations.transformers.known_code import CACHE_ARGUMENTS, cache_in
from cute_kernels.integrations.transformers.merged import PartOfPair, follow, interleave, is_merged, merge, unmerge
from cute_kernels.integrations.transformers.norms import (
    Projected,
    add_and_norm,
    add_with_next_norm,
    deferred_norm_of,
    has_hooks,
    is_plain,
    terms_of,
    with_deferred_norm,
    with_product,
)
from cute_kernels.integrations.transformers.patterns import KnownAttention, KnownLayer, KnownMlp
from cute_kernels.integrations.transformers.ropes import ModelRope, version_of

_SILU = tuple(type(ACT2FN[name]) for name in ("silu", "swish"))


class Block:
    """A ``forward`` that replaces a module's own ``forward``. ``own`` is the replaced ``forward``.

    Attributes:
        compiles: whether torch.compile guards everything that a call depends on.
    """

    compiles = False
    _last: Product

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.own = module.forward

    def install(self) -> None:
        """Replaces the module's ``forward``."""
        self.module.forward = self

    def remove(self) -> None:
        """Gives the module its own ``forward`` back, and undoes all other changes."""
        self.module.__dict__.pop("forward", None)

    def _of_output(self, layer: nn.Module) -> Product:
        """Returns the `Product` of the layer that makes the block's results; a new one if the layer was replaced."""
        if self._last.layer is not layer:  # never one that is served in order
            self._last = Product(layer)
        return self._last

    def _may_pass_by(self, parts: Sequence[nn.Module]) -> bool:
        """Returns whether a call may compute these modules' results without calling the modules."""
        if self.module.training or torch.is_grad_enabled():
            return False
        if torch.compiler.is_compiling() and not self.compiles:
            return False
        return not any(map(has_hooks, parts))


BlockT = TypeVar("BlockT", bound=Block)


def direct(module: nn.Module, kind: type[BlockT]) -> BlockT | None:
    """Returns the block of a module if it may be called instead of the module: the block is of type ``kind``, and the
    module has no hooks.

    Returns None otherwise, and while torch.compile traces, since torch.compile follows modules.
    """
    block = vars(module).get("forward")
    if not isinstance(block, kind) or has_hooks(module) or torch.compiler.is_compiling():
        return None
    return block


class AttentionBlock(Block):
    """An attention's ``forward`` in fewer launches, for up to 16 tokens of each request over a `DecodeCache`.

    Args:
        module: the attention that ``known`` describes.
        rope: the rotary embedding of the model.
    """

    def __init__(self, module: nn.Module, known: KnownAttention, rope: ModelRope) -> None:
        super().__init__(module)
        self.rope = rope
        self.options = known.options
        self.parts: list[nn.Module] = [getattr(module, name) for name in known.projections]
        self.norms: list[nn.Module] = [getattr(module, name) for name in known.norms or ()]
        self.merged = merge(self.parts) if len(self.parts) > 1 else None
        self.rotate_halves = vars(sys.modules[type(module).__module__])["apply_rotary_pos_emb"]
        self._names = known.projections
        one = self.merged if self.merged is not None else self.parts[0]
        self._first, self._last = Product(one), Product(self.module.o_proj)

    def remove(self) -> None:
        super().remove()
        if self.merged is not None and is_merged(self.merged, self.parts):
            unmerge(self.parts)
        self.merged = None

    def __call__(
        self,
        hidden_states: Rows,
        position_embeddings: tuple[torch.Tensor, ...] = (),
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        into: Sum | Ending | None = None,
        **kwargs: Any,
    ) -> tuple[Normed | LayerRows, torch.Tensor | None]:
        """Computes the results of the module's own ``forward``.

        into: the operations that follow: the sum and norm after the output projection, or the rest of the layer. The
        block may compute them, too: its result is then `NormedRows` or `LayerRows`.
        """
        module: Any = self.module
        rows = shaped(hidden_states)
        if args or not self._serves(rows, kwargs):
            return self.own(tensor_of(hidden_states), position_embeddings, attention_mask, *args, **kwargs)
        position_ids, cache = cast("torch.Tensor", kwargs.get("position_ids")), cache_in(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in CACHE_ARGUMENTS}
        q, k, v = self._projected(hidden_states)
        terms = [terms_of(norm) for norm in self.norms]
        # The kernel's norm has the weight itself; another one is a launch of its own.
        fused = bool(terms) and all(offset == 0 and weight.dtype == q.dtype for weight, _, offset in terms)
        if terms and not fused:
            q, k = (norm(x) for norm, x in zip(self.norms, (q, k), strict=True))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        handle, _ = cache.update(k, v, module.layer_idx)
        options: dict[str, Any] = {"rope": self.rope.rope, "position_ids": position_ids.expand(len(q), -1).contiguous()}
        if fused:
            options |= {"q_norm": terms[0][0], "k_norm": terms[1][0], "norm_eps": terms[0][1]}

        def rotate(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if fused:
                q, k = (norm(x) for norm, x in zip(self.norms, (q, k), strict=True))
            return self.rotate_halves(q, k, *position_embeddings)

        handle.prologue = Prologue(options, rotate)
        asked = {name: self._option(attribute) for name, attribute in self.options}
        out, _ = attention(module, q, handle, handle, attention_mask, scaling=module.scaling, **asked, **kwargs)
        out = out.reshape(*rows.shape[:-1], -1)
        given = None if into is None else into.given(out, self._of_output(module.o_proj))
        return (module.o_proj(out) if given is None else given), None

    def taker(self, x: torch.Tensor, kwargs: Mapping[str, Any]) -> Product | None:
        """Returns the product that would read a norm of x in a call with these arguments.

        Returns None if q, k and v come from several products or from a layer that is not quantised, or if the module's
        own ``forward`` would run.
        """
        if not self._serves(x, kwargs) or not self._is_one():
            return None
        return self._first

    def _is_one(self) -> bool:
        """Returns whether q, k and v come from one quantised product."""
        if self.merged is None:
            return len(self.parts) == 1 and self._first.may_defer()
        return self._first.may_defer() and is_merged(self.merged, self.parts)

    def _serves(self, x: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
        cache, position_ids = cache_in(kwargs), kwargs.get("position_ids")
        if not isinstance(cache, DecodeCache) or self.module.config._attn_implementation != ATTENTION_NAME:
            return False
        if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 2 or x.dim() != 3:
            return False
        # Of more tokens than a step has, the parts are as fast one by one, and each is freed once it is rotated.
        if x.shape[1] > MAX_Q_LEN:
            return False
        if position_ids.shape[1] != x.shape[1] or position_ids.shape[0] not in (1, x.shape[0]):
            return False
        if any(getattr(self.module, name) is not part for name, part in zip(self._names, self.parts, strict=True)):
            return False
        if not follow(self.merged, self.parts):
            return False
        return self._may_pass_by(self.parts) and all(map(is_plain, self.norms)) and self.rope.is_current

    def _projected(self, x: Rows) -> list[torch.Tensor]:
        """Returns q, k and v [batch, tokens, heads, head_dim], before norms and rotation."""
        config, head_dim = self.module.config, self.module.head_dim
        if isinstance(x, Projected) and not (self._is_one() and x.weight is self._first.weight):
            x = x.rows
        if isinstance(x, NormedRows) and not self._is_one():
            x = x.normed()
        if isinstance(x, Projected):
            found = [x.result]
        elif isinstance(x, NormedRows):
            found = [self._first(x)]
        elif self.merged is not None and is_merged(self.merged, self.parts):
            found = [self.merged(x)]
        else:
            found = [part(x) for part in self.parts]
        if len(found) == 1:
            heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
            found = list(found[0].split([count * head_dim for count in heads], dim=-1))
        return [y.unflatten(-1, (-1, head_dim)) for y in found]

    def _option(self, name: str) -> Any:
        module = self.module
        return getattr(module, name) if hasattr(module, name) else getattr(module.config, name, None)


class OrderedInputs:
    """A quantised layer in act-order, for callers whose x is already permuted to the layer's order.

    Args:
        layer: a layer for which `wants_order` is True.
    """

    def __init__(self, layer: QuantizedLinear) -> None:
        assert layer.perm is not None
        self.layer, self.order = layer, layer.perm.clone()
        self._perm, self._version = layer.perm, version_of(layer.perm)
        self.product = Product(layer, in_order=True)

    def is_current(self) -> bool:
        """Returns whether the layer's order is still ``order``. Loading may change or remove it.

        Waits for the GPU in the first call after the layer was moved or written; that call is never captured.
        """
        perm = self.layer.perm
        if perm is None or not wants_order(self.layer):
            return False
        compiling = torch.compiler.is_compiling()  # which sees no versions
        if perm is self._perm and (compiling or version_of(perm) == self._version):
            return True
        if not torch.equal(perm.to(self.order.device), self.order):
            return False
        self._perm, self._version = perm, version_of(perm)
        return True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes [..., N] for x [..., K], which is in the layer's order."""
        return self.product(x)


def wants_order(layer: nn.Module) -> bool:
    """Returns whether a layer is quantised and permutes its inputs (act-order), but does not scale them."""
    return type(layer) is QuantizedLinear and layer.perm is not None and layer.input_scale is None


class MlpBlock(Block):
    """A gated MLP with quantised projections. The rows of gate and up are in one weight: see `interleave`.

    If the down projection is in act-order, the rows of gate and up are permuted to its order. The "swiglu" epilogue
    then writes the down projection's inputs in this order, which takes no additional time.
    """

    compiles = True

    def __init__(self, module: nn.Module, known: KnownMlp) -> None:
        super().__init__(module)
        self.names = known.projections
        self.activation = getattr(module, known.activation)
        self.originals: list[nn.Module] = [getattr(module, name) for name in self.names]
        self.parts = list(self.originals)
        down: Any = module.down_proj
        self.down = OrderedInputs(down) if wants_order(down) else None
        self.order = None if self.down is None else self.down.order
        self.pair = interleave(self.originals, self.order) if type(self.activation) in _SILU else None
        self._first = None if self.pair is None else Product(self.pair)
        self._last = Product(down) if self.down is None else self.down.product
        self.known = known

    def install(self) -> None:
        """Replaces the module's ``forward``, and its gate and up projections by parts of the interleaved weight."""
        assert self.pair is not None
        halves = [(0,), (1,)] if len(self.names) == 2 else [(0, 1)]
        self.parts = [PartOfPair(self.pair, each, self.order) for each in halves]
        self.originals = []
        for name, part in zip(self.names, self.parts, strict=True):
            setattr(self.module, name, part)
        super().install()

    def remove(self) -> None:
        super().remove()
        for name, part in zip(self.names, self.parts, strict=True):
            if isinstance(part, PartOfPair) and getattr(self.module, name) is part:
                setattr(self.module, name, part.separate())

    def __call__(self, *args: Any, into: Sum | None = None, **kwargs: Any) -> Normed:
        """Computes the results of the module's own ``forward``. into: as in `AttentionBlock`."""
        if kwargs or len(args) != 1 or not self._serves():
            return self.own(*map(tensor_of, args), **kwargs)
        assert self._first is not None
        x = self._first(args[0], activation="swiglu")
        if into is not None and (given := into.given(x, self._of_output(self.module.down_proj))) is not None:
            return given
        return self.module.down_proj(x) if self.down is None else self.down(x)

    def products(self) -> tuple[Product, Product] | None:
        """Returns (the product that reads the norm before the MLP, the last product). Returns None if the module's own
        ``forward`` runs.
        """
        return (cast("Product", self._first), self._of_output(self.module.down_proj)) if self._serves() else None

    def _serves(self) -> bool:
        module = self.module
        if self.pair is None or getattr(module, self.known.activation) is not self.activation:
            return False
        if any(getattr(module, name) is not part for name, part in zip(self.names, self.parts, strict=True)):
            return False
        if not follow(self.pair, self.parts):
            return False
        passed_by = [*self.parts, self.activation]
        if self.down is not None:
            if module.down_proj is not self.down.layer or not self.down.is_current():
                return False
            passed_by.append(module.down_proj)
        return self._may_pass_by(passed_by)


@dataclass(frozen=True)
class Place:
    """The position of a layer in a model.

    Attributes:
        stack: the module with the model's ``layers``, and the ``norm`` after them.
        number: the index of the layer.
        following: the norm that reads the layer's result; None if it is not known.
        next_layer: the layer that calls this norm; None for the norm after all layers.
    """

    stack: Foreign
    number: int
    following: nn.Module | None
    next_layer: nn.Module | None

    def is_current(self) -> bool:
        """Returns whether the next layer in the stack is still ``next_layer``. If ``next_layer`` is None, returns
        whether there is still no next layer.
        """
        layers, number = self.stack.layers, self.number + 1
        return (layers[number] if number < len(layers) else None) is self.next_layer


class LayerBlock(Block):
    """A decoder layer's ``forward`` in fewer launches.

    Args:
        module: the decoder layer.
        known: the names of the layer's norms and dropouts.
        place: the layer's position in the model.
    """

    compiles = True

    def __init__(self, module: nn.Module, known: KnownLayer, place: Place) -> None:
        super().__init__(module)
        self.known = known
        self.place = place

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Computes the results of the module's own ``forward``."""
        module, known = self.module, self.known
        before_mlp = getattr(module, known.before_mlp)
        dropouts = [getattr(module, name) for name in known.dropouts]
        if args or not is_plain(before_mlp) or not self._may_pass_by(dropouts):
            return self.own(hidden_states, *args, **kwargs)
        after = [getattr(module, name) for name in known.after or ()]
        mlp = None if after else direct(module.mlp, MlpBlock)
        following = self._seen_by_alone()
        taker = None if mlp is None or following is None else self._next_taker(hidden_states, kwargs)
        x = self._attended(hidden_states, self._into(hidden_states, mlp, following, taker), kwargs)
        if isinstance(x, LayerRows):
            if x.qkv is None:
                return x.rows.rows
            assert following is not None and taker is not None
            return with_product(x.rows, following, taker.weight, x.qkv)
        if isinstance(x, NormedRows):
            total = x.rows
        else:
            x, total = add_and_norm(after[0](x) if after else x, hidden_states, before_mlp)
        into = None if taker is None or following is None else Sum(total, following, taker)
        y = module.mlp(x) if mlp is None else mlp(x, into=into)
        if isinstance(y, NormedRows):
            assert into is not None
            return with_deferred_norm(y, into.norm)
        y = after[1](y) if after else y
        return total + y if following is None else add_with_next_norm(y, total, following)

    def _into(
        self, hidden_states: torch.Tensor, mlp: MlpBlock | None, following: nn.Module | None, taker: Product | None
    ) -> Sum | Ending | None:
        """Returns the operations that attention's output projection may also compute: a sum and norm, or the rest of
        the layer. Returns None if there are none. following: the norm that reads the layer's result. taker: the product
        that reads this norm.
        """
        products = None if mlp is None else mlp.products()
        if products is None:
            return None
        first, last = products
        middle = Sum(hidden_states, getattr(self.module, self.known.before_mlp), first)
        # Products of a layer without that of the next one would leave a norm between them.
        if following is None or (taker is None and self.place.next_layer is not None):
            return middle
        return Ending(middle, last, following, taker)

    def _attended(self, hidden_states: torch.Tensor, into: Sum | Ending | None, kwargs: Mapping[str, Any]) -> Any:
        """Returns attention's results for the norm of the hidden states.

        into: operations after attention's output projection. If attention has computed them, the results are
        `NormedRows` or `LayerRows`.
        """
        before = getattr(self.module, self.known.before)
        attention = direct(self.module.self_attn, AttentionBlock)
        normed = deferred_norm_of(hidden_states, before) if attention is not None and is_plain(before) else None
        x = before(hidden_states) if normed is None else normed
        if attention is None:
            return self.module.self_attn(hidden_states=x, **kwargs)[0]
        return attention(x, into=into, **kwargs)[0]

    def _next_taker(self, rows: torch.Tensor, kwargs: Mapping[str, Any]) -> Product | None:
        """Returns the next layer's product that would read a norm of ``rows``; None if there is none."""
        next_layer = self.place.next_layer
        block = None if next_layer is None else direct(next_layer, LayerBlock)
        attention = None if block is None else direct(block.module.self_attn, AttentionBlock)
        return None if attention is None else attention.taker(rows, kwargs)

    def _seen_by_alone(self) -> nn.Module | None:
        """Returns the norm that reads this layer's sum, if nothing else can read the sum; else None."""
        following, next_layer = self.place.following, self.place.next_layer
        if torch.compiler.is_compiling():  # which sees no notes on tensors
            return None
        if following is None or not is_plain(following) or has_hooks(self.module) or not self.place.is_current():
            return None
        return None if next_layer is not None and has_hooks(next_layer) else following
