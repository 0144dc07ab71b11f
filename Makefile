# Every target does its own set-up; when .venv is already right it costs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The demo and the tests run on CPU ranks with one thread each; a user's own settings win.
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test lint bench clean

setup: $(STAMP)

# torch goes first and alone, at the exact version: later requirements then keep it.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/sparsebalance compare --config examples/demo.yaml --out runs/demo
	$(BIN)/sparsebalance compare --config examples/demo_pipeline.yaml --out runs/demo_pipeline

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy --strict src/sparsebalance/planning
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/attention.py --json benchmarks/results/attention.json
	$(BIN)/python benchmarks/predictor.py --json benchmarks/results/predictor.json
	$(BIN)/python benchmarks/planner.py --json benchmarks/results/planner.json
	$(BIN)/python benchmarks/correction.py --json benchmarks/results/correction.json
	$(BIN)/python benchmarks/batching.py --json benchmarks/results/batching.json
	$(BIN)/python benchmarks/planning_time.py --json benchmarks/results/planning_time.json --figure docs/planning_time.svg
	$(BIN)/python benchmarks/chunked_step.py --json benchmarks/results/chunked_step.json
	$(BIN)/python benchmarks/pipeline_step.py --json benchmarks/results/pipeline_step.json
	$(BIN)/python benchmarks/held_out.py --json benchmarks/results/held_out.json
	$(BIN)/python benchmarks/tuning.py --json benchmarks/results/tuning.json
	$(BIN)/python benchmarks/comparison.py --json benchmarks/results/comparison.json
	$(BIN)/python benchmarks/readme.py

clean:
	rm -rf $(VENV) runs build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
