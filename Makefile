# make train   set up, then run the main job
# make test    set up, then run the tests
# make docs    set up, then build the documentation into build/site
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q

.PHONY: setup train test docs lint types format sanitize stress bench clean

setup: $(VENV)/.built

$(VENV)/.installed: requirements.txt requirements-no-deps.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements.txt
	$(PIP) install --no-deps -r requirements-no-deps.txt
	touch $@

$(VENV)/.built: $(VENV)/.installed pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	$(PIP) install --no-build-isolation --no-deps -e .
	touch $@

train: setup
	$(VENV)/bin/dynamicemb train

test: setup
	$(PY) -m pytest -n 2

docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -q

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror csrc/*.h csrc/*.cpp tests/cpp/*.h tests/cpp/*.cpp

types: setup
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i csrc/*.h csrc/*.cpp tests/cpp/*.h tests/cpp/*.cpp

sanitize: setup
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash tests/cpp/run_sanitizers.sh

stress: setup
	$(PY) -m pytest -m stress

bench: setup
	$(PY) benchmarks/cpu.py

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
