"""Times of the numbers of rows between powers of two: `tests/facts/linear_between.json`."""

from tests import facts

BETWEEN = facts.table("linear_between", "BETWEEN")
