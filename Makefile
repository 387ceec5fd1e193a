# Each target works as the only command on a fresh machine: .venv is made when it is missing or out of date.
# PYTHON=/path/to/python3 chooses the interpreter, ARGS="…" is passed on to gdn run, pytest or the benchmarks.
.PHONY: help setup run test test-page test-matrix mcp-servers test-models simulate chaos conformance mutations mutants check format bench bench-peers bench-page page-shots soak pins requirements size without clean
.DEFAULT_GOAL := help
export PYTHON

help:
	@echo "make run           start the swarm of ./goondan.yaml (or the quickstart) and talk to it"
	@echo "make test          all tests                     ARGS=\"tests/unit -k codec\" for some"
	@echo "make test-page     the page in a real Chromium, which it installs first: in all colours and sizes"
	@echo "make test-matrix   README and quickstart word by word, then tests, on clean setups (minutes; best as root)"
	@echo "make mcp-servers   MCP servers of npm and PyPI in real jails; installs them first"
	@echo "make test-models   whole turns against llama.cpp's server and LiteLLM, from their packages; installs them first"
	@echo "make simulate      10,000 seeded histories of a bus that breaks (minutes)   ARGS=\"--first 17 --histories 1\""
	@echo "make chaos         200 kills of everything under load, 1,000 of the broker under each client, a table of 80 in a swarm that works, power cuts at every call (minutes)"
	@echo "make conformance   the MCP conformance package against what we have of MCP (minutes)   ARGS=\"server\" for one side"
	@echo "make mutations     change lines that requirements need, and see their tests fail   ARGS=\"--all\" or ids"
	@echo "make mutants       change pure modules line by line: how much do their tests notice? (half an hour)   ARGS=\"turn --show\""
	@echo "make check         style, types, architecture, drift: what CI runs beside the tests"
	@echo "make format        rewrite the sources in the house style"
	@echo "make without       the tree without features: checks, tests, quickstart   ARGS=\"all\" or names, --short (docs/design/features.md)"
	@echo "make bench         benchmarks beside their baselines   ARGS=\"--record\" keeps the figures for docs/performance.md"
	@echo "make bench-peers   installs AutoGen's runtime, NATS's server and the sandbox runner, and measures beside them"
	@echo "make bench-page    the figures and plots of docs/performance.md and the READMEs, from bench/results.json"
	@echo "make page-shots    the pictures of docs/page.md, from the recorded example in a real Chromium"
	@echo "make soak          half an hour of mixed load and kills, then three times too much   ARGS=\"--minutes 5\""
	@echo "make requirements  which requirements have a test  UPDATE=1 to record the covered ones"
	@echo "make size          how large everything is: lines of code, modules, imports, words of documents"
	@echo "make pins          find the hashes of all packages anew, after a version in constraints.txt was changed"
	@echo "make setup         only make .venv ready for development"
	@echo "make clean         remove .venv and caches"

setup:
	@scripts/setup dev

run:
	@exec scripts/run $(ARGS)

test:
	@scripts/setup dev
	@exec scripts/test $(ARGS)

test-page:
	@scripts/setup dev
	GOONDAN_PAGE_MUST=1 scripts/test tests/features/page $(ARGS)

test-matrix:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.test_matrix $(ARGS)

mcp-servers:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.mcp_servers $(ARGS)

test-models:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.model_servers $(ARGS)

simulate:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.simulate $(ARGS)

chaos:
	@scripts/setup dev
	GOONDAN_CHAOS_KILLS=200 scripts/test -q -s tests/chaos/test_chains_under_kills.py tests/chaos/test_changesets_under_kills.py \
		tests/chaos/test_a_large_trace.py tests/chaos/test_clients_under_kills.py tests/chaos/test_fuzz_frames.py tests/chaos/test_random_kills.py tests/chaos/test_swarm_under_kills.py \
		tests/process/test_restart.py tests/process/test_rust_client.py tests/process/test_toolhost_fuzz.py tests/features/certify/process \
		tests/features/serve/process/test_door_under_kills.py $(ARGS)
	.venv/bin/python -m tests.power.replay

mutations:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.mutations $(ARGS)

mutants:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.mutants $(ARGS) $(if $(UPDATE),--update)

without:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.without $(ARGS)

check:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.check

format:
	@scripts/setup dev
	@.venv/bin/ruff check --fix-only --quiet . && .venv/bin/ruff format .

bench:
	@scripts/setup bench
	@exec .venv/bin/python -I -m bench $(ARGS)

soak:
	@scripts/setup bench
	@exec .venv/bin/python -I -m bench.soak $(ARGS)

bench-peers:
	@scripts/setup bench
	-@.venv/bin/python -I -m bench.others
	@exec .venv/bin/python -I -m bench others $(ARGS)

bench-page:
	@scripts/setup bench
	@exec .venv/bin/python -I -m bench.page $(ARGS)

page-shots:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.page_shots

conformance:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.conformance $(ARGS)

pins:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.pin

size:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.size $(ARGS)

requirements:
	@scripts/setup dev
	@exec .venv/bin/python -I -m scripts.requirements $(if $(UPDATE),--update)

clean:
	rm -rf .venv .cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
