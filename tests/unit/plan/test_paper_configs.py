"""Every experiment of the paper has a config that loads, says what the paper says, and what its name says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tango_hpc.base.config import Config
from tango_hpc.commands.plan_report import make_plan
from tango_hpc.method.hooks import load_hook
from tango_hpc.method.role_schedule import role_schedule
from tango_hpc.stages.stage import EVAL, TEACHER
from tests.helpers.recipes import AUTHORS, EVALUATIONS, EXPERIMENTS, LAYERS, recipe

ROOT = Path(__file__).parents[3]
MODELS = json.loads((ROOT / "tests/data/hf_configs.json").read_text())
# Parts of a name -> how the experiment differs from the paper's main run, 4x8/qwen_grpo_tango.
DIFFERENCES = {
    "1x8": ["launch.nodes=1"],
    "1x4": [
        "launch.nodes=1",
        "launch.tasks_per_node=4",
        "generator.recompute=selective",
    ],
    "llama": [
        "sft.generator.init.path=models/Llama-3.1-8B-Instruct",
        "sft.generator.output=models/llama-3.1-8b-sft",
        "verifier.model.path=models/Llama-3.1-8B-Instruct",
    ],
    "rloo": [
        "algorithm.advantages.generator.name=rloo",
        "algorithm.advantages.generator.settings.step_scale=10.0",
        "algorithm.advantages.verifier.name=rloo",
    ],
    "reinforce_pp": [
        "algorithm.advantages.generator.name=reinforce_plus_plus",
        "algorithm.advantages.verifier.name=reinforce_plus_plus",
        "algorithm.alpha_start=0.5",
    ],
    "vanilla": [
        "verifier=null",
        "algorithm.alpha_start=0.0",
        "algorithm.alpha_end=0.0",
        "train.verifier_warmup_steps=0",
        "train.verifier_steps_per_cycle=0",
    ],
}
FINE_TUNED = {
    "qwen2.5-math-7b-sft": "Qwen2.5-Math-7B",
    "qwen2.5-math-7b-sft-authors": "Qwen2.5-Math-7B",
    "llama-3.1-8b-sft": "Llama-3.1-8B-Instruct",
}


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model folders that the configs name, with config.json alone, below the working directory."""
    for name, config in {**MODELS, **{new: MODELS[base] for new, base in FINE_TUNED.items()}}.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_differ_from_the_main_run_in_what_their_names_say(name):
    differences = [override for part, overrides in DIFFERENCES.items() if part in name for override in overrides]
    same_place = ["run.dir=runs/mine"]
    expected = recipe("4x8/qwen_grpo_tango", [*differences, *same_place])
    assert recipe(name, same_place) == expected
    assert expected.verifier is None or expected.verifier.rollout == expected.generator.rollout
    for role in expected.roles.values():
        assert (role.parallel, role.recompute) == (
            expected.generator.parallel,
            "selective" if "1x4" in name else "none",
        )


@pytest.mark.parametrize("name", LAYERS)
def test_every_config_loads(name):
    recipe(name)


def names_of(config: Config) -> set[str]:
    """The files that the advantages of the roles come from."""
    both = config.algorithm.advantages
    return {both.generator.name, both.verifier.name}


def test_all_experiments_are_there_for_all_machines():
    assert len(EXPERIMENTS) == 2 * 3 * 2 * 3
    for size, ranks in (("4x8", 32), ("1x8", 8), ("1x4", 4)):
        assert {recipe(name).world_size for name in EXPERIMENTS if name.startswith(size)} == {ranks}


