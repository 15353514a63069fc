#!/usr/bin/env python3
"""Write configs/paper/: one stand-alone file for each experiment of the paper, and for each size of machine.

    python tools/make_paper_configs.py            # a test compares the files with what this writes

Experiments: {qwen, llama} x {grpo, rloo, reinforce++} x {tango, vanilla}. Machines: 4 nodes of 8 GPUs (the paper's),
1 node of 8 and 1 node of 4. Beside them the teacher, the evaluations, and the four runs of Section 4.3 (last letter).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs/paper"


@dataclass(frozen=True)
class Models:
    """The pair of models of an experiment, as folders below models/."""

    title: str
    generator: str
    verifier: str
    fine_tuned: str


@dataclass(frozen=True)
class Machine:
    """GPUs, and how the two 7B or 8B models are cut over them."""

    title: str
    nodes: int
    gpus: int
    recompute: bool
    engine_share: float  # of a GPU, while an engine is awake; the trainer's state stays beside it in a weight sync


MODELS = {
    "qwen": Models("Qwen2.5-Math-7B with Qwen2.5-7B", "Qwen2.5-Math-7B", "Qwen2.5-7B", "qwen2.5-math-7b-sft"),
    "llama": Models(
        "Llama-3.1-8B-Instruct for both", "Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct", "llama-3.1-8b-sft"
    ),
}
MACHINES = {
    "4x8": Machine("4 nodes of 8 GPUs, as in the paper", 4, 8, recompute=False, engine_share=0.6),
    "1x8": Machine("1 node of 8 GPUs", 1, 8, recompute=True, engine_share=0.5),
    "1x4": Machine("1 node of 4 GPUs", 1, 4, recompute=True, engine_share=0.4),
}
ALGORITHMS = {"grpo": 0.1, "rloo": 0.1, "reinforce++": 0.5}  # name -> first alpha


def experiment(models: Models, algorithm: str, with_tango: bool, machine: Machine, name: str) -> str:
    """One training run: fine-tuning of the generator, then reinforcement learning."""
    what = f"{algorithm.upper()} {'with Tango' if with_tango else 'alone (outcome rewards)'}"
    verifier = (
        f"""
verifier:
  model: {{path: models/{models.verifier}}}
  parallel: {{tensor: 4}}
  optimizer: {{learning_rate: 1.0e-6}}
  max_prompt_tokens: 4608
  max_response_tokens: 3072
  micro_batch_tokens: 8192
  recompute_activations: {str(machine.recompute).lower()}
"""
        if with_tango
        else "\nverifier: null\n"
    )
    schedule = (
        """  verifier_warmup_steps: 40
  generator_steps_per_cycle: 3
  verifier_steps_per_cycle: 1
"""
        if with_tango
        else """  verifier_warmup_steps: 0
  verifier_steps_per_cycle: 0
"""
    )
    return f"""# {models.title}: {what}, on {machine.title} (docs/reproduce.md).
# Written by tools/make_paper_configs.py. 200 generator steps; the paper's best table has 300 (train.generator_steps=300).
seed: 0

run:
  dir: runs/paper/{name}

task:
  name: math

data:
  train: data/eurus_rl.parquet
  eval: data/eval/math500.parquet
  eval_questions: 500

# Once for all experiments of this generator: the folder that it writes is where the others start.
sft:
  generator:
    data: data/teacher/train.parquet
    output: models/{models.fine_tuned}
    init: {{path: models/{models.generator}}}
    steps: 800
    batch_size: 64
    optimizer: {{learning_rate: 5.0e-6, schedule: cosine, warmup_ratio: 0.1}}

generator:
  model: {{path: models/{models.fine_tuned}}}
  parallel: {{tensor: 4}}
  optimizer: {{learning_rate: 1.0e-6}}
  max_prompt_tokens: 1024
  max_response_tokens: 3072
  micro_batch_tokens: 8192
  recompute_activations: {str(machine.recompute).lower()}
{verifier}
algorithm:
  name: {algorithm}
  alpha_start: {ALGORITHMS[algorithm] if with_tango else 0.0}
  alpha_end: {"0.001" if with_tango else "0.0"}
  kl_coef: 0.001
  format_weight: 0.8
  class_ema_decay: 0.8

train:
{schedule}  generator_steps: 200
  questions_per_step: 256
  rollouts_per_question: 5
  eval_every: 20
  dump_every: 20

