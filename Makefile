# Every target does its own set-up. PYTHON: a Python 3.11; PRESET: smoke, quick, full, modern, paper; ISOLATION: venv or docker;
# ARGS: more options of dpbench; BASE, HEAD: git refs, NAME==VERSION, wheels, or . (the working tree).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PRESET ?= quick
ISOLATION ?= venv
ARGS ?=
BASE ?= origin/main
HEAD ?= .
VENV := .venv
TORCH := .venvs/torch
MODELS := .venvs/models
TRITON := .venvs/triton
DOCS := .venvs/docs
BIN := $(VENV)/bin
READY := $(VENV)/ready
TORCH_READY := $(TORCH)/ready
MODELS_READY := $(MODELS)/ready
RAY := .venvs/ray
RAY_READY := $(RAY)/ready
DEPENDENTS := .venvs/dependents
DEPENDENTS_READY := $(DEPENDENTS)/ready
REHEARSAL := .venvs/gpu-rehearsal
REHEARSAL_READY := $(REHEARSAL)/ready
TRITON_READY := $(TRITON)/ready
DOCS_READY := $(DOCS)/ready
PIP := -m pip install --disable-pip-version-check --quiet
# By uv where it can be had, else by pip: makes the environment and installs into it.
UV := $(VENV)/uv-tried
INSTALL = PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTHON) -m harness.environments.installer

# The quick grid ends sooner where it is known who is fastest, and later where it is not.
LIMIT = $(if $(filter quick,$(PRESET)), --minutes 24)

# RUN: a run's folder or packed file, for `make history`.
RUN ?= results/local/$(PRESET)

# FOUND: the Python whose packages `make bench-gpu` measures as they are; OUT: where it leaves its three files.
FOUND ?= $(shell command -v python3)
OUT ?= results/local/gpu
# The runs of README's figure: what the site's report is made from.
CITED = $(shell grep '^<!-- figure: ' README.md | grep -oE '[a-z0-9-]+-20[0-9]{2}-[0-9-]+')

.PHONY: help bench-e2e bench-modern bench-layers bench-frontier bench-gpu gpu-folder compare findings prove-alerts dependents golden golden-weights scale verify-packs prove-exactness images report history dashboard gate test environments lint types-dpcore test-harness test-dpcore test-gpu-kernels test-gpu-rehearsal test-frameworks test-grid test-models minilm-imdb test-versions test-containers test-wheel test-wheels conformance mutants compare-wheel comment history-check history-publish ready wheels publish-wheels fuzz-kernels test-slow doctor docs clean

help:  ## this list
	@echo "For you:"; awk -F ':.*  ## ' '/^[a-z0-9-]+:.*  ## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "For maintainers and CI, and parts of the above:"; awk -F ':.*  ##ci ' '/^[a-z0-9-]+:.*  ##ci /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PRESET=$(PRESET) ISOLATION=$(ISOLATION) BASE=$(BASE) HEAD=$(HEAD) ARGS=\"more options of dpbench\""

bench-e2e: $(READY)  ## median seconds per epoch of frameworks x tasks x batch sizes
	@isolation=$(ISOLATION); out=results/local/$(PRESET); \
	if [ $$isolation = docker ]; then \
	  if $(BIN)/dpbench image sweep --json >/dev/null; then out=$$out-docker; \
	  else echo "==> No container engine (see above): measuring in virtual environments instead"; isolation=venv; fi; \
	fi; \
	echo "==> dpbench run e2e --preset $(PRESET)$(LIMIT) --isolation $$isolation: missing data, environments or images are made first"; \
	$(BIN)/dpbench run e2e --preset $(PRESET)$(LIMIT) --isolation $$isolation --out $$out $(ARGS)

bench-modern: $(READY)  ## the modern tasks (transformers, a wide ResNet) with the core frameworks: throughput, cost of privacy
	@echo "==> dpbench run e2e --preset modern --minutes 15: missing data and environments are made first"
	$(BIN)/dpbench run e2e --preset modern --minutes 15 $(ARGS)

images: $(READY)  ##ci a container image for every framework, built from its lock with the network off
	$(BIN)/dpbench image build $(ARGS)

