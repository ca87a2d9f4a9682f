# Everything runs in .venv; nothing else has to be installed first.
PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check
VENV := .venv
# The plug-in drives processors of Intel only, this build of ONNX Runtime those of any vendor.
OPENVINO := .venv-openvino
# ggml's plug-in wants a version of ONNX Runtime of its own.
GGML := .venv-ggml
BIN := $(VENV)/bin
GPU := .venv-gpu
CACHE := .cache
GGUF := $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf
BUNDLE := $(CACHE)/smollm2
SOURCES := pyproject.toml $(shell find configs exporter providers runtime -name '*.py' -o -name '*.yaml' -o -name '*.jsonl' -o -name '*.jinja')
DRAFTER := $(wildcard samples/smollm2/drafter/*)

# Strict: type checkers see what is linked, and nothing else of the checkout.
EDITABLE := --config-settings editable_mode=strict --editable
# What an earlier build left would be in the next wheel, too: its files, and files that only its list names.
LEFTOVERS := build/lib build/bdist.* *.egg-info

.PHONY: demo develop docs test test-slow test-parity test-providers test-openvino test-ggml test-gpu lint format types wheel clean
.NOTPARALLEL: # one pip at a time

demo: $(BUNDLE)/manifest.json ## export SmolLM2-135M with its drafter, generate with and without speculation
	$(BIN)/python samples/smollm2/demo.py $(BUNDLE)

develop: $(VENV)/.dev ## install editably, so that edits take effect at once; to be repeated when files come or go
	$(BIN)/pip install $(PIP_FLAGS) --no-deps $(EDITABLE) .
	rm -f $(VENV)/.installed

test: $(VENV)/.dev $(VENV)/.installed ## the tests that need neither a model nor PyTorch
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow and not gpu and not providers"

test-slow: $(VENV)/.dev $(VENV)/.installed $(GGUF) ## the tests on SmolLM2 and other slow ones
	$(BIN)/python -m pytest --durations=10 -m "slow and not gpu and not providers"

test-parity: $(VENV)/.dev $(VENV)/.installed ## the tests against PyTorch and transformers
	$(BIN)/pip install $(PIP_FLAGS) torch==2.13.0 accelerate "transformers>=5" optimum
	$(BIN)/python -m pytest -m "not slow and not gpu and not providers" tests/exporter tests/reference tests/runtime/decoding tests/runtime/text tests/samples

test-providers: $(VENV)/.dev $(VENV)/.installed $(GGUF) test-openvino test-ggml ## the tests with vendors' libraries that run without their devices
	$(BIN)/pip install $(PIP_FLAGS) tensorrt-rtx onnxruntime-ep-openvino onnxruntime-qnn
	$(BIN)/python -m pytest --durations=10 -m "providers and not gpu"

test-openvino: $(GGUF) ## the whole loop on OpenVINO's CPU device
	test -x $(OPENVINO)/bin/python || $(PYTHON) -m venv $(OPENVINO)
	rm -rf $(LEFTOVERS)
	$(OPENVINO)/bin/pip install $(PIP_FLAGS) ".[export]" onnxruntime-openvino hypothesis "pytest>=8"
	$(OPENVINO)/bin/python -m pytest --durations=10 -m "providers and not gpu" tests/integration/test_openvino.py

test-ggml: ## the loop with the target on ggml
	test -x $(GGML)/bin/python || $(PYTHON) -m venv $(GGML)
	rm -rf $(LEFTOVERS)
	$(GGML)/bin/pip install $(PIP_FLAGS) ".[export]" onnxruntime-ggml hypothesis "pytest>=8"
	$(GGML)/bin/python -m pytest --durations=10 -m "providers and not gpu" tests/integration/test_ggml.py

# ONNX Runtime's builds exclude each other, so this has an environment of its own.
test-gpu: $(GGUF) ## everything that needs an NVIDIA GPU, with a table of what it measured
	test -x $(GPU)/bin/python || $(PYTHON) -m venv $(GPU)
	rm -rf $(LEFTOVERS)
	$(GPU)/bin/pip install $(PIP_FLAGS) ".[export,tensorrt,tensorrt-rtx]" hypothesis "pytest>=8"
	$(GPU)/bin/python -m pytest -m gpu tests/gpu

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff format .

types: develop
	$(BIN)/mypy -p dspark.providers -p dspark.runtime -p dspark.exporter -p dspark.configs

# Zensical's cache is beside the demo's files: its --clean would take them along.
docs: develop $(VENV)/.docs ## the documentation as a site in build/site, strictly: every link has to lead somewhere
	mkdir -p $(CACHE)
	find $(CACHE) -maxdepth 1 -type f ! -name '*.gguf' -delete
	rm -rf build/site
	PYTHONPATH=. $(BIN)/zensical build --strict

wheel: $(VENV)/.release $(GGUF) ## sdist and wheel in dist, checked: their contents, and the demo from a fresh environment
	rm -rf dist $(LEFTOVERS)
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m tests.release.check dist $(GGUF)

clean:
	rm -rf $(VENV) $(OPENVINO) $(GGML) $(GPU) $(CACHE) build dist *.egg-info

# Tools come with an editable installation. What is tested replaces it: the wheel, which is what users get.
$(VENV)/.runtime: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) --upgrade pip
	$(BIN)/pip install $(PIP_FLAGS) $(EDITABLE) ".[cpu,export]"
	rm -f $(VENV)/.installed
	touch $@

$(VENV)/.dev $(VENV)/.docs $(VENV)/.release: $(VENV)/.%: $(VENV)/.runtime
	$(BIN)/pip install $(PIP_FLAGS) $(EDITABLE) ".[$*]"
	rm -f $(VENV)/.installed
	touch $@

$(VENV)/.installed: $(SOURCES) $(VENV)/.runtime
	rm -rf $(LEFTOVERS)
	$(BIN)/pip install $(PIP_FLAGS) --force-reinstall --no-deps .
	touch $@

$(GGUF): | $(VENV)/.runtime
	$(BIN)/python samples/smollm2/fetch.py $@

$(BUNDLE)/manifest.json: $(VENV)/.installed $(GGUF) $(DRAFTER)
	$(BIN)/dspark-export $(GGUF) --drafter samples/smollm2/drafter --output $(BUNDLE) --force \
		--draft-vocabulary 8192 --draft-vocabulary-from samples/smollm2/conversations.npz --draft-top-k 64
