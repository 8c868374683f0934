"""MLA decode of 8, 16 or 32 heads over FP8 tokens: tokens are the rows of the MMAs, heads their few columns.

docs/design/mla_few_heads.md explains it with numbers.
"""
