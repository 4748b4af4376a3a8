# Everything that a person types: `make demo` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
# tests start thousands of processes, each of which would compile what it imports
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo demo-remote test test-fast soak storm gpu torch transformers check bench bench-quick bench-goodput bench-recovery bench-checkpoints bench-overhead bench-scale bench-walls bench-starts bench-trainers bench-ladder bench-workloads docs site pictures reports clean

setup: $(VENV)/.ready

# constraints.txt pins what CI tests with; a torch that is there already is kept.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" bash docs/demo.sh demo

# a daemon carries a run through three sessions at Kaggle, of which one is lost: with Kaggle's real client, and a stand-in for its server
demo-remote: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[kaggle]' trustme
	$(BIN)/python docs/demo_remote.py

# tests side by side, by cores and memory (tests/conftest.py)
JOBS ?= auto

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not soak"

# without the folders in which most tests run sessions
FAST := admission checkpoint cli core db docs gpu plan platforms protocol storm worker workloads
test-fast: setup
	$(BIN)/python -m pytest -n $(JOBS) $(FAST:%=tests/%) -m "not slow and not soak"

# kill -9 in the midst of saves, ROUNDS times; files with changed bytes, four times as many as in the tests; what is marked soak
ROUNDS ?= 5000
soak: setup
	KGORCH_SOAK=$(ROUNDS) $(BIN)/python -m pytest tests/snapshots/test_snapshots.py -k kill_9 --timeout=0
	KGORCH_FUZZ=4 $(BIN)/python -m pytest -n $(JOBS) tests/checkpoint/test_hostile_files.py tests/protocol/test_hostile_messages.py tests/worker/checkpoint/test_hostile_state.py tests/cli/test_any_words.py tests/cli/test_rows_by_hand.py --timeout=0
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m soak

# real runs under random faults (tests/storm), MINUTES long; SEED replays one, which is printed. As root it has disks of its own
MINUTES ?= 10
STORM_JOBS ?= 2
storm: setup
	PYTHONPATH=tests JOBS=$(STORM_JOBS) $(BIN)/python -m storm --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# what only a GPU can show (tests/gpu), 50 minutes at most, without internet: make gpu STEPS="basics memory", STEPS=--list, STEPS=--cpu
STEPS ?=
gpu:
	PYTHONPATH=tests $(if $(wildcard $(VENV)/.ready),$(BIN)/python,$(PYTHON)) -m gpu $(STEPS)

# the training tests with another PyTorch, in an environment of its own (its wheel and CUDA's are some 5 GB): make torch TORCH=2.8.0
TORCH ?= 2.6.0
OTHER := .venv-torch-$(TORCH)
TORCH_TESTS := tests/worker tests/snapshots tests/gpu tests/sessions/test_sameness.py
torch:
	$(PYTHON) -m venv $(OTHER)
	grep -v -E '^(torch|sympy)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt torch==$(TORCH)
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt --editable '.[diagnose]' pytest pytest-timeout pytest-xdist hypothesis
	$(OTHER)/bin/python -m pytest -n $(JOBS) --dist worksteal $(TORCH_TESTS) -m "not slow and not soak"

# the VQA student with another transformers, in an environment of its own: make transformers VERSION=4.50.0, the oldest that fits
VERSION ?= 4.50.0
WITH := .venv-transformers-$(VERSION)
transformers:
	$(PYTHON) -m venv $(WITH)
	grep -v -E '^(transformers|tokenizers|huggingface_hub|hf-xet|typer)==' constraints.txt > $(WITH)/constraints.txt
	$(WITH)/bin/python -m pip install --quiet --constraint $(WITH)/constraints.txt torch
	$(WITH)/bin/python -m pip install --quiet --constraint $(WITH)/constraints.txt --editable '.[workloads]' transformers==$(VERSION) pytest pytest-timeout
	$(WITH)/bin/python -m pytest tests/workloads/test_vqa.py tests/workloads/test_vivqa.py

check: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks

# every figure beside the last one kept in git (benchmarks/results), and docs/benchmarks.md: a night; one alone: make bench WHAT=walls
WHAT ?= goodput overhead checkpoints recovery scale walls starts trainers
bench: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@mkdir -p benchmarks/results
	@set -e; for what in $(WHAT); do echo "── $$what"; $(BIN)/python benchmarks/$$what.py --json benchmarks/results/$$what.json --docs; done
	$(BIN)/python benchmarks/goals.py --docs
	-$(BIN)/python benchmarks/claims.py --rewrite

bench-goodput bench-recovery bench-checkpoints bench-overhead bench-scale bench-walls bench-starts bench-trainers:
	$(MAKE) bench WHAT=$(@:bench-%=%)

# the same in small, to see that nothing has gone bad
bench-quick: setup
	@mkdir -p benchmarks/results/quick
	@set -e; for what in $(WHAT); do echo "── $$what"; $(BIN)/python benchmarks/$$what.py --quick --json benchmarks/results/quick/$$what.json; done

bench-ladder: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/ladder.py --json benchmarks/results/ladder.json --docs

bench-workloads: setup
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/workloads.py --json benchmarks/results/workloads.json

# memory, time and sessions of each real plan on the machines of its document (docs/reports): some ten minutes; one alone: make reports OF=vqa
OF ?=
reports: setup
	$(BIN)/python docs/reports.py $(OF)

# the pictures of docs/looking.md, by a real Chromium, and the README's recording
pictures: setup
	$(BIN)/python docs/screenshots.py
	$(BIN)/python docs/recording.py

# what is written from the code: the lifecycle in ARCHITECTURE.md, docs/reference
docs: setup
	$(BIN)/python docs/lifecycle.py
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/troubleshooting.py

# the pages as a site, build/site: python -m http.server -d build/site
site: setup
	$(BIN)/python docs/build_site.py

clean:
	rm -rf demo demo-remote build outputs .pytest_cache .mypy_cache .ruff_cache
