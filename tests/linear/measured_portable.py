"""Times of the portable kernel: `tests/facts/linear_portable.json`."""

from tests import facts

MICROSECONDS = facts.table("linear_portable", "MICROSECONDS")
