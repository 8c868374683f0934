"""Checks of arguments that all kernel families share; errors name the argument, what came and what is wanted."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MOST = 2**63 - 1  # of anything that is counted


def shape_of(tensor: torch.Tensor) -> list[int]:
    """Returns a tensor's shape as a list, for error messages."""
    return list(tensor.shape)


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns a tensor's strides in elements. torch allows any stride for a dimension of size 1. For such a dimension,
    this function returns the stride of a contiguous tensor.
    """
    strides = list(tensor.stride())
    for i in reversed(range(tensor.dim())):
        if tensor.shape[i] <= 1:
            strides[i] = strides[i + 1] * max(tensor.shape[i + 1], 1) if i + 1 < tensor.dim() else 1
    return tuple(strides)


def overlaps(tensor: torch.Tensor) -> bool:
    """Returns whether two elements of a tensor may share memory. It compares sizes and strides only, so True may be a
    false alarm."""
    reach = 1  # elements from the first to after the last one of the dimensions looked at
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


class _UnlessCapturing:
    """A value that is true except while a CUDA graph is captured. The values of tensors cannot be read during a
    capture.
    """

    def __bool__(self) -> bool:
        return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors may share memory. It compares sizes and strides only, so True may be a false alarm.

    Interleaved views of one tensor, such as K and V of each page, do not share memory.
    """
    if is_compiling() or a.device != b.device:  # traced tensors have no address
        return False
    if any(each.is_meta or each.is_nested or each.layout != torch.strided or not each.numel() for each in (a, b)):
        return False
    try:
        places = a.data_ptr(), b.data_ptr()
    except RuntimeError:  # of one that stands for another, which has no address, or 0
        return False
    return all(places) and _meet(places[1] - places[0], _steps_of(a), _steps_of(b))


Steps = list[tuple[int, int]]
"""(stride in bytes, size) of each dimension of a tensor, and (1, bytes) for an element, sorted by stride, the widest
first."""


def _steps_of(tensor: torch.Tensor) -> Steps:
    width = tensor.element_size()
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    steps = [(stride * width, size) for stride, size in strides if size > 1 and stride]
    return sorted([*steps, (1, width)], reverse=True)


def _meet(offset: int, a: Steps, b: Steps) -> bool:
    """Returns whether two tensors may share a byte.

    a, b: the steps of the tensors' dimensions. offset: the byte at which the second tensor begins, if the first begins
    at byte 0.
    """
    if offset >= _reach(a) or -offset >= _reach(b):
        return False
    if not a or not b or a[0][0] != b[0][0] or max(_reach(a[1:]), _reach(b[1:])) > a[0][0]:
        return True
    inner = offset % a[0][0]  # from a step of either to the one of the other that comes next
    return any(_meet(place, a[1:], b[1:]) for place in (inner, inner - a[0][0]))


def _reach(steps: Steps) -> int:
    return 1 + sum(stride * (size - 1) for stride, size in steps)


def check_apart(name: str, written: torch.Tensor, others: Mapping[str, object], in_place: Container[str] = ()) -> None:
    """Raises ValueError if an output of a call may share memory with another tensor of the call. The message names both
    tensors.

    in_place: names of tensors that the output may overwrite: both then have the same elements at the same addresses.

    On a GPU, a call that already has a plan is checked only if the family's launcher has a function ``always`` that
    returns True for it.
    """
    for other, tensor in others.items():
        if not isinstance(tensor, torch.Tensor) or not share_memory(written, tensor):
            continue
        if other not in in_place:
            raise ValueError(f"{name}: got memory that {other} takes too, want another tensor's")
        if written.data_ptr() != tensor.data_ptr() or strides_of(written) != strides_of(tensor):
            raise ValueError(f"{name}: got memory that {other} takes too, want {other} itself or another tensor's")


# Whether every call's values are checked, too. Read once: looking at the environment would cost a call 0.7 us.
DEBUG: bool | _UnlessCapturing = os.environ.get("CUTE_KERNELS_DEBUG", "") not in ("", "0") and _UnlessCapturing()


