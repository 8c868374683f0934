"""Rewriting of a model's traced step, which fuses small operations into products. It needs only torch.

    gate, up = product(x); y = silu(gate) * up         ->  y = product(x, activation="swiglu")
    s = product(x) + r; y = rms_norm(s)                ->  s = product(x, residual=r); y = norm(s)
    s = product(x); y = norm(s); z = product(y)        ->  a part of the norm moves into each product
    o, gate and up, down, the next layer's q, k and v  ->  one operator

The first pattern is found by its results, since versions of torch trace the same source differently. The operations
after a product are run on noise, up to the only result that other operations use. The second pattern's sum and norm are
one operator in vLLM. The third and fourth rewriting depend on the number of rows, which is known only when the graph
runs. `cute_kernels.gemm.deferred_ops` defers the norm if its kernels can; `cute_kernels.gemm.layer.operator` uses one
launch if it can.

Other operations are not changed. For example, Inductor fuses a norm without a neighbouring product.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional

from cute_kernels.gemm import deferred_ops
from cute_kernels.gemm.layer import operator as layer_operator
from cute_kernels.gemm.wgmma.deferred_config import STEP_N
from cute_kernels.norm.call import MAX_COLUMNS, VECTOR_BYTES

LINEAR = torch.ops.cute_kernels.weight_only_linear.default
RESIDUAL, FORMAT, COLUMNS, INPUTS, ACTIVATION, OUT_DTYPE, INVARIANT = 5, 6, 7, 8, 9, 10, 11  # arguments of LINEAR
GIVING = torch.ops.cute_kernels.weight_only_linear_norm.default
TAKING = torch.ops.cute_kernels.weight_only_linear_of_normed.default
LAYER = torch.ops.cute_kernels.layer_products.default
NORM = torch.ops.cute_kernels.norm.default
DTYPES = (torch.bfloat16, torch.float16)
MAX_BETWEEN = 24  # operations between a product and the gated result
NOISE_ROWS = 5


@dataclass(frozen=True)
class Sums:
    """The operator of a residual sum with its RMSNorm, and its replacement.

    Attributes:
        add_norm: the operator. Its arguments are (x, residual, weight, eps, variance columns or None), its results (the
            norm of the sum, the sum).
        norm: vLLM's operator of the norm alone. Its arguments are (x, weight, eps, variance columns or None).
        is_ready: a function from (columns, dtype, whether there is a residual) to whether this package's norm of such
            rows can be launched.
    """

    add_norm: Callable[..., Any]
    norm: Callable[..., Any]
    is_ready: Callable[[int, torch.dtype, bool], bool]


def fuse(graph: fx.Graph, sums: Sums | None) -> dict[str, int]:
    """Rewrites a graph in place. Returns the number of fused operations of each kind.

    sums: None if vLLM has no such operators.
    """
    gates = sum(_fuse_gate(node) for node in [node for node in graph.nodes if is_plain_product(node)])
    residuals = norms = 0
    if sums is not None:
        for node in [node for node in graph.nodes if node.target is sums.add_norm]:
            residual, norm = _fuse_sum(node, sums)
            residuals, norms = residuals + residual, norms + norm
    left = sum(_leave_norm(node) for node in [node for node in graph.nodes if node.target is NORM])
    graph.eliminate_dead_code()  # what is no longer used does not count as a user
    whole = sum(_join_layer(node) for node in [node for node in graph.nodes if node.target is GIVING])
    graph.eliminate_dead_code()
    return {"gates": gates, "residuals": residuals, "norms": norms, "left": left, "whole": whole}


def is_product(node: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target is LINEAR


def is_plain_product(node: object) -> TypeGuard[fx.Node]:
    """Returns whether a node is a product in x's dtype that is not fused with another operation yet."""
    if not is_product(node) or node.args[RESIDUAL] is not None or node.args[ACTIVATION] is not None:
        return False
    return node.args[OUT_DTYPE] in DTYPES


# -- gates -------------------------------------------------------------------------------------------------------------


