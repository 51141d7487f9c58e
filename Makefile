# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0

PYTHON ?= python3
VENV := .venv
CHECKOUT := build/$(if $(NEXT),next,Megatron-LM)
DATA ?= digits
RUN ?= build/runs/$(if $(filter digits,$(DATA)),train,$(DATA))
TASKS := $(if $(filter omni,$(DATA)),omni,digits)
SHARDS := build/$(TASKS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NEXT

ifneq ($(words $(CURDIR)),1)
$(error $(CURDIR) has a space, at which make splits paths: move the repository)
endif
TRAIN_RANKS ?= 8
ifeq ($(filter train,$(MAKECMDGOALS))$(filter digits energon omni,$(DATA)),train)
$(error DATA=$(DATA): choose from digits, energon, omni)
endif
ifeq ($(DATA),omni)
MODEL := --model tiny-omni --dynamic-resolution --encoder images:tp=2,dp=4 --encoder sound:dp=8 \
	--seq-length 48 --train-iters 400
SURVEY := --model tiny-omni --dynamic-resolution
else
MODEL := --model tiny --encoder tp=2,dp=4
# Strips of one or two digits fit 16 tokens: they are learned surely, and in shorter steps.
MODEL += $(if $(filter digits,$(DATA)),--seq-length 16 --train-iters 500,--seq-length 32 --train-iters 350)
SURVEY :=
endif
TRAIN_ARGS ?= $(MODEL) --device cpu --placement colocated \
	--language tp=1,cp=2,pp=2,dp=2,ep=2 --seed 1 --global-batch-size 64 --micro-batch-size 16 \
	--lr 3e-3 --lr-warmup-iters 20 --eval-interval 50 --eval-iters 4
TRAIN_DATA = --data digits
ifneq ($(filter energon omni,$(DATA)),)
TRAIN_DATA = --data energon:$(abspath $(SHARDS)) --tokenizer-model $(abspath $(SHARDS))/tokenizer
endif
TRAIN_OUT = --metrics-out $(abspath $(RUN))/metrics.jsonl --report $(abspath $(RUN))/report.html \
	--tensorboard-dir $(abspath $(RUN))/tensorboard --save-interval 50 \
	--save $(abspath $(RUN))/checkpoints --load $(abspath $(RUN))/checkpoints

# A PYTHON that was given brings its packages along; test-gpu installs nothing then.
IS_GIVEN = $(filter-out file,$(firstword $(origin PYTHON)))
GPU_PYTHON = $(if $(IS_GIVEN),$(PYTHON),$(VENV)/bin/python)
GPU_JSON ?= build/runs/gpu.json

.PHONY: help setup fetch apply lock train test test-all test-gpu test-slurm lint docs clean
help: ## Show this help
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST)

setup: $(VENV)/installed apply ## Virtual environment and applied checkout

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo "error: $(PYTHON) is missing or older than 3.11; set PYTHON" >&2; exit 1; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
	    { echo "error: $(PYTHON) cannot make a virtual environment (is venv installed?)" >&2; exit 1; }
	@echo "installing the dependencies into $(VENV): some minutes the first time"
	@$(VENV)/bin/python -m pip install --quiet --editable '.[cpu,test]'
	@touch $@

fetch: ## Fetch the pinned upstream into build/
	@tools/fetch_upstream.sh $(CHECKOUT) $(if $(NEXT),--next $(NEXT))

apply: $(VENV)/installed fetch ## Put the overlay onto the checkout
	@tools/apply_overlay.sh $(CHECKOUT)

lock: $(if $(NEXT),fetch) ## After a change to patches or overlay: canonical patches and the lock
	@tools/python.sh tools/overlay refresh

$(SHARDS)/tokenizer: | setup
	$(VENV)/bin/python tools/data/make_webdataset.py $(SHARDS) --samples 8000 --seed 1 --tasks $(TASKS)
	$(VENV)/bin/python tools/data/survey.py $(SHARDS) --tokenizer-model $(SHARDS)/tokenizer $(SURVEY)

train: setup $(if $(filter energon omni,$(DATA)),$(SHARDS)/tokenizer) ## Train the tiny VLM on real digits, on CPU ranks; DATA=energon reads them from shards, DATA=omni has video and sound
	@mkdir -p $(RUN)
	cd $(CHECKOUT) && OMP_NUM_THREADS=1 PYTHONPATH=$$PWD $(abspath $(VENV))/bin/python \
	    -m examples.mimo.common.launch --standalone --nproc-per-node $(TRAIN_RANKS) \
	    examples/mimo/pretrain_nemotron_vlm.py $(TRAIN_ARGS) $(TRAIN_DATA) $(TRAIN_OUT)

test: setup ## Show every capability: each test once, with the first of its rows
	$(VENV)/bin/python tests/run.py --once

# Tests on main also go on with the release's checkpoints.
test-all: setup ## Run every row of every test; NEXT=GITDIR: on the lock's commit of upstream's main
	$(if $(NEXT),@$(MAKE) --no-print-directory NEXT= apply)
	$(VENV)/bin/python tests/run.py

test-gpu: $(if $(IS_GIVEN),fetch,$(VENV)/installed-gpu apply) ## Prove on one or two GPUs what CPU ranks cannot; PYTHON=… takes its packages
	@tools/apply_overlay.sh $(CHECKOUT)
	@mkdir -p $(dir $(GPU_JSON))
	CHECKOUT=$(abspath $(CHECKOUT)) $(GPU_PYTHON) tests/gpu/run.py --json $(GPU_JSON)

$(VENV)/installed-gpu: $(VENV)/installed
	@$(VENV)/bin/python -m pip install --quiet --editable '.[gpu,flash4,test]'
	@touch $@

test-slurm: setup ## Run a Slurm job on a Slurm of this host; as root, on Debian: installs it
	@PATH=$$PATH:/usr/sbin; { command -v munged && command -v slurmctld && command -v slurmd; } || \
	    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y slurm-wlm munge; }
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/slurm

lint: $(VENV)/installed ## Check the style
	$(VENV)/bin/ruff check .

docs: $(VENV)/installed ## Build the documentation into build/site; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@echo 'open build/site/index.html'

clean: ## Remove build/ and the virtual environment
	rm -rf build $(VENV) *.egg-info
