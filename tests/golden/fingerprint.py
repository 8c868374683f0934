"""What an exported kernel does, without what it is called: digests that a renamed class or configuration leaves alone.

A kernel's name holds its class, module and argument types, and is found in a CUBIN's section names and string tables
and, on the host, in the two functions that look kernels up. Everything else is compared: instructions, constants,
relocations, registers, stack, shared memory, attributes, and the host code that computes grids and packs arguments.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.resources import cubins_in

_NOBITS = 8  # a section that takes no room in the file
_FUNCTION = 2
_STRING_TABLES = (".strtab", ".shstrtab")
_NAMED_HOST_CODE = ("_cuda_load", "_cuda_load_to_device")  # of the DSL: they build the kernels' names on the stack


@dataclass(frozen=True)
class _Section:
    name: str
    header: tuple[int, ...]  # type, flags, size, link, info, alignment, entry size
    data: bytes


@dataclass(frozen=True)
class _Symbol:
    name: str
    info: int
    other: int
    section: int
    value: int
    size: int


def fingerprint(object_code: bytes, kernels: Sequence[str]) -> dict[str, str]:
    """Digests by part of an exported object, such as {"kernel0 .text": ..., "host function 3": ...}.

    kernels: full names in launch order; the parts are named by their position in it.
    """
    names = {name: f"kernel{index}" for index, name in enumerate(dict.fromkeys(kernels))}
    parts = dict(_host_parts(object_code))
    for index, image in enumerate(cubins_in(object_code)):
        parts |= {f"cubin{index} {name}": digest for name, digest in _cubin_parts(image, names)}
    return parts


def _cubin_parts(image: bytes, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    sections = _sections(image)
    symbols = _symbols(sections)
    for section in sections:
        name = _renamed(section.name, names)
        if section.name == ".symtab":
            rows = [(_renamed(item.name, names), item.info, item.other, item.section, item.value, item.size)
                    for item in symbols]  # fmt: skip
            yield name, _digest(repr(rows).encode())
        elif section.name not in _STRING_TABLES:
            yield name, _digest(repr(section.header).encode() + section.data)


def _host_parts(object_code: bytes) -> Iterator[tuple[str, str]]:
    sections = _sections(object_code)
    functions = [item for item in _symbols(sections) if item.info & 15 == _FUNCTION]
    functions = [item for item in functions if not item.name.endswith(_NAMED_HOST_CODE)]
    for index, item in enumerate(sorted(functions, key=lambda item: (item.section, item.value))):
        code = sections[item.section].data[item.value : item.value + item.size]
        yield f"host function {index}", _digest(code)


def _renamed(text: str, names: dict[str, str]) -> str:
    for old in sorted(names, key=len, reverse=True):  # a name may begin another
        text = text.replace(old, names[old])
    return text


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _sections(image: bytes) -> list[_Section]:
    """The sections of a 64-bit little-endian ELF file."""
    (start,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, start + index * size) for index in range(count)]
    strings = _data(image, headers[names])
    return [
        _Section(_text(strings, name), (kind, flags, length, link, info, align, entry), _data(image, header))
        for header in headers
        for name, kind, flags, _, _, length, link, info, align, entry in [header]
    ]


def _data(image: bytes, header: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size, *_ = header
    return b"" if kind == _NOBITS else image[offset : offset + size]


def _symbols(sections: list[_Section]) -> list[_Symbol]:
    by_name = {section.name: section.data for section in sections}
    table, strings = by_name.get(".symtab", b""), by_name.get(".strtab", b"")
    return [
        _Symbol(_text(strings, name), *rest)
        for name, *rest in (struct.unpack_from("<IBBHQQ", table, offset) for offset in range(0, len(table), 24))
    ]


def _text(strings: bytes, offset: int) -> str:
    return strings[offset : strings.index(b"\0", offset)].decode()