def _fuse_gate(product: fx.Node) -> bool:
    n = product.args[COLUMNS]
    if not isinstance(n, int) or n % 2:
        return False
    for inside in _regions(product, n // 2):
        if _is_swiglu(product, inside):
            result = inside[-1]
            arguments = list(product.args)
            arguments[ACTIVATION] = "swiglu"
            with product.graph.inserting_before(product):
                fused = product.graph.call_function(LINEAR, tuple(arguments), dict(product.kwargs))
            fused.meta = {**product.meta, "val": result.meta["val"]}
            result.replace_all_uses_with(fused)
            _erase([product, *inside])
            return True
    return False


def _regions(product: fx.Node, columns: int) -> Iterator[list[fx.Node]]:
    """Yields lists of operations, in order, that read nothing but a product's result. Operations outside a list use
    only the result of its last operation. This result has ``columns`` columns.
    """
    inside: dict[fx.Node, None] = {product: None}
    node = product.next
    while node.op != "output" and len(inside) <= MAX_BETWEEN:
        tensors = _tensors_of(node)
        if tensors and all(each in inside for each in tensors) and node.op == "call_function":
            inside[node] = None
            value = node.meta.get("val")
            ends = isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == columns
            if ends and all(user in inside for each in inside if each is not node for user in each.users):
                yield [*inside][1:]
        node = node.next


def _is_swiglu(product: fx.Node, inside: list[fx.Node]) -> bool:
    """Runs operations on noise. Returns whether they compute silu(even columns) * odd columns of a product's result."""
    value, last = product.meta["val"], inside[-1].meta["val"]
    if last.dtype != value.dtype:
        return False
    with unset_fake_temporarily(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        shape = (NOISE_ROWS, value.shape[1])
        noise = (3 * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")).to(value.dtype)
        try:
            found = _run(inside, {product: noise}, value.shape[0])
        except Exception:  # whatever an operation may say: then it is another one
            return False
        gate, up = noise[:, 0::2].float(), noise[:, 1::2].float()
        wanted = functional.silu(gate) * up
        return found.shape == wanted.shape and torch.allclose(found.float(), wanted, rtol=0.02, atol=1e-3)


def _run(nodes: list[fx.Node], known: dict[fx.Node, Any], rows: int | torch.SymInt) -> torch.Tensor:
    """Computes nodes from known values and returns the last node's value.

    rows: the graph's number of rows, which is replaced by `NOISE_ROWS`.
    """

    def value_of(node: fx.Node) -> Any:
        if node in known:
            return known[node]
        number = node.meta.get("val")
        if isinstance(number, torch.SymInt) and isinstance(rows, torch.SymInt) and number.node.expr == rows.node.expr:
            return NOISE_ROWS
        raise LookupError(f"{node}: not a number of rows")

    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        known[node] = cast("Callable[..., Any]", node.target)(*args, **kwargs)
    return known[nodes[-1]]


# -- sums and their norms ----------------------------------------------------------------------------------------------


def _fuse_sum(node: fx.Node, sums: Sums) -> tuple[bool, bool]:
    """Rewrites an operator that adds a residual to x and norms the sum: fuses the residual into the product that makes
    x, and replaces the norm. Returns (whether the residual was fused, whether the norm was replaced)."""
    x, residual, weight, eps, *rest = node.args
    if (
        any(rest)
        or node.kwargs
        or not isinstance(eps, float)
        or not _fits(x, residual, weight)
        or not all(map(_is_item, node.users))
    ):
        return False, False
    assert isinstance(x, fx.Node) and isinstance(residual, fx.Node) and isinstance(weight, fx.Node)
    x = _unviewed(x)
    value, graph = x.meta["val"], node.graph
    columns, dtype = value.shape[1], value.dtype
    absorbs = is_plain_product(x) and len(x.users) == 1
    ready = _is_beside_product(x, node) and sums.is_ready(columns, dtype, not absorbs)
    if not absorbs and not ready:
        return False, False
    with graph.inserting_before(node):
        total = x
        if absorbs:
            arguments = list(x.args)
            arguments[RESIDUAL] = residual
            total = graph.call_function(LINEAR, tuple(arguments), dict(x.kwargs))
            total.meta = dict(x.meta)
        if not ready:
            normed = graph.call_function(sums.norm, (total, weight, eps, None))
            normed.meta = {"val": value}
        else:
            kept = None if absorbs else residual
            both = graph.call_function(NORM, (total, weight, None, kept, "rms", eps, 0.0))
            other = value.new_empty(0) if absorbs else value
            both.meta = {"val": (value, other)}
            normed = item(both, 0, value)
            total = total if absorbs else item(both, 1, value)
    items = list(node.users)
    for one in items:
        one.replace_all_uses_with(normed if one.args[1] == 0 else total)
    _erase([node, *items])
    return absorbs, ready


def _is_beside_product(x: fx.Node, node: fx.Node) -> bool:
    """Returns whether a product makes a norm's input x or reads the norm's result. Operations with one input, such as a
    sum over GPUs, may lie between the first product and x."""
    while not is_product(x) and len(inputs := _tensors_of(x)) == 1:
        (x,) = inputs
    takes = (reader for item in node.users if item.args[1] == 0 for reader in _readers(item))
    return is_product(x) or any(map(is_product, takes))


def _tensors_of(node: fx.Node) -> list[fx.Node]:
    """Returns an operation's inputs that are tensors, without the numbers of rows."""
    return [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that read a node's rows, or views of them."""
    for user in node.users:
        yield from _readers(user) if user.target in VIEWS else (user,)


# -- norms between products --------------------------------------------------------------------------------------------


def _leave_norm(norm: fx.Node) -> bool:
    """Defers a norm from the product that makes its rows to the one product that reads the norm.

    Returns whether the norm was deferred. It is deferred only if both products support that.
    """
    product, weight, *others = norm.args
    bias, residual, kind, eps, offset = others
    if (bias, residual, kind, offset) != (None, None, "rms", 0.0) or not is_product(product):
        return False
    if not _may_defer(product) or product.args[RESIDUAL] is None:
        return False
    assert isinstance(weight, fx.Node)
    items = list(norm.users)
    taker = _only_product_of(items[0]) if len(items) == 1 and items[0].args[1] == 0 else None
    if taker is None or not _may_defer(taker, with_activation=True) or taker.args[RESIDUAL] is not None:
        return False
    rows, n = product.meta["val"], product.args[COLUMNS]
    assert isinstance(n, int)
    if n % STEP_N or rows.dtype != torch.bfloat16 or weight.meta["val"].dtype != rows.dtype:
        return False
    _rewrite(product, norm, taker, (weight, eps), rows)
    return True


def _rewrite(product: fx.Node, norm: fx.Node, taker: fx.Node, terms: tuple[Any, Any], rows: torch.Tensor) -> None:
    graph, (x, *fields) = product.graph, product.args
    _, *taker_fields = taker.args
    codes, bias, residual = fields[:3], fields[3], fields[4]
    sums = rows.new_empty((rows.shape[0], rows.shape[1] // deferred_ops.SQUARES_N), dtype=torch.float32)
    form = product.args[FORMAT], product.args[COLUMNS], product.args[INPUTS]
    with graph.inserting_before(product):
        sides = taker.args[FORMAT], taker.args[COLUMNS]
        given = graph.call_function(GIVING, (x, *codes, bias, residual, *form, *terms, *sides))
    given.meta = {"val": (rows, rows, sums)}
    squares, scaled, total = (item(given, i, value) for i, value in ((2, sums), (1, rows), (0, rows)))
    product.replace_all_uses_with(total)
    with graph.inserting_before(taker):
        left = scaled, squares, total, *terms, product.args[FORMAT], product.args[INPUTS]
        its = taker.args[FORMAT], taker.args[COLUMNS], taker.args[INPUTS], taker.args[ACTIVATION]
        taken = graph.call_function(TAKING, (*left, *taker_fields[:4], *its))
    taken.meta = {"val": taker.meta["val"]}  # the rest is of another operator's arguments
    taker.replace_all_uses_with(taken)
    between, node = [norm], taker.args[0]
    while isinstance(node, fx.Node) and node is not norm:
        between.insert(1, node)
        node = node.args[0]
    _erase([*between, taker])
    graph.erase_node(product)


# -- from one attention to the next ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """Two products with a deferred norm between them.

    Attributes:
        gives, takes: the nodes of the operators GIVING and TAKING.
        rows: the node of the first product's rows.
    """

    gives: fx.Node
    takes: fx.Node
    rows: fx.Node

    @classmethod
    def of(cls, gives: fx.Node) -> _Pair | None:
        """Returns the pair that begins with ``gives``; None if another node reads the deferred parts."""
        items = {item.args[1]: item for item in gives.users if _is_item(item)}
        if set(items) != {0, 1, 2} or len(gives.users) != 3:
            return None
        (takes, *others), squares = [*items[1].users], [*items[2].users]
        if others or squares != [takes] or takes.target is not TAKING:
            return None
        return cls(gives, takes, items[0])

    def weights(self) -> list[tuple[str, int, int]]:
        """Returns (format, n, k) of both products."""
        return cast("list[tuple[str, int, int]]", [self.gives.args[6:9], self.takes.args[11:14]])

    def is_plain(self) -> bool:
        """Returns whether scales and the norm's weight are in bf16, and neither product has zero points or a bias."""
        scales, zeros, bias = self.gives.args[2:5]
        norm, its_scales, its_zeros, its_bias = (self.takes.args[i] for i in (3, 8, 9, 10))
        if (zeros, bias, its_zeros, its_bias) != (None, None, None, None):
            return False
        nodes = cast("list[fx.Node]", [scales, its_scales, norm])
        return all(node.meta["val"].dtype == torch.bfloat16 for node in nodes)


def _join_layer(node: fx.Node) -> bool:
    """Joins the products between two attentions into one operator, if ``node`` is the first of them. Returns whether
    they were joined."""
    first = _Pair.of(node)
    if first is None or first.takes.args[-1] != "swiglu":
        return False
    down = [user for user in first.rows.users if user.target is GIVING]
    last = _Pair.of(down[0]) if len(down) == 1 else None
    if last is None or last.takes.args[-1] is not None or set(first.rows.users) != {first.takes, last.gives}:
        return False
    if last.gives.args[5] is not first.rows or _only_reader_of(first.takes) is not last.gives:
        return False
    if not (first.is_plain() and last.is_plain()) or first.gives.args[10] != last.gives.args[10]:
        return False
    if not layer_operator.may_serve([*first.weights(), *last.weights()]):
        return False
    return _replace_layer(first, last)


def _only_reader_of(node: fx.Node) -> fx.Node | None:
    """Returns the node that reads a node's rows unchanged, if it is the only reader; else None."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in VIEWS:
            return user if list(user.all_input_nodes).count(node) == 1 else None
        if user.meta["val"].shape != node.meta["val"].shape:
            return None
        node = user
    return None


def _replace_layer(first: _Pair, last: _Pair) -> bool:
    (x, o, o_scales, _, _, residual, _, hidden, heads, norm, eps, *_), down = first.gives.args, last.gives.args
    gate_up, gate_up_scales = first.takes.args[7:9]
    qkv, qkv_scales = last.takes.args[7:9]
    weights = o, o_scales, norm, gate_up, gate_up_scales, *down[1:3], down[9], qkv, qkv_scales
    graph, order = last.gives.graph, {node: number for number, node in enumerate(last.gives.graph.nodes)}
    if any(order[cast("fx.Node", each)] > order[last.gives] for each in (x, residual, *weights)):
        return False
    sizes = heads, hidden, down[8], last.takes.args[12], eps
    with graph.inserting_before(last.gives):
        both = graph.call_function(LAYER, (x, residual, *weights, *sizes))
    values = last.rows.meta["val"], last.takes.meta["val"]
    both.meta = {"val": values}
    qkv_rows, rows = (item(both, number, values[number]) for number in (1, 0))
    last.rows.replace_all_uses_with(rows)  # what is left then is used by nobody
    last.takes.replace_all_uses_with(qkv_rows)
    return True


def _may_defer(product: fx.Node, with_activation: bool = False) -> bool:
    """Returns whether a product has bf16 results, is not batch-invariant, and has no activation unless
    ``with_activation``."""
    args = product.args
    if product.kwargs or args[OUT_DTYPE] != torch.bfloat16 or (len(args) > INVARIANT and args[INVARIANT]):
        return False
    return with_activation or args[ACTIVATION] is None


def _only_product_of(node: fx.Node) -> fx.Node | None:
    """Returns the product that has this node as its x, if nothing else reads the node; else None."""
    reader = _only_reader_of(node)
    return reader if is_product(reader) else None


def _unviewed(node: fx.Node) -> fx.Node:
    """Goes back from a node over views that keep the shape, as long as each node has a single reader. Returns the node
    where this ends."""
    while node.target in VIEWS and isinstance(node.args[0], fx.Node) and len(node.args[0].users) == 1:
        before = node.args[0]
        if len(node.users) > 1 or before.meta["val"].shape != node.meta["val"].shape:
            break
        node = before
    return node


VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def _fits(x: Any, residual: Any, weight: Any) -> bool:
    """Returns whether this package's kernels take these rows, the residual and the norm's weight."""
    if not all(isinstance(node, fx.Node) for node in (x, residual, weight)):
        return False
    one, other, scale = (node.meta.get("val") for node in (x, residual, weight))
    if not all(isinstance(value, torch.Tensor) for value in (one, other, scale)):
        return False
    if one.dim() != 2 or other.shape != one.shape or one.dtype not in DTYPES or other.dtype != one.dtype:
        return False
    columns = one.shape[1]
    sized = columns <= MAX_COLUMNS and columns * one.element_size() % VECTOR_BYTES == 0
    weighted = scale.shape == one.shape[1:] and scale.dtype in (one.dtype, torch.float32)
    return sized and weighted and all(value.is_contiguous() for value in (one, other, scale))


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def item(node: fx.Node, index: int, value: torch.Tensor) -> fx.Node:
    with node.graph.inserting_after(node):
        found = node.graph.call_function(operator.getitem, (node, index))
    found.meta = {"val": value}
    return found


def _erase(nodes: list[fx.Node]) -> None:
    """Removes ``nodes``, which nothing uses any more. They are in graph order. Nodes that only ``nodes`` used stay in
    the graph; vLLM removes them later."""
    for node in reversed(nodes):
        node.graph.erase_node(node)