bench-layers: $(READY)  ## time and memory of single layers: plain, the library's own module, with DP
	@echo "==> dpbench run layers --preset $(PRESET): missing environments and references are made first"
	$(BIN)/dpbench run layers --preset $(PRESET) $(ARGS)

bench-frontier: $(READY)  ## the largest physical batch in a memory budget, and the throughput there
	@echo "==> dpbench run frontier: missing data and environments are made first"
	$(BIN)/dpbench run frontier $(ARGS)

bench-gpu:  ## under 9 minutes, offline, in the Python that is there (FOUND): gates, steps and layers into OUT
	@$(if $(wildcard $(READY)),$(BIN)/python,$(FOUND)) -m harness run gpu --python $(FOUND) --out $(OUT) $(ARGS)

gpu-folder: $(READY)  ##ci the folder to carry to a machine with a GPU and no network, with its run.sh: results/local/gpu-folder
	$(BIN)/python .ci/gpu_folder.py $(ARGS)

compare: $(READY)  ## two states of the code against each other: BASE and HEAD; exit code 1 on a proven regression
	@echo "==> dpbench compare --base $(BASE) --head $(HEAD): missing environments and references are made first"
	$(BIN)/dpbench compare --base $(BASE) --head $(HEAD) $(ARGS)

prove-alerts: $(READY)  ##ci planted slowdowns, memory and clip faults, and A/A: how many are caught, in how many minutes
	$(BIN)/python -m tests.planted $(ARGS)

golden: $(READY)  ##ci every number of every committed run's report is what it was; ARGS=--write where a change is meant
	$(BIN)/python -m proofs.golden.reports $(ARGS)

scale: $(READY)  ##ci processor time and memory of pack, merge and report, of 100,000 simulated records: docs/grid.md
	$(BIN)/python -m proofs.scale $(ARGS)

golden-weights: $(TORCH_READY)  ##ci seeded runs of dpcore end with the weights that they had, bit for bit; ARGS=--write on the commit before
	@OMP_NUM_THREADS=1 $(TORCH)/bin/python -m proofs.golden.weights $(ARGS)

dependents: $(DEPENDENTS_READY)  ##ci software that is built on Opacus, with it and with dpcore in its place: docs/dependents.md
	@$(DEPENDENTS)/bin/python -m proofs.dependents

prove-exactness: $(TORCH_READY)  ##ci dpcore's fast paths in float32 beside float64, also under cancellation: docs/exactness.md
	@OMP_NUM_THREADS=1 $(TORCH)/bin/python -m tests.dpcore.exactness

report: $(READY)  ## tables and figures from the records of the last run with this preset
	$(BIN)/dpbench report results/local/$(PRESET) $(ARGS)

findings: $(READY)  ##ci rewrites the tables of README, docs and results/findings from the committed records
	$(BIN)/dpbench findings $(ARGS)

history: $(READY)  ##ci adds a run (RUN=folder) to results/history: a file that is never rewritten
	$(BIN)/dpbench history add $(RUN) $(ARGS)

history-check: $(READY)  ##ci fails while a regression of results/history is open
	$(BIN)/dpbench history check $(ARGS)

dashboard: $(READY)  ## the static site over results/history: results/local/dashboard/index.html
	$(BIN)/dpbench dashboard $(ARGS)

gate: $(READY)  ## the admission gate alone
	$(BIN)/dpbench gate $(ARGS)

doctor: $(READY)  ## checks of the instrument itself
	$(BIN)/dpbench doctor

# First, side by side, what is one process each: containers wait more than they work, so that the harness's tests, which
# use two, begin beside them. Then the other parts that use two processes, side by side too, so that no processor waits
# for the last test of one of them. The closing line of either counts executed tests on every machine: without a
# container engine, all of the containers' are skipped. DONE: what was already, in CI.
test: $(READY)  ## what most pull requests need; CI adds make conformance, make mutants and a comparison
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target $(filter-out $(DONE),test-containers lint environments types-dpcore test-gpu-kernels test-harness)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-dpcore test-frameworks

environments: $(READY)  ##ci the environment of every framework
	@echo "==> environments of the frameworks that are not there yet; exit code 3 where one cannot be installed: its tests are skipped"
	$(BIN)/dpbench env make || [ $$? = 3 ]

