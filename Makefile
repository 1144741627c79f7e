# From a bare clone: `make demo` trains a model, `make test` runs the tests. Both make the virtual environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORDS  ?=        # more words for the demo's train command
TESTS  ?=        # which tests; all of them by default
JOBS   ?= auto   # processes that test side by side: one per core

CASES  ?=        # which benchmarks: lora, full, pre-training, prepare, start, char-large-dropout-0, ...; all of them by default
BENCH  ?=        # more words for the benchmarks, such as --minutes 10, --nanogpt CHECKOUT, or --busy for a busy machine

RUN    ?=        # the run of `make picture`

# pip compiles nothing: what is imported is compiled then, and kept, which takes half the time
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check lint schema docs picture bench bench-gpu install clean

demo: install
	$(BIN)/powertrain train default $(WORDS)
	@echo "Next: $(BIN)/powertrain train docstrings    tunes this model (LoRA) to write docstrings, in about a minute"

test: install
	$(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 8 $(TESTS)

check: lint test

lint: install
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/vulture

# the documentation as a site in site/; a broken link or anchor is an error
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# the README's picture, docs/run.svg: the loss curve of a run
picture: install
	$(BIN)/python benchmarks/picture.py $(RUN)

# the schema of events.jsonl, from the classes of records/events.py; a test fails where it is out of date
schema: install
	$(BIN)/python benchmarks/events_schema.py > docs/events.schema.json

# the peers get an environment of their own, .peers/
bench: install
	$(BIN)/python benchmarks/bench.py $(CASES) $(BENCH)

bench-gpu: install
	$(BIN)/python benchmarks/gpu.py $(BENCH)

install: $(STAMP)

# torch goes in first, pinned: a range alone would take the newest build with several GB of CUDA packages
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .peers site .pytest_cache .mypy_cache .ruff_cache