@contextmanager
def checking_values(checks: bool = True) -> Iterator[None]:
    """Makes calls within this context check the values of their tensors, as `CUTE_KERNELS_DEBUG=1` does everywhere.

    checks: False turns these checks off.
    """
    global DEBUG
    before, DEBUG = DEBUG, checks and _UnlessCapturing()
    try:
        yield
    finally:
        DEBUG = before


def check_tensors(**tensors: object) -> None:
    """Raises TypeError if an argument is no tensor, or is a sparse or nested tensor. The message names the first such
    argument."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, want a torch.Tensor")
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested tensor" if tensor.is_nested else f"tensor in layout {tensor.layout}"
            raise TypeError(f"{name}: got a {kind}, want an ordinary (strided) one")


def check_kind(name: str, value: object, kind: type | UnionType | tuple[type, ...], wanted: str) -> None:
    """Raises TypeError unless ``value`` is an instance of ``kind``. wanted: the words for ``kind`` in the message."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: got {type(value).__name__}, want {wanted}")


def check_given_tensors(optional: Mapping[str, object]) -> None:
    """Checks the tensors among optional arguments, as :func:`check_tensors` does."""
    check_tensors(**{name: value for name, value in optional.items() if isinstance(value, torch.Tensor)})


def check_numbers(**tensors: object) -> None:
    """Raises TypeError or ValueError if an argument is no tensor with data. The message names the first such
    argument.
    """
    check_tensors(**tensors)
    for name, tensor in tensors.items():
        assert isinstance(tensor, torch.Tensor)
        if tensor.is_meta:
            raise ValueError(f"{name}: got a tensor without data (meta), want one on a CPU or CUDA device")


def check_floating(**tensors: object) -> None:
    """Raises TypeError or ValueError if an argument is no floating tensor with data. The message names the first such
    argument."""
    check_numbers(**tensors)
    for name, tensor in tensors.items():
        assert isinstance(tensor, torch.Tensor)
        check_dtype(name, tensor, *FLOATING)