rollout:
  tensor: 2
  max_num_seqs: 256
  max_batched_tokens: 8192
  gpu_memory_utilization: {machine.engine_share}

checkpoint:
  every_steps: 20
  keep: 20

launch:
  nodes: {machine.nodes}
  tasks_per_node: {machine.gpus}
  device: cuda
  dtype: bfloat16
"""


TEACHER = """# Step-tagged solutions by Llama-3.1-70B-Instruct for the 113K mathematics prompts of Eurus-2-SFT-Data.
# One job: tango submit teacher configs/paper/teacher.yaml. An array of 8: see docs/reproduce.md.
# Written by tools/make_paper_configs.py.
seed: 0

run:
  dir: runs/paper/teacher_${teacher.shard}

task:
  name: math

data: # not read by this stage
  train: data/eurus_sft.parquet
  eval: data/eval/math500.parquet

teacher:
  questions: data/eurus_sft.parquet
  output: data/teacher
  temperature: 0.1
  top_p: 0.5
  test_rows: 500
  chunk_questions: 2048
  num_shards: 1
  shard: 0

generator:
  model: {path: models/Llama-3.1-70B-Instruct}
  parallel: {tensor: 8}
  max_prompt_tokens: 2048
  max_response_tokens: 3072

train:
  verifier_warmup_steps: 0
  verifier_steps_per_cycle: 0

rollout:
  tensor: 8
  max_num_seqs: 256
  max_batched_tokens: 8192
  gpu_memory_utilization: 0.9

launch:
  nodes: 1
  tasks_per_node: 8
  device: cuda
  dtype: bfloat16
"""


def evaluation(models: Models, name: str, *, sampled: bool) -> str:
    """Greedy pass@1 on all sets and ProcessBench; or sixteen samples with votes and the verifier's choice."""
    what = (
        "16 samples of each question: pass@k, majority vote, best of 16 and weighted vote by the verifier"
        if sampled
        else "greedy pass@1 on the five math sets and the four out-of-domain sets, and ProcessBench"
    )
    sets = (
        "[math500, aime24, aime25, amc23, olympiadbench]"
        if sampled
        else "[math500, aime24, aime25, amc23, olympiadbench, boardgameqa, cruxeval, strategyqa, tablebench, processbench]"
    )
    samples = "\n  samples: 16\n  temperature: 1.0\n  verifier_samples: 4" if sampled else "\n  use_verifier: false"
    return f"""# {models.title}: {what}.
# Evaluates the last checkpoint of the run that eval.checkpoints_of names; eval.checkpoints=all for all of them, and
# eval.checkpoints_of=null generator.model.path=FOLDER for any Hugging Face folder. Written by tools/make_paper_configs.py.
seed: 0

run:
  dir: runs/paper/{name}

task:
  name: math

data: # not read by this stage
  train: data/eurus_rl.parquet
  eval: data/eval/math500.parquet

eval:
  data: data/eval
  benchmarks: {sets}
  checkpoints_of: runs/paper/{name.split("_")[1]}_grpo_tango{samples}

generator:
  model: {{path: models/{models.fine_tuned}}}
  parallel: {{tensor: 4}}
  max_prompt_tokens: 1024
  max_response_tokens: 3072

verifier:
  model: {{path: models/{models.verifier}}}
  parallel: {{tensor: 4}}
  max_prompt_tokens: 4608
  max_response_tokens: 3072

rollout:
  tensor: 1
  max_num_seqs: 256
  max_batched_tokens: 8192
  gpu_memory_utilization: 0.4

launch:
  nodes: 1
  tasks_per_node: 4
  device: cuda
  dtype: bfloat16
"""


LAST_LETTER = {
    "tango": ("Tango: both are trained", "", "", 10, 1),
    "grpo": ("GRPO alone, without a verifier", "", "verifier: null", 0, 0),
    "generator_frozen": ("the generator is frozen, the verifier learns", "\n  trainable: false", "", 10, 1),
    "verifier_frozen": ("the verifier is frozen, the generator learns", "", "  trainable: false", 0, 0),
}


