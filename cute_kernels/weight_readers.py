"""Finds layers whose weight is read by the code around them, such as Mamba's `self.dt_proj.weight @ steps`. Such layers
are not quantised.

The source of a model's own classes is searched for ``<...>.layer.weight``. Code that does not need the weight's values
(``.dtype``, `isinstance`) is ignored. Code that does not run because a flag of the module is off is ignored, too.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import FunctionType

from torch import nn

_NOT_NUMBERS = {"dtype", "device", "shape", "ndim", "is_cuda", "requires_grad"}
_SETTING_UP = ("__init__", "init", "_init", "reset_parameters", "tie_weights", "_tie_weights", "initialize")
"""The names, or beginnings of names, of methods that make or tie weights. Weights that these methods read do not
count."""
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
}


@dataclass(frozen=True)
class _Reading:
    """One place in the code that reads a layer's weight.

    Attributes:
        path: if ``of_self``, the layer's name relative to self; otherwise only the last parts of the layer's name.
        of_self: whether the code reads the layer from ``self``.
        method: the name of the method that has the code.
        guards: (test, wanted result) of each `if` around the code.
    """

    path: str
    of_self: bool
    method: str
    guards: tuple[tuple[ast.expr, bool], ...]


def layers_read_by_code(model: nn.Module) -> dict[nn.Module, str]:
    """Returns the layers whose weight is read, each with the method that reads it."""
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        for reading in _readings(type(module)):
            if any(_value(test, module) not in (None, wanted) for test, wanted in reading.guards):
                continue
            for name, layer in module.named_modules():
                if name == reading.path or (not reading.of_self and name.endswith(f".{reading.path}")):
                    found.setdefault(layer, f"{type(module).__name__}.{reading.method}")
    return found


@cache
def _readings(kind: type) -> tuple[_Reading, ...]:
    """Returns each place where the methods of a class, inherited methods included, read the weight of a layer. Methods
    of torch's own classes, methods that set up weights, and methods without source are skipped."""
    methods: dict[str, FunctionType] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("torch."):
            own = {name: inspect.unwrap(each) for name, each in vars(base).items() if callable(each)}
            methods |= {name: each for name, each in own.items() if isinstance(each, FunctionType)}
    found: list[_Reading] = []
    for name, method in methods.items():
        if name.startswith(_SETTING_UP) or "weight" not in method.__code__.co_names:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        except (OSError, TypeError, SyntaxError):
            continue
        found += (_Reading(".".join(path), root == "self", name, guards) for root, path, guards in _places(tree, ()))
    return tuple(found)


def _places(
    node: ast.AST, guards: tuple[tuple[ast.expr, bool], ...]
) -> Iterator[tuple[str, tuple[str, ...], tuple[tuple[ast.expr, bool], ...]]]:
    """Yields (first name of the expression, path to the layer, guards) of each weight whose values are read."""
    if isinstance(node, (ast.If, ast.IfExp)):
        yield from _places(node.test, guards)
        for branch, wanted in ((node.body, True), (node.orelse, False)):
            for each in branch if isinstance(branch, list) else [branch]:
                yield from _places(each, (*guards, (node.test, wanted)))
        return
    if isinstance(node, ast.Attribute) and node.attr in _NOT_NUMBERS:
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "hasattr"):
        return
    if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.ctx, ast.Load):
        path: list[str] = []
        root: ast.expr = node.value
        while isinstance(root, ast.Attribute):
            path.insert(0, root.attr)
            root = root.value
        if path and isinstance(root, ast.Name):
            yield root.id, tuple(path), guards
        return
    for each in ast.iter_child_nodes(node):
        yield from _places(each, guards)


def _value(test: ast.expr, module: nn.Module) -> bool | None:
    """Returns the result of a test of a module's plain flags; None if the test reads anything else."""
    if isinstance(test, ast.BoolOp):
        values = [_value(each, module) for each in test.values]
        decides = isinstance(test.op, ast.Or)
        if decides in values:
            return decides
        return None if None in values else not decides
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = _value(test.operand, module)
        return None if value is None else not value
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = _plain(test.left, module), _plain(test.comparators[0], module)
        compare = _COMPARISONS.get(type(test.ops[0]))
        if compare is None or isinstance(left, str) or isinstance(right, str) or left is None or right is None:
            return None
        return compare(left, right)
    value = _plain(test, module)
    return value if isinstance(value, bool) else None


def _plain(node: ast.expr, module: nn.Module) -> bool | int | float | str | None:
    """Returns the value of a constant, or of a plain attribute of the module; None for other expressions."""
    if isinstance(node, ast.Constant):
        found: object = node.value
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        found = False if node.attr == "training" else getattr(module, node.attr, None)  # quantised layers do not train
    else:
        return None
    return found if isinstance(found, (bool, int, float, str)) else None
