"""What engines start with where `rollout.max_num_seqs` and `rollout.gpu_memory_utilization` are null, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tango_hpc.base.config import Config, load_config
from tango_hpc.commands.plan_report import make_plan, show_plan
from tango_hpc.models.engine.capacity import (
    GIB,
    LARGEST_GRAPH,
    MOST_OF_A_GPU,
    cache_problem,
    engine_memory,
    resident_gpu_bytes,
    role_engine,
)
from tango_hpc.stages import teacher as teacher_module
from tango_hpc.stages.evaluate import _for_evaluation
from tango_hpc.stages.stage import EVAL, TEACHER
from tango_hpc.stages.teacher import Teacher
from tests.helpers.recipes import CONFIGS, recipe

GPU = 80 * GIB


def load(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / name, overrides) if name.endswith(".yaml") else recipe(name, overrides)


def test_an_engine_fills_what_is_free_of_its_share() -> None:
    config = load("1x8/qwen_grpo_tango")
    memory, engine = engine_memory(config, "generator", GPU), role_engine(config, "generator")
    assert memory.total + resident_gpu_bytes(config) == int(MOST_OF_A_GPU * GPU) == int(0.88 * 80 * GIB)
    assert memory.weights == engine.weights and memory.activations == engine.workspace(8192, 320)
    # Of each sequence: a count of 4 bytes and two masks of a bit for each of 151,936 or 152,064 tokens.
    vocabulary = engine.shape.vocab_size
    assert vocabulary % 32 == 0 and memory.tables == 320 * vocabulary * (4 + 2 / 8)
    half = load("1x8/qwen_grpo_tango", "generator.rollout.gpu_memory_utilization=0.5")
    assert memory.cache - engine_memory(half, "generator", GPU).cache == pytest.approx(0.38 * GPU, abs=1)


def test_an_engine_takes_its_share_of_the_responses_at_once() -> None:
    """1,280 solutions and as many verifications, and 500 questions of an evaluation, for 4 engines of 2 GPUs."""
    config = load("1x8/qwen_grpo_tango")
    assert [engine_memory(config, role, GPU).num_seqs for role in config.roles] == [320, 320]
    fewer = load("1x8/qwen_grpo_tango", "train.questions_per_step=40", "data.eval_questions=500")
    assert engine_memory(fewer, "generator", GPU).num_seqs == 125  # of the evaluation; of a step 50
    several = load("1x8/qwen_grpo_tango", "train.questions_per_step=40", "train.verifications_per_solution=3")
    assert [engine_memory(several, role, GPU).num_seqs for role in config.roles] == [125, 150]
    told = load("1x8/qwen_grpo_tango", "generator.rollout.max_num_seqs=700")
    assert engine_memory(told, "generator", GPU).num_seqs == 700


def test_no_more_at_once_than_a_graph_and_a_batch_take() -> None:
    four = "1x4/qwen_grpo_vanilla"
    assert engine_memory(load(four), "generator", GPU).num_seqs == LARGEST_GRAPH == 512  # of 640
    small = load(four, "generator.rollout.max_batched_tokens=300")
    assert engine_memory(small, "generator", GPU).num_seqs == 300


def test_no_more_at_once_than_the_cache_holds_at_half_their_length() -> None:
    config = load("1x8/llama_grpo_tango")
    memory, engine = engine_memory(config, "verifier", GPU), role_engine(config, "verifier")
    assert engine.cache_bytes_per_token == 2 * 32 * 4 * 128 * 2  # k and v, layers, heads of a rank, their size, bf16
    half = (4608 + 3072) // 2 * engine.cache_bytes_per_token
    assert memory.num_seqs < 320 and memory.num_seqs * half <= memory.cache < (memory.num_seqs + 1) * half
    # One more would take its row of logits and of the tables from the cache too.
    more = load("1x8/llama_grpo_tango", f"verifier.rollout.max_num_seqs={memory.num_seqs + 1}")
    assert engine_memory(more, "verifier", GPU).cache < (memory.num_seqs + 1) * half
    fixed = load("1x8/llama_grpo_tango", f"verifier.rollout.kv_cache_gb={10.5 * half / GIB}")
    assert engine_memory(fixed, "verifier", GPU).num_seqs == 10


def test_a_cpu_resolves_the_number_of_sequences_too(tmp_path: Path) -> None:
    asked = (f"run.dir={tmp_path}", "generator.rollout.max_num_seqs=null")
    config = load("quickstart.yaml", *asked)
    memory = engine_memory(config, "generator", 0)
    assert (memory.num_seqs, memory.tables, memory.cache) == (256, 0, GIB // 2)  # 512 questions for two engines
    # 2 x 4 layers x 2 heads x 32 numbers in fp32 are 2,048 bytes a token: 0.01 GiB are 5,242 tokens, 43 times 120
    tight = load("quickstart.yaml", *asked, "generator.rollout.kv_cache_gb=0.01")
    assert engine_memory(tight, "generator", 0).num_seqs == 43


def test_the_plan_says_how_many_waves_a_rollout_takes() -> None:
    config = load("1x4/qwen_grpo_tango", "data.eval_questions=1100")
    plan = make_plan(config, gpu_gb=80, node_gb=None)
    for role, longest in (("generator", 2), ("verifier", 3)):
        numbers = plan["batch"][role]
        assert (numbers["rollouts_per_engine"], numbers["evaluations_per_engine"]) == (640, 550)
        assert (numbers["max_num_seqs"], numbers["gpu_share"]) == (512, 0.88)
        assert (numbers["waves"], numbers["evaluation_waves"], numbers["longest_waves"]) == (2, 2, longest)
    console = Console(record=True, width=400)
    show_plan(plan, console)
    text = console.export_text()
    assert "takes 512 sequences at once and 88% of the GPU: its 640 responses of a step in 2 waves, its 550 of" in text
    assert "in 2 waves (3 where all are as long as allowed)" in text
    once = make_plan(load("1x8/qwen_grpo_tango"), gpu_gb=80, node_gb=None)["batch"]["generator"]
    assert (once["max_num_seqs"], once["waves"], once["evaluation_waves"]) == (320, 1, 1)


def test_where_nothing_is_trained_the_plan_does_not_know_the_waves() -> None:
    plan = make_plan(load("teacher"), gpu_gb=80, node_gb=None, stage=TEACHER)
    numbers = plan["batch"]["generator"]
    assert 400 < numbers["max_num_seqs"] <= LARGEST_GRAPH
    assert numbers["waves"] is numbers["evaluation_waves"] is numbers["longest_waves"] is None
    console = Console(record=True, width=400)
    show_plan(plan, console)
    assert f"takes {numbers['max_num_seqs']} sequences at once and 88% of the GPU; its cache" in console.export_text()


def test_a_gpu_that_is_too_small_is_refused_with_the_share() -> None:
    problem = cache_problem(load("1x8/qwen_grpo_tango"), "verifier", 16 * GIB)
    assert problem is not None
    assert "verifier.rollout.gpu_memory_utilization 0.88 leaves nothing for the KV cache" in problem


@pytest.mark.parametrize("name", ["eval_qwen", "eval_llama"])
def test_an_evaluation_starts_its_engines_as_the_plan_says(name: str) -> None:
    """Without ProcessBench no verifier is asked, and no process of it keeps anything on the GPU."""
    for overrides, roles in (([], 2), (["eval.benchmarks=[math500]"], 1)):
        config = load(name, *overrides)
        planned = make_plan(config, gpu_gb=80, node_gb=None, stage=EVAL)["batch"]
        started = {role: engine_memory(_for_evaluation(config), role, GPU) for role in planned}
        assert len(planned) == roles
        for role, memory in started.items():
            tokens = memory.cache // role_engine(config, role).cache_bytes_per_token
            assert (memory.num_seqs, tokens) == (planned[role]["max_num_seqs"], planned[role]["kv_cache_tokens"])


def test_a_teacher_starts_its_engine_as_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = f"teacher={{questions: {tmp_path}/questions.parquet, output: {tmp_path}/out}}"
    config = load("1x8/qwen_grpo_tango", asked)
    started: list[Config] = []
    monkeypatch.setattr(teacher_module, "Generator", lambda _name, config, *_: started.append(config))
    monkeypatch.setattr(teacher_module, "load_models", lambda *_: {"generator": None})
    unused: Any = None
    Teacher(config, unused, unused, unused)
    planned = make_plan(config, gpu_gb=80, node_gb=None, stage=TEACHER)["batch"]["generator"]
    memory = engine_memory(started[0], "generator", GPU)
    tokens = memory.cache // role_engine(config, "generator").cache_bytes_per_token
    assert (memory.num_seqs, tokens) == (planned["max_num_seqs"], planned["kv_cache_tokens"])
    assert not started[0].generator.trainable and started[0].generator.temperature == config.teacher.temperature  # type: ignore[union-attr]