def test_the_main_run_says_what_the_paper_says_and_what_the_docs_say_of_the_rest():
    """From the paper (its Section 4 and Appendix D), and ours of docs/reproduce.md where it states nothing."""
    config = recipe("4x8/qwen_grpo_tango")
    assert (config.task.name, names_of(config), config.seed) == ("math", {"grpo"}, 0)
    assert (config.launch.nodes, config.launch.tasks_per_node, config.launch.dtype) == (4, 8, "bfloat16")
    assert config.generator.model.path == config.sft.generator.output == Path("models/qwen2.5-math-7b-sft").absolute()
    assert config.sft.generator.init.path == Path("models/Qwen2.5-Math-7B").absolute()
    assert config.verifier.model.path == Path("models/Qwen2.5-7B").absolute()
    for role, lengths in ((config.generator, (1024, 3072)), (config.verifier, (4608, 3072))):
        assert (role.max_prompt_tokens, role.max_response_tokens, role.micro_batch_tokens) == (*lengths, 8192)
        assert (role.temperature, role.top_p, role.chat_template, role.trainable) == (1.0, 1.0, "auto", True)
        assert role.model.reference_path is None and role.prompt is None
        adam = role.optimizer
        assert (adam.learning_rate, adam.schedule, adam.warmup_ratio) == (1e-6, "constant", 0.0)
        assert (adam.beta1, adam.beta2, adam.epsilon) == (0.9, 0.95, 1e-8)
        assert (adam.weight_decay, adam.clip_grad_norm) == (0.0, 1.0)
        assert (role.parallel.tensor, role.parallel.pipeline, role.parallel.sequence) == (2, 1, True)
        assert role.recompute == "none"
        rollout = role.rollout
        assert (rollout.tensor, rollout.gpu_memory_utilization) == (2, None)
        assert (rollout.max_num_seqs, rollout.max_batched_tokens) == (None, 8192)
    train, algorithm = config.train, config.algorithm
    assert (train.questions_per_step, train.rollouts_per_question, train.updates_per_batch) == (256, 5, 1)
    assert (train.verifier_warmup_steps, train.generator_steps, train.max_logprob_gap) == (40, 200, 0.05)
    assert (train.generator_steps_per_cycle, train.verifier_steps_per_cycle) == (3, 1)
    schedule = role_schedule(config)
    assert schedule[:44] == ["verifier"] * 40 + ["generator"] * 3 + ["verifier"]
    # 66 cycles of 3 and 1, then the last 2 of the generator, which no verifier step follows
    assert (schedule.count("generator"), schedule.count("verifier")) == (200, 40 + 66)
    assert schedule[-3:] == ["verifier", "generator", "generator"]
    assert (algorithm.alpha_start, algorithm.alpha_end, algorithm.alpha_schedule) == (0.1, 1e-3, "exponential")
    assert load_hook(algorithm.loss).settings == {"average": "response", "clip_low": 0.2, "clip_high": 0.2}
    assert (algorithm.kl_coef, algorithm.kl_estimator, algorithm.entropy_coef) == (0.001, "k3", 0.0)
    assert (algorithm.correction.name, load_hook(algorithm.correction).settings) == ("tis", {"cap": 2.0})
    assert load_hook(algorithm.advantages.generator).settings == {"max_draws": 1, "step_scale": 1.0}
    assert algorithm.ground_truth_weight == 1.0
    assert (algorithm.generator_format_weight, algorithm.format_weight) == (0.0, 0.8)
    assert (algorithm.verifier_format, algorithm.class_weights, algorithm.class_ema_decay) == (
        "authors",
        "sqrt_inverse",
        0.8,
    )
    sft = config.sft.generator
    assert config.sft.verifier is None and (sft.steps, sft.batch_size) == (800, 64)
    assert (sft.optimizer.learning_rate, sft.optimizer.schedule, sft.optimizer.warmup_ratio) == (5e-6, "cosine", 0.1)
    assert (sft.optimizer.beta2, sft.optimizer.weight_decay, sft.optimizer.final_ratio) == (0.95, 0.0, 0.1)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_have_the_papers_settings(name):
    config = recipe(name)
    train, algorithm = config.train, config.algorithm
    assert (train.generator_steps, train.questions_per_step, train.rollouts_per_question) == (200, 256, 5)
    assert algorithm.kl_coef == 0.001 and config.generator.optimizer.learning_rate == 1e-6
    assert config.generator.temperature == config.generator.top_p == 1.0
    sft = config.sft.generator
    assert (sft.steps, sft.batch_size, sft.optimizer.learning_rate) == (800, 64, 5e-6)
    assert (sft.optimizer.schedule, sft.optimizer.warmup_ratio) == ("cosine", 0.1)
    assert config.sft.verifier is None and sft.output == config.generator.model.path
    if "vanilla" in name:
        assert config.verifier is None
        return
    assert (train.verifier_warmup_steps, train.generator_steps_per_cycle, train.verifier_steps_per_cycle) == (40, 3, 1)
    plus_plus = "reinforce_plus_plus" in names_of(config)
    assert algorithm.alpha_start == (0.5 if plus_plus else 0.1) and algorithm.alpha_end == 1e-3
    assert (algorithm.format_weight, algorithm.class_ema_decay) == (0.8, 0.8)


