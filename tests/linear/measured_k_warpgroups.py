"""Times of warpgroups that interleave k blocks: `tests/facts/linear_k_warpgroups.json`."""

from tests import facts

K_WARPGROUPS = facts.table("linear_k_warpgroups", "K_WARPGROUPS")
FORM_K_WARPGROUPS = facts.table("linear_k_warpgroups", "FORM_K_WARPGROUPS")
MORE_K_WARPGROUPS = facts.table("linear_k_warpgroups", "MORE_K_WARPGROUPS")
