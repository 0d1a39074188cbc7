# Two commands from a fresh clone, with only python3.11+, g++ and make: `make demo` and `make test`.
# The environment is made in .venv with the tested versions. Without a GPU, let pip find the small build of torch:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin
READY := .venv/ready
CXX_FILES = $(shell find runtime tests benchmarks -name '*.hpp' -o -name '*.cpp')
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
PIP_INSTALL := $(PIP) -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: setup lock demo learn learn-int4 learn-curves test test-all zoo trainer-options mutants versions sanitize tiles census fuzz reliability attack kt-environment llama-environment lf-environment check format docs clean

setup: $(READY)

# Every package is installed by its hash, but torch and what it brings (CUDA libraries, setuptools): which of its builds
# fits depends on the machine (docs/design.md).
$(READY): pyproject.toml constraints.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("ktc needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "making .venv with the tested versions (requirements.lock, and torch of constraints.txt)"
	$(PYTHON) -m venv .venv
	$(PIP) --require-hashes --no-deps -r requirements.lock
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $(READY)

# The hashes of constraints.txt, after a change of it. Needs uv (`pip install uv`).
lock:
	grep -v '^#\|^torch==' constraints.txt | uv pip compile --quiet --no-deps --generate-hashes --universal \
		--python-version 3.11 --no-annotate --custom-compile-command 'make lock' -o requirements.lock -

demo: $(READY)
	$(BIN)/python docs/demo.py

# A small MoE is pre-trained on an invented world, compiled, tuned to two tasks and measured: docs/details/learning.md.
learn: $(READY)
	PYTHONPATH=benchmarks $(BIN)/python -m learning $(LEARN)

# The same model tuned and served in bf16 and INT4, in every way: docs/details/quantisation.md.
learn-int4: $(READY)
	PYTHONPATH=benchmarks $(BIN)/python -m learning.modes $(LEARN)

# An adapter on its experts trained by stock PEFT and by ktc, in bf16 and INT4, on a GPU too where there is one.
learn-curves: $(READY)
	PYTHONPATH=benchmarks $(BIN)/python -m learning.curves $(LEARN)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

# The quick tests and, beside them, the static checks, whose output is shown if they fail. ROOM=experts runs the quick
# tests of one room alone. Each worker has one OpenMP thread: a second one would spin on the core of another worker.
# Python keeps its bytecode, because every child process would otherwise compile torch and transformers again.
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
PYTEST = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest
QUICK = $(PYTEST) -m "not slow and not full" --numprocesses $(WORKERS) --dist worksteal
test: $(READY)
ifdef ROOM
	@$(QUICK) $(wildcard tests/$(ROOM) tests/*/$(ROOM) tests/*/*/$(ROOM))
else
	@mkdir -p build
	@echo "the static checks run beside the tests: build/check.log"
	@$(MAKE) --no-print-directory check > build/check.log 2>&1 & checks=$$!; \
	$(QUICK); tests=$$?; \
	wait $$checks || { cat build/check.log; echo "the static checks failed"; exit 1; }; exit $$tests
endif

# Everything: slow tests with the compiler's flags of the product, the census of all families, LLaMA-Factory in its own
# environment, and those that depend on the supported packages, with their oldest and newest versions.
test-all: check versions lf-environment
	$(PYTEST) -m "" --optimised
	@$(MAKE) --no-print-directory tiles

# The invented models with traps, each compiled and compared with its stock model. CASES="layer_* aux_*" runs some.
zoo: $(READY)
	@OMP_NUM_THREADS=1 PYTHONPATH=.:tests:tests/support $(BIN)/python -m invented $(CASES)

# The options of the trainers of transformers and TRL, on a compiled model beside stock, five to twenty minutes.
# CASES="dpo:* sft:loss_type*" runs some.
trainer-options: $(READY)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=.:tests:tests/support $(BIN)/python -m trainer_options $(CASES)

# Changes of recipes, recognised parameters, graphs, modules and weights, each of which has to be noticed: nightly, about
# ten minutes. MUTANTS="gpt_oss graph" runs some and writes no table.
mutants: $(READY)
	@OMP_NUM_THREADS=1 PYTHONPATH=.:tests:tests/support $(BIN)/python -m mutants $(or $(MUTANTS),-o tests/mutants/table.md)

# The tests that depend on torch, transformers and peft, with the oldest and the newest supported, each in build/versions.
versions: $(READY)
	$(BIN)/python tests/version_matrix.py $(if $(TORCH_INDEX),--index $(TORCH_INDEX))

# Every kernel of every instruction set of this machine under the thread, address and undefined-behaviour sanitizers of
# the compiler (test-all runs it too). SANITIZE="avx2 and thread" runs some.
sanitize: $(READY)
	$(BIN)/python -m pytest -m "" -rA tests/stages/codegen/test_sanitizers.py $(if $(SANITIZE),-k "$(SANITIZE)")

# The kernels for AMX on a processor that has AVX512-BF16: their tile instructions are functions (test-all runs it too).
tiles: $(READY)
	$(QUICK) --software-tiles tests/model/experts tests/model/linears tests/model/attention tests/stages/codegen/test_units.py

# kt-kernel in build/kt-kernel, for `ktc bench moe --kt-python build/kt-kernel/bin/python`.
kt-environment:
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) benchmarks/kt_environment.sh

# llama.cpp in build/llama, built from its source for this processor, for `ktc bench decode --peer llama.cpp`.
llama-environment:
	PYTHON=$(PYTHON) benchmarks/llama_environment.sh

# LLaMA-Factory in build/llama-factory, with the versions that it requires and this checkout: tests/tools/llama_factory/test_training.py.
lf-environment:
	@PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) tests/llama_factory_environment.sh

# The table of all mixture-of-experts families, generated again.
census: $(READY)
	PYTHONPATH=benchmarks $(BIN)/python -m census --format markdown -o docs/reference/families.md

# Mutants of everything that is read from outside for SECONDS; the corpus in build/fuzz grows. KINDS="gguf configs"
# chooses; FUZZ=--json or FUZZ="-o FILE" writes the table as JSON.
SECONDS ?= 600
fuzz: $(READY)
	@PYTHONPATH=.:tests:tests/support $(BIN)/python -m fuzz $(SECONDS) --kinds "$(KINDS)" $(FUZZ)

# Every write of every command fails, or is the last one before a kill. COMMANDS="merge train" tries some, MOST=20 limits
# the calls of each per kind of fault, KINDS="ENOSPC EIO SIGKILL" the kinds. JOBS runs at a time (all CPUs). RUNS=FILE keeps
# the runs and continues from there; TIME=540 ends it after 540 seconds. docs/details/reliability.md has the table.
reliability: $(READY)
	@OMP_NUM_THREADS=1 PYTHONPATH=.:tests:tests/support $(BIN)/python -m reliability.sweep $(COMMANDS) \
		$(if $(JOBS),--jobs $(JOBS)) $(if $(MOST),--most $(MOST)) $(if $(KINDS),--kinds $(KINDS)) \
		$(if $(TIME),--seconds $(TIME)) $(if $(RUNS),-o $(RUNS))

# 200 clients attack `ktc serve` for SECONDS: tests/reliability/soak.py. ATTACK="--clients 50 --json" changes it.
attack: $(READY)
	@PYTHONPATH=.:tests:tests/support $(BIN)/python -m reliability.soak $(SECONDS) $(ATTACK)

# The site of the documentation, in build/site. Links and anchors are checked, and a fault ends it.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -W ignore -m mkdocs build --strict
	@echo "written: build/site/index.html; with its search: $(BIN)/python -m http.server --directory build/site"

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .import_linter_cache
