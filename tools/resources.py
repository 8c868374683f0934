"""What a compiled kernel uses: registers, stack, spills, shared memory, and the instructions that matter.

Read from the machine code with `cuobjdump` and `nvdisasm`, so it needs no GPU and no driver. Both come from the pip
packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, or from a CUDA toolkit on PATH.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cute_kernels.runtime.artifact import Artifact, Launch, launches_in
from cute_kernels.runtime.doctor import find_tool

# Opcodes worth a gate, by the hardware they occupy. Counted by base name: MUFU.EX2 and MUFU.RCP are both MUFU.
KEY_OPCODES: dict[str, tuple[str, ...]] = {
    "tensor cores": ("HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA", "WARPGROUP"),
    "global memory": ("LDG", "STG", "LDGSTS", "UBLKCP", "UBLKPF", "UTMALDG", "UTMASTG", "UTMAREDG", "ATOMG", "RED"),
    "shared memory": ("LDS", "STS", "LDSM", "STSM", "MOVM", "ATOMS", "SYNCS", "STAS"),
    "local memory": ("LDL", "STL"),
    "conversion": ("PRMT", "LOP3", "I2F", "I2FP", "F2F", "F2FP", "HADD2", "HMUL2", "HFMA2"),
    "arithmetic": ("FFMA", "FADD", "FMUL", "MUFU", "SHFL"),
    "control": ("BAR", "BRA", "CALL", "NANOSLEEP"),
    "dependent launch": ("ACQBULK", "PREEXIT"),  # waiting for the grid before, letting the next one start
}
_KEYS = frozenset(name for names in KEY_OPCODES.values() for name in names)

_ELF_MAGIC = b"\x7fELF"
_EM_CUDA = 190


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel.

    registers: per thread. stack_bytes: local memory per thread, in bytes.
    spill_store_bytes, spill_load_bytes: bytes per thread that the code's STL and LDL instructions move, each counted
        once, as ptxas counts spills (arrays in local memory count too: neither is wanted).
    static_smem_bytes, dynamic_smem_bytes: per CTA. Static includes the 1 KiB that sm_90 reserves in kernels that use
        shared memory; dynamic is None where it is decided at run time or unknown.
    num_instructions: without NOPs. opcodes: counts of the KEY_OPCODES that occur.
    """

    kernel: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int
    dynamic_smem_bytes: int | None
    threads: int | None
    num_instructions: int
    opcodes: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def resource_report(source: object) -> list[KernelResources]:
    """Resources of every kernel in `source`, in the order they are launched where that is known, else by name.

    source: an Artifact, the object that `cute.compile` returned (kept with its CUBIN: `--keep-cubin`), or the bytes or
    path of a CUBIN, an exported object or a bundle. Only the first two know the dynamic shared memory.

    Raises ToolMissingError, TypeError for something else, ValueError where no machine code is found.
    """
    content, launches = _content_of(source)
    images = cubins_in(content)
    if not images:
        raise ValueError(f"no CUBIN found in {len(content)} bytes of {type(source).__name__}")
    found: dict[str, KernelResources] = {}
    for image in images:
        for resources in _report_cubin(image, launches):
            found[resources.kernel] = resources
    order = {launch.kernel: index for index, launch in reversed(list(enumerate(launches)))}
    return sorted(found.values(), key=lambda item: (order.get(item.kernel, len(order)), item.kernel))


def _content_of(source: object) -> tuple[bytes, tuple[Launch, ...]]:
    if isinstance(source, Artifact):
        return source.object_code, source.launches
    if isinstance(source, (bytes, bytearray)):
        return bytes(source), ()
    if isinstance(source, (str, os.PathLike)):
        return Path(source).read_bytes(), ()
    cubin = getattr(getattr(source, "artifacts", None), "CUBIN", None)
    if isinstance(cubin, bytes):
        return cubin, launches_in(str(getattr(source, "ir_module", "")))
    raise TypeError(
        f"source must be an Artifact, a compiled kernel with its CUBIN kept, bytes or a path, got {source!r}"
    )


