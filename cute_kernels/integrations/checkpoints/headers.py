"""What safetensors files say they hold, checked before any of it is read.

A file is 8 bytes of header length, little-endian, the header in JSON, and the tensors' bytes; `data_offsets` count from
the end of the header. The safetensors package refuses a file that was cut off; this says which tensors it has lost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER = 100 << 20  # what the safetensors package accepts


@dataclass(frozen=True)
class Entry:
    """A tensor in a file; dtype in safetensors' letters."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_headers(path: Path) -> dict[str, Entry]:
    """The tensors of a file, or of a directory's files, by name: those that its index names, or else all.

    Raises:
        FileNotFoundError: there is no such file, or no safetensors file in the directory.
        ValueError: a file is no safetensors file or is cut off, a tensor is in two files, or one that the directory's
            index promises is in none; the message names file and tensor.
    """
    promised = _read_index(path / INDEX) if (path / INDEX).exists() else {}
    files = [path]
    if path.is_dir():
        files = [path / name for name in sorted(set(promised.values()))] or sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"path: got the directory {path} without *.safetensors, want at least one")
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name in entries:
                raise ValueError(f"{name}: got it in {entries[name].file.name} and in {file.name}, want it once")
            entries[name] = entry
    for name, where in promised.items():
        if name not in entries:
            raise ValueError(f"{name}: got no such tensor, want it in {where}, as {INDEX} says")
    return entries


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, all of which exist."""
    promised: dict[str, str] = json.loads(index.read_text())["weight_map"]
    for name, where in promised.items():
        if not (index.parent / where).exists():
            raise FileNotFoundError(f"{name}: got no file {where}, want it beside {INDEX}, which says so")
    return promised


def _read_header(file: Path) -> dict[str, Entry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER):
            raise ValueError(f"{file.name}: got {size} bytes that do not hold a header, want a whole safetensors file")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file.name}: got a header that is no JSON, want a safetensors file") from error
    header.pop("__metadata__", None)
    present = size - _LENGTH_BYTES - length
    lost = sorted(name for name, entry in header.items() if entry["data_offsets"][1] > present)
    if lost:
        more = f" and {len(lost) - 1} others" if len(lost) > 1 else ""
        raise ValueError(f"{lost[0]}{more}: got {file.name} cut off after {size} bytes, want the whole file")
    return {name: Entry(file, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
