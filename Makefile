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

.PHONY: demo develop docs test test-slow test-parity test-providers test-openvino test-ggml test-gpu lint format types clean

demo: $(BUNDLE)/manifest.json ## export SmolLM2-135M with its drafter, generate with and without speculation
	$(BIN)/python samples/smollm2/demo.py $(BUNDLE)

develop: $(VENV)/.dev ## installs editably, so that edits take effect at once; to be repeated when files come or go
	$(BIN)/pip install $(PIP_FLAGS) --no-deps --editable . --config-settings editable_mode=strict

test: $(VENV)/.dev ## the tests that need neither a model nor PyTorch
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow and not gpu and not providers"

test-slow: $(VENV)/.dev $(GGUF) ## the tests on SmolLM2 and other slow ones
	$(BIN)/python -m pytest --durations=10 -m "slow and not gpu and not providers"

test-parity: $(VENV)/.dev ## the tests against PyTorch and transformers
	$(BIN)/pip install $(PIP_FLAGS) torch==2.13.0 accelerate "transformers>=5" optimum
	$(BIN)/python -m pytest -m "not slow and not gpu and not providers" tests/exporter tests/reference tests/runtime/decoding tests/runtime/text tests/samples

test-providers: $(VENV)/.dev $(GGUF) test-openvino test-ggml ## the tests with vendors' libraries that run without their devices
	$(BIN)/pip install $(PIP_FLAGS) tensorrt-rtx onnxruntime-ep-openvino onnxruntime-qnn
	$(BIN)/python -m pytest --durations=10 -m "providers and not gpu"

test-openvino: $(GGUF) ## the whole loop on OpenVINO's CPU device
	test -x $(OPENVINO)/bin/python || $(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO)/bin/pip install $(PIP_FLAGS) ".[export]" onnxruntime-openvino hypothesis "pytest>=8"
	$(OPENVINO)/bin/python -m pytest --durations=10 -m "providers and not gpu" tests/integration/test_openvino.py

test-ggml: ## the loop with the target on ggml
	test -x $(GGML)/bin/python || $(PYTHON) -m venv $(GGML)
	$(GGML)/bin/pip install $(PIP_FLAGS) ".[export]" onnxruntime-ggml hypothesis "pytest>=8"
	$(GGML)/bin/python -m pytest --durations=10 -m "providers and not gpu" tests/integration/test_ggml.py

# ONNX Runtime's builds exclude each other, so this has an environment of its own.
test-gpu: $(GGUF) ## everything that needs an NVIDIA GPU, with a table of what it measured
	test -x $(GPU)/bin/python || $(PYTHON) -m venv $(GPU)
	$(GPU)/bin/pip install $(PIP_FLAGS) ".[export,tensorrt,tensorrt-rtx]" hypothesis "pytest>=8"
	$(GPU)/bin/python -m pytest -m gpu tests/gpu

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff format .

types: $(VENV)/.dev
	$(BIN)/mypy -p dspark.providers -p dspark.runtime -p dspark.exporter -p dspark.configs

docs: $(VENV)/.docs ## the documentation as a site in build/site, strictly: every link has to lead somewhere
	PYTHONPATH=. $(BIN)/zensical build --strict --clean

clean:
	rm -rf $(VENV) $(OPENVINO) $(GGML) $(GPU) $(CACHE) build dist *.egg-info

# The wheel is installed, not the checkout: what is tested is what users get.
$(VENV)/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -rf build
	$(BIN)/pip install $(PIP_FLAGS) --upgrade pip
	$(BIN)/pip install $(PIP_FLAGS) ".[cpu,export]"
	$(BIN)/pip install $(PIP_FLAGS) --force-reinstall --no-deps .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install $(PIP_FLAGS) ".[dev]"
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install $(PIP_FLAGS) ".[docs]"
	touch $@

$(GGUF): | $(VENV)/.installed
	$(BIN)/python samples/smollm2/fetch.py $@

$(BUNDLE)/manifest.json: $(VENV)/.installed $(GGUF) $(DRAFTER)
	$(BIN)/dspark-export $(GGUF) --drafter samples/smollm2/drafter --output $(BUNDLE) --force \
		--draft-vocabulary 8192 --draft-vocabulary-from samples/smollm2/conversations.npz --draft-top-k 64
