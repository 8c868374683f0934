"""What a compiled kernel must keep: no spills, room for the CTAs that an SM is to hold, and its instructions."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

from cute_kernels.runtime import KernelSpec

MMA = frozenset({"HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA"})
COPIES = frozenset({"UTMALDG", "UBLKCP", "UTMASTG"})
SM_REGISTERS = 65536

INSTRUCTIONS: dict[str, str] = {
    "decode_*_tma*": "HMMA UTMALDG",
    "decode_*_map*": "HMMA UTMALDG",
    "decode_*": "HMMA UBLKCP",
    "extend_combine_*": "",
    "extend_unpack_*": "",
    "extend_*p8_*": "HGMMA",
    "extend_*": "HGMMA UTMALDG",
    "append_*": "",
    "layer_products_*": "IMMA UBLKCP",
    "linear_inputs_*": "",
    "linear_limb*": "",
    "*linear_wgmma_*mmasync*": "HMMA UTMALDG UBLKCP",
    "linear_wgmma_e?m?*limbs*resident*loads*": "QGMMA UBLKCP",
    "linear_wgmma_e?m?*limbs*resident*": "QGMMA UTMALDG UBLKCP",
    "linear_wgmma_*limbs*resident*loads*": "IGMMA UBLKCP",
    "linear_wgmma_*limbs*resident*": "IGMMA UTMALDG UBLKCP",
    "grouped_linear_wgmma_*limbs*": "IGMMA UTMALDG UBLKCP",
    "grouped_linear_wgmma_*entries*": "HGMMA UBLKCP",
    "*linear_wgmma_*": "HGMMA UTMALDG UBLKCP",
    "grouped_linear_e?m?*_ranges*": "QGMMA UBLKCP",
    "grouped_linear_e?m?*_assigned*": "QGMMA UBLKCP",
    "grouped_linear_*_ranges*": "IGMMA UBLKCP",
    "grouped_linear_*_assigned*": "IGMMA UBLKCP",
    "*linear_*": "HMMA UBLKCP",
    "mla_append_*": "",
    "mla_combine_*": "",
    "mla_*_h[0-9]*": "HMMA",
    "mla_*": "HGMMA UTMALDG",
    "*": "",
}
"""By the first pattern that a symbol has: MMA instructions of just these kinds, and copies of these."""

SPILLS = {
    "extend_unpack_*_token_head_*": 144, "extend_unpack_int4_*": 24,
    "linear_wgmma_e2m1*_m16n128x4k128_*resident16less1*": 56,
}  # fmt: skip
"""Bytes of stack, spilled and loaded again; docs/design/extend_attention.md and weight_only_few_rows.md say why. None
elsewhere."""
MOST_ACCESSES = 0.02  # of a kernel's instructions that may be to local memory


def broken(spec: KernelSpec, kernel: dict[str, Any]) -> Iterator[str]:
    """What a kernel of a spec does not keep, one line each. kernel: as `tests.golden.measure` has it."""
    opcodes = kernel["opcodes"]
    allowed = max((bytes for pattern, bytes in SPILLS.items() if fnmatch(spec.symbol, pattern)), default=0)
    spilled = kernel["stack_bytes"] + kernel["spill_store_bytes"] + kernel["spill_load_bytes"]
    if spilled > allowed:
        yield f"{spilled} bytes of a thread in local memory, want at most {allowed}"
    if sum(opcodes.get(name, 0) for name in ("LDL", "STL")) > MOST_ACCESSES * kernel["num_instructions"]:
        yield f"more than {MOST_ACCESSES:.0%} of the instructions are to local memory"
    yield from _without_room(spec, kernel)
    group_steps = getattr(getattr(spec.config, "mainloop", None), "group_steps", 1)
    if group_steps > 1 and 0 < 2 * opcodes.get("HGMMA", 0) <= opcodes.get("WARPGROUP", 0):
        yield "a fence and a wait for each MMA: ptxas serialised them, want one for each commit group"
    wanted = set(next(names for pattern, names in INSTRUCTIONS.items() if fnmatch(spec.symbol, pattern)).split())
    found = {name for name in MMA | COPIES if opcodes.get(name)}
    if found & MMA != wanted & MMA:
        yield f"MMA instructions {sorted(found & MMA)}, want {sorted(wanted & MMA)}"
    if not wanted & COPIES <= found:
        yield f"copies by {sorted(found & COPIES)}, want {sorted(wanted & COPIES)}"


def _without_room(spec: KernelSpec, kernel: dict[str, Any]) -> Iterator[str]:
    """Where fewer CTAs fit an SM than the configuration counts with."""
    ctas, limits = getattr(spec.config, "least_ctas", getattr(spec.config, "ctas_per_sm", 1)), spec.limits
    if kernel["threads"] is not None:
        warps = -(-kernel["threads"] // 32)
        registers = ctas * warps * -(-kernel["registers"] * 32 // 256) * 256
        if registers > SM_REGISTERS:
            yield f"{registers} registers of {ctas} CTAs, want at most {SM_REGISTERS}"
    if kernel["dynamic_smem_bytes"] is not None:
        # What the system takes is part of the static bytes, where there are any.
        shared = ctas * (kernel["dynamic_smem_bytes"] + max(kernel["static_smem_bytes"], limits.reserved_shared_bytes))
        if shared > limits.sm_shared_bytes:
            yield f"{shared} bytes of shared memory of {ctas} CTAs, want at most {limits.sm_shared_bytes}"
