"""Times of products on one H200: `tests/facts/linear.json` says how they were measured."""

from tests import facts

MICROSECONDS = facts.table("linear", "MICROSECONDS")
CUBLAS = facts.table("linear", "CUBLAS")
CLUSTERS = facts.table("linear", "CLUSTERS")
LIMBS = facts.table("linear", "LIMBS")
RESIDENT = facts.table("linear", "RESIDENT")
RESIDENT_LAYERS = facts.table("linear", "RESIDENT_LAYERS")
SCALED = facts.table("linear", "SCALED")
LARGE = facts.table("linear", "LARGE")
