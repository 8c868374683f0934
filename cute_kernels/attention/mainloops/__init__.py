"""The mainloops. Warps multiply few rows of queries, warpgroups multiply tiles of many rows, or MMAs have keys as
rows."""
