"""What a self-check returns: a claim, how it was proved, and for how many cases.

Every object of this package has a ``verify()`` that returns `Proof` records or raises `ProofError`; The command line
prints the proofs of all objects in the registry.
"""

from __future__ import annotations

from dataclasses import dataclass

METHODS = ("exhaustive", "matrix", "symbolic", "sampled")
"""How a claim was established.

``exhaustive``: every input was tried. ``matrix``: an identity of matrices over F2, valid for all coordinates.
``symbolic``: an identity of CuTe layouts, valid for all coordinates. ``sampled``: a stated number of drawn cases.
"""


class ProofError(AssertionError):
    """The error for a claim of a transform or format about itself that is not true."""


@dataclass(frozen=True)
class Proof:
    """One proved claim.

    Args:
        claim: the claim, in one sentence.
        method: one of `METHODS`.
        cases: the number of inputs or coordinates for which the claim was proved.
    """

    claim: str
    method: str
    cases: int

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; want one of {METHODS}")


def prove(holds: bool, claim: str, method: str, cases: int) -> Proof:
    """Returns the `Proof` of a claim; raises `ProofError`, naming the claim, if it is not true."""
    if not holds:
        raise ProofError(f"not so: {claim}")
    return Proof(claim, method, int(cases))