def test_the_authors_recipes_are_of_their_three_algorithms():
    found = [names_of(recipe(name)) for name in AUTHORS]
    assert found == [{"grpo"}, {"rloo"}, {"reinforce_plus_plus"}]


@pytest.mark.parametrize("name", AUTHORS)
def test_the_authors_recipes_have_the_settings_of_their_scripts(name):
    """The numbers are those of scripts/run_rl_tango.sh and run_sft_generator.sh, and of the defaults under them."""
    config = recipe(name)
    train, algorithm = config.train, config.algorithm
    plus_plus = "reinforce_plus_plus" in names_of(config)
    assert (config.launch.nodes, config.launch.tasks_per_node) == (4, 8)
    for role, lengths in ((config.generator, (2048, 2048)), (config.verifier, (4096, 4096))):
        assert (role.max_prompt_tokens, role.max_response_tokens) == lengths
        adam = role.optimizer
        assert (adam.learning_rate, adam.schedule, adam.warmup_ratio) == (1e-6, "constant", 0.0)
        assert (adam.beta1, adam.beta2, adam.weight_decay, adam.clip_grad_norm) == (0.9, 0.999, 0.01, 1.0)
        assert role.chat_template == "none"
        assert (role.temperature, role.top_p, role.recompute) == (1.0, 1.0, "full")
        rollout = role.rollout
        assert (rollout.tensor, rollout.gpu_memory_utilization) == (2, 0.6)
    batched = [role.rollout.max_batched_tokens for role in (config.generator, config.verifier)]
    assert batched == [8192, 12800]
    assert (train.questions_per_step, train.rollouts_per_question, train.updates_per_batch) == (256, 5, 1)
    assert (train.generator_steps_per_cycle, train.verifier_steps_per_cycle) == (3, 1)
    schedule = role_schedule(config)
    assert schedule[:44] == ["verifier"] * 40 + ["generator"] * 3 + ["verifier"]
    assert schedule.count("generator") == 300
    assert (
        len(schedule) == 440 - 1
    )  # the script's last one, a verifier step that no generator step follows, is left out
    assert (train.eval_every, config.checkpoint.every_steps) == (10, 50)
    assert load_hook(algorithm.loss).settings == {"average": "token", "clip_low": 0.2, "clip_high": 0.2}
    assert algorithm.kl_coef == 0.001
    assert algorithm.kl_estimator == ("k2" if plus_plus else "k3")
    assert algorithm.entropy_coef == (0.0 if plus_plus else 0.001)
    assert algorithm.correction is None
    assert (algorithm.alpha_schedule, algorithm.alpha_end) == ("exponential", 1e-3)
    assert algorithm.alpha_start == (0.5 if plus_plus else 0.1)
    assert load_hook(algorithm.advantages.generator).settings["step_scale"] == (10 if "rloo" in names_of(config) else 1)
    assert (algorithm.ground_truth_weight, algorithm.generator_format_weight) == (1.0, 0.0)
    assert (algorithm.format_weight, algorithm.verifier_format) == (0.8, "authors")
    assert (algorithm.class_weights, algorithm.class_ema_decay) == ("sqrt_inverse", 0.8)
    sft = config.sft.generator
    assert sft.batch_size == 64 and sft.output == config.generator.model.path
    assert (sft.optimizer.learning_rate, sft.optimizer.schedule, sft.optimizer.final_ratio) == (5e-6, "cosine", 0.0)
    assert (sft.optimizer.warmup_ratio, sft.optimizer.beta2, sft.optimizer.weight_decay) == (0.1, 0.95, 0.01)


