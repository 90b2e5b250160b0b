# Everything runs in .venv, which each target sets up from nothing.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: venv study test slow check clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[development]'
	touch $(STAMP)

# The quickstart study on the embedded model; ends with the path of its report. Run again, it goes on or is done.
study: $(STAMP)
	$(BIN)/kvdrift run studies/quickstart.toml

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

# The long checks: coverage of intervals, a distributed derivation. They need Dask, which nothing else does.
slow: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[distributed]'
	$(BIN)/python -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture

clean:
	rm -rf .venv build *.egg-info
