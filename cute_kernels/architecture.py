"""The limits of each GPU architecture for one CTA. `KernelSpec.limits` says which limits a kernel assumes.

This module has no GPU types, since configurations import it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """The resources of one GPU architecture that configurations must fit into.

    Attributes:
        num_sms: the number of SMs that schedules assume on a machine without a GPU.
        shared_bytes: bytes of shared memory that one CTA may use.
        reserved_shared_bytes: bytes of an SM's shared memory that the system reserves for every resident CTA.
        threads: the largest number of threads of a CTA.
    """

    num_sms: int
    shared_bytes: int
    reserved_shared_bytes: int = 1024
    threads: int = 1024

    @property
    def sm_shared_bytes(self) -> int:
        """The number of bytes of shared memory of an SM, for all its CTAs, including the bytes that the system reserves
        for each CTA.
        """
        return self.shared_bytes + self.reserved_shared_bytes

    def holds(self, other: Limits) -> bool:
        """Returns whether every configuration that is within the limits ``other`` is also within these limits."""
        return all(getattr(self, name) >= getattr(other, name) for name in ("shared_bytes", "threads")) and (
            self.reserved_shared_bytes <= other.reserved_shared_bytes
        )

    def refuses(self, threads: int, shared_bytes: int) -> str | None:
        """Returns why a CTA of ``threads`` threads with ``shared_bytes`` bytes of shared memory cannot be launched, or
        None."""
        if threads > self.threads:
            return f"{threads} threads are more than the {self.threads} of a CTA"
        if shared_bytes > self.shared_bytes:
            return f"{shared_bytes} bytes of shared memory exceed the {self.shared_bytes} of a CTA"
        return None


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". The SMs are those of A100, A40, L40S,
# H100 SXM and H200, B200, RTX PRO 6000.
LIMITS: dict[str, Limits] = {
    "sm_80": Limits(108, 163 * 1024),
    "sm_86": Limits(84, 99 * 1024),
    "sm_89": Limits(142, 99 * 1024),
    "sm_90a": Limits(132, 227 * 1024),
    "sm_100": Limits(148, 227 * 1024),
    "sm_120": Limits(188, 99 * 1024),
}
HOPPER = LIMITS["sm_90a"]


def least_of(archs: Iterable[str]) -> Limits:
    """Returns the limits that hold for all of these architectures. Raises KeyError for an architecture that is not in
    `LIMITS`."""
    of_each = [LIMITS[arch] for arch in archs]
    least = {field.name: min(getattr(limits, field.name) for limits in of_each) for field in fields(Limits)}
    return Limits(**{**least, "reserved_shared_bytes": max(limits.reserved_shared_bytes for limits in of_each)})
