# make demo    train with several reducers on the same text and seed, print the table and the path of the plot
# make test    every check: conflict markers, format, lint, layers, types, docs, tests and doctests
#
# Each makes .venv with PYTHON and pinned versions first. Other variables:
#   PYTHON=python3.13   another Python (3.11 or newer); .venv is then made anew
#   VENV=.venv-3.13     another place for the environment, to keep several
#   INSTALL=wheel       test the built wheel instead of the sources, as CI does
#   WORKERS=4           processes of pytest, threads of pyright
#   ARGS=...            more for jaxdist compare or for pytest, as in ARGS="--slow"
PYTHON ?= python3
VENV ?= .venv
INSTALL ?= editable
WORKERS ?= 2
ARGS ?=

.PHONY: demo test docs clean

demo:
	@scripts/environment.sh $(PYTHON) $(VENV) cli,train $(INSTALL)
	$(VENV)/bin/jaxdist compare $(ARGS)

test:
	@scripts/environment.sh $(PYTHON) $(VENV) cli,train,dev,docs $(INSTALL)
	@BIN=$(VENV)/bin WORKERS=$(WORKERS) PYTEST_ARGS='$(ARGS)' scripts/check.sh

docs:
	@scripts/environment.sh $(PYTHON) $(VENV) cli,train,dev,docs $(INSTALL)
	PYTHONPATH=docs $(VENV)/bin/mkdocs serve

clean:
	rm -rf $(VENV) site dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
