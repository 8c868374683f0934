"""The products of a layer between two attentions in one launch, for few rows: :mod:`.call`."""
