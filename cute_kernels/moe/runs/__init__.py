"""Products of few rows an expert in digits that CTAs make themselves, by equal runs of whole blocks of features."""
