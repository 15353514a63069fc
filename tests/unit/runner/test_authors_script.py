"""docs/authors_script.md has every setting of the authors' script, and the recipes have what it says."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tango_hpc.base.config import Config
from tests.helpers.recipes import recipe as of_paper

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/authors_script.md").read_text()
# What scripts/run_rl_tango.sh of github.com/kaiwenzha/RL-Tango (commit 411ed83) assigns.
VARIABLES = (
    "ACTOR_LR_WARMUP_STEPS_RATIO ADV_ESTIMATOR ALPHA_MIN ALPHA_SCHEDULE ALPHA_START APPLY_CHAT_TEMPLATE CRITIC_LR "
    "CRITIC_LR_WARMUP_STEPS_RATIO CRITIC_WARMUP ENABLE_GRAD_CHECKPOINTING ENTROPY_COEFF EXPERIMENT_NAME "
    "EXP_TARGET_FRAC GENERATOR_FORMAT_REWARD_WEIGHT GENERATOR_LR GENERATOR_MAX_PROMPT_LENGTH "
    "GENERATOR_MAX_RESPONSE_LENGTH GENERATOR_MODEL_PATH GENERATOR_OUTCOME_REWARD_WEIGHT "
    "GENERATOR_PROCESS_REWARD_WEIGHT GENERATOR_WARMUP_STEPS GPU_MEMORY_UTILIZATION GROUND_TRUTH_WEIGHT "
    "KL_CTRL_KL_COEF KL_LOSS_COEF KL_LOSS_TYPE LOG_DIR LOG_PROB_MICRO_BATCH_SIZE_PER_GPU MAX_NUM_BATCHED_TOKENS "
    "NNODES N_GENERATOR_STEPS N_GPUS_PER_NODE N_VERIFIER_INFERENCE_ROLLOUTS N_VERIFIER_STEPS "
    "PPO_MICRO_BATCH_SIZE_PER_GPU PPO_MINI_BATCH_SIZE PROJECT_NAME REWEIGHT_METHOD REWEIGHT_VERIFIER_REWARDS "
    "ROLLOUT_N SAVE_FREQ TENSOR_MODEL_PARALLEL_SIZE TEST_FREQ TIMESTAMP TOTAL_EPOCHS TOTAL_TRAINING_STEPS "
    "TRAIN_BATCH_SIZE USE_KL_LOSS USE_REMOVE_PADDING VAL_BEFORE_TRAIN VERIFIER_ACTOR_LR_WARMUP_STEPS_RATIO "
    "VERIFIER_CORRECTNESS_REWARD_WEIGHT VERIFIER_CRITIC_LR VERIFIER_CRITIC_LR_WARMUP_STEPS_RATIO "
    "VERIFIER_CRITIC_WARMUP VERIFIER_ENABLE VERIFIER_FORMAT_REWARD_WEIGHT VERIFIER_LABEL_EMA_DECAY VERIFIER_LR "
    "VERIFIER_MAX_PROMPT_LENGTH VERIFIER_MAX_RESPONSE_LENGTH VERIFIER_MODEL_PATH VERIFIER_TEMPERATURE "
    "VERIFIER_TRAINABLE VERIFIER_WARMUP_STEPS "
)
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("|") and "---" not in line]
OURS = [
    (match[1], value.strip(), remark)
    for _, _, key, value, remark in ROWS
    if (match := re.fullmatch(r"`([\w.]+)`", key.strip()))
]


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe(name: str) -> Config:
    return of_paper(f"authors/qwen_{name}_tango")


def setting(config: Config, key: str) -> Any:
    """The value of a key; a path as it stands in the recipe, seen from the working directory."""
    value = reduce(getattr, key.split("."), config)
    return value.relative_to(Path.cwd()) if isinstance(value, Path) and value.is_relative_to(Path.cwd()) else value


def test_no_setting_of_the_script_is_missing() -> None:
    named = {name for theirs, *_ in ROWS for name in re.findall(r"`([A-Z_]+)`", theirs)}
    assert sorted(named) == VARIABLES.split() and len(named) == 65


def test_the_recipe_has_what_the_page_says() -> None:
    config = recipe("grpo")
    assert len(OURS) > 50
    assert [(key, str(setting(config, key))) for key, _, _ in OURS] == [(key, value) for key, value, _ in OURS]
    for shared in ("rollout.tensor", "rollout.gpu_memory_utilization", "chat_template", "micro_batch_tokens"):
        assert setting(config.generator, shared) == setting(config.verifier, shared)


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp"])
def test_the_other_recipes_differ_where_the_page_says(name: str) -> None:
    grpo, other = recipe("grpo"), recipe(name)
    for key, value, remark in OURS:
        told = re.search(r"REINFORCE\+\+: ([^\s,]+)", remark) if name == "reinforce_pp" else None
        if key == "algorithm.advantages.generator.name":
            assert setting(other, key) != setting(grpo, key)
        else:
            assert str(setting(other, key)) == (told[1] if told else value), key


def test_the_script_takes_as_many_steps() -> None:
    train = recipe("grpo").train
    cycles = train.generator_steps // train.generator_steps_per_cycle
    assert train.verifier_warmup_steps + train.generator_steps + cycles * train.verifier_steps_per_cycle == 440
