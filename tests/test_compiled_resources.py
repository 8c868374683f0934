"""Every shipped kernel compiles without a GPU and uses what was reviewed: no silent spill, no lost instruction."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from cute_kernels import families
from cute_kernels.runtime import KernelSpec, default_cache, native
from tests import golden
from tests.each import each

SPECS = families.shipped_specs()
# All whose sources have changed since they were reviewed, and a sample of the others. GOLDEN_ALL=1 takes all.
REVIEWED = golden.read()
MEASURED = golden.to_compile(SPECS, REVIEWED) if native.dsl_version() else []

# Bytes of stack, spilled and loaded again, by kernels' names. Why is on docs/design/extend_attention.md.
SPILLS = {
    "extend_unpack_*_token_head_*": 144,
    "extend_unpack_int4_*": 24,
}
MOST_ACCESSES = 0.02  # of a kernel's instructions that may be to local memory

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")


@pytest.fixture(scope="module")
def measured() -> dict[str, golden.Entry]:
    return golden.measure(MEASURED, default_cache())


def test_the_reviewed_configurations_are_the_shipped_ones():
    reviewed, shipped = set(REVIEWED["kernels"]), {spec.symbol for spec in SPECS}
    new, gone = sorted(shipped - reviewed), sorted(reviewed - shipped)
    assert not new and not gone, f"not reviewed: {new}; no longer shipped: {gone}. Run {golden.COMMAND}"


@pytest.mark.parametrize("spec", MEASURED, ids=str)
def test_resources_are_as_reviewed(spec: KernelSpec, measured: dict[str, golden.Entry]):
    reviewed = REVIEWED["kernels"].get(spec.symbol)
    assert reviewed is not None, f"{spec} was never reviewed. Run {golden.COMMAND}"
    changes = golden.differences(reviewed, measured[spec.symbol])
    if changes:
        changes += [f"reviewed with {REVIEWED['toolchain']}, compiled with {golden.toolchain()}"]
        changes += [f"if this is wanted, run {golden.COMMAND} and review the diff"]
        pytest.fail(f"{spec} uses other resources than were reviewed:\n  " + "\n  ".join(changes), pytrace=False)


@each("spec", SPECS)
def test_no_kernel_spills(spec: KernelSpec):
    """As reviewed: what is compiled is as reviewed."""
    bounds = [bound for pattern, bound in SPILLS.items() if fnmatch(spec.symbol, pattern)]
    for kernel in REVIEWED["kernels"].get(spec.symbol, []):
        spilled = kernel["stack_bytes"] + kernel["spill_store_bytes"] + kernel["spill_load_bytes"]
        assert spilled <= max(bounds, default=0), (
            f"{spec}/{kernel['kernel']} keeps {kernel['stack_bytes']} bytes per thread in local memory"
        )
        accesses = sum(kernel["opcodes"].get(opcode, 0) for opcode in ("LDL", "STL"))
        assert accesses <= MOST_ACCESSES * kernel["num_instructions"]


def test_what_spills_is_said():
    """No entry that nothing needs any more."""
    spilling = [name for name, kernels in REVIEWED["kernels"].items() if any(one["stack_bytes"] for one in kernels)]
    assert spilling and all(any(fnmatch(name, pattern) for name in spilling) for pattern in SPILLS)