@pytest.mark.parametrize("name", [*EXPERIMENTS, *AUTHORS])
def test_experiments_fit_their_gpus_and_their_weight_syncs_move_nothing(name):
    config = recipe(name)
    plan = make_plan(config, gpu_gb=80.0, node_gb=None)
    assert plan["problems"] == []
    assert {role: sync["total"]["received_bytes"] for role, sync in plan["reshard"].items()} == dict.fromkeys(
        config.roles, 0
    )


CUT_BY_FOUR = ["generator.parallel.tensor=4", "generator.rollout.tensor=4"]


@pytest.mark.parametrize("name", [*EXPERIMENTS, *AUTHORS])
def test_those_that_fit_40_gb_are_the_ones_that_the_docs_name(name):
    """docs/reproduce.md, section 3: cut by four, on one node of eight with selective recomputation; not four GPUs."""
    size = name.partition("/")[0]
    overrides = [*CUT_BY_FOUR, *(["generator.recompute=selective"] if size == "1x8" else [])]
    plan = make_plan(recipe(name, overrides), gpu_gb=40.0, node_gb=None)
    assert plan["fits"] == (size != "1x4")
    assert all(sync["total"]["received_bytes"] == 0 for sync in plan["reshard"].values())


def peaks(plan: dict) -> tuple[float, float]:
    """GiB of the trainers' fullest phase on a GPU, and of a node."""
    trainers = [one for one in plan["memory"]["gpu"]["phases"] if one["phase"] not in ("rollout", "verify")]
    return max(one["total_bytes"] for one in trainers) / 2**30, plan["memory"]["node"]["peak_bytes"] / 2**30


def test_the_docs_have_the_figures_of_the_plan():
    """docs/reproduce.md, section 3: its table of cuts, and its limits of 40 GiB and of host memory."""
    text = (ROOT / "docs/reproduce.md").read_text()
    _, _, table = text.partition("| settings after the config | cut |")
    rows = [row.strip("|").split("|") for row in table.split("\n\n")[0].splitlines()[2:]]
    assert len(rows) == 6
    for settings, _, gpu, node, moved in rows:
        overrides = [] if settings.strip() == "none" else settings.strip(" `").split()
        plan = make_plan(recipe("4x8/qwen_grpo_tango", overrides), gpu_gb=80.0, node_gb=None)
        assert (f"{peaks(plan)[0]:.1f}", f"{peaks(plan)[1]:.0f}") == (gpu.strip(), node.strip()), settings
        for sync in plan["reshard"].values():
            assert sync["total"]["received_bytes"] / 1e9 == pytest.approx(float(moved), abs=0.05), settings
    words = " ".join(text.split())
    found = {}
    for size in ("4x8", "1x8", "1x4"):
        for cut, overrides in (("shipped", []), ("cut", CUT_BY_FOUR)):
            for family in ("qwen", "llama"):
                config = recipe(f"{size}/{family}_grpo_tango", overrides)
                found[size, cut, family] = peaks(make_plan(config, gpu_gb=80.0, node_gb=None))
    waves = {
        (size, family, role): make_plan(recipe(f"{size}/{family}_grpo_tango"), gpu_gb=80.0, node_gb=None)["batch"][role]["waves"]
        for size in ("4x8", "1x8", "1x4") for family in ("qwen", "llama") for role in ("generator", "verifier")
    }  # fmt: skip
    more = {("llama", "verifier", "1x8"): 2, ("llama", "verifier", "1x4"): 3}
    assert waves == {
        (size, family, role): more.get((family, role, size), 2 if size == "1x4" else 1) for size, family, role in waves
    }
    largest = [max(found[size, "shipped", family][0] for family in ("qwen", "llama")) for size in ("4x8", "1x8", "1x4")]
    assert "at most {:.1f} GiB at 4×8, {:.1f} at 1×8 and {:.1f} at 1×4".format(*largest) in words
    nodes = {key: round(node) for key, (_, node) in found.items()}
    shipped = [nodes[size, "shipped", family] for family in ("qwen", "llama") for size in ("4x8", "1x8", "1x4")]
    assert (
        "take {} GiB of a node at 4×8, {} at 1×8 and {} at 1×4 for Qwen; {}, {} and {} for Llama".format(*shipped)
        in words
    )
    cut = [nodes[size, "cut", family] for size in ("1x8", "4x8", "1x4") for family in ("qwen", "llama")]
    assert "{} GiB at 1×8 for Qwen and {} for Llama, at 4×8 {} and {}; one of four {} and {}".format(*cut) in words
    selective = recipe("1x8/llama_grpo_tango", [*CUT_BY_FOUR, "generator.recompute=selective"])
    peak = peaks(make_plan(selective, gpu_gb=80.0, node_gb=None))[0]
    assert f"take at most {found['4x8', 'cut', 'llama'][0]:.1f} GiB; on 1×8 they take at most {peak:.1f}" in words


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations_fit_80_gb_as_evaluations(name):
    plan = make_plan(recipe(name), gpu_gb=80.0, node_gb=None, stage=EVAL)
    assert plan["problems"] == [] and plan["memory"]["gpu"]["peak_bytes"] == int(0.88 * 80 * 2**30)