lint: $(READY)  ## ruff, mypy and the contracts of imports
	@echo "==> ruff, mypy and the contracts of imports"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/lint-imports --config dpcore/pyproject.toml --no-cache

test-harness: $(READY)  ##ci tests of the harness
	@echo "==> tests of the harness"
	$(BIN)/pytest -q tests/test_house.py tests/harness -m "not slow and not network and not frameworks and not containers" -n 2 --dist worksteal

types-dpcore: $(TORCH_READY)  ##ci types of dpcore
	@echo "==> types of dpcore, in an environment with torch"
	$(TORCH)/bin/mypy --config-file dpcore/pyproject.toml -p dpcore

test-dpcore: $(TORCH_READY)  ##ci tests of dpcore
	@echo "==> tests of dpcore, in an environment with torch"
	OMP_NUM_THREADS=1 $(TORCH)/bin/pytest -q tests/dpcore -m "not slow" -p no:cacheprovider -n 2 --dist loadgroup

test-gpu-kernels: $(TRITON_READY)  ##ci dpcore's kernels for GPUs, by Triton's interpreter on the CPU
	@echo "==> dpcore's kernels for GPUs by Triton's interpreter, and compiled ahead of time for one of them"
	TRITON_INTERPRET=1 DPCORE_TRITON=1 DPCORE_NATIVE=0 OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) \
	  $(TORCH)/bin/pytest -q tests/dpcore/test_gpu_kernels.py -m "not slow" -p no:cacheprovider

test-gpu-rehearsal: $(READY) $(REHEARSAL_READY)  ##ci the folder's run on the processors, with the very versions of the machine with a GPU (5 GB)
	$(BIN)/pytest -q -s tests/harness/run/test_gpu_rehearsal.py -p no:cacheprovider

test-frameworks: environments  ##ci every framework's default: gate, conformance, a short run
	@echo "==> every framework's default in its own environment: the gate, the conformance suite; a short run end to end"
	$(BIN)/pytest -q tests/harness tests/frameworks -m "frameworks and not slow" -n 2 --dist loadgroup

conformance: environments  ##ci every framework's default against the contract, the gate included
	$(BIN)/pytest -q tests/frameworks -m "frameworks and (not slow or conformance)" $(ARGS)

# The first command fails where a cell of the matrix is not right, so that the second leaves the matrix out.
test-models: $(MODELS_READY)  ##ci dpcore on models and trainers of transformers, PEFT, timm, accelerate, TRL: docs/models.md
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 DPCORE_NATIVE=0 $(MODELS)/bin/python -m tests.dpcore.models
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(MODELS)/bin/pytest -q tests/dpcore/test_models.py tests/dpcore/test_trainers.py tests/dpcore/test_trainer_optimizers.py tests/dpcore/test_accelerate.py tests/dpcore/test_trainer_ranks.py tests/dpcore/test_minilm.py -p no:cacheprovider --deselect tests/dpcore/test_models.py::test_architecture

minilm-imdb: $(READY) $(MODELS_READY)  ##ci MiniLM fine-tuned on IMDb by dpcore and by Opacus: 18 runs, resumable: results/minilm-imdb
	$(BIN)/dpbench data fetch imdb-wordpiece
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(MODELS)/bin/python -m tests.dpcore.minilm_series \
	  --data "$$($(BIN)/dpbench data path imdb-wordpiece)" $(ARGS)

test-versions:  ##ci dpcore's tests on torch 2.6 to the newest, Python 3.11 to 3.13, 5 GB each; ARGS="--quick --remove"
	$(PYTHON) -m tests.dpcore.versions $(ARGS)

mutants: $(READY)  ##ci the deliberately wrong adapters: the gate must reject each
	$(BIN)/dpbench gate --mutants $(ARGS)

test-containers: $(READY)  ##ci real containers; skips where there is no engine
	@echo "==> a base, a small framework's image and its cells in a real container engine; skips where there is none"
	$(BIN)/pytest -q tests/harness/environments/test_containers.py -m "containers and not slow" -rs

