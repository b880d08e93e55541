# On a fresh machine `make demo` and `make test` do all set-up by themselves.
PY := .venv/bin/python
export HF_HUB_OFFLINE ?= 1

.PHONY: help setup demo browser test test-slow test-compose lint docs bench clean

help:            ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | column -t -s '|'

setup: .venv/ready  ## Make .venv (CPU or GPU, whichever the machine has)

.venv/ready: pyproject.toml setup.sh requirements-cpu.lock
	./setup.sh
	@touch $@

demo: setup      ## Watch a tiny policy learn arithmetic: server and trainer, two processes
	$(PY) -m trainer demo

browser: setup   ## Install Chromium, without which the tests of the server's page are skipped
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	then apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; \
	else $(PY) -m playwright install chromium; fi

lint: setup      ## Formatting, lint, types and import contracts
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy shared rollout_server trainer tests
	.venv/bin/lint-imports

# A type or name that cannot be resolved is an error, so that the pages have no gaps.
docs: setup      ## Pages of the API, from the docstrings, in build/docs
	$(PY) -W error::UserWarning:pdoc.doc_types -W error::UserWarning:pdoc.doc \
	  -m pdoc -d google -o build/docs shared trainer rollout_server

test: lint       ## Lint, then every test that is not slow
	$(PY) -m pytest -m "not slow and not compose"

test-slow: setup ## The slow tests: whole training runs and their controls
	$(PY) -m pytest -m slow

test-compose: setup ## The images and docker-compose.yml, with a Docker engine
	$(PY) -m pytest -m compose

# All but those that need several GPUs or a model of one's own.
BENCHES := async channels load publish rollout steps trainer

bench: setup     ## The benchmarks that any machine can run; one JSON line per result
	@for name in $(BENCHES); do $(PY) -m tests.bench.bench_$$name || exit 1; done

clean:           ## Remove the virtual environment and what runs have left
	rm -rf .venv build runs *.egg-info
