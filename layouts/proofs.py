"""What a self-check reports: a claim, how it was established, and on how many cases.

Every object of this package has a ``verify()`` that returns `Proof` records or raises `ProofError`; the command line
walks the registry and prints them, so nothing in this package claims more than it can show.
"""

from __future__ import annotations

from dataclasses import dataclass

METHODS = ("exhaustive", "matrix", "symbolic", "sampled")
"""How a claim was established.

``exhaustive``: every input was tried. ``matrix``: an identity of matrices over F2, valid for all coordinates.
``symbolic``: an identity of CuTe layouts, valid for all coordinates. ``sampled``: a stated number of drawn cases.
"""


class ProofError(AssertionError):
    """A claim that a transform or format makes about itself does not hold."""


@dataclass(frozen=True)
class Proof:
    """One established claim.

    Args:
        claim: what holds, in one sentence.
        method: one of `METHODS`.
        cases: how many inputs or coordinates the claim was established on.
    """

    claim: str
    method: str
    cases: int

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; want one of {METHODS}")


def prove(holds: bool, claim: str, method: str, cases: int) -> Proof:
    """Returns the `Proof` of a claim; raises `ProofError`, naming the claim, if it does not hold."""
    if not holds:
        raise ProofError(f"not so: {claim}")
    return Proof(claim, method, int(cases))
