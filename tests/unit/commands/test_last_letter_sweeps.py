"""The sweeps of last letter and of addition: every cell is a run that can start, and the report tells their
arms apart.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tango_hpc.base.config import Config, config_to_yaml, load_config
from tango_hpc.base.config.roles import TinyModelConfig
from tango_hpc.commands.plan_report import make_plan
from tango_hpc.commands.sweep import load_sweep
from tango_hpc.questions.tasks.tiny import build_tiny_model
from tango_hpc.report.comparison import arms_of

CONFIGS = Path(__file__).parents[3] / "configs/experiments/last_letter"
SWEEPS = {"addition": CONFIGS.parent / "addition.yaml"}  # those that lie elsewhere
TINY = TinyModelConfig(
    family="qwen2", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=2, max_position=4096
)
ARMS = {
    "figure4": ["Tango, GRPO", "GRPO alone", "generator frozen, GRPO", "verifier frozen, GRPO"],
    "figure4_1_5b": ["Tango, GRPO", "GRPO alone", "generator frozen, GRPO", "verifier frozen, GRPO"],
    "eight_questions": ["Tango, GRPO", "GRPO alone", "generator frozen, GRPO", "verifier frozen, GRPO"],
    "tuning": [
        "GRPO alone, learning_rate=0.0001",
        "GRPO alone, learning_rate=5e-05",
        "GRPO alone, learning_rate=0.0002",
        "GRPO alone, learning_rate=0.0001, questions_per_step=8",
        "RLOO alone",
        "Tango, GRPO, learning_rate=0.0001",
        "Tango, GRPO, learning_rate=5e-05",
        "Tango, GRPO, learning_rate=0.0002",
        "Tango, GRPO, learning_rate=0.0001, questions_per_step=8",
    ],
    "quickstart": ["Tango, GRPO", "GRPO alone"],
    "common_answers": ["Tango, GRPO", "GRPO alone", "generator frozen, GRPO", "verifier frozen, GRPO"],
    "addition": ["Tango, GRPO", "GRPO alone"],
    "ablations": [
        "Tango, GRPO",
        "Tango, GRPO, alpha_schedule=constant",
        "Tango, GRPO, alpha_start=0.0, alpha_end=0.0",
        "Tango, GRPO, verifier_draws=1",
        "Tango, GRPO, class_weights=off, verifier_draws=1",
        "Tango, GRPO, name=merged",
        "Tango, GRPO, verifier_warmup_steps=15",
        "Tango, GRPO, generator_steps_per_cycle=1",
        "Tango, GRPO, generator_steps_per_cycle=10",
    ],
    "independent_verdicts": ["Tango, GRPO"],
    "algorithms": [
        "Tango, RLOO",
        "verifier frozen, RLOO",
        "RLOO alone",
        "Tango, REINFORCE++, alpha_start=0.5, alpha_end=0.05",
        "Tango, REINFORCE++, alpha_start=0.1, alpha_end=0.01",
        "REINFORCE++ alone",
    ],
    "four_and_five_words": [
        "GRPO alone",
        "Tango, GRPO",
        "Tango, GRPO, verifier_warmup_steps=0",
        "Tango, GRPO, min_verifier_j=0.1",
        "Tango, GRPO, verifier_draws=8",
        "Tango, GRPO, alpha_end=0.05, alpha_schedule=exponential, verifier_draws=8",
        "Tango, GRPO, alpha_end=0.05, alpha_schedule=exponential, verifier_warmup_steps=0, verifier_draws=8",
        "Tango, GRPO, class_weights=off",
        "verifier frozen, GRPO, alpha_schedule=constant",
        "verifier frozen, GRPO, alpha_end=0.05, alpha_schedule=exponential",
    ],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the start checkpoints lie that the sweeps name."""
    folder = tmp_path_factory.mktemp("work")
    starts = ("last_letter/start/models/generator", "last_letter/start/models/verifier")
    starts += ("last_letter/start_1_5b/models/generator", "last_letter/start_1_5b/models/verifier")
    starts += ("last_letter/rare/start/models/generator", "last_letter/rare/start/models/verifier")
    starts += ("quickstart/models/generator_sft", "quickstart/models/verifier_sft")
    starts += ("last_letter/rare/independent/models/verifier",)
    starts += ("addition/models/generator_sft", "addition/models/verifier_sft")
    for path in starts:
        build_tiny_model(folder / "runs" / path, TINY, seed=0)
    return folder


@pytest.mark.parametrize("name", ARMS)
def test_each_cell_can_start_and_is_an_arm_over_at_least_three_seeds(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    cells = load_sweep(SWEEPS.get(name, CONFIGS / f"{name}.yaml")).cells
    arms = arms_of([yaml.safe_load(config_to_yaml(cell.config)) for cell in cells])
    seeds = [0, 1, 2, 3, 4, 5] if name == "eight_questions" else [0, 1, 2]
    assert arms == [arm for arm in ARMS[name] for _ in seeds]
    assert [cell.seed for cell in cells] == seeds * len(ARMS[name])
    starts: set[tuple[Path, ...]] = {tuple(role.model.path for role in cell.config.roles.values()) for cell in cells}
    assert len({models[0] for models in starts}) == 1 and len({models[1] for models in starts if len(models) > 1}) == 1


def test_the_arms_of_figure_4_differ_in_what_is_trained_only(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    shared = []
    for cell in load_sweep(CONFIGS / "figure4.yaml").cells[::3]:
        run = cell.config.model_dump()
        run["train"] = {key: value for key, value in run["train"].items() if not key.startswith("verifier_")}
        del run["algorithm"]["alpha_start"], run["algorithm"]["alpha_end"]
        del run["verifier"], run["generator"]["trainable"], run["run"], run["data"]  # the data by the run's folder
        shared.append(run)
    assert shared[1:] == shared[:1] * 3


def test_the_data_at_the_papers_size_are_the_papers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    config = load_config(CONFIGS / "qwen_1_5b.yaml")
    made = config.task.last_letter
    assert made is not None and made.dictionary is not None
    assert (made.sft_words, made.sft_letters) == ((2, 4), (3, 6))
    assert (made.train_words, made.train_letters) == ((2, 10), (3, 10))
    assert (made.eval_words, made.eval_letters) == ((2, 12), (3, 12))
    assert (config.algorithm.kl_coef, config.train.verifier_warmup_steps) == (0.001, 40)
    assert (config.train.questions_per_step, config.generator.optimizer.schedule) == (64, "exponential")


def test_tiny_models_train_on_words_of_the_dictionary_with_the_papers_kl(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    config = load_config(CONFIGS / "tango.yaml")
    made = config.task.last_letter
    assert made is not None and made.dictionary is not None
    assert made.sft_words == made.train_words == made.eval_words
    assert made.sft_letters == made.train_letters == made.eval_letters
    assert (config.algorithm.kl_coef, config.generator.optimizer.schedule) == (0.001, "exponential")


def planned(config: Config) -> bool:
    return make_plan(config, gpu_gb=80.0, node_gb=None)["fits"]


def test_the_papers_size_fits_one_gpu_of_80_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without models: sizes are those of the published ones
    config = load_config(CONFIGS / "qwen_1_5b.yaml")
    assert config.world_size == 1 and config.launch.device == "cuda"
    assert config.task.last_letter is not None and config.task.last_letter.worded
    assert planned(config)
    assert not planned(load_config(CONFIGS / "qwen_1_5b.yaml", ["generator.micro_batch_tokens=65536"]))
