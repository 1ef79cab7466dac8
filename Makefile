# make demo   the whole job on this machine's CPU, core install only
# make test   everything that CI runs
# make lint   ruff and mypy
# make bench  accuracy, and the compiled core against the reference (quick)
# make gpu    everything that needs an NVIDIA GPU, in one command under ten minutes
# make newest the kernel tests on the newest triton (optional, 1 GB)
# make parity random workloads, ours against the reference (MINUTES=10, BACKENDS=vllm,trtllm,sglang)

PYTHON ?= python3
MINUTES ?= 10
SEED ?= 0
BACKENDS ?= vllm,trtllm,sglang
OUT ?= gpu-out

.PHONY: demo test lint bench gpu newest parity clean

demo: .venv-demo/.done
	.venv-demo/bin/passtime demo

test: .venv/.done
	.venv/bin/python -m pytest -q

lint: .venv/.done
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/mypy tests benchmarks

bench: .venv/.done .venv-compiled/.done .venv-reference/.done
	OPENBLAS_NUM_THREADS=1 .venv/bin/python benchmarks/accuracy.py
	OPENBLAS_NUM_THREADS=1 .venv-compiled/bin/python benchmarks/versus_reference.py --quick

parity: .venv/.done .venv-reference/.done
	.venv/bin/python tests/parity/fuzz.py --minutes $(MINUTES) --seed $(SEED) --backend $(BACKENDS)

gpu:
	.ci/gpu $(OUT)

newest: .venv-newest/.done
	.venv-newest/bin/python -m pytest -q -W default tests/kernels

clean:
	rm -rf .venv .venv-compiled .venv-demo .venv-newest .venv-reference build *.egg-info src/*.egg-info

.venv-demo/.done: pyproject.toml
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/pip install -q -e .
	touch $@

# torch first and pinned: a plain torch would fetch gigabytes of CUDA. numpy < 2.4 is what the
# interpreter of triton 3.6 can run on.
.venv/.done: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q 'torch==2.13.0' 'triton==3.6.0' 'numpy<2.4'
	.venv/bin/pip install -q -e '.[report,cluster,dev]'
	touch $@

# The lock-step core compiled: a copy of the sources as they are now. Build it anew after a change.
.venv-compiled/.done: pyproject.toml setup.py $(wildcard sched/*.py sched/*/*.py)
	$(PYTHON) -m venv .venv-compiled
	.venv-compiled/bin/pip install -q 'setuptools>=77' 'mypy>=1.15'
	rm -rf build
	PASSTIME_COMPILE=1 .venv-compiled/bin/pip install -q --no-build-isolation --force-reinstall .
	touch $@

.venv-newest/.done: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install -q 'torch==2.13.0'
	.venv-newest/bin/pip install -q --upgrade triton
	.venv-newest/bin/pip install -q -e '.[dev]'
	touch $@

.venv-reference/.done:
	$(PYTHON) -m venv .venv-reference
	.venv-reference/bin/pip install -q ai-dynamo-runtime==1.6.1
	.venv-reference/bin/pip install -q --no-deps ai-dynamo==1.6.1
	touch $@
