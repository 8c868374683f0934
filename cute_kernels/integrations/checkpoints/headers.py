"""The headers of safetensors files, checked before any tensor is read.

A file has 8 bytes with the header's length, little-endian, then the header in JSON, then the tensors' bytes.
`data_offsets` begin at the end of the header. The safetensors package refuses a file that was cut off; this module also
says which tensors are lost.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ITEM_BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}
_SHARD = re.compile(r"(.+)-\d+-of-(\d+)\.safetensors")
_LENGTH_BYTES = 8
_MAX_HEADER = 100 << 20  # what the safetensors package accepts


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, or some rows of it. dtype: in safetensors' notation, such as "BF16".

    Args:
        key: the tensor's name in the file.
        rows: the range (first, last + 1) of the tensor's rows; None for all rows.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    key: str = ""
    rows: tuple[int, int] | None = None


class Headers(dict[str, Entry]):
    """The tensors of files by name, and the files' metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata: dict[str, str] = {}


def read_headers(path: Path) -> Headers:
    """Reads the tensors of a file, or of a directory, by name.

    A directory's files are those that its index names. Without an index they are model.safetensors, or else all files.
    If a file's name says that it is one of several shards (model-00001-of-00002), all shards must be there. If two
    files have a tensor, the index says from which of them it is read.

    Raises:
        FileNotFoundError: there is no such file, no safetensors file in the directory, or a shard is missing.
        ValueError: a file is no safetensors file or is truncated, a tensor is in two files and the index names neither
            file, or the index names a tensor that no file has. The message names file and tensor.
    """
    promised = _read_index(path / INDEX) if (path / INDEX).exists() else {}
    files = [path / name for name in sorted(set(promised.values()))] if path.is_dir() else [path]
    files = files or sorted(path.glob(WHOLE)) or sorted(path.glob("*.safetensors"))
    if not files:
        there = sorted(file.name for kind in ("*.bin", "*.gguf", "*.pt", "*.pth") for file in path.glob(kind))
        how = "is not" if there and there[0].endswith(".gguf") else "runs code when it is"
        beside = f" but with {there[0]}, which {how} read" if there else ""
        raise FileNotFoundError(f"path: got the directory {path} without *.safetensors{beside}, want at least one")
    for shard in filter(None, (_SHARD.fullmatch(file.name) for file in files if path.is_dir() and not promised)):
        if (found := len([*path.glob(f"{shard[1]}-*-of-{shard[2]}.safetensors")])) < int(shard[2]):
            raise FileNotFoundError(f"path: got {found} of {int(shard[2])} files of {shard[1]}, want all of them")
    entries = Headers()
    for file in files:
        for name, entry in _read_header(file, entries.metadata).items():
            where = path / promised[name] if name in promised else None
            if name in entries and where not in (file, entries[name].file):
                raise ValueError(f"{name}: got it in {entries[name].file.name} and in {file.name}, want it once")
            if name not in entries or where == file:
                entries[name] = entry
    for name, where in promised.items():
        if name not in entries:
            raise ValueError(f"{name}: got no such tensor, want it in {where}, as {INDEX} says")
    return entries


def _read_index(index: Path) -> dict[str, str]:
    """Returns the file of each tensor that the index names. Checks that each file exists, in the directory or below
    it."""
    promised = read_json(index).get("weight_map")
    if not isinstance(promised, dict) or not all(isinstance(where, str) for where in promised.values()):
        raise ValueError(f"{index.name}: got no 'weight_map' of names and files, want the index of a checkpoint")
    for name, where in promised.items():
        if Path(where).is_absolute() or ".." in Path(where).parts:
            raise ValueError(f"{name}: got {where} in {INDEX}, want a file of the checkpoint's directory")
        if not (index.parent / where).is_file():
            raise FileNotFoundError(f"{name}: got no file {where}, want it beside {INDEX}, which says so")
    return promised


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of settings. Raises ValueError, naming the file, if the file holds no JSON
    object.
    """
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file.name}: got what is no JSON ({error}), want a JSON object") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file.name}: got a JSON {type(found).__name__}, want a JSON object")
    return found


def _read_header(file: Path, metadata: dict[str, str]) -> dict[str, Entry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER):
            raise ValueError(f"{file.name}: got {size} bytes that do not hold a header, want a whole safetensors file")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file.name}: got a header that is no JSON, want a safetensors file") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file.name}: got a header that is a JSON {type(header).__name__}, want an object")
    said = header.pop("__metadata__", None)
    if isinstance(said, dict):
        metadata.update((key, value) for key, value in said.items() if isinstance(value, str))
    for name, entry in header.items():
        if not _describes_a_tensor(entry):
            raise ValueError(
                f"{name}: got {json.dumps(entry)[:80]} in the header of {file.name}, want dtype, shape "
                "and data_offsets that agree"
            )
    present = size - _LENGTH_BYTES - length
    lost = sorted(name for name, entry in header.items() if entry["data_offsets"][1] > present)
    if lost:
        more = f" and {len(lost) - 1} others" if len(lost) > 1 else ""
        raise ValueError(f"{lost[0]}{more}: got {file.name} cut off after {size} bytes, want the whole file")
    return {name: Entry(file, entry["dtype"], tuple(entry["shape"]), name) for name, entry in header.items()}


def _describes_a_tensor(entry: object) -> bool:
    """Returns whether an entry of a header has a dtype, a shape and data offsets, and the offsets span the bytes of
    such a tensor."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    said: list[Any] = [entry.get("shape"), entry.get("data_offsets")]
    shape, place = said
    known = all(isinstance(one, list) and all(type(number) is int and number >= 0 for number in one) for one in said)
    in_order = known and len(place) == 2 and place[0] <= place[1]
    size = _ITEM_BYTES.get(entry["dtype"])  # None for one that is nothing to the importers
    return in_order and (size is None or place[1] - place[0] == size * math.prod(shape))