def test_the_teacher_fits_80_gb_as_a_teacher_and_would_not_as_a_trainer():
    config = recipe("teacher")
    assert make_plan(config, gpu_gb=80.0, node_gb=None, stage=TEACHER)["problems"] == []
    assert make_plan(config, gpu_gb=80.0, node_gb=None)["problems"] != []


def test_the_teacher_samples_as_in_the_paper():
    teacher = recipe("teacher").teacher
    assert (teacher.temperature, teacher.top_p) == (0.1, 0.5)


def test_the_authors_models_are_asked_as_they_were_trained():
    evaluation, run = recipe("authors/eval_qwen"), recipe("authors/qwen_grpo_tango")
    assert evaluation.eval.checkpoints_of == run.run.dir
    for role, trained in run.roles.items():
        keys = {"model", "prompt", "chat_template", "max_prompt_tokens", "max_response_tokens", "stop"}
        assert evaluation.roles[role].model_dump(include=keys) == trained.model_dump(include=keys)


@pytest.mark.parametrize("family", ["qwen", "llama"])
@pytest.mark.parametrize("samples", ["", "_samples"])
def test_evaluations_load_the_models_of_the_run_that_they_evaluate(family, samples):
    evaluation, run = recipe(f"eval_{family}{samples}"), recipe(f"4x8/{family}_grpo_tango")
    assert evaluation.eval.checkpoints_of == run.run.dir
    for role, trained in run.roles.items():
        evaluated = evaluation.roles[role]
        assert evaluated.model == trained.model
        assert evaluated.max_prompt_tokens == trained.max_prompt_tokens
        assert evaluated.max_response_tokens == trained.max_response_tokens
    assert (evaluation.eval.samples, evaluation.eval.use_verifier) == ((16, True) if samples else (0, False))
    assert ("processbench" in evaluation.eval.benchmarks) == (not samples)


GRACE_HOPPER_GB = {"4": 440.0, "1": 105.0}  # host memory of a node, by its GPUs, without what its system takes


def test_the_docs_say_what_grace_hopper_nodes_take():
    """docs/reproduce.md, section 3: the last table; every recipe for several nodes fits there."""
    text = (ROOT / "docs/reproduce.md").read_text()
    _, _, table = text.partition("| settings after the config | a GPU at its fullest")
    rows = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in table.split("\n\n")[0].splitlines()[2:]]
    assert len(rows) == 3
    for settings, *figures in rows:
        node_gb = GRACE_HOPPER_GB[settings.split("launch.tasks_per_node=")[1][0]]
        for family, said in zip(("qwen", "llama"), figures, strict=True):
            config = recipe(f"4x8/{family}_grpo_tango", settings.split())
            memory = (plan := make_plan(config, gpu_gb=95.0, node_gb=node_gb))["memory"]
            assert plan["problems"] == []
            sizes = (memory["gpu"]["peak_bytes"], memory["node"]["peak_bytes"])
            assert ", ".join(f"{size / 2**30:.0f}" for size in sizes) == said, (settings, family)
            assert all(sync["total"]["received_bytes"] == 0 for sync in plan["reshard"].values())
    for name in (name for name in EXPERIMENTS if name.startswith("4x8")):
        for nodes in (4, 8):
            config = recipe(name, [f"launch.nodes={nodes}", "launch.tasks_per_node=4"])
            assert make_plan(config, gpu_gb=95.0, node_gb=440.0)["problems"] == [], (name, nodes)