def cubins_in(content: bytes) -> list[bytes]:
    """The CUBIN images embedded in `content` (an object, a library, or a CUBIN itself), in order.

    An image is an ELF file for the machine "CUDA"; its length follows from its section and program headers.
    """
    images, start = [], content.find(_ELF_MAGIC)
    while start >= 0:
        following = start + 4
        if content[start + 4 : start + 5] == b"\x02" and content[start + 18 : start + 20] == struct.pack(
            "<H", _EM_CUDA
        ):
            length = _elf_length(content, start)
            images.append(content[start : start + length])
            following = start + length
        start = content.find(_ELF_MAGIC, following)
    return images


def _elf_length(content: bytes, start: int) -> int:
    """Length of the 64-bit ELF file at `start`: the end of the furthest thing its headers name."""
    program_offset, section_offset = struct.unpack_from("<QQ", content, start + 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", content, start + 54)
    end = max(program_offset + program_size * program_count, section_offset + section_size * section_count)
    for index in range(section_count):
        kind, _, _, offset, size = struct.unpack_from(
            "<IQQQQ", content, start + section_offset + index * section_size + 4
        )
        if kind != 8:  # SHT_NOBITS takes no room in the file
            end = max(end, offset + size)
    return end


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([find_tool(tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} {' '.join(arguments)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_SECTION = re.compile(r"\.section\s+\.text\.([\w$.]+)")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)")
_WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def _report_cubin(image: bytes, launches: tuple[Launch, ...]) -> list[KernelResources]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        instructions = _instructions(_run("nvdisasm", "-c", "-ndf", file.name))
    return [
        _resources(kernel, (int(registers), int(stack), int(shared)), instructions.get(kernel, []), launches)
        for kernel, registers, stack, shared in _USAGE.findall(usage)
    ]


def _instructions(disassembly: str) -> dict[str, list[str]]:
    """Mnemonics with their modifiers, such as "MUFU.EX2", by kernel."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in disassembly.splitlines():
        if match := _SECTION.search(line):
            current = found.setdefault(match[1], [])
        elif match := _INSTRUCTION.match(line):
            current.append(match[1])
    return found


def _resources(
    kernel: str, usage: tuple[int, int, int], instructions: list[str], launches: tuple[Launch, ...]
) -> KernelResources:
    registers, stack_bytes, static_smem_bytes = usage
    counts = Counter(name.split(".", 1)[0] for name in instructions)
    own = [launch for launch in launches if launch.kernel == kernel]
    return KernelResources(
        kernel=kernel,
        registers=registers,
        stack_bytes=stack_bytes,
        spill_store_bytes=_local_bytes(instructions, "STL"),
        spill_load_bytes=_local_bytes(instructions, "LDL"),
        static_smem_bytes=static_smem_bytes,
        dynamic_smem_bytes=_largest([launch.dynamic_smem_bytes for launch in own]),
        threads=_largest([launch.threads for launch in own]),
        num_instructions=len(instructions) - counts["NOP"],
        opcodes={name: counts[name] for name in sorted(counts.keys() & _KEYS)},
    )


def _local_bytes(instructions: list[str], opcode: str) -> int:
    total = 0
    for name in instructions:
        base, *modifiers = name.split(".")
        if base == opcode:
            total += next((_WIDTH[modifier] for modifier in modifiers if modifier in _WIDTH), 4)
    return total


def _largest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def short_name(kernel: str) -> str:
    """The part of a mangled kernel name that its author wrote: without the DSL's prefix and the argument types.

    A method of this package's classes is named Class.method, a function by its name.
    """
    name = kernel.removeprefix("kernel_cutlass_")
    method = re.match(r"(\w+?)_(?:cute_kernels|tests)[a-z0-9_]*([A-Z][A-Za-z0-9]*)_object_at_", name)
    if method:
        return f"{method[2]}.{method[1]}"
    return re.split(r"_(?:tensorptr|Tensor|object_at|cute|ptr|[A-Z]\w*Float|\d+_)", name, maxsplit=1)[0]
