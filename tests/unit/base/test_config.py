"""The configuration: every shipped file parses, every mistake is named with its key's path, nothing heavy is
imported.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tango_hpc.base.config import config_to_yaml, load_config
from tango_hpc.base.config.load import read_tree, validate_tree
from tango_hpc.base.errors import UserError
from tango_hpc.base.published import published_dimensions
from tango_hpc.commands.reference import render
from tango_hpc.models.weight_sync.planned import plan_report
from tango_hpc.questions.tasks.tiny import build_tiny_model

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs/quickstart.yaml"
OWN_RUN = "run.dir=/nowhere/run"  # else what lies in ./runs/quickstart would count
# A sweep file names the configuration of its runs; a layer has no task and lies over another file.
FILES = [file for file in sorted(ROOT.glob("configs/**/*.yaml")) if "\nconfig: " not in file.read_text()]
SHIPPED = [file for file in FILES if "task" in read_tree(file)]
LAYERS = [file for file in FILES if file not in SHIPPED]


def mistakes(*overrides: str) -> list[str]:
    """The lines of the message that the quick start with these overrides is refused with."""
    with pytest.raises(UserError) as caught:
        load_config(QUICKSTART, [OWN_RUN, *overrides])
    return str(caught.value).splitlines()[1:]


def test_overrides_references_and_round_trip(tmp_path: Path) -> None:
    config = load_config(
        QUICKSTART, ["run.dir=/tmp/x y", "train.generator_steps=7", "generator.optimizer.learning_rate=1e-4"]
    )
    assert config.train.generator_steps == 7
    assert config.generator.optimizer.learning_rate == 1e-4
    assert str(config.generator.model.path) == "/tmp/x y/models/generator_sft"
    written = tmp_path / "config.yaml"
    written.write_text(config_to_yaml(config))
    assert load_config(written) == config


def test_importing_the_configuration_loads_no_heavy_library() -> None:
    code = (
        "import sys, tango_hpc.base.config; print([m for m in ('torch', 'vllm', 'megatron', 'transformers') if m in"
        " sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_all_mistakes_at_once_with_paths_and_suggestions() -> None:
    lines = mistakes(
        "train.generator_step=3", "algorithm.class_weights=none", "generator.optimizer.learning_rate=-1", "foo.bar=1"
    )
    assert len(lines) == 4
    text = "\n".join(lines)
    assert "train.generator_step: unknown key; did you mean generator_steps?" in text
    assert "algorithm.class_weights" in text and "'inverse'" in text and "'none'" in text
    assert "generator.optimizer.learning_rate" in text and "greater than 0" in text
    assert "foo: unknown key; valid names here: seed, run," in text


def test_a_key_of_another_section_is_led_to_its_place() -> None:
    assert mistakes("rollout.tensor=2") == [
        "  - rollout: unknown key; did you mean generator.rollout.tensor or verifier.rollout.tensor?"
    ]
    (line,) = mistakes("rollout.tensor=2", "rollout.kv_cache_gb=1")
    assert line == "  - rollout: unknown key; did you mean generator.rollout or verifier.rollout?"
    (line,) = mistakes("trainable=false")
    assert line == "  - trainable: unknown key; did you mean generator.trainable or verifier.trainable?"
    (line,) = mistakes("generator.beta1=0.5")
    assert line == "  - generator.beta1: unknown key; did you mean generator.optimizer.beta1?"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["generator.parallel.tensor=2", "launch.tasks_per_node=3"], "generator.parallel: tensor 2 * pipeline 1 does not divide the 3 ranks"),
        (["generator.parallel.tensor=2", "sft.generator.init.build.num_kv_heads=3"], "3 key/value heads and tensor size 2 do not divide each other"),
        (["sft.generator.init.build.num_layers=3", "generator.parallel.pipeline=4", "launch.tasks_per_node=8"], "3 layers cannot be spread over 4 pipeline stages"),
        (["generator.top_p=0.9"], "generator.top_p: 0.9 with generator.trainable"),
        (["verifier.rollout.max_batched_tokens=300"], "verifier.rollout.max_batched_tokens: 300 is below verifier.max_prompt_tokens + max_response_tokens = 440"),
        (["generator.max_response_tokens=600"], "is over the model's 512 positions"),
        (["generator.micro_batch_tokens=100"], "cannot hold one sequence"),
        (["generator.parallel={tensor: 1, sequence: true}"], "generator.parallel.sequence: true, but with parallel.tensor 1"),
        (["generator.rollout.tensor=3"], "generator.rollout.tensor: 3 does not divide the 2 ranks"),
        (["generator.rollout.tensor=4", "launch.nodes=2", "launch.tasks_per_node=6"], "generator.rollout.tensor: groups of 4 ranks do not fit evenly into nodes of 6"),
        (["verifier.rollout.tensor=3"], "verifier.rollout.tensor: 3 does not divide the 2 ranks"),
        (["generator.rollout.kv_cache_gb=null"], "generator.rollout.kv_cache_gb: required with launch.device cpu"),
        (["verifier.rollout.kv_cache_gb=null"], "verifier.rollout.kv_cache_gb: required with launch.device cpu"),
        (["verifier.rollout.max_num_seqs=5000"], "verifier.rollout.max_batched_tokens: 4096 is below verifier.rollout.max_num_seqs 5000"),
        (["verifier=null", "sft.verifier=null", "train.verifier_warmup_steps=0"], "train.verifier_steps_per_cycle: must be 0 without a verifier"),
        (["algorithm.alpha_end=0.5"], "algorithm.alpha_end: 0.5 is above alpha_start"),
        (["reshard.timeout_seconds=2400"], "reshard.timeout_seconds: 2400 must be below launch.collective_timeout_seconds (2400)"),
        (["launch.hang_timeout_seconds=2400"], "launch.collective_timeout_seconds: must be above launch.hang_timeout_seconds (2400)"),
        (["generator.prompt=/nowhere"], "generator.prompt: /nowhere cannot be read"),
        (["verifier.chat_template=/nowhere"], "verifier.chat_template: no file at /nowhere; give one, or auto or none"),
        (["algorithm.ground_truth_weight=0.5", "verifier=null", "sft.verifier=null", "train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0"], "algorithm.ground_truth_weight: 0.5 needs a verifier"),
        (["train.verifications_per_solution=3", "verifier=null", "sft.verifier=null", "train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0"], "train.verifications_per_solution: 3 needs a verifier"),
        (["train.verifier_draws=2", "verifier.trainable=false", "train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0"], "train.verifier_draws: 2 needs a verifier that is trained"),
        (["generator.trainable=false", "train.verifier_warmup_steps=0", "train.generator_steps=3", "train.generator_steps_per_cycle=3"], "nothing would be trained"),
        (["algorithm.alpha_start=0.1", "algorithm.alpha_end=0"], "algorithm.alpha_end: an exponential decay never reaches 0"),
        (["verifier.adapter.rank=8", "verifier.trainable=false", "train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0"], "verifier.adapter: given, but verifier.trainable is false"),
        (["generator.adapter.path=adapters/a"], "generator.adapter.path: training starts from what sft.generator writes"),
        (["generator.adapter.rank=0"], "generator.adapter.rank: input should be greater than or equal to 1"),
        (["generator.optimizer.beta1=1"], "generator.optimizer.beta1: input should be less than 1"),
        (["verifier.optimizer={schedule: exponential, final_ratio: 0}"], "verifier.optimizer.final_ratio: an exponential decay never reaches 0"),
        (["generator.stop=[x, '']"], "generator.stop.1: string should have at least 1 character"),
        (["task.last_letter.eval_words=[5, 2]"], "task.last_letter.eval_words: [5, 2] is not from low to high"),
        (["data.train=${run.folder}/x"], "data.train: ${run.folder} names no key"),
        (["data.train=${oc.env:HOME}/x"], "data.train: ${oc.env:HOME} names no key"),
    ],
)  # fmt: skip
def test_impossible_combinations_are_refused(overrides: list[str], expected: str) -> None:
    assert expected in "\n".join(mistakes(*overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.questions_per_step=33", "sft.generator.batch_size=33"],  # 165 responses on 2 data-parallel ranks
        ["sft.generator.init.build.num_layers=3", "generator.parallel.pipeline=2", "launch.tasks_per_node=4"],
        ["algorithm.alpha_start=0"],
        ["algorithm.alpha_start=0", "algorithm.advantages.generator={name: prof, settings: {trained_rollouts: 3, max_draws: 3}}", "train.verifications_per_solution=2"],
        ["verifier.top_p=0.9", "verifier.trainable=false", "train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0"],
        ["algorithm.alpha_end=0", "algorithm.alpha_schedule=linear"],
        ["generator.trainable=false", "train.verifier_warmup_steps=0", "train.generator_steps=4", "train.generator_steps_per_cycle=3"],
        ["eval.top_p=0.9", "teacher.questions=q.parquet", "teacher.output=out", "teacher.top_p=0.5"],
    ],
)  # fmt: skip
def test_what_the_code_below_supports_is_not_refused(overrides: list[str]) -> None:
    load_config(QUICKSTART, [OWN_RUN, *overrides])


@pytest.mark.parametrize(
    ("name", "dimensions", "layout"),
    [
        # Llama-3.1-405B, which docs/weight_sync.md plans, and Qwen2.5-1.5B with two key/value heads.
        ("405b", {"model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
                  "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256}, {"tensor": 8, "pipeline": 16}),
        ("1.5b", published_dimensions("Qwen2.5-1.5B"), {"tensor": 4, "pipeline": 1}),
    ],
)  # fmt: skip
def test_published_models_are_cut_as_the_weight_sync_plans_them(
    tmp_path: Path, name: str, dimensions: dict[str, Any], layout: dict[str, int]
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(dimensions))
    role = f"{{model: {{path: {tmp_path / name}}}, parallel: {layout}, rollout: {{tensor: 4}}}}"
    model = f"generator={role}".replace("'", "")
    ranks = ["launch.device=cuda", "launch.nodes=16", "launch.tasks_per_node=8"]
    alone = ["verifier=null", "sft={}", "train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0"]
    config = load_config(QUICKSTART, [OWN_RUN, model, *ranks, *alone])
    assert plan_report(config)["generator"]["ratio_to_minimum"] == 1.0


def test_a_model_built_with_other_sizes_or_another_seed_is_not_taken_for_this_one(tmp_path: Path) -> None:
    init = [f"run.dir={tmp_path}", "sft.generator.init.build.num_layers=2"]
    config = load_config(QUICKSTART, init)
    assert config.sft.generator is not None and config.sft.generator.init.build is not None
    build_tiny_model(config.sft.generator.init.path, config.sft.generator.init.build, seed=0)
    (tmp_path / "as the umask has it").touch()
    usual = (tmp_path / "as the umask has it").stat().st_mode
    assert {file.name for file in config.sft.generator.init.path.iterdir() if file.stat().st_mode != usual} == set()
    load_config(QUICKSTART, init)
    (line,) = mistakes(*init, "sft.generator.init.build.num_layers=3")
    assert "sft.generator.init.build: " in line and str(config.sft.generator.init.path) in line
    assert (
        "was built with num_hidden_layers 2; asked for is num_hidden_layers 3" in line and "remove that folder" in line
    )
    (line,) = mistakes(*init, "seed=4")
    assert "was built with seed 0; asked for is seed 4" in line


def test_temperatures_that_the_engine_would_raise_are_refused() -> None:
    teacher = ["teacher.questions=q.parquet", "teacher.output=out"]
    keys = ("generator.temperature", "verifier.temperature", "eval.temperature", "teacher.temperature")
    lines = mistakes(*teacher, *(f"{key}=0.005" for key in keys))
    assert len(lines) == len(keys)
    for key in keys:
        assert any(key in line and "no temperature below 0.01; give 0.01 or more (got 0.005)" in line for line in lines)
    load_config(QUICKSTART, [OWN_RUN, *teacher, *(f"{key}=0.01" for key in keys)])
    load_config(QUICKSTART, [OWN_RUN, *teacher, "teacher.temperature=0"])  # greedy
    assert len(mistakes("eval.temperature=0")) == 1


def test_off_is_a_word(tmp_path: Path) -> None:
    """As in YAML 1.2; in 1.1 it is false."""
    assert load_config(QUICKSTART, [OWN_RUN, "algorithm.class_weights=off"]).algorithm.class_weights == "off"
    assert (
        load_config(QUICKSTART, [OWN_RUN, "launch.device=cpu", "sft.generator.shuffle=False"]).sft.generator.shuffle
        is False
    )


def test_a_chat_template_is_read_before_anything_loads(tmp_path: Path) -> None:
    file = tmp_path / "bad.jinja"
    file.write_text("{% for message in messages %}\n{{ message.content }")
    assert f"generator.chat_template: {file} is no Jinja template: line 2: " in "\n".join(
        mistakes(f"generator.chat_template={file}")
    )
    file.write_text(
        "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    load_config(QUICKSTART, [OWN_RUN, f"generator.chat_template={file}"])


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2", "seed: 1\nseed: 2"])
def test_broken_yaml_is_a_users_mistake(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match="broken"):
        load_config(file)


def test_missing_file_and_bad_override_name_the_way_out() -> None:
    with pytest.raises(UserError, match="no YAML file at .*; shipped ones are in configs/"):
        load_config(ROOT / "configs/nothing.yaml")
    with pytest.raises(UserError, match="not of the form key.path=value"):
        load_config(QUICKSTART, ["train.generator_steps"])


def test_every_section_is_required_or_has_defaults() -> None:
    with pytest.raises(UserError) as caught:
        validate_tree({}, "empty")
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        f"- {name}: required, but not given" for name in ("run", "task", "data", "generator")
    ]


ONE_MODEL = "verifier={same_as: generator, max_prompt_tokens: 240, max_response_tokens: 200}"
NO_SFT = "sft.verifier=null"


def test_what_a_verifier_of_the_generators_model_leaves_out_is_as_the_generator_has_it(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.md"
    prompt.write_text("Solve {question}")
    config = load_config(
        QUICKSTART, [OWN_RUN, ONE_MODEL, NO_SFT, "generator.temperature=0.7", "generator.stop=[z]",
                     f"generator.prompt={prompt}"],
    )  # fmt: skip
    verifier = config.roles["verifier"]
    assert (verifier.temperature, verifier.stop, verifier.max_prompt_tokens) == (0.7, ("z",), 240)
    assert verifier.prompt is None and verifier.model == config.generator.model
    (model,) = config.models.values()
    assert (model.longest, config.generator.longest, model.trainable) == (440, 240, True)
    assert config.roles_of("generator") == ["generator", "verifier"] and config.model_of("verifier") == "generator"
    written = tmp_path / "config.yaml"
    written.write_text(config_to_yaml(config))
    assert load_config(written) == config


def test_a_section_with_same_as_replaces_that_of_the_base(tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(f"base: {QUICKSTART}\nverifier: {{same_as: generator}}\nsft: {{verifier: null}}\n")
    config = load_config(file, [OWN_RUN])
    assert config.is_one_model and config.roles["verifier"].max_prompt_tokens == config.generator.max_prompt_tokens


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [ONE_MODEL, NO_SFT, "verifier.optimizer.learning_rate=1", "verifier.parallel.tensor=2"],
            "verifier: optimizer, parallel cannot stand beside same_as, since the generator's hold for the model",
        ),
        ([ONE_MODEL, NO_SFT, "verifier.adapter.rank=8"], "verifier: adapter cannot stand beside same_as"),
        ([ONE_MODEL, NO_SFT, "verifier.temperatur=1"], "verifier.temperatur: unknown key; did you mean temperature?"),
        (["verifier={same_as: verifier}", NO_SFT], "verifier.same_as: input should be 'generator'"),
        ([ONE_MODEL], "sft.verifier: needs {same_as: generator, data: FILE}, as verifier has it"),
        (
            ["sft.verifier={same_as: generator, data: x}"],
            "sft.verifier: needs settings of a model of its own, as verifier has it",
        ),
        (
            [ONE_MODEL, "sft={verifier: {same_as: generator, data: x}}"],
            "sft.verifier: its rows are for the model that sft.generator fine-tunes, which is missing",
        ),
        (
            [ONE_MODEL, NO_SFT, "generator.micro_batch_tokens=400"],
            "generator.micro_batch_tokens: 400 cannot hold one sequence of verifier.max_prompt_tokens +",
        ),
        ([ONE_MODEL, NO_SFT, "verifier.top_p=0.9"], "verifier.top_p: 0.9 with verifier.trainable"),
        (["train.verifier_learning_rate_scale=0.5"], "set verifier.optimizer.learning_rate"),
        (["train.joint=true", "train.verifier_steps_per_cycle=0"], "train.joint: updates one model with both kinds"),
        (["train.joint_weight=0.5"], "train.joint_weight: for joint updates only (train.joint)"),
        ([ONE_MODEL, NO_SFT, "train.joint=true"], "train.verifier_steps_per_cycle: must be 0 with train.joint"),
        (
            [ONE_MODEL, NO_SFT, "train.joint=true", "train.verifier_steps_per_cycle=0", "train.joint_solutions=161"],
            "train.joint_solutions: 161 of the 160 solutions of a step",
        ),
        (
            [ONE_MODEL, NO_SFT, "train.joint=true", "train.verifier_steps_per_cycle=0", "generator.trainable=false"],
            "train.joint: trains both roles, and one of them is not trainable",
        ),
    ],
)  # fmt: skip
def test_one_model_in_both_roles_is_refused_what_it_cannot_have(overrides: list[str], message: str) -> None:
    assert message in "\n".join(mistakes(*overrides))


def test_the_reference_page_is_up_to_date() -> None:
    committed = (ROOT / "docs/configuration.md").read_text()
    assert committed == render(), "run: python -m tango_hpc.commands.reference"


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_config_is_well_formed(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types, keys and combinations; models that are not on this machine are the one thing that may be missing."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")  # where prompts of a config's own lie
    monkeypatch.chdir(tmp_path)
    try:
        load_config(file, [OWN_RUN])
    except UserError as error:
        others = [line for line in str(error).splitlines()[1:] if ": no folder at " not in line]
        assert not others, others


@pytest.mark.parametrize("file", LAYERS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_layer_lies_over_other_configs(file: Path) -> None:
    """Over that of its folder, or the paper's main run; it changes something."""
    below = {"eval_llama": "paper/eval.yaml"}.get(file.stem, "paper/qwen.yaml")
    if file.parent.name == "methods" and file.parents[1].name == "experiments":
        below = "experiments/last_letter/rare_answers.yaml"
    base = ROOT / "configs" / below
    plain, layered = load_config(base, [OWN_RUN]), load_config(base, [str(file), OWN_RUN])
    assert (layered == plain) == (file.stem == "tango")


def test_each_shipped_file_has_its_line_in_the_list() -> None:
    listed = re.findall(r"`([\w/]+\.yaml)`", (ROOT / "configs/README.md").read_text())
    there = [str(file.relative_to(ROOT / "configs")) for file in ROOT.glob("configs/**/*.yaml")]
    assert sorted(listed) == sorted(name for name in there if not name.startswith("experiments/"))
