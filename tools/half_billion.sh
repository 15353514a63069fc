#!/usr/bin/env bash
# A real model of half a billion parameters learns on two CPU cores and 24 GB: a warm start from its own right
# solutions, then GRPO alone and Tango, and the accuracy of all on questions that none of them saw.
#
#   tango import Qwen/Qwen2.5-0.5B-Instruct --out models/Qwen2.5-0.5B-Instruct
#   bash tools/half_billion.sh            # hours; stop it with Ctrl-C at any time, run it again and it goes on
#
# Arguments are settings of configs/experiments/half_billion/tango.yaml for all stages: launch.dtype=float32 where the CPU has no bfloat16
# instructions, which then takes four times as long. GSM8K comes from its hub, or from a folder with train.jsonl and
# test.jsonl that the variable GSM8K names. Uses the tango on the PATH, else installs it (tools/install.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v tango >/dev/null || source tools/install.sh
config=configs/experiments/half_billion/tango.yaml data=data/half_billion runs=runs/half_billion
alone=(
    verifier=null sft.generator=null sft.verifier=null train.verifier_steps_per_cycle=0 train.verifier_draws=1
    algorithm.alpha_start=0 algorithm.alpha_end=0 algorithm.min_verifier_j=null
)
settings=("$@")
say() { printf '\n== %s\n' "$*"; }
stage() { # stage NAME RUN CONFIG SETTINGS...: begin it, or go on with it
    local name=$1 run=$2 file=$3
    shift 3
    [ -e "$run/config.yaml" ] && set -- "$@" --resume
    tango "$name" "$file" run.dir="$run" "${settings[@]}" "$@"
}

say "questions of one or two calculations"
for split in test train; do
    out=$data/$([ $split = test ] && echo eval || echo train).parquet
    [ -e "$out" ] && continue
    from=() && [ -n "${GSM8K:-}" ] && from=(--source "$GSM8K/$split.jsonl")
    without=() && [ $split = train ] && without=(--exclude "$data/all_test.parquet")
    tango data gsm8k --split $split "${from[@]}" "${without[@]}" --out "$data/all_$split.parquet"
    python tools/warm_start.py easy "$data/all_$split.parquet" --out "$out"
done

say "its own solutions, and what of them a warm start takes"
stage eval $runs/samples configs/experiments/half_billion/samples.yaml
python tools/warm_start.py rows $runs/samples/eval/model/task.parquet --out $runs/warm_start
[ -e $runs/models/verifier/config.json ] || stage sft $runs/start $config

say "GRPO alone"
stage train $runs/arms/alone $config "${alone[@]}"
say "Tango"
stage train $runs/arms/tango $config sft.generator=null sft.verifier=null

say "all held-out questions"
stage eval $runs/eval/start $config "${alone[@]}"
for arm in alone tango; do
    stage eval $runs/eval/$arm $config "${alone[@]}" eval.checkpoints_of=$runs/arms/$arm
done
tango report $runs/arms
