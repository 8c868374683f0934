"""Products for few rows an expert. Each CTA has an equal work range of whole blocks of features, and makes the limbs of
x that it needs."""
