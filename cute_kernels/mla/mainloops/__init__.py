"""The mainloops of the consumer warpgroups over tiles of tokens: scores, softmax, P V."""
