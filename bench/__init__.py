"""Benchmarks: this package's kernels beside their peers and beside what reading the same bytes costs.

python -m bench decode          decode attention: main table, other shapes, optimisation ladder
python -m bench accuracy        what each KV cache format costs in accuracy (any machine)
python -m bench demo            a small Llama, token by token, INT4 cache against BF16 cache
python -m bench plot RESULT     figures from a recorded run
python -m bench table RESULT    Markdown tables from a recorded run
"""
