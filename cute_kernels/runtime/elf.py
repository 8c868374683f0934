"""Reads the dynamic symbols of a shared library from its file: those that it exports, and those that it needs."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_DYNSYM = 11  # section type: the symbols that the dynamic linker sees
_WEAK = 2  # binding: may stay unresolved
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


class DynamicSymbols(NamedTuple):
    """The names of a library's dynamic symbols. wanted: the symbols that other libraries must provide; weak symbols are
    left out.
    """

    exported: frozenset[str]
    wanted: frozenset[str]


def dynamic_symbols(path: Path) -> DynamicSymbols:
    """Reads the dynamic symbols of a 64-bit little-endian ELF file. Raises ValueError for other files."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no 64-bit ELF file")
        offset = struct.unpack_from("<Q", content, 40)[0]
        size, count = struct.unpack_from("<HH", content, 58)
        sections = [_SECTION.unpack_from(content, offset + i * size) for i in range(count)]
        exported, wanted = set(), set()
        for section in sections:
            if section[1] != _DYNSYM:
                continue
            strings = sections[section[6]][4]
            for start in range(section[4], section[4] + section[5], _SYMBOL.size):
                name, info, _, index, _, _ = _SYMBOL.unpack_from(content, start)
                if not name:
                    continue
                begin = strings + name
                text = content[begin : content.find(b"\0", begin)].decode()
                if index:
                    exported.add(text)
                elif info >> 4 != _WEAK:
                    wanted.add(text)
    return DynamicSymbols(frozenset(exported), frozenset(wanted))