def check_count(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raises TypeError or ValueError unless ``value`` is an int from ``least`` to ``most``, by default 2**63 - 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, want an int")
    greatest = MOST if most is None else most
    if not least <= value <= greatest:
        wanted = f"at least {least}" if most is None and value < least else f"{least} to {greatest}"
        raise ValueError(f"{name}: got {value}, want {wanted}")


def check_positive(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless ``value`` is a positive finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, want a number")
    if not 0 < value <= sys.float_info.max:  # an int may be beyond all floats, too
        raise ValueError(f"{name}: got {value}, want a positive finite number")


def check_all_positive(name: str, values: torch.Tensor) -> None:
    """Raises ValueError unless all values are positive and finite; waits for the tensor's GPU."""
    wrong = values[~((values > 0) & (values < torch.inf))]
    if wrong.numel():
        raise ValueError(f"{name}: got {float(wrong[0])}, want positive finite numbers")


def check_optional_positive(name: str, value: object, most: float = 2.0**126) -> None:
    """Raises TypeError or ValueError unless ``value`` is None or a number from 2**-126 to ``most``. Kernels take fp32,
    in which such numbers stay positive and finite.

    softmax_scale must be positive. Kernels mask scores with -inf before they scale them, and -inf times zero or a
    negative number is no mask.
    """
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, want None or a number")
    if not 2.0**-126 <= value <= most:
        raise ValueError(f"{name}: got {value}, want None or a positive finite number, from 2**-126 to {most:g}")


def check_optional_count(name: str, value: object, most: int | None = None) -> None:
    """Raises ValueError unless ``value`` is None or an int of at least 1 and, if given, at most ``most``."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        raise ValueError(
            f"{name}: got {value!r}, want None or an int {'of at least 1' if most is None else f'from 1 to {most}'}"
        )


def check_number(name: str, value: object, least: int | None = None) -> None:
    """Raises TypeError or ValueError unless ``value`` is a finite number of at least ``least``.

    This function only compares ``value``. So `torch.compile` can trace ``value`` as a symbolic number, and each
    comparison becomes a guard.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, want a number")
    lowest = -sys.float_info.max if least is None else least
    if not lowest <= value <= sys.float_info.max:  # an int may be beyond all floats, too
        wanted = "a finite number" if least is None else f"a finite number of at least {least}"
        raise ValueError(f"{name}: got {value}, want {wanted}")


def is_one_of(value: object, choices: Container[int]) -> bool:
    """Returns whether ``value`` is an int among ``choices``. 64.0 and True are no ints, though they equal 64 and 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value in choices


def check_flag(name: str, value: object) -> None:
    """Raises TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, want True or False")


def check_matrix_shape(name: str, shape: object) -> None:
    """Raises TypeError or ValueError unless ``shape`` is a pair of ints of at least 1."""
    if not isinstance(shape, Sequence) or not all(isinstance(n, int) and not isinstance(n, bool) for n in shape):
        raise TypeError(f"{name}: got {shape!r}, want the ints (N, K)")
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"{name}: got {list(shape)}, want (N, K) with N and K at least 1")


def needs_dispatch(**tensors: object) -> bool:
    """Returns whether a call must go through its operator: it is being traced, or a tensor is not plain.

    The first tensor decides the device. If it is on neither a CPU nor a GPU, such as a meta tensor, the operator uses
    shapes alone and computes nothing. Then all tensors must be on that device.

    Raises TypeError for an argument that is no tensor, and ValueError for a tensor on another device.
    """
    if is_compiling():
        return True
    for tensor in tensors.values():
        if type(tensor) is not torch.Tensor:
            check_tensors(**tensors)
            return True
    first: Any = next(iter(tensors.values()))
    if first.is_cuda or first.is_cpu:
        return False
    check_together(**tensors)
    return True


def check_together(**tensors: Any) -> None:
    """Raises TypeError unless all arguments are tensors, ValueError unless all are on the first one's device."""
    check_tensors(**tensors)
    (speaker, first), *others = tensors.items()
    for name, tensor in others:
        check_place(name, tensor, first.device, speaker)


def check_place(name: str, tensor: torch.Tensor, device: torch.device, speaker: str = "q") -> None:
    """Raises ValueError unless a tensor is on ``device``.

    speaker: the name, for the message, of the argument that decides the device.
    """
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, want it on {device}, where {speaker} is")


def check_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype, why: str = "") -> None:
    """Raises TypeError unless a tensor has one of ``dtypes``. The message ends with ``why``."""
    if tensor.dtype not in dtypes:
        known = [*map(str, dict.fromkeys(dtypes))]
        wanted = " or ".join(known) if len(known) < 3 else f"one of {', '.join(known)}"
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want {wanted}{why}")


def check_shape(name: str, tensor: torch.Tensor, *sizes: int | str, why: str = "") -> None:
    """Raises ValueError unless a tensor has these sizes. The message ends with ``why``.

    A string among ``sizes`` stands for any size. "..." in the first place stands for any number of dimensions.
    """
    leads = sizes[:1] == ("...",)
    own = sizes[1:] if leads else sizes
    found = tensor.shape[len(tensor.shape) - len(own) :] if leads and len(tensor.shape) >= len(own) else tensor.shape
    if len(found) != len(own) or any(not isinstance(b, str) and a != b for a, b in zip(found, own, strict=True)):
        raise ValueError(f"{name}: got shape {shape_of(tensor)}, want [{', '.join(map(str, sizes))}]{why}")


class Wanted(NamedTuple):
    """The requirements on a tensor among a call's arguments.

    Attributes:
        name: the argument's name.
        tensor: the argument's value. It may be no tensor.
        dtypes: the dtypes that the tensor may have.
        sizes: the sizes that the tensor must have, as for `check_shape`.
        device: the device that the tensor must be on.
        speaker: the name of the argument that decides the device.
        why: the end of the message about a wrong dtype, with the reason for the requirement.
        size_why: the end of the message about wrong sizes, with the reason for the requirement.
        contiguous: whether the tensor must be contiguous.
        unit: the number of bytes of which the tensor's address must be a multiple; 1: any address.
    """

    name: str
    tensor: object
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int | str, ...]
    device: torch.device
    speaker: str = "x"
    why: str = ""
    size_why: str = ""
    contiguous: bool = False
    unit: int = 1


