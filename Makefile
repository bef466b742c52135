# One word each. Every target sets up what it needs; `make demo` and `make test` work on a fresh clone.

PYTHON ?= python3
RANKS ?= 2
# Of test-hosts: hosts, and ranks on each, as in 2x4; or 2x4dealt, where ranks are dealt out to hosts one by one.
HOSTS ?= $(RANKS)x1
VERSION ?= dev
RUN := .venv/bin/python
OLDEST := PYTHONPATH=.oldest .venv/bin/python
# A GPU machine's own torch fits its driver, so tests on GPUs run in the Python that is there.
TORCHRUN = PYTHONPATH=. $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $(1)
ON_RANKS = $(call TORCHRUN,$(RANKS))
# "2x4" has 2 * 4 of them.
RANKS_OF_HOSTS = $(filter-out 0,$(shell echo $$(($(subst x,*,$(HOSTS:dealt=))))))
ON_HOSTS = $(call TORCHRUN,$(or $(RANKS_OF_HOSTS),$(error HOSTS=$(HOSTS) is no number of hosts and ranks on each: 2x4)))

# Python keeps what it has compiled, also where containers are told not to: `.venv` is installed without, and tests start
# hundreds of processes, each of which would compile torch or this library anew.
unexport PYTHONDONTWRITEBYTECODE

# Of the tests, the longest first. As many run at a time as there are cores: ranks poll while they wait for each other, and
# with more parts they would also wait for a core.
PARTS := test-operations test-compiled test-collectives test-simulator test-over-hosts test-oldest test-sanitized
CORES := $(shell getconf _NPROCESSORS_ONLN)
OPERATIONS := language ops sanitizer tracing test_docs.py
COLLECTIVES := ccl experts heap inductor

# What runs under the sanitizer only; and besides, in `make test-all`, all that uses ranks.
SANITIZED := x ops/test_rounds.py experts/test_rounds.py test_example_folders.py test_example_refusals.py
ALSO_SANITIZED := $(if $(IRIS_TEST_ALL),language ops ccl experts heap tracing $(addprefix test_,$(addsuffix .py,\
	bench bench_over_hosts bootstrap context docs examples hosts tensors world)))

# What the oldest Triton compiles, for the GPUs that were run, and runs: in `make test-all` for all, and by torchrun too.
# For NVIDIA's the sample leaves what is made of the same device functions to the newest.
OLDEST_LEAVES := $(addprefix --ignore tests/codegen/test_,$(addsuffix .py,clusters example_kernels fused_dtypes generated_code host_guards tiles))
OLDEST_TARGETS := $(if $(IRIS_TEST_ALL),,-k "not gfx" $(OLDEST_LEAVES))
# Of the simulator, what waits and how it is switched on know nothing of Triton's version.
OLDEST_PROGRAMS := $(if $(IRIS_TEST_ALL),,-k "not torchrun" $(addprefix --ignore tests/simulator/test_,activation.py grid.py resting.py))

# All combinations take hours: they run in pieces, and go on where they were interrupted.
PYTEST := $(if $(IRIS_TEST_ALL),scripts/in_pieces.py,-m pytest -q)

OVER_HOSTS := test_hosts.py test_bench_over_hosts.py $(addsuffix /test_over_hosts.py,ops experts tracing) \
	$(addprefix ccl/test_,$(addsuffix .py,\
	over_hosts over_hosts_on_gpu all_to_all_v_over_hosts messages_over_hosts fp32_partials groups_over_hosts \
	process_group_over_hosts vendor_over_hosts chunks_over_hosts))
# Besides, those that start hosts or delay their rails by themselves, or play NCCL.
OF_HOSTS_HERE := ccl/test_late_rails.py test_two_hosts.py test_nccl_rail.py

# One after the other, as each wants the GPUs for itself; and all of them, whichever misses its floors.
MEASURED := perf-accesses perf-collectives perf-operations perf-experts

.PHONY: demo test test-all $(PARTS) test-gpu test-hosts perf $(MEASURED) lint types fix docs docs-version package
.PHONY: setup setup-oldest

demo: setup          ## two ranks exchange data from inside Triton and Gluon kernels
	$(RUN) -m iris demo

test: setup          ## lint, and the covering sample: simulator, compile checks, oldest Triton
	$(MAKE) --jobs $(CORES) $(if $(IRIS_TEST_ALL),--keep-going,--output-sync=target) --no-print-directory lint $(PARTS)

