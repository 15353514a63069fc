"""The seconds that `tango plan` predicts: against formulas worked out by hand, rates that are known, published runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import ModelShape
from tango_hpc.base.published import PUBLISHED
from tango_hpc.commands.cli import app
from tango_hpc.plan.cards import CARDS, GPU_RATES, Machine, card_named, card_of_driver, machine_of
from tango_hpc.plan.lengths import SPREAD, Lengths, Load, assumed_load, choose_load, given_load, measured_load
from tango_hpc.plan.rates import Observed, cpu_machine, fitted, keep, machine_of_cpu, non_negative
from tango_hpc.plan.seconds import Costs, plan_time, step_phases
from tests.helpers.recipes import arguments, recipe
from tests.helpers.runs import ROOT
from tools.bench.checked import RECORDS, compare
from tools.bench.published import RUNS

PAPER = arguments("1x4/qwen_grpo_tango")
NEVER = 1e-30
# A machine on which nothing but arithmetic, memory and links costs anything: 1 operation, byte and byte a second.
PLAIN = replace(
    GPU_RATES, training=1.0, prefill=1.0, decoding=1.0, reading=1.0, activations=1.0, links=1.0,
    decode_step=0.0, decode_sequence=0.0, layer=0.0, collective=0.0, update=0.0, score=0.0, score_response=0.0,
)  # fmt: skip
QWEN = ModelShape.from_hf_config(PUBLISHED["Qwen2.5-7B"])
MULTIPLIED = QWEN.num_parameters - QWEN.vocab_size * QWEN.hidden_size  # its embedding is looked up


WARM = ("train.verifier_warmup_steps=0",)


def machine(rates: Any = PLAIN, **changes: float) -> Machine:
    values = {"operations": 1 / NEVER, "bandwidth": 1 / NEVER, "peer_link": 1 / NEVER, "host_link": 1 / NEVER}
    return Machine("made up", 80.0, **(values | {"network": 1 / NEVER, "disk": 1 / NEVER} | changes), rates=rates)


def paper(*overrides: str) -> Config:
    return recipe("1x4/qwen_grpo_tango", overrides)


def equal_lengths(prompt: float, response: float) -> Load:
    """Every response is as long as allowed."""
    lengths = Lengths(prompt, response, int(response))
    return Load({"generator": lengths, "verifier": lengths}, {"generator": 1.0, "verifier": 1.0})


def costs(config: Config, on: Machine, prompt: float = 100, response: float = 1000) -> Costs:
    return Costs(config, on, equal_lengths(prompt, response))


# -- engines ----------------------------------------------------------------------------------------------------


def test_an_engine_that_memory_bounds_reads_weights_and_cache_at_each_token() -> None:
    """Two engines of two ranks; 8 responses each, all at once."""
    config = paper("generator.rollout.max_num_seqs=8")
    found = costs(config, machine(bandwidth=1.0)).generation("generator", 16, 16)
    weights = QWEN.num_parameters * 2 / 2
    per_token = 2 * 28 * 2 * 128 * 2  # keys and values of 28 layers, two of the four key heads, bf16
    expected = 1000 * weights + per_token * 8 * sum(100 + step + 0.5 for step in range(1000))
    assert found.seconds == pytest.approx(expected, rel=2e-3)  # norms and biases are on both ranks
    assert found.bound == "memory"


def test_twice_as_many_responses_as_sequences_take_two_waves_and_twice_the_overhead() -> None:
    rates = replace(PLAIN, decode_step=1.0, decode_sequence=0.1)
    one, two = (
        costs(paper("generator.rollout.max_num_seqs=8"), machine(rates)).generation("generator", count, count)
        for count in (16, 32)
    )
    assert one.seconds == pytest.approx(1000 * (1 + 0.8)) and two.seconds == pytest.approx(2 * one.seconds)
    assert one.bound == "overheads"


def test_the_last_responses_run_alone() -> None:
    """A tenth and less of the sequences that an engine began with are its tail."""
    lengths = Lengths(10, 200, 4000, spread=1.0)
    rates = replace(PLAIN, decode_step=1.0)
    config = paper("generator.rollout.max_num_seqs=64", "generator.max_response_tokens=3000")
    found = Costs(config, machine(rates), Load({"generator": lengths}, {})).generation("generator", 128, 128)
    sorted_N = lengths.responses(64)
    tail_from = sorted_N[-7]  # six are left of 64
    assert found.parts["longest response"] == pytest.approx(sorted_N[-1] - tail_from)
    assert found.seconds == pytest.approx(sorted_N[-1])  # one wave: the longest


def test_prompts_of_one_question_are_read_once() -> None:
    config, on = paper("generator.rollout.max_num_seqs=64"), machine(operations=1.0)
    alone, shared = (
        costs(config, on, prompt=500, response=1).generation("generator", 64, prompts) for prompts in (64, 8)
    )
    read_less = (32 - 4) * 500 * 2 * MULTIPLIED / 2  # on each of two engines, each of two ranks
    assert alone.seconds - shared.seconds == pytest.approx(read_less, rel=1e-6)


def test_tensor_ranks_reduce_twice_a_layer() -> None:
    found = costs(paper("generator.rollout.max_num_seqs=8"), machine(replace(PLAIN, collective=1.0))).generation(
        "generator", 16, 16
    )
    assert found.parts["links"] == pytest.approx(1000 * 2 * 28)


# -- trainers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "per_parameter"),
    [
        ([], 6),
        (["generator.recompute=full"], 8),
        (["generator.adapter={rank: 8}", "generator.recompute=none"], 4),
        (["train.updates_per_batch=2"], 12),
    ],
)
def test_operations_of_an_update(settings: list[str], per_parameter: float) -> None:
    config = paper("generator.recompute=none", "algorithm.kl_coef=0", *settings)
    cut = config.generator.parallel
    found = costs(config, machine(operations=1.0)).update("generator")
    attention = 28 * 28 * 128 * 1100
    tokens = 256 * 5 * 1100 / (4 / cut.tensor / cut.pipeline)
    expected = per_parameter * tokens * (MULTIPLIED + attention) / (cut.tensor * cut.pipeline)
    assert found.parts["arithmetic"] == pytest.approx(expected)


def test_log_probabilities_take_a_pass_for_each_that_is_needed() -> None:
    def passes(*settings: str) -> float:
        found = costs(paper(*settings), machine(operations=1.0)).logprobs("generator").seconds
        return found / costs(paper(), machine(operations=1.0)).logprobs("generator").seconds

    assert passes() == 1 and passes("algorithm.kl_coef=0") == 0
    assert passes("algorithm.correction.level=sequence") == pytest.approx(2)
    assert passes("algorithm.loss.name=gspo", "train.updates_per_batch=3") == pytest.approx(3)


def test_a_pipeline_waits_for_its_first_and_last_micro_batches() -> None:
    """Eight micro-batches through two stages take nine turns."""
    plain = ["generator.parallel.tensor=1", "generator.parallel.sequence=false", "algorithm.kl_coef=0"]
    batch = ["train.questions_per_step=8", "train.rollouts_per_question=4", "generator.micro_batch_tokens=4096"]
    one, two = (
        costs(paper(*plain, *batch, f"generator.parallel.pipeline={stages}"), machine(operations=1.0), 24, 1000)
        .update("generator")
        .parts["arithmetic"]
        for stages in (1, 2)
    )
    assert two / one == pytest.approx(
        (4 + 1) / 4
    )  # 16 sequences of 1,024 on each of two data ranks: four micro-batches


def test_data_ranks_reduce_gradients_over_the_slower_link() -> None:
    one_node = ["generator.parallel.tensor=2", "launch.tasks_per_node=4"]
    gradients = QWEN.num_parameters / 2 * 4
    inside = costs(paper(*one_node), machine(peer_link=1.0)).update("generator").parts
    assert inside["links"] > 2 * gradients / 2 and "network" not in inside
    across = costs(paper(*one_node, "launch.nodes=2"), machine(network=1.0)).update("generator").parts
    assert across["network"] == pytest.approx(2 * gradients * 3 / 4, rel=2e-3)


# -- steps and runs ---------------------------------------------------------------------------------------------


def test_the_phases_of_each_step_are_those_of_metrics() -> None:
    on = machine_of(CARDS["H100"])
    phases = {role: set(step_phases(paper(), on, assumed_load(paper()), role)) for role in ("generator", "verifier")}
    of_both = {"rollout", "verify", "logprobs", "train", "reshard", "onload", "offload", "score"}
    assert phases == {"generator": of_both, "verifier": of_both}
    tried = paper("algorithm.step_labels={continuations: 2}")
    assert "try" in step_phases(tried, on, assumed_load(tried), "verifier")


def test_a_run_is_its_steps_evaluations_checkpoints_and_start() -> None:
    config = paper("train.eval_every=20", "checkpoint.every_steps=20", "checkpoint.background=false")
    plan = plan_time(config, machine_of(CARDS["A100-80"]), assumed_load(config))
    assert plan.num_steps == {"generator": 200, "verifier": 106} and plan.num_evaluations == 2 + 10
    expected = 200 * plan.step_seconds("generator") + 106 * plan.step_seconds("verifier")
    expected += 12 * plan.evaluation.seconds + (1 + 306 // 20) * plan.checkpoint.seconds + plan.start
    assert plan.run_seconds == pytest.approx(expected) and plan.rank_hours == pytest.approx(4 * expected / 3600)
    in_background = paper("train.eval_every=20", "checkpoint.every_steps=20", "checkpoint.background=true")
    assert plan_time(in_background, machine_of(CARDS["A100-80"]), assumed_load(config)).checkpoint.seconds == 0


@pytest.mark.parametrize(
    ("settings", "evaluations", "checkpoints"),
    [
        (["train.eval_every=0", "checkpoint.every_steps=0"], 2, 1),
        (["train.generator_steps=45", "train.eval_every=20", *WARM], 1 + 3, 1),  # 0, 20, 40, 45
        (["train.generator_steps=40", "train.eval_every=20", *WARM], 1 + 2, 1),
        (["train.generator_steps=40", "train.verifier_steps_per_cycle=0", "checkpoint.every_steps=20", *WARM], 3, 2),
        (["train.generator_steps=40", "train.eval_every=20", "train.verifier_warmup_steps=5"], 1 + 2 + 1, 1),
    ],
)  # fmt: skip
def test_evaluations_and_checkpoints_are_counted_as_the_loop_takes_them(
    settings: list[str], evaluations: int, checkpoints: int
) -> None:
    config = paper("checkpoint.every_steps=0", *settings)
    plan = plan_time(config, machine_of(CARDS["A100-80"]), assumed_load(config))
    assert (plan.num_evaluations, plan.num_checkpoints) == (evaluations, checkpoints)


def test_jobs_of_a_time_limit() -> None:
    config = paper()
    plan = plan_time(config, machine_of(CARDS["A100-80"]), assumed_load(config))
    longest = max(plan.step_seconds(role) for role in plan.steps)
    assert plan.num_jobs(plan.run_seconds + 61, 60) == 1
    half = (plan.run_seconds - plan.start) / 2 + plan.start
    assert plan.num_jobs(half + 61, 60) == 2
    assert plan.num_jobs(plan.start + longest + 59, 60) is None  # no step ends before it has to save


# -- lengths ----------------------------------------------------------------------------------------------------


def test_lengths_have_the_mean_asked_for_and_none_is_longer_than_allowed() -> None:
    lengths = Lengths(0, 500, 1000, spread=0.8).responses(1000)
    assert np.mean(lengths) == pytest.approx(500, rel=1e-6) and max(lengths) == 1000 and min(lengths) > 10
    assert list(lengths) == sorted(lengths)


def test_lengths_and_draws_are_learned_from_a_run() -> None:
    config = paper("train.verifier_draws=4")
    wide = Lengths(0, 600, 3072, spread=1.2).responses(200)
    cut = sum(length >= 3072 for length in wide) / 200
    texts = {"generator/prompt_tokens": 80, "generator/response_tokens": 600, "generator/truncated_share": cut}
    judged = {"verifier/prompt_tokens": 900, "verifier/response_tokens": 300}
    rows = [
        {"role": "generator", "data/questions_drawn": 256, **texts, **judged},
        {"role": "verifier", "data/questions_drawn": 640, **texts, **judged},
    ]
    load = measured_load(config, rows)
    assert load.lengths["generator"] == Lengths(80, 600, 3072, pytest.approx(1.2, abs=0.11))
    assert load.lengths["verifier"] == Lengths(900, 300, 3072, SPREAD)
    assert load.draws == {"generator": 1.0, "verifier": 2.5}
    assert measured_load(config, []) == assumed_load(config)


@pytest.mark.parametrize(
    ("means", "message"),
    [("900", "one mean for each of generator and verifier"), ("900,9000", "verifier: a mean of 9000"), ("a,b", "are no numbers")],
)  # fmt: skip
def test_lengths_that_cannot_be(means: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_load(paper(), means, None)
    with pytest.raises(UserError, match="not both"):
        choose_load(paper(), means, Path("runs/mine"))


def test_given_means_replace_the_assumed_ones() -> None:
    load = given_load(paper(), [900, 600])
    assert [lengths.response for lengths in load.lengths.values()] == [900, 600]
    assert load.lengths["verifier"].prompt == assumed_load(paper()).lengths["verifier"].prompt


# -- cards and rates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "mib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80"), ("NVIDIA A100-PCIE-40GB", 40960, "A100-40"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100"), ("NVIDIA H20", 97871, "H20"), ("NVIDIA H200", 143771, "H200"),
        ("NVIDIA GH200 120GB", 97871, "GH200"), ("NVIDIA L40S", 46068, "L40S"), ("NVIDIA A40", 46068, "A40"),
        ("NVIDIA RTX A6000", 49140, "A6000"), ("NVIDIA GeForce RTX 4090", 24564, "RTX4090"),
    ],
)  # fmt: skip
def test_a_card_is_known_by_what_the_driver_calls_it(driver: str, mib: float, name: str) -> None:
    found = card_of_driver(driver, mib)
    assert found is not None and found.name == name and found.memory_gib == pytest.approx(mib / 1024, rel=0.02)


def test_an_unknown_card_is_refused_with_those_that_are_like_it() -> None:
    assert card_of_driver("NVIDIA Tesla P100", 16384) is None and card_named("h100") is CARDS["H100"]
    with pytest.raises(UserError, match="no card named 'H10' is known; did you mean H100"):
        card_named("H10")


def test_rates_are_found_again_from_the_steps_that_they_would_give() -> None:
    """Three small runs as `tango doctor --rates` takes them, on a machine whose rates are known."""
    rates = replace(
        PLAIN, training=0.6, prefill=0.5, decoding=0.25, activations=0.2, decode_step=5e-3,
        decode_sequence=4e-5, layer=0.0, update=0.1, score=0.06, score_response=4e-4, start=20.0,
    )  # fmt: skip
    on = machine_of_cpu(80e9, 15e9, rates)
    observed = []
    for size, questions in (("Qwen3-0.6B", 4), ("Qwen3-0.6B", 32), ("Qwen3-1.7B", 8)):
        models = [f"{role}.model.path=models/{size}" for role in ("generator", "verifier")]
        cut = [f"{role}.{key}=1" for role in ("generator", "verifier") for key in ("parallel.tensor", "rollout.tensor")]
        cpu = [
            "launch.device=cpu",
            "launch.tasks_per_node=1",
            "algorithm.kl_coef=0",
            "generator.parallel.sequence=false",
        ]
        cache = [f"{role}.rollout.kv_cache_gb=4" for role in ("generator", "verifier")]
        config = paper(*models, *cut, *cpu, *cache, f"train.questions_per_step={questions}")
        for role in config.roles:
            load = equal_lengths(50, 60)
            seconds = {name: cost.seconds for name, cost in step_phases(config, on, load, role).items()}
            observed.append(Observed(config, load, role, seconds))
    found = fitted(observed, replace(on, rates=PLAIN), 20.0)
    for field in ("training", "prefill", "decoding", "activations", "decode_step", "score"):
        assert getattr(found, field) == pytest.approx(getattr(rates, field), rel=0.05), field


def test_non_negative_least_squares() -> None:
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert non_negative(rows, rows @ [2.0, 3.0]) == pytest.approx([2, 3])
    assert non_negative(rows, rows @ [2.0, -1.0]) == pytest.approx([1.5, 0])  # the best with the second at 0


def test_rates_are_kept_for_launches_like_the_one_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quickstart = load_config(ROOT / "configs/quickstart.yaml", ["run.dir=/nowhere/run"])
    assert cpu_machine(quickstart) is None
    keep(machine_of_cpu(1e11, 2e10, GPU_RATES), quickstart)
    found = cpu_machine(quickstart)
    assert found is not None and (found.operations, found.bandwidth, found.rates) == (1e11, 2e10, GPU_RATES)
    other = load_config(ROOT / "configs/quickstart.yaml", ["run.dir=/nowhere/run", "launch.threads_per_rank=2"])
    assert cpu_machine(other) is None
    keep(machine_of_cpu(2e11, 2e10, GPU_RATES), other)
    assert [cpu_machine(config).operations for config in (quickstart, other)] == [1e11, 2e11]  # type: ignore[union-attr]
    file = tmp_path / "tango_hpc/rates.json"
    file.write_text(file.read_text().replace('"cpu": "', '"cpu": "another '))
    assert cpu_machine(quickstart) is None


# -- held against others, and as a command ----------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_published_runs_are_within_a_factor_of_one_and_a_half(run: Any) -> None:
    """Of the range that a page leaves open, some length must be."""
    low, high = (run.predicted(response)["step"] for response in run.response)
    published = run.seconds["step"]
    assert low / 1.5 <= published <= high * 1.5


def test_the_kept_comparison_is_that_of_this_code() -> None:
    kept = json.loads((ROOT / "docs/measurements/published.json").read_text())
    steps = {row["run"]: row["predicted"] for row in kept if row["phase"] == "step"}
    for run in RUNS:
        now = [run.predicted(response)["step"] for response in run.response]
        assert steps[run.name] == pytest.approx(now, abs=0.06), run.name


def test_the_page_has_what_one_h100_took(tmp_path: Path) -> None:
    page = (ROOT / "docs/plan.md").read_text()
    rows = compare(RECORDS, tmp_path)
    assert len(rows) == 5
    for name, predicted, measured in rows:
        assert f"| {name} | {predicted:.2f} | {measured:.2f} | {predicted / measured:.2f} |" in page
        assert 1 / 1.5 <= predicted / measured <= 1.5, name


def test_the_command_says_seconds_hours_and_jobs() -> None:
    told = CliRunner().invoke(app, ["plan", *PAPER, "--gpu", "h100", "--at", "24:00:00", "--json"])
    time = json.loads(told.output)["time"]
    assert time["machine"] == "H100" and time["jobs"] == -(-(time["run_seconds"] - 100) // (86400 - 100 - 900))
    shown = CliRunner().invoke(app, ["plan", *PAPER, "--gpu", "H100", "--at", "24:00:00"]).output
    assert (
        "Seconds of a step, H100" in shown
        and "hours of all ranks together" in shown
        and "in jobs of 24:00 h: " in shown
    )
    for options, message in ((["--gpu", "H10"], "did you mean H100"), (["--at", "soon"], "must be minutes")):
        refused = CliRunner().invoke(app, ["plan", *PAPER, *options])
        assert isinstance(refused.exception, UserError) and message in str(refused.exception)
    without = CliRunner().invoke(app, ["plan", *PAPER, "--gpu-gb", "80", "--json"])
    assert "time" not in json.loads(without.output)  # of a card that is not named, only the memory is known
