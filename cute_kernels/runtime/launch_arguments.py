"""The arguments of a compiled function, declared once: names and types, in order.

One `LaunchArguments` makes the compiler's fake arguments, the host function that is compiled, and a plan's call. All
three use arguments by name, so arguments cannot be swapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

Kind = Literal["tensor", "address", "int64", "int32", "float32"]


def compile_options(arch: str, *extra: str) -> str:
    """Returns the options of `cute.compile` that all kernels have, as a string.

    `arch` is always given: the DSL would otherwise ask the driver, and compiling needs no GPU. `--keep-cubin` is not
    given, since it writes a file into the working directory; reports read the CUBIN from the exported object.
    """
    return " ".join(("--enable-tvm-ffi", f"--gpu-arch {arch}", *extra))


@dataclass(frozen=True)
class Argument:
    """One launch argument. An address is a 64-bit address of device memory, 0 for none."""

    name: str
    kind: Kind


def arguments(kind: Kind, *names: str) -> tuple[Argument, ...]:
    """Returns several arguments of one kind."""
    return tuple(Argument(name, kind) for name in names)


@dataclass(frozen=True)
class LaunchArguments:
    """The arguments of a kernel in order, except the stream."""

    arguments: tuple[Argument, ...]

    def __post_init__(self) -> None:
        twice = {name for name in self.names if self.names.count(name) > 1}
        if twice:
            raise ValueError(f"arguments: got {', '.join(sorted(twice))} twice, want each once")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    def fake(self, tensors: Mapping[str, Any]) -> list[Any]:
        """Returns the fake arguments for compilation, in order. tensors: fake tensors by name."""
        import cutlass

        numbers = {"address": cutlass.Int64(0), "int64": cutlass.Int64(0), "int32": cutlass.Int32(0)}
        numbers["float32"] = cutlass.Float32(1.0)
        wanted = [argument.name for argument in self.arguments if argument.kind == "tensor"]
        if set(wanted) != set(tensors):
            raise TypeError(f"tensors: got {', '.join(tensors)}, want {', '.join(wanted)}")
        return [tensors[each.name] if each.kind == "tensor" else numbers[each.kind] for each in self.arguments]

    def compile(self, launch: Callable[..., None], tensors: Mapping[str, Any], arch: str, *options: str) -> Any:
        """Compiles ``launch`` (see :meth:`entry`) for ``arch`` ("sm_90a"), on torch's current stream.

        tensors: fake tensors by name. options: compiler options besides those of `compile_options`.
        """
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_stream

        given = *self.fake(tensors), make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile(self.entry(launch), *given, options=compile_options(arch, *options))

    def entry(self, launch: Callable[..., None], *, with_stream: bool = True) -> Any:
        """Makes the host function to be compiled, which takes these arguments, then the stream if ``with_stream``.

        launch: the function that the host function calls. It gets an object with the arguments as attributes, then the
        stream.
        """
        import cutlass
        import cutlass.cute as cute

        types: dict[str, Any] = {"tensor": cute.Tensor, "address": cutlass.Int64, "int64": cutlass.Int64}
        types |= {"int32": cutlass.Int32, "float32": cutlass.Float32}
        stream = ["stream"] * with_stream
        given = f"_Given({', '.join(f'{name}={name}' for name in self.names)})"
        source = f"def entry({', '.join((*self.names, *stream))}):\n    _launch({', '.join((given, *stream))})\n"
        made = _executed("entry", source, launch)
        made.__annotations__ = {each.name: types[each.kind] for each in self.arguments}
        return cute.jit(preprocess=False)(made)

    def bound(
        self,
        function: Callable[..., Any],
        fixed: Mapping[str, object],
        tensors: Mapping[str, Place] | None = None,
        values: Mapping[str, Place] | None = None,
        made: Mapping[str, Callable[[], object]] | None = None,
        ignored: tuple[str, ...] = (),
    ) -> Callable[..., Any]:
        """Makes a function for a plan. It calls the compiled ``function`` with all arguments in order.

        The made function takes, by name, each kernel argument that is in none of fixed, tensors, values and made. It
        also has arguments of its own. A `Place` names one of these, and keys to an item of it.

        Args:
            fixed: values by name.
            tensors: by name, the place of a tensor whose address is passed; 0 is passed for None.
            values: by name, the place of a value.
            made: by name, a function that makes a value for each launch.
            ignored: names that a caller may pass although they are not used.

        Raises:
            TypeError: an argument does not exist or is named twice; the message says which.
        """
        said = [*fixed, *(tensors or {}), *(values or {}), *(made or {})]
        for name in said:
            if name not in self.names or said.count(name) > 1:
                raise TypeError(f"{name}: got an argument of that name, want each once of {', '.join(self.names)}")
        places = tuple((tensors or {}).items()), tuple((values or {}).items())
        return _binder(self.names, tuple(fixed), *places, tuple(made or ()), ignored)(function, fixed, made)


Place = tuple["str | int", ...]
"""Where a plan's function finds a value: the name of its own argument, then the keys with which that argument is
indexed."""


def by_name(*names: str) -> dict[str, Place]:
    """Returns the places of tensors that callers pass by the names of their arguments."""
    return {name: (name,) for name in names}


@functools.lru_cache(maxsize=256)
def _binder(
    names: tuple[str, ...],
    fixed: tuple[str, ...],
    tensors: tuple[tuple[str, Place], ...],
    values: tuple[tuple[str, Place], ...],
    made: tuple[str, ...],
    ignored: tuple[str, ...],
) -> Callable[..., Any]:
    """Makes the function of `LaunchArguments.bound` as source code, since **kwargs would cost time at every launch."""
    passed = {name: f"_{name}" for name in fixed}
    passed |= {name: f"0 if _{name} is None else _{name}.data_ptr()" for name, _ in tensors}
    passed |= {name: _looked_up(place) for name, place in values}
    passed |= {name: f"_{name}()" for name in made}
    free = [name for name in names if name not in passed]
    sources = dict.fromkeys(str(place[0]) for _, place in (*tensors, *values))
    lines = ["def bind(function, fixed, made):"]
    lines += [f"    _{name} = fixed[{name!r}]" for name in fixed]
    lines += [f"    _{name} = made[{name!r}]" for name in made]
    unused = (f"{name}=None" for name in ignored if name not in sources)
    lines += [f"    def send({', '.join((*free, *sources, *unused))}):"]
    lines += [f"        _{name} = {_looked_up(place)}" for name, place in tensors]
    lines += [f"        return function({', '.join(passed.get(name, name) for name in names)})", "    return send"]
    return _executed("bind", "\n".join(lines))


def _looked_up(place: Place) -> str:
    return str(place[0]) + "".join(f"[{key!r}]" for key in place[1:])


def _executed(name: str, source: str, launch: object = None) -> Any:
    scope: dict[str, Any] = {"_launch": launch, "_Given": SimpleNamespace}
    exec(compile(source, f"<{name} of launch arguments>", "exec"), scope)
    return scope[name]


def joined(*parts: Iterable[Argument]) -> LaunchArguments:
    """Joins the arguments of several parts, in order."""
    return LaunchArguments(tuple(argument for part in parts for argument in part))