# For CI jobs (docs/ci.md). Their values come from strangers too, so that the shell reads them and never make: $$NAME.
compare-wheel: $(READY)  ##ci PACKAGE, WHEEL; BASE_VERSION (default the last release), LAYERS, THRESHOLD, ...: a wheel against a release
	@$(BIN)/dpbench ci compare --package "$$PACKAGE" --wheel "$$WHEEL" --base "$$BASE_VERSION" --layers "$$LAYERS" \
	  --frameworks "$$FRAMEWORKS" --batch-sizes "$$BATCH_SIZES" --threshold "$$THRESHOLD" --minutes "$$MINUTES" \
	  --threads "$$THREADS" --workspace "$$GITHUB_WORKSPACE" --markdown "$$MARKDOWN" --tolerate "$$TOLERATE" --dry-run "$$DRY_RUN"

# The text is what code of a pull request wrote: a bot that says it calls nobody by name, and it fits.
comment:  ##ci FILE as the comment of PULL_REQUEST in REPOSITORY (owner/name), over its former one
	@sed 's/@/\&#64;/g; s/<!--/\&lt;!--/g' "$$FILE" | head --bytes=60000 | iconv --from-code=UTF-8 --to-code=UTF-8 -c | \
	  gh pr comment "$$PULL_REQUEST" --repo "$$REPOSITORY" --edit-last --create-if-none --body-file -

# Packs of strangers: their names are read by xargs and never by a shell.
verify-packs: $(READY)  ##ci dpbench verify of every pack in results/records that differs from the commit BASE: docs/submit.md
	git diff -z --name-only --diff-filter=d "$$BASE" -- 'results/records/*.jsonl.gz' | \
	  xargs -0 --no-run-if-empty --max-args=1 $(BIN)/dpbench verify

history-publish:  ##ci commits and pushes new files of results/history; PUBLISH_BY: commit or pull-request
	@.ci/publish_history.sh

ready: $(READY)  ##ci the harness's own environment and nothing else
	@$(BIN)/dpbench --help >/dev/null

wheels: $(READY)  ##ci dpcore's wheels and source archive for a release, built twice and compared: dist/
	$(BIN)/python .ci/build_wheels.py $(ARGS)

test-wheels: $(TORCH_READY)  ##ci dist/ as a user gets it: an empty environment with torch, and no compiler
	$(TORCH)/bin/pytest -q -s tests/dpcore/test_installed_wheel.py -m slow -p no:cacheprovider $(ARGS)

