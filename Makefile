# All that is needed is Python 3.10 or newer and make; the rest is installed into .venv, once.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: help run test test-cpu test-gpu lint bench bench-gpu corpus docs clean

help:
	@echo "make run    compute, verify and time the gradients of real layers"
	@echo "make test   lint, then all tests"
	@echo "make test-cpu  test tile registers (AMX), on a machine that has them"
	@echo "make lint   ruff and mypy"
	@echo "make bench  time real layers beside PyTorch and oneDNN; BENCH='--quick' passes options on"
	@echo "make test-gpu   the GPU engine on this machine's GPU: exact, guarded, the same bits every time"
	@echo "make bench-gpu  time the GPU engine beside cuDNN; BENCH='--dtype bf16' passes options on"
	@echo "make corpus CORPUS=DIR  check every benchdnn descriptor below DIR/conv and DIR/deconv to the bit"
	@echo "make docs   write docs/ops.md from the operation table"
	@echo "make clean  remove .venv and what tools have left"

run: $(VENV)/.installed-cli
	@$(PY) examples/layers.py
	@echo
	@$(PY) -m convgrad run --mode=CP examples/resnet50.json

test: lint
	$(PY) -m pytest -n auto --dist worksteal

# With a PYTHON that has convgrad's dependencies, nothing is installed: make test-cpu PY=python3.12
test-cpu: $(if $(filter $(VENV)/%,$(PY)),$(VENV)/.installed)
	$(PY) tests/cpu/hardware.py $(TESTS)

lint: $(VENV)/.installed-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(VENV)/.installed-test
	$(PY) benchmarks/run.py --json bench.json --png bench.png $(BENCH)

# These run with the Python that is there, which has PyTorch and Triton: nothing is installed. Without a GPU they say so.
GPU_PYTHON ?= $(PYTHON)
test-gpu:
	@$(GPU_PYTHON) tests/gpu/device.py $(TESTS)

bench-gpu:
	@$(GPU_PYTHON) benchmarks/gpu.py --json bench-gpu.json --png bench-gpu.png $(BENCH)

# Batches of 2 unless MB says otherwise (0 keeps those of the files, which takes hours).
MB ?= 2
corpus: $(VENV)/.installed-cli
	@test -n "$(CORPUS)" || { echo "say where: make corpus CORPUS=oneDNN/tests/benchdnn/inputs"; exit 2; }
	@for file in $(CORPUS)/conv/shapes_* $(CORPUS)/deconv/shapes_*; do \
	  $(PY) -m convgrad check --batch=$$file --mb=$(MB) --dir=FWD_B,BWD_D,BWD_W --dt=f32,bf16,f16 || exit 1; done

docs: $(VENV)/.installed
	$(PY) -m convgrad.spec.page > docs/ops.md

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# On a terminal a dot for each second says that it goes on.
DOTS = if [ -t 1 ]; then (while sleep 1 && kill -0 $$$$ 2> /dev/null; do printf .; done) & trap "kill $$!; echo" EXIT; fi

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "convgrad needs Python 3.10 or newer; say which one: make PYTHON=python3.12 ..."; exit 1; }
	@echo "making $(VENV), the folder for everything that is installed (some seconds, once)"
	@$(DOTS); $(PYTHON) -m venv $(VENV)

# Installed again when the dependencies may have changed. The tests' installation serves for everything else too.
PIP := $(PY) -m pip install --disable-pip-version-check --progress-bar on
$(VENV)/.installed: pyproject.toml | $(PY)
	@echo "installing NumPy and llvmlite (less than a minute, once)"
	@$(DOTS); $(PIP) -e .
	@touch $@

$(VENV)/.installed-cli: pyproject.toml | $(PY)
	@echo "installing NumPy, llvmlite, rich and msgspec (less than a minute, once)"
	@$(DOTS); $(PIP) -e '.[cli]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-test: pyproject.toml | $(PY)
	@echo "installing the tests' tools and PyTorch, some 200 MB to 3 GB (minutes, once)"
	@$(DOTS); $(PIP) -e '.[test]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-cli
