# Everything runs inside .venv, which the first target that needs it builds with pip and constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: help demo test quick check format browser docs dist bench clean

help:
	@echo "make demo    set up, then show the main job on what the package carries"
	@echo "make test    set up, then run all tests"
	@echo "make quick   the tests that take less than half a second each, without OpenVINO"
	@echo "make check   ruff, ruff format and mypy"
	@echo "make docs    build the site of the documentation into site/"
	@echo "make dist    build wheel and sdist into dist/"
	@echo "make bench   measure inference side by side with the peers"

# torch comes first and alone: its pin in constraints.txt selects the CPU build.
$(VENV)/.base: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (torch and the core packages; the first time takes about two minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch 2>&1 | { grep -v '^WARNING: Location' || true; }
	@$(PIP) install -c constraints.txt -e '.[train]' 2>&1 | { grep -v '^WARNING: Location' || true; }
	@$(BIN)/python -c "import torch, vitruvian"
	@touch $@

# timm without its dependency torchvision, for which the one test that imports it has an empty module.
$(VENV)/.dev: $(VENV)/.base
	@echo "adding the packages for tests and checks ..."
	@$(PIP) install -c constraints.txt -e '.[dev]' 2>&1 | { grep -v '^WARNING: Location' || true; }
	@$(PIP) install -c constraints.txt --no-deps timm 2>&1 | { grep -v '^WARNING: Location' || true; }
	@$(BIN)/python -c "import pytest, transformers, zensical"
	@touch $@

demo: $(VENV)/.base
	@$(BIN)/vit demo

# The processes that tests start read compiled files, whatever the shell says about writing them.
unexport PYTHONDONTWRITEBYTECODE

# One worker a core, a file of tests each, so that what a module prepares is prepared once.
# A worker that ends is not replaced: xdist would begin its file again, and again with the test that ended it.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

# The tests of the pages drive Debian's chromium, axe-core and onnxruntime-web; where these cannot be installed they are
# skipped, and say so.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "installing chromium for the tests of the page ..." \
	  && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver >/dev/null; } \
	  || echo "chromium and chromedriver are not installed (as root: apt-get install chromium chromium-driver)"
	@test -e node_modules/axe-core/axe.min.js -a -e node_modules/onnxruntime-web/dist || { \
	  command -v npm >/dev/null && npm install --silent --no-save --no-package-lock axe-core onnxruntime-web@1.30.0 >/dev/null; } \
	  || echo "axe-core and onnxruntime-web are not installed (npm install --no-save axe-core onnxruntime-web@1.30.0)"

test: $(VENV)/.dev browser
	@$(PYTEST) -m "not openvino"
	@$(BIN)/python -m pytest -n 0 -m openvino $$(grep -rlw openvino --include='test_*.py' tests)

quick: $(VENV)/.dev
	@$(PYTEST) -m "not slow and not openvino"

fresh: $(VENV)/.dev
	@PYTHONPATH=src VITRUVIAN_FRESH=$${VITRUVIAN_FRESH:-check} $(BIN)/python -m pytest -n 0 tests/weights/test_fresh.py

check: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The bundled model runs in the browser under site/demo, which needs a web server.
docs: $(VENV)/.dev browser
	@$(BIN)/zensical build --strict -f mkdocs.yml
	@rm -rf site/demo
	@$(BIN)/vit export src/vitruvian/bundled site/demo --to web
	@echo "open site/index.html, or run: python3 -m http.server --directory site"

dist: $(VENV)/.dev
	@$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) node_modules build dist site .cache *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

# The peers live apart: timm imports torchvision, whose published builds expect another torch, so both
# come without their dependencies and only benchmarks ever import them.
.venv-peers/.ready: $(VENV)/.base benchmarks/peers.txt
	@echo "setting up .venv-peers (timm, torchvision, transformers, vit-pytorch, litserve) ..."
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip -q install -c constraints.txt torch 2>&1 | { grep -v '^WARNING: Location' || true; }
	@.venv-peers/bin/python -m pip -q install -c constraints.txt -e '.[onnx,openvino,serve]' transformers vit-pytorch 2>&1 | { grep -v '^WARNING: Location' || true; }
	@.venv-peers/bin/python -m pip -q install --no-deps -r benchmarks/peers.txt 2>&1 | { grep -v '^WARNING: Location' || true; }
	@touch $@

bench: .venv-peers/.ready $(VENV)/.dev
	@.venv-peers/bin/python benchmarks/inference.py --cold-python $(BIN)/python