test-simulator:
	$(RUN) $(PYTEST) tests \
	  $(addprefix --ignore tests/,codegen $(OPERATIONS) $(COLLECTIVES) $(SANITIZED) $(OVER_HOSTS) $(OF_HOSTS_HERE))

test-operations:
	$(RUN) $(PYTEST) $(addprefix tests/,$(OPERATIONS)) $(addprefix --ignore tests/,$(SANITIZED) $(OVER_HOSTS))

test-collectives:
	$(RUN) $(PYTEST) $(addprefix tests/,$(COLLECTIVES)) \
	  $(addprefix --ignore tests/,$(SANITIZED) $(OVER_HOSTS) $(OF_HOSTS_HERE))

test-over-hosts:
	$(RUN) $(PYTEST) $(addprefix tests/,$(OVER_HOSTS) $(OF_HOSTS_HERE))

# Make begins a part that waits for a setting up after all others.
test-compiled: $(if $(IRIS_TEST_ALL),setup-oldest)
	IRIS_SIMULATOR=0 $(RUN) $(PYTEST) tests/codegen
	$(if $(IRIS_TEST_ALL),$(RUN) scripts/digests.py)

test-sanitized:
	IRIS_SANITIZE=1 $(RUN) $(PYTEST) $(addprefix tests/,$(SANITIZED) $(ALSO_SANITIZED))

test-oldest: setup-oldest
	IRIS_SIMULATOR=0 $(OLDEST) $(PYTEST) tests/codegen $(OLDEST_TARGETS)
	$(OLDEST) $(PYTEST) tests/test_acceptance.py tests/simulator $(OLDEST_PROGRAMS) $(if $(IRIS_TEST_ALL),tests/sanitizer)

test-all: export IRIS_TEST_ALL = 1
test-all: test       ## every combination, on up to 8 ranks, and more rounds: hours; goes on where it was stopped

test-gpu:            ## the same tests on RANKS GPUs of this machine
	$(ON_RANKS) -m pytest -q -x tests $(addprefix --ignore tests/,codegen sanitizer simulator)

test-hosts:          ## those of several hosts on GPUs here, a rank each: HOSTS, or RANKS hosts of one; then on late rails
	IRIS_OVER_HOSTS=iris IRIS_TEST_HOSTS=$(HOSTS) $(ON_HOSTS) -m pytest -q -x $(addprefix tests/,$(OVER_HOSTS))
	IRIS_SIMULATOR=1 IRIS_TEST_LATE_RAILS=1 PYTHONPATH=. $(PYTHON) -m pytest -q -x $(addprefix tests/,$(OVER_HOSTS))

perf:                ## measures on RANKS GPUs, and fails below the floors of benchmarks/floors.json
	$(MAKE) --keep-going --jobs 1 --no-print-directory $(MEASURED)

perf-accesses:
	$(ON_RANKS) benchmarks/point_to_point.py --floors benchmarks/floors.json

perf-collectives:
	$(ON_RANKS) -m iris bench ccl --library iris --library nccl --sizes 8,128,8192,65536 --floors benchmarks/floors.json

perf-operations:
	$(ON_RANKS) -m iris bench ops --library iris --library vendor --floors benchmarks/floors.json \
	  --shape 8192x8192x8192 --shape 1024x8192x28672 --shape 4096x16384x4096 --shape 8x4096x0 --shape 16x8192x0

perf-experts:
	$(ON_RANKS) -m iris bench experts --library 'iris fp8' --layout compact --tokens 8,128,1024,4096 \
	  --floors benchmarks/floors.json

lint: types          ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: setup         ## mypy: the interface and the host code
	$(RUN) -m mypy

fix: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

package: setup       ## builds sdist and wheel, and tries them in an environment and a folder of their own
	$(RUN) scripts/package.py

docs: setup          ## the site, in the folder `site`; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

docs-version: docs   ## commits it to the branch gh-pages as VERSION, beside the others; pushes nothing
	PATH="$(CURDIR)/.venv/bin:$$PATH" mike deploy --update-aliases $(VERSION) $(if $(filter-out dev,$(VERSION)),latest)
	.venv/bin/mike set-default --allow-undefined latest

setup:
	@$(PYTHON) scripts/setup.py

setup-oldest: setup
	@test -d .oldest || (echo "Adding the oldest Triton (once)" && rm -rf .oldest.part && $(RUN) -m pip install \
	    --quiet --disable-pip-version-check --no-deps --target .oldest.part triton==3.6.0 && mv .oldest.part .oldest)