def check_wanted(wanted: Iterable[Wanted]) -> None:
    """Raises TypeError or ValueError, naming the argument, unless each tensor meets its requirements.

    A tensor is checked before the next item of ``wanted`` is made, so later requirements may depend on checked tensors.
    """
    for name, tensor, dtypes, sizes, device, speaker, why, size_why, contiguous, unit in wanted:
        check_tensors(**{name: tensor})
        assert isinstance(tensor, torch.Tensor)
        check_dtype(name, tensor, *dtypes, why=why)
        check_shape(name, tensor, *sizes, why=size_why)
        check_place(name, tensor, device, speaker)
        if contiguous:
            check_contiguous(name, tensor)
        if unit > 1:
            check_aligned(name, tensor, unit)


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless a tensor is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name}: got strides {tensor.stride()} for shape {shape_of(tensor)}, want a contiguous tensor"
        )


def check_aligned(name: str, tensor: torch.Tensor, unit: int) -> None:
    """Raises ValueError unless a tensor starts on a multiple of ``unit`` bytes."""
    if past := tensor.data_ptr() % unit:
        raise ValueError(
            f"{name}: got a tensor that starts {past} bytes past a multiple of {unit}, want it aligned to {unit} bytes"
        )


def check_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int, what: str) -> None:
    """Raises TypeError or ValueError unless the tensor is a contiguous ``dtype`` [size]."""
    check_dtype(name, tensor, dtype)
    check_shape(name, tensor, size, why=f", {what}")
    check_contiguous(name, tensor)


TOKENS_OF_TABLE = "the tokens of a row of block_table"


def checked_lengths(seq_lens: torch.Tensor, most: int, room: str) -> torch.Tensor:
    """Returns the requests' lengths as int64 on the host. Raises ValueError, naming the request, for a length below 0
    or above ``most``. Waits for the tensor's GPU.

    room: words for the message that say what ``most`` is.
    """
    lengths = seq_lens.to(torch.int64).cpu()
    wrong = torch.nonzero((lengths < 0) | (lengths > most))
    if wrong.numel():
        request = int(wrong[0])
        raise ValueError(f"seq_lens: got {int(lengths[request])} for request {request}, want 0 to {most}, {room}")
    return lengths


def check_pages(table: torch.Tensor, used: torch.Tensor, page_size: int, num_pages: int) -> None:
    """Raises ValueError, naming request and position, if a used entry of a block table is no page of the cache.

    table: the block table, on the host. used: which entries are used: bool, of the table's shape, on the host.
    """
    wrong = torch.nonzero(used & ((table < 0) | (table >= num_pages)))
    if wrong.numel():
        request, entry = wrong[0].tolist()
        raise ValueError(
            f"block_table: got page {int(table[request, entry])} for request {request} at position "
            f"{entry * page_size}, want 0 to {num_pages - 1}, the cache's pages"
        )


def check_permutation(name: str, perm: torch.Tensor) -> None:
    """Raises ValueError unless ``perm`` has each index exactly once. Waits for the tensor's GPU."""
    if not torch.equal(perm.sort().values, torch.arange(perm.numel(), dtype=perm.dtype, device=perm.device)):
        raise ValueError(f"{name}: got indices that are missing or repeated, want each of 0 to {perm.numel() - 1} once")


def row_stride(tensor: torch.Tensor) -> int | None:
    """Returns the distance, in elements, from one row of a tensor [..., n] to the next. Returns None if rows are not
    evenly spaced, or a row is not contiguous."""
    n = tensor.shape[-1]
    if tensor.stride(-1) != 1 and n > 1:
        return None
    outer = [(size, stride) for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    if not outer:
        return n
    step = outer[-1][1]
    rows = 1
    for size, stride in reversed(outer):
        if stride != step * rows:
            return None
        rows *= size
    return step
