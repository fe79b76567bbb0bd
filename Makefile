PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
OLDEST = .venv-oldest
# Tests start many processes, and each would compile all that it imports. Whatever the environment says, bytecode is kept.
export PYTHONDONTWRITEBYTECODE =
# Python compiles what it imports; to compile all of PyTorch takes longer than to install it.
INSTALL = $(BIN)/pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow test-nightly test-oldest lint docs pictures dist bench clean
export NO_MKDOCS_2_WARNING = 1   # an announcement of the theme

demo:
	$(MAKE) --jobs 2 $(VENV)/installed $(VENV)/loops-float32
	$(BIN)/mixnorm compare

test:
	$(MAKE) --jobs 3 $(VENV)/prepared lint   # each uses one core, or waits for the network
	$(BIN)/pytest -n 2 --dist worksteal   # neighbours stay together, and what they share is made once

test-slow: $(VENV)/prepared   # what takes minutes, launches of many processes among it, and packages that it needs beside
	$(INSTALL) --editable ".[dev,slow]"
	$(BIN)/pytest -m slow

test-nightly: $(VENV)/prepared   # 12,000 random cases of layers, 2,000 of models
	MIXNORM_PROPERTY_CASES=3000 $(BIN)/pytest tests/library/test_properties.py
	MIXNORM_MODEL_CASES=1900 $(BIN)/pytest -m 'slow or not slow' tests/library/test_model_properties.py

# The library's tests with the oldest packages that it claims to run with. Its loops are kept apart: a numba throws away those of another.
test-oldest: $(OLDEST)/installed
	NUMBA_CACHE_DIR=$(abspath $(OLDEST)/numba) $(OLDEST)/bin/pytest -n 2 --dist worksteal tests/library

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed   # the documents as a site: open build/site/index.html
	$(BIN)/mkdocs build --strict

pictures: $(VENV)/prepared   # those of the documents, and the notebook with its outputs
	$(BIN)/python docs/site/pictures.py
	$(BIN)/jupyter nbconvert --execute --inplace --to notebook --ExecutePreprocessor.record_timing=False docs/look-inside.ipynb

dist: $(VENV)/installed   # a wheel and a source distribution, checked as a package index does
	$(INSTALL) --editable ".[release]"
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

bench: $(VENV)/prepared
	mkdir -p build
	$(BIN)/mixnorm bench all --out build/bench.csv
	$(BIN)/mixnorm bench plot build/bench.csv --out build/bench

$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch numpy numba
	touch $@

$(VENV)/installed: pyproject.toml $(VENV)/torch
	$(INSTALL) --editable ".[dev]"
	touch $@

$(OLDEST)/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --no-compile --quiet --disable-pip-version-check --constraint constraints-oldest.txt \
		--editable ".[cpu]" hypothesis pytest pytest-xdist scikit-learn transformers
	touch $@

# The loops for the CPU, compiled once, while the rest is installed. Those of fp64 are for tests alone, and need not be fast;
# but with NUMBA_OPT=0 numba does not keep them.
$(VENV)/loops-%: $(VENV)/torch
	PYTHONPATH=src NUMBA_OPT=$(if $(filter float64,$*),1,3) $(BIN)/python -m mixnorm.prepare $*
	touch $@

$(VENV)/prepared: $(VENV)/loops-float32 $(VENV)/loops-float64 $(VENV)/installed
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist .pytest_cache .mypy_cache .ruff_cache
