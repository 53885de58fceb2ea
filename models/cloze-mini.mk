# How models/cloze-mini is made, from the root of the clone: `make default-model`. Days on two cores; a GPU makes the training
# faster. Needs DATA/corpus, its folder varied, and DATA/snli_devtest_triplets.csv, which `make data` does not fetch.

include Makefile

RUN    ?= runs/cloze-mini
TEACHER := runs/parents/all-mpnet-base-v2
CORPUS := $(DATA)/corpus
SENTENCES := $(CORPUS)/enwiki_sentences.txt $(CORPUS)/enwikinews_sentences.txt
SINGLES := $(patsubst %,$(CORPUS)/varied/%.txt,banking77_train clinc_train hwu64_train snips_train restaurant8k_train \
	dstc9_service_faq query_wellformedness_train opentriviaqa wordnet software_descriptions)
ARTICLES = $(filter-out $(SINGLES),$(sort $(wildcard $(CORPUS)/varied/*.txt)))
VARIED = $(BIN)/cloze texts $(@D) --seed 7 --held-out 500 --held-out-queries 200 --exclude $(DATA)/senteval \
	$(DATA)/retrieval --corpus $(SENTENCES) $(ARTICLES) --singles $(SINGLES)
STS    := $(DATA)/senteval/downstream
TEXT_ALONE := import json, sys; [print(json.loads(line)['text']) for line in sys.stdin]
ON_CARD := transfer space cost
DISTILL = distill --corpus $(RUN)/texts/texts.jsonl --columns text --batch-size 256 --max-tokens 256 --held-out 0 \
	--teacher-vectors $(RUN)/vectors/mpnet $(RUN)/vectors/minilm --teacher-weights 0.65 0.35 --frozen-layers 0
FIRST = $(DISTILL) --encoder $(PARENT) --learning-rate 3e-4 --warmup-steps 200 --max-steps 5000 --out $(RUN)/first
SECOND = $(DISTILL) --encoder $(RUN)/first/model --learning-rate 2.5e-4 --warmup-steps 168 --max-steps 4200 --seed 7 \
	--out $(RUN)/second
SIMCSE = simcse --columns sent0 sent1 hard_neg --template "[X]" --pooling mean --precision fp32 --batch-size 64 \
	--learning-rate 2e-5 --max-tokens 64
TRIPLETS = $(SIMCSE) --encoder $(RUN)/second/model --corpus $(DATA)/snli_devtest_triplets.csv --epochs 2 \
	--dev $(STS)/STS/STSBenchmark/sts-dev.csv --eval-steps 91 --out $(RUN)/triplets
RULES = $(SIMCSE) --encoder $(RUN)/student/model --corpus $(RUN)/rules.csv --epochs 1 --held-out 0 --out $(RUN)/rules
EMBED = $(BIN)/cloze bulk $(RUN)/texts/texts.jsonl --dtype float16
OWN = $(BIN)/cloze bulk $(RUN)/$1/texts.jsonl $(RUN)/vectors/$1 --dtype float16 --bundle $(RUN)/cloze-mini-mean
# learns the vectors of cloze-mini-mean at [MASK]
PROMPT = distill --encoder $(RUN)/cloze-mini-mean --corpus $(RUN)/$1/texts.jsonl --columns text --held-out 0 --save-steps 400 \
	--teacher-vectors $(RUN)/vectors/$1 --template "[X] means [MASK]." --pooling mask --out $(RUN)/prompt-$1
MANY = $(call PROMPT,many) --batch-size 512 --max-tokens 384 --frozen-layers 0 --learning-rate 5e-4 --warmup-steps 200 \
	--max-steps 2400
FEW = $(call PROMPT,few) --batch-size 64 --max-tokens 256 --frozen-layers 3 --frozen-share 0.5 --learning-rate 3e-4 \
	--warmup-steps 100 --max-steps 1700
# trains a run, or continues it
fit = $(BIN)/cloze fit $(if $(wildcard $(RUN)/$1/recipe.toml),--resume $(RUN)/$1,$2)

.PHONY: cloze-mini

# The same command continues what was interrupted: each line skips what it finds done.
cloze-mini: .venv/dev $(PARENT) $(RUN)/texts/texts.jsonl $(RUN)/rules.csv $(RUN)/teachers/mpnet $(RUN)/teachers/minilm \
  $(RUN)/many/texts.jsonl $(RUN)/few/texts.jsonl
	$(EMBED) $(RUN)/vectors/mpnet --bundle $(RUN)/teachers/mpnet
	$(EMBED) $(RUN)/vectors/minilm --bundle $(RUN)/teachers/minilm --text-column words
	$(call fit,first,$(FIRST))
	$(call fit,second,$(SECOND))
	$(call fit,triplets,$(TRIPLETS))
	rm -rf $(RUN)/student $(RUN)/mean $(RUN)/weighed $(RUN)/cloze-mini-mean $(RUN)/prompt $(RUN)/parent.json
	$(BIN)/cloze average $(RUN)/second $(RUN)/triplets --out $(RUN)/student --parent $(PARENT)
	$(call fit,rules,$(RULES))
	head -n 64 $(RUN)/texts/texts.jsonl | $(BIN)/python -c "$(TEXT_ALONE)" > $(RUN)/calibration.txt
	$(BIN)/cloze average $(RUN)/rules $(RUN)/second $(RUN)/triplets --weights 0.5 0.25 0.25 --out $(RUN)/mean \
	  --parent $(PARENT) --parent-share 0.5
	$(BIN)/cloze weigh $(RUN)/mean --corpus $(SENTENCES) --out $(RUN)/weighed
	$(BIN)/cloze export $(RUN)/weighed $(RUN)/cloze-mini-mean --precision int8 --max-tokens 512 \
	  --calibrate $(RUN)/calibration.txt
	$(call OWN,many)
	$(call OWN,few)
	$(call fit,prompt-many,$(MANY))
	$(call fit,prompt-few,$(FEW))
	$(BIN)/cloze average $(RUN)/prompt-many $(RUN)/prompt-few --weights 0.6 0.4 --out $(RUN)/prompt
	$(BIN)/cloze evaluate $(PARENT) --template "[X]" --pooling mean --max-tokens 256 --data $(DATA) \
	  --suite sts retrieval $(ON_CARD) --json $(RUN)/parent.json
	head -n 64 $(RUN)/few/texts.jsonl | $(BIN)/python -c "$(TEXT_ALONE)" > $(RUN)/prompt-calibration.txt
	sed -n '/^## Limits/,/^## Files/{/^## Files/d;p}' $(MODEL)/README.md > $(RUN)/notes.md
	$(BIN)/cloze export $(RUN)/prompt $(MODEL) --precision int8 --max-tokens 384 --data $(DATA) \
	  --calibrate $(RUN)/prompt-calibration.txt --notes $(RUN)/notes.md
	$(BIN)/cloze evaluate $(MODEL) --data $(DATA) --suite sts retrieval probes $(ON_CARD) \
	  --card --beside $(RUN)/parent.json
	$(BIN)/cloze calibrate $(MODEL) --pairs $(STS)/STS/STSBenchmark/sts-train.csv

$(RUN)/texts/texts.jsonl: | .venv/dev
	rm -rf $(@D)
	$(BIN)/cloze texts $(@D) --seed 7 --sentences 480000 --passages 100000 --queries 420000 \
	  --exclude $(DATA)/senteval $(DATA)/retrieval \
	  --corpus $(SENTENCES)

$(RUN)/many/texts.jsonl: | .venv/dev
	rm -rf $(@D)
	$(VARIED) --sentences 450000 --passages 270000 --queries 330000 --single-texts 145000

$(RUN)/few/texts.jsonl: | .venv/dev
	rm -rf $(@D)
	$(VARIED) --sentences 60000 --passages 24000 --queries 50000 --single-texts 50000

$(RUN)/rules.csv: | .venv/dev
	mkdir -p $(@D)
	$(BIN)/python -m benchmarks.probes --data $(DATA) --triplets $@

$(RUN)/teachers/mpnet: | $(TEACHER)
$(RUN)/teachers/minilm: | $(PARENT)
$(RUN)/teachers/%:
	mkdir -p $(@D)
	$(BIN)/cloze adopt $(word 1,$|) $@ --precision int8

$(TEACHER): | .venv/dev
	mkdir -p $(@D)
	$(BIN)/python models/fetch_teacher.py $@
