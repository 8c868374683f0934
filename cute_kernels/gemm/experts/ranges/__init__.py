"""Products of few rows an expert, by equal work ranges of whole blocks of features. CTAs make limbs of x themselves."""
