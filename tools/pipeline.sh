#!/usr/bin/env bash
# The paper's whole pipeline on tiny models and the last-letter task, under three minutes on two CPU cores:
#
#   prepare    question sets, and the sloppy solutions that a base model has seen
#   teacher    the base model answers questions; what is right is kept (the tiny model is its own teacher)
#   sft        generator on those solutions, verifier on judged ones
#   tango      both, in turn
#   eval       greedy accuracy, pass@k, votes and the verifier's choice, on held-out questions
#   report     curves and rollouts; and the generator as a Hugging Face folder
#
#   bash tools/pipeline.sh [FOLDER]      # default: runs/pipeline
#
# Real models differ in the config only: docs/reproduce.md has the same stages for the paper's models and data.
# Uses the tango on the PATH, else installs it (tools/install.sh).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
config="$root/configs/pipeline.yaml"
folder="${1:-runs/pipeline}"
command -v tango >/dev/null || source "$root/tools/install.sh"
mkdir -p "$folder"
cd "$folder" # the config's paths start here
say() { printf '\n== %s\n' "$*"; }

say "prepare"
ranges=(--words 2-3 --letters 3-3)
tango data last_letter "${ranges[@]}" --seed 1 --rows 400 --out data/train.parquet
tango data last_letter "${ranges[@]}" --seed 2 --rows 64 --split eval --out data/eval.parquet
tango data last_letter "${ranges[@]}" --seed 3 --rows 256 --split sft_generator --out data/teacher_questions.parquet
tango data last_letter "${ranges[@]}" --seed 4 --rows 4000 --kind generator_sft --slip 0.3 --out data/sloppy.parquet
tango data last_letter "${ranges[@]}" --seed 5 --rows 4000 --kind verifier_sft --slip 0.2 --out data/sft_verifier.parquet

say "a base model"
alone=(verifier=null sft.verifier=null train.verifier_warmup_steps=0 train.verifier_steps_per_cycle=0)
tango sft "$config" run.dir=base "${alone[@]}" sft.generator.data=data/sloppy.parquet \
    sft.generator.output=models/base sft.generator.steps=150 sft.generator.optimizer.learning_rate=2e-3 \
    'sft.generator.init={path: models/untrained, build: {hidden_size: 128, intermediate_size: 256, num_layers: 3, num_heads: 4, num_kv_heads: 2}}'

say "teacher"
tango teacher "$config" run.dir=teach "${alone[@]}" generator.model.path=models/base

say "sft"
tango sft "$config" run.dir=tango

say "tango"
tango train "$config" run.dir=tango

say "eval"
tango eval "$config" run.dir=eval eval.checkpoints_of=tango

say "report"
tango report tango
tango export tango --out models/trained
echo "Everything is in $PWD: tango/report.html, eval/eval/answers.html, models/trained"
