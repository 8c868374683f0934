"""The mainloops of consumer warpgroups over tiles of tokens: scores, softmax, weights times values."""