def last_letter(kind: str) -> str:
    """One of the four runs of Section 4.3, with tiny models from scratch: two CPU ranks, under an hour."""
    title, generator_extra, verifier_extra, warmup, verifier_steps = LAST_LETTER[kind]
    if verifier_extra.startswith("verifier"):
        verifier, verifier_sft = verifier_extra, ""
    else:
        extra = f"\n{verifier_extra}" if verifier_extra else ""
        verifier = f"""verifier:
  model: {{path: "${{run.dir}}/models/verifier_sft"}}
  optimizer: {{learning_rate: 2.0e-5}}
  max_prompt_tokens: 400
  max_response_tokens: 340
  micro_batch_tokens: 16384{extra}"""
        verifier_sft = """
  verifier:
    data: ${run.dir}/data/sft_verifier.parquet
    output: ${run.dir}/models/verifier_sft
    init: *tiny
    steps: 600
    batch_size: 64
    optimizer: {learning_rate: 1.0e-3, schedule: cosine, warmup_ratio: 0.1}"""
    alpha = "alpha_start: 0.0\n  alpha_end: 0.0" if kind == "grpo" else "alpha_start: 0.1\n  alpha_end: 0.001"
    return f"""# Last-letter concatenation (paper, Section 4.3): {title}.
# Ranges of words and letters are the paper's, except that fine-tuning covers 2-6 words with a teacher that slips
# (docs/reproduce.md says why). Tiny models from scratch on two CPU ranks. Written by tools/make_paper_configs.py.
seed: 0

run:
  dir: runs/paper/last_letter_{kind}

task:
  name: last_letter
  last_letter:
    sft_words: [2, 6]
    sft_letters: [3, 6]
    train_words: [2, 10]
    train_letters: [3, 10]
    eval_words: [2, 12]
    eval_letters: [3, 12]
    generator_slip: 0.5
    verifier_slip: 0.25

data:
  train: ${{run.dir}}/data/train.parquet
  eval: ${{run.dir}}/data/eval.parquet
  eval_questions: 512

sft:
  generator:
    data: ${{run.dir}}/data/sft_generator.parquet
    output: ${{run.dir}}/models/generator_sft
    init: &tiny
      path: ${{run.dir}}/models/untrained
      build: {{family: qwen2, hidden_size: 192, intermediate_size: 512, num_layers: 4, num_heads: 6, num_kv_heads: 2, max_position: 1024}}
    steps: 300
    batch_size: 64
    optimizer: {{learning_rate: 1.0e-3, schedule: cosine, warmup_ratio: 0.1}}{verifier_sft}

generator:
  model: {{path: "${{run.dir}}/models/generator_sft"}}
  optimizer: {{learning_rate: 5.0e-5, schedule: exponential, final_ratio: 0.1}}
  max_prompt_tokens: 180
  max_response_tokens: 340
  micro_batch_tokens: 16384{generator_extra}

{verifier}

algorithm:
  name: grpo
  {alpha}
  kl_coef: 0.0

train:
  verifier_warmup_steps: {warmup}
  generator_steps: 200
  generator_steps_per_cycle: 3
  verifier_steps_per_cycle: {verifier_steps}
  questions_per_step: 64
  rollouts_per_question: 5
  eval_every: 20
  dump_every: 50

rollout:
  tensor: 1
  max_num_seqs: 320
  max_batched_tokens: 8192
  kv_cache_gb: 1.0

checkpoint:
  every_steps: 40

launch:
  nodes: 1
  tasks_per_node: 2
  device: cpu
  dtype: float32
"""


def all_files() -> dict[str, str]:
    """Path below configs/paper -> text."""
    files = {"teacher.yaml": TEACHER}
    for model_name, models in MODELS.items():
        files[f"eval_{model_name}.yaml"] = evaluation(models, f"eval_{model_name}", sampled=False)
        files[f"eval_{model_name}_samples.yaml"] = evaluation(models, f"eval_{model_name}_samples", sampled=True)
        for algorithm in ALGORITHMS:
            for with_tango in (True, False):
                name = f"{model_name}_{algorithm.replace('++', '_pp')}_{'tango' if with_tango else 'vanilla'}"
                for size, machine in MACHINES.items():
                    files[f"{size}/{name}.yaml"] = experiment(models, algorithm, with_tango, machine, name)
    for kind in LAST_LETTER:
        files[f"last_letter_{kind}.yaml"] = last_letter(kind)
    return files


def main() -> int:
    """Write all files and remove what is no longer among them."""
    files = all_files()
    for path in FOLDER.rglob("*.yaml") if FOLDER.is_dir() else []:
        if path.relative_to(FOLDER).as_posix() not in files:
            path.unlink()
    for name, text in files.items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"{len(files)} configs in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
