"""Options of weight-only linear layers beside the plain call, at the shapes of real layers and of their shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.linear import CHECKED_ROWS
from bench.options import Bar, Option, run_cases
from bench.peers import relative_error
from bench.random_weights import TORCH_DTYPES, Format, Weights
from bench.suites import TOLERANCE, Bench, WrongOutput
from cute_kernels import rms_norm
from cute_kernels.gemm import NormedRows, PackedWeight, linear_reference, quantized_linear, quantized_linear_norm
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.deferred_choice import deferred
from cute_kernels.gemm.normed import DeferredParts, left_to_next
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.deferred_config import GIVES, SQUARES_N, TAKES
from cute_kernels.norm import config as norms
from cute_kernels.norm.compile import NormSpec
from cute_kernels.runtime import KernelSpec

SHAPES = (
    *((8192, 8192, m) for m in (1, 16, 64, 512)),
    *((4096, 4096, m) for m in (1, 64)),
    *((8192, 1024, 64), (28672, 4096, 64), (4096, 14336, 1), (4096, 14336, 32), (1280, 8192, 64)),
)  # N, K, rows of x

RESIDUAL = Bar(0.03, 1.0)
EPILOGUE = Bar(0.04)  # also of other formats
INPUT = Bar(0.05, 1.0)
INVARIANT = Bar(0.15)
EPS = 1e-6  # of norms


@dataclass(frozen=True)
class Layer:
    """One product: x [m, k] with W [n, k]."""

    n: int
    k: int
    m: int

    @property
    def name(self) -> str:
        return f"{self.n} x {self.k}, M = {self.m}"


class LinearOptions:
    """The calls of one layer, each with one option, and with a copy of the weight of its own.

    A weight that several calls share is read more often, and what makes L2 cold might leave it warmer than others. (It
    does not: with shared weights the plain call took as long, docs/design/history/decode_step.md.)

    Args:
        layer, form: what is multiplied.
        device: of all tensors.
    """

    def __init__(self, layer: Layer, form: Format, device: str = "cuda"):
        self.layer, self.form, self.device = layer, form, device
        self.dtype = TORCH_DTYPES[form.dtype]
        self.generator = torch.Generator(device).manual_seed(0)
        self.x = self.random(layer.m, layer.k)
        self.weight = self.packed()

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, device=self.device).to(self.dtype)

    def packed(self, **changes: Any) -> PackedWeight:
        """The layer's weight, or one of a format that differs in ``changes``."""
        layer = self.layer
        return Weights(self.device).of(replace(self.form, **changes).problem(layer.m, layer.n, layer.k))

    def option(
        self, bar: Bar, x: torch.Tensor | NormedRows | None = None, weight: PackedWeight | None = None, **arguments: Any
    ) -> Option:
        """The call with an option, and how much more than the plain one it reads and writes."""
        x, weight = self.x if x is None else x, self.weight if weight is None else weight
        more = sum(value.nbytes for value in arguments.values() if isinstance(value, torch.Tensor))
        more += weight.nbytes - self.weight.nbytes
        outs = self.layer.m * self.layer.n
        if arguments.get("out_dtype") == torch.float32:
            more += 2 * outs
        if arguments.get("activation") == "swiglu":
            more -= outs
        return Option(partial(quantized_linear, x, copy_of(weight), **arguments), max(more, 0), bar)

    def all(self) -> dict[str, Option]:
        """By name."""
        layer, random = self.layer, self.random
        order = torch.randperm(layer.k, generator=self.generator, device=self.device).to(torch.int32)
        wide = random(layer.m, layer.k + layer.k // 2)[:, : layer.k]
        found = {
            "plain": self.option(EPILOGUE),
            "residual": self.option(RESIDUAL, residual=random(layer.m, layer.n)),
            "bias": self.option(EPILOGUE, bias=random(layer.n)),
            "bias and residual": self.option(RESIDUAL, bias=random(layer.n), residual=random(layer.m, layer.n)),
            "silu": self.option(EPILOGUE, activation="silu"),
            "gelu": self.option(EPILOGUE, activation="gelu"),
            "swiglu": self.option(EPILOGUE, activation="swiglu"),
            "fp32 out": self.option(EPILOGUE, out_dtype=torch.float32),
            "act order": self.option(INPUT, weight=replace(self.weight, perm=order)),
            "input scale": self.option(INPUT, weight=replace(self.weight, input_scale=random(layer.k))),
            "strided x": self.option(INPUT, x=wide),
            "norm": self.option(INPUT, norm=random(layer.k)),
            "batch invariant": self.option(INVARIANT, batch_invariant=True),
            "norm taken": self.taking(),
        }
        if layer.n <= norms.MAX_COLUMNS:  # wider rows, of gates and heads, are never normed
            found["norm given"] = self.giving()
        found |= self.normed(order)
        for name, changes in other_formats(self.form).items():
            found[name] = self.option(EPILOGUE, weight=self.packed(**changes))
        return found

    def giving(self) -> Option:
        """Rows that are normed next, where a kernel leaves what that needs: the rows times the norm's weight, and sums
        of their squares."""
        n, m = self.layer.n, self.layer.m
        arguments = {"residual": self.random(m, n), "norm": self.random(n)}
        more = sum(value.nbytes for value in arguments.values()) + 2 * m * n + 4 * m * (n // SQUARES_N)
        return Option(partial(quantized_linear_norm, self.x, copy_of(self.weight), **arguments), more, RESIDUAL)

    def normed(self, order: torch.Tensor) -> dict[str, Option]:
        """Rows whose norm is a launch before the product, and the same where that launch puts them in order, or scales
        them, as well."""
        rows = NormedRows(self.x, self.random(self.layer.k), EPS)
        plain = self.option(INPUT, x=rows)
        ordered = self.option(INPUT, x=rows, weight=replace(self.weight, perm=order))
        scaled = self.option(INPUT, x=rows, weight=replace(self.weight, input_scale=self.random(self.layer.k)))
        named = {"act order behind a norm": ordered, "input scale behind a norm": scaled}
        return {"behind a norm": plain} | {name: replace(one, plain="behind a norm") for name, one in named.items()}

    def taking(self) -> Option:
        """Rows whose norm the product before has left to this one."""
        norm, (m, k) = self.random(self.layer.k), self.x.shape
        squares = self.x.float().square().view(m, -1, min(k, SQUARES_N)).sum(-1)
        parts = DeferredParts((self.x.float() * norm).to(self.dtype), squares)
        rows = left_to_next(self.x, norm, EPS, 0.0, parts)
        return Option(partial(quantized_linear, rows, copy_of(self.weight)), squares.nbytes, INPUT)


def check(options: dict[str, Option]) -> None:
    """WrongOutput where a call's result is not the reference's in some of its rows."""
    for name, option in options.items():
        assert isinstance(option.call, partial)
        (x, weight), arguments = option.call.args, dict(option.call.keywords)
        arguments.pop("batch_invariant", None)
        x, norm = x.normed() if isinstance(x, NormedRows) else x, arguments.pop("norm", None)
        some = torch.linspace(0, len(x) - 1, min(len(x), CHECKED_ROWS), device=x.device).long()
        rows, result = x[some], option.call()
        if isinstance(result, NormedRows):
            result = result.rows
        elif norm is not None:
            rows = rms_norm(rows, norm)
        if "residual" in arguments:
            arguments["residual"] = arguments["residual"][some]
        error = relative_error(result[some], linear_reference(rows, weight, **arguments).float())
        if not error <= TOLERANCE:
            raise WrongOutput(f"{name}: relative error {error:.2e}, at most {TOLERANCE:g}")


def copy_of(weight: PackedWeight) -> PackedWeight:
    """The same in memory of its own."""
    zeros = None if weight.zeros is None else weight.zeros.clone()
    return replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone(), zeros=zeros)


def other_formats(form: Format) -> dict[str, dict[str, Any]]:
    """What of a format is changed, by the option's name."""
    return {"zero points": {"zero_point": True}, "groups of 32": {"group_size": 32}}


def specs(shapes: Iterable[tuple[int, int, int]] = SHAPES, form: Format | None = None) -> list[KernelSpec]:
    """The kernels that `run` runs."""
    return list(dict.fromkeys(_specs([Layer(*shape) for shape in shapes], form or Format())))


def _specs(layers: Iterable[Layer], form: Format) -> Iterator[KernelSpec]:
    for layer in layers:
        for changes in ({}, *other_formats(form).values()):
            problem = replace(form, **changes).problem(layer.m, layer.n, layer.k)
            schedule = chosen(problem)
            yield GemmSpec(schedule.config)
            if not changes:
                for inputs in ("", norms.ORDERED, norms.SCALED):
                    yield NormSpec(norms.NormConfig("rms", form.dtype, *norms.launch_shape(layer.k), inputs=inputs))
                yield GemmSpec(chosen(replace(problem, batch_invariant=True)).config)
                around = deferred(schedule, GIVES), deferred(schedule, TAKES)
                yield from (GemmSpec(config) for config in around if config is not None)


def run(bench: Bench, forms: Iterable[Format], rows: Iterable[int] | None = None) -> None:
    """A row for each layer and format under the record's key "options"."""
    layers = [Layer(*shape) for shape in SHAPES]
    if rows is not None:
        sizes = dict.fromkeys((layer.n, layer.k) for layer in layers)
        layers = [Layer(n, k, m) for n, k in sizes for m in rows]
    by_name = {form.name: form for form in forms}
    cases = [(layer, name) for layer in layers for name in by_name]
    run_cases(bench, cases, lambda layer, name: LinearOptions(layer, by_name[name]).all(), check)
