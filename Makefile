# From a bare clone: `make demo` trains a model, `make test` runs the tests. Both make the virtual environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORDS  ?=        # more words for the demo's train command
TESTS  ?=        # which tests; all of them by default
JOBS   ?= auto   # processes that test side by side: one per core

MINUTES ?= 2     # of random faults in `make faults`
EVERY  ?= 1      # each N-th fault of it, on a busy machine

CASES  ?=        # which benchmarks: lora, full, pre-training, prepare, start, char-large-dropout-0, ...; all of them by default
BENCH  ?=        # more words for the benchmarks, such as --minutes 10, --nanogpt CHECKOUT, or --busy for a busy machine

OLDEST ?= .oldest
OLDEST_TORCH = $(shell sed -n 's/.*"torch>=\([0-9.]*\),.*/torch==\1.*/p' pyproject.toml)
ON_OLDEST ?= tests/training/test_loop.py tests/training/test_pipeline.py tests/techniques/test_other_devices.py \
  tests/launch/test_processes.py::test_a_run_that_is_asked_to_stop_saves_and_goes_on_with_another_number_of_processes

AUDIT  ?= .audit

RUN    ?=        # the run of `make picture`

# pip compiles nothing: what is imported is compiled then, and kept, which takes half the time
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test faults oldest check lint schema docs picture bench bench-gpu install install-locked lock audit-deps clean

demo: install
	$(BIN)/powertrain train default $(WORDS)
	@echo "Next: $(BIN)/powertrain train docstrings    tunes this model (LoRA) to write docstrings, in about a minute"

test: install
	$(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 8 $(TESTS)

# every fault of tests/faults/, in half an hour on two cores, and docs/reliability.md from what was counted
faults: install
	rm -rf .faults
	$(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 8 --faults .faults --bad-inputs --minutes $(MINUTES) \
	  --every $(EVERY) tests/faults
	$(BIN)/python tests/faults/page.py .faults $(EVERY)

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

# every use of torch's names and keywords, checked against the oldest torch that pyproject.toml allows; then runs on it
oldest: install $(OLDEST)/.installed
	$(BIN)/mypy --python-executable $(OLDEST)/bin/python --cache-dir $(OLDEST)/mypy \
	  --implicit-reexport --no-warn-unused-ignores --no-warn-return-any
	$(OLDEST)/bin/python -m pytest --numprocesses $(JOBS) --maxprocesses 8 -p no:cacheprovider $(ON_OLDEST)

# nothing but torch is its own: the rest comes from $(VENV). On Linux this downloads 1.7 GB: that build is made for CUDA
$(OLDEST)/.installed: pyproject.toml $(STAMP)
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --no-compile '$(OLDEST_TORCH)' || \
	  { echo "$(OLDEST_TORCH), the oldest that pyproject.toml allows, could not be installed: nothing was checked on it"; exit 1; }
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'), '$(CURDIR)/src', sep='\n')" > \
	  $$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/rest.pth
	touch $@

# requirements.lock: each package of this platform with the sum of its file, from constraints.txt, which holds what is chosen
lock: install
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --report $(VENV)/report.json \
	  --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python benchmarks/lock.py write $(VENV)/report.json

# what needs no network, then known vulnerabilities; where nobody can be asked for these, it says so
audit-deps: install
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv --clear $(AUDIT) && \
	  $(AUDIT)/bin/python -m pip install --quiet --no-compile pip-audit; } || echo "pip-audit could not be installed"
	@rm -f $(AUDIT)/found.json
	@$(AUDIT)/bin/pip-audit --requirement requirements.lock --require-hashes --disable-pip --progress-spinner off \
	  --format json --output $(AUDIT)/found.json > /dev/null 2>&1 || true
	@$(BIN)/python benchmarks/lock.py audit $(AUDIT)/found.json
	@$(BIN)/python benchmarks/lock.py check

install: $(STAMP)

# as install, and a file whose sum is not that of the lock is refused. On the lock's platform only
install-locked:
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --editable .
	touch $(STAMP)

# torch goes in first, pinned: a range alone would take the newest build with several GB of CUDA packages
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .peers $(OLDEST) $(AUDIT) site .pytest_cache .mypy_cache .ruff_cache
