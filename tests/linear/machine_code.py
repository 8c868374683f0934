"""Reading machine code: whether registers that asynchronous MMAs still read or write are written."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from cute_kernels.runtime.doctor import find_tool
from tools.resources import cubins_in

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)(?: (.*?))? ;")
_LABEL = re.compile(r"^(\.L_x_\d+):")
MMAS = ("HGMMA", "IGMMA", "QGMMA")  # of warpgroups: of floats, of bytes and of E4M3
_WIDTHS = {".64": 2, ".128": 4}
# What writes no register although one stands first, or only predicates.
_NO_RESULT = ("ST", *MMAS, "WARPGROUP", "BRA", "SYNCS", "UBLKCP", "BAR", "UTMA", "MEMBAR", "EXIT")


def instructions(object_code: bytes, folder: Path) -> list[tuple[str, str, str]]:
    """(labels or "", opcode, operands) of a kernel's instructions; the labels that stand before each."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubins_in(object_code)[0])
    text = subprocess.run([find_tool("nvdisasm"), "-c", path], capture_output=True, text=True, check=True).stdout
    found, label = [], ""
    for line in text.splitlines():
        if match := _LABEL.match(line):
            label = f"{label} {match[1]}".strip()
        elif match := _INSTRUCTION.match(line):
            found.append((label, match[2], match[3] or ""))
            label = ""
    return found


def main_loop(code: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """From the target of the first branch back after the last MMA to that branch."""
    places = {label: place for place, (labels, _, _) in enumerate(code) for label in labels.split()}
    mmas = [place for place, (_, opcode, _) in enumerate(code) if opcode.startswith(MMAS)]
    for place in range(mmas[-1], len(code)):
        target = re.search(r"\.L_x_\d+", code[place][2]) if code[place][1] == "BRA" else None
        if target and places[target[0]] < mmas[0]:
            return code[places[target[0]] : place + 1]
    raise AssertionError("no loop around the MMAs")


def early_writes(loop: list[tuple[str, str, str]]) -> list[str]:
    """Instructions that write a register of A or D while an MMA that has it may be running, two rounds of the loop."""
    groups: list[set[int]] = []  # of registers, oldest first; the last one is open
    current: set[int] = set()
    wrong = []
    for _, opcode, operands in loop * 2:
        if opcode.startswith(MMAS):
            acc, first = (int(operand.strip()[1:].split(".")[0]) for operand in operands.split(",")[:2])
            columns = int(opcode.split(".")[1].split("x")[1])
            current |= {*range(acc, acc + columns // 2), *range(first, first + 4)}
            if "gsb0" in operands:
                groups.append(current)
                current = set()
        elif opcode == "WARPGROUP.DEPBAR.LE":
            pending = int(operands.split(",")[1], 16)
            groups = groups[len(groups) - pending :] if pending else []
        elif not opcode.startswith(_NO_RESULT) and (match := re.match(r"R(\d+)\b", operands)):
            width = next((count for suffix, count in _WIDTHS.items() if suffix in opcode), 1)
            written = set(range(int(match[1]), int(match[1]) + width))
            if written & current.union(*groups):
                wrong.append(f"{opcode} {operands}")
    return wrong
