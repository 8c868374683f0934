"""Products of few rows an expert in limbs that CTAs make themselves, by equal work ranges of whole blocks of
features."""
