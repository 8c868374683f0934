"""One launch that computes all products between the attentions of two layers, for one row of x: :mod:`.call`."""