publish-wheels:  ##ci attests and publishes dist/: a release's job, which has an identity and no password
	cd dist && sha256sum --check SHA256SUMS
	$(PYTHON) -m venv .venvs/publish
	.venvs/publish/bin/python $(PIP) twine==7.0.0 pypi-attestations==0.0.30
	.venvs/publish/bin/python -m pypi_attestations sign dist/*.whl dist/*.tar.gz
	.venvs/publish/bin/python -m twine upload --attestations dist/*.whl dist/*.tar.gz dist/*.attestation

fuzz-kernels: $(TORCH_READY)  ##ci dpcore's kernels against the pure rules under AddressSanitizer and UBSan
	OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
	  CXX="g++ -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer" \
	  $(TORCH)/bin/pytest -q tests/dpcore/test_kernel_fuzz.py tests/dpcore/test_native.py tests/dpcore/test_cross_entropy.py --hypothesis-profile=explore \
	  -p no:cacheprovider -k "not compiled_graphs and not without_a_compiler" $(ARGS)

test-grid: $(READY) $(RAY_READY)  ##ci thirty units each by local, a real Slurm and a real Ray (285 MB), whose nodes are killed: docs/grid.md
	PYTHONPATH=$(CURDIR)/$(RAY) $(BIN)/pytest -q -s tests/harness/grid -m slow -p no:cacheprovider $(ARGS)

test-wheel: $(READY)  ##ci the wheel of dpbench, installed outside of the checkout: what it holds, and the preset smoke
	$(BIN)/pytest -q tests/harness/test_wheel.py

test-slow: $(READY) $(TORCH_READY) $(TRITON_READY)  ##ci every variant on every task, and the long proofs
	$(BIN)/pytest -q tests/harness tests/frameworks -m "slow or network" -o faulthandler_timeout=7200
	$(TORCH)/bin/pytest -q tests/dpcore -m slow -p no:cacheprovider
	TRITON_INTERPRET=1 DPCORE_TRITON=1 DPCORE_NATIVE=0 PYTHONPATH=$(TRITON) \
	  $(TORCH)/bin/pytest -q tests/dpcore/test_gpu_kernels.py -m slow -p no:cacheprovider
	OMP_NUM_THREADS=1 $(TORCH)/bin/pytest -q tests/dpcore -m "not slow" -p no:cacheprovider -n 2 --dist loadgroup --hypothesis-profile=explore

# The environment that installs the others, this one included.
$(UV): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dpbench needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Say make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) $$(grep '^uv==' requirements.txt) || echo "uv is not to be had here: pip installs, which takes longer."
	@touch $@

$(READY): requirements.txt pyproject.toml | $(UV)
	@echo "==> Setting up the harness: a virtual environment in $(VENV) with the pins of requirements.txt"
	$(INSTALL) $(VENV) --no-compile -r requirements.txt
	$(INSTALL) $(VENV) --no-compile --no-deps --no-build-isolation --editable .
	@touch $@
	@nice $(BIN)/python -m compileall -q $(VENV)/lib >/dev/null 2>&1 &  # bytecode, which nothing waits for

$(TORCH_READY): tests/requirements-torch.txt tests/requirements-dependents-alone.txt | $(UV)
	@echo "==> Setting up the test environment with torch in $(TORCH)"
	$(INSTALL) $(TORCH) -r tests/requirements-torch.txt
	$(INSTALL) $(TORCH) --no-deps $$(grep secureml tests/requirements-dependents-alone.txt) || echo "Its test is skipped."
	@touch $@

$(TRITON_READY): $(TORCH_READY) tests/requirements-triton.txt
	@echo "==> Setting up Triton in $(TRITON), beside the environment with torch"
	$(INSTALL) $(TORCH) --target $(TRITON) --no-deps -r tests/requirements-triton.txt
	@touch $@

$(RAY_READY): $(READY) tests/requirements-ray.txt
	@echo "==> Setting up Ray in $(RAY), beside the harness's environment"
	$(INSTALL) $(VENV) --target $(RAY) -r tests/requirements-ray.txt
	@touch $@

$(REHEARSAL_READY): tests/requirements-gpu-rehearsal.txt | $(UV)
	@echo "==> Setting up $(REHEARSAL): Python 3.12 with the versions of the machine with a GPU"
	@command -v python3.12 >/dev/null || { echo "The rehearsal needs Python 3.12, which is what that machine has; install it."; exit 2; }
	PATH="$(CURDIR)/$(BIN):$$PATH" python3.12 -m harness.environments.installer $(REHEARSAL) -r tests/requirements-gpu-rehearsal.txt
	@touch $@

$(MODELS_READY): tests/requirements-models.txt tests/requirements-torch.txt | $(UV)
	@echo "==> Setting up the environment with transformers, PEFT and timm in $(MODELS)"
	$(INSTALL) $(MODELS) -r tests/requirements-models.txt
	@touch $@

$(DEPENDENTS_READY): tests/requirements-dependents.txt tests/requirements-dependents-alone.txt | $(UV)
	@echo "==> Setting up the environment with what is built on Opacus in $(DEPENDENTS)"
	$(INSTALL) $(DEPENDENTS) -r tests/requirements-dependents.txt
	$(DEPENDENTS)/bin/python $(PIP) --no-deps --ignore-requires-python -r tests/requirements-dependents-alone.txt
	@touch $@

docs: $(READY) $(DOCS_READY)  ## one site: pages with search, tutorials, dpcore's API, report, dashboard: build/site/index.html
	rm -rf build/docs && mkdir -p build/docs
	git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --target-directory build/docs
	$(PYTHON) docs/site/tutorials.py build/docs/docs/tutorials
	$(BIN)/dpbench report $(CITED) --out build/docs/site-report >/dev/null
	$(BIN)/dpbench dashboard --out build/docs/site-dashboard
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --config-file docs/mkdocs.yml --strict --quiet
	@echo "build/site/index.html; its search needs a server: $(PYTHON) -m http.server --directory build/site"

$(DOCS_READY): docs/requirements.txt | $(UV)
	@echo "==> Setting up the environment of the documentation in $(DOCS)"
	$(INSTALL) $(DOCS) -r docs/requirements.txt
	@touch $@

clean:  ## removes the virtual environments of this folder and build/; results stay
	rm -rf $(VENV) .venvs build
