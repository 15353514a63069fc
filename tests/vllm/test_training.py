"""Algorithm 1 with real trainers and engines on two ranks: an interrupted run computes what an uninterrupted
one does.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.config.models import role_shape
from tango_hpc.base.errors import UserError
from tango_hpc.base.prompts import generator_prompt_ids
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import dumped_steps, read_rollouts
from tango_hpc.base.run.metrics import REQUIRED_KEYS, read_evaluations, read_events, read_metrics
from tango_hpc.base.run.step_names import StepName
from tango_hpc.base.run.summary import read_summary
from tango_hpc.commands.status import states
from tango_hpc.models.layout.engine_layout import engine_layout
from tango_hpc.plan.memory import COPIES, plan_memory
from tango_hpc.questions.data.tables import read_questions, read_rows
from tango_hpc.questions.protocol.forms import read_solution
from tango_hpc.questions.protocol.tokenizer import load_tokenizer
from tango_hpc.report.run_page import write_report
from tango_hpc.runner.outcome import read_failures
from tango_hpc.stages.rescore import score_rows
from tango_hpc.stages.stage import EVAL, TRAIN
from tests.helpers.attempts import Attempt, make_attempts
from tests.helpers.runs import OF_THE_MACHINE, computed, prepare_small_run

# Safe points in the order in which this schedule (v g g g v g) meets them, and at which of these an attempt stops. The
# models know nothing, so no question carries a signal and no solution is right: steps of either role draw twice.
STOPS = (("rollout", 2), ("verify_2", 2), ("between steps", 2), ("rollout_2", 1))
# Rank, role, phase, and how many of these it lives to see: a process of either role is killed in each phase, where its
# role works and where it waits for the other. A checkpoint follows every step, so that attempts get on.
KILLS = (
    (0, "generator", "rollout", 1),
    (1, "verifier", "rollout", 2),
    (1, "verifier", "verify", 1),
    (0, "generator", "verify", 2),
    (1, "generator", "train", 2),
    (0, "verifier", "train", 1),
    (0, "verifier", "reshard", 2),
    (1, "generator", "saving", 1),
    (0, "generator", "evaluation", 1),
)
SETTINGS = (
    "generator.max_prompt_tokens=15",  # too few for some of the questions
    "generator.stop=[z]",
    "algorithm.advantages.generator.settings.max_draws=2",
    "train.verifications_per_solution=2",
    "train.verifier_draws=2",
    "algorithm.min_verifier_j=0.1",
    "algorithm.entropy_coef=0.5",  # so that every step changes the weights all the same
)
# Six generator steps without a signal: after the fifth, which is step 7, the run goes back to step 6, once. It was
# stopped
# in the middle of that step.
GOES_BACK = (
    "train.generator_steps=6",
    "algorithm.entropy_coef=0.01",  # so that weights change all the same
    "train.on_trouble.equal_rewards=rollback",
    "train.max_rollbacks=1",
    "checkpoint.every_steps=2",
)

# Free text, of which the tiny models write blank lines instead of some tags; the verifier judges all of it.
FREE = ("protocol.solution=free", "protocol.max_steps=3", "train.generator_steps=2")
BLANK_LINES = {'"->"': "\n\n", '":"': "\n \n", '","': "\n\n\n", '" "': ".\n\n"}

# Both roles, with a reference and optimizers whose state counts.
ADAPTED = (
    "generator.adapter.rank=4",
    "verifier.adapter={rank: 8, alpha: 8, target_modules: [q_proj, v_proj, down_proj]}",
    "algorithm.kl_coef=0.01",
    "algorithm.entropy_coef=0.5",
    "generator.optimizer.learning_rate=0.01",
    "verifier.optimizer.learning_rate=0.01",
    "checkpoint.every_steps=2",
    "checkpoint.background=true",
)

Run = tuple[Config, RunDirectory]


def make_runs(folder: Path, settings: dict[str, tuple[str, ...]]) -> tuple[dict[str, Run], dict[str, str]]:
    """Runs that are ready to start, and the folder of each."""
    made = {name: prepare_small_run(folder / name, *overrides) for name, overrides in settings.items()}
    return made, {name: str(directory.path) for name, (_, directory) in made.items()}


# Each group of runs is made within the time limit of one test.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same run four times: uninterrupted, stopped, killed and resumed, and with engines that forget; and one that
    goes back.
    """
    folder = tmp_path_factory.mktemp("training runs")
    settings = {name: SETTINGS for name in ("straight", "stopped", "forgetful")}
    settings["killed"] = (*SETTINGS, "checkpoint.every_steps=1", "checkpoint.background=true")
    settings["back"] = GOES_BACK
    made, path = make_runs(folder, settings)
    attempts = [Attempt(path["straight"])]
    attempts += [*(Attempt(path["stopped"], stop=stop) for stop in STOPS), Attempt(path["stopped"])]
    attempts += [Attempt(path["killed"], kill=kill) for kill in KILLS]
    attempts += [Attempt(path["killed"], flips="generator/__1_weights.distcp")]
    attempts += [Attempt(path["forgetful"], forgetful=True)]
    attempts += [Attempt(path["back"], stop=("rollout", 7)), Attempt(path["back"])]
    ended = make_attempts(folder, attempts)
    assert [task.code for task in ended] == [0, *[85] * len(STOPS), 0, *[1] * len(KILLS), 0, 0, 85, 78]
    return made


@pytest.fixture(scope="module")
def free_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run in free text, uninterrupted and stopped."""
    folder = tmp_path_factory.mktemp("free runs")
    made, path = make_runs(folder, {"straight": FREE, "stopped": FREE})
    for config, _ in made.values():
        for role in config.roles.values():
            file = role.model.path / "tokenizer.json"
            text = file.read_text()
            for token, blank in BLANK_LINES.items():
                text = text.replace(token, json.dumps(blank))
            file.write_text(text)
    attempts = [Attempt(path["straight"]), Attempt(path["stopped"], stop=("verify", 1)), Attempt(path["stopped"])]
    assert [task.code for task in make_attempts(folder, attempts)] == [0, 85, 0]
    return made


@pytest.fixture(scope="module")
def adapted_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run with adapters, uninterrupted and killed."""
    folder = tmp_path_factory.mktemp("adapted runs")
    made, path = make_runs(folder, {"straight": ADAPTED, "killed": ADAPTED})
    attempts = [
        Attempt(path["straight"]),
        Attempt(path["killed"], stop=("verify", 1)),
        Attempt(path["killed"], kill=(1, "generator", "train", 2)),
        Attempt(path["killed"]),
    ]
    assert [task.code for task in make_attempts(folder, attempts)] == [0, 85, 1, 0]
    return made


def weights_and_optimizers(directory: RunDirectory, step: int = 6) -> dict[str, bytes]:
    """The files of the checkpoint of `step`, the last one, that hold them."""
    folder = directory.checkpoints / "train" / f"step_{step:06d}"
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.distcp"))}


SYNCED = ("reshard/bytes_sent", "reshard/bytes_local", "reshard/bytes_minimum")


@pytest.mark.parametrize(("name", "attempts"), [("stopped", len(STOPS) + 1), ("killed", len(KILLS) + 1)])
def test_an_interrupted_run_computes_the_same(runs: dict[str, Run], name: str, attempts: int) -> None:
    straight, interrupted = runs["straight"][1], runs[name][1]
    expected, resumed = read_metrics(straight), read_metrics(interrupted)
    assert [row["role"][0] for row in expected] == list("vgggvg")
    assert [computed(row) for row in resumed] == [computed(row) for row in expected]
    evaluations = [[computed(row) for row in read_evaluations(run)] for run in (straight, interrupted)]
    assert evaluations[0] == evaluations[1]
    assert read_summary(interrupted)["stages"]["train"]["attempts"] == attempts
    saved = weights_and_optimizers(straight)
    assert len(saved) == 8 and weights_and_optimizers(interrupted) == saved


def test_a_run_in_free_text_that_was_interrupted_in_a_step_computes_the_same(free_runs: dict[str, Run]) -> None:
    """Its verifier writes no verdicts, so that the rewards are what they are; the steps and the weights count."""
    straight, stopped = free_runs["straight"][1], free_runs["stopped"][1]
    assert read_summary(stopped)["stages"]["train"]["attempts"] == 2
    assert [computed(row) for row in read_metrics(stopped)] == [computed(row) for row in read_metrics(straight)]
    last = read_metrics(straight)[-1]["step"]
    assert weights_and_optimizers(stopped, last) == weights_and_optimizers(straight, last)
    rows = [row for step in dumped_steps(straight.rollouts)["generator"] for row in
            read_rollouts(straight.rollout_file("generator", step))]  # fmt: skip
    assert {len(row.step_end_tokens) for row in rows} >= {1, 2}
    for row in rows:
        solution = read_solution(row.response_text, free_runs["straight"][0].protocol)
        assert len(solution.steps) == len(row.step_end_tokens) <= 3
        assert not solution.steps or row.step_end_tokens[-1] == len(row.response_ids) - 1


def test_a_run_with_adapters_that_was_interrupted_computes_the_same(adapted_runs: dict[str, Run]) -> None:
    straight, killed = adapted_runs["straight"][1], adapted_runs["killed"][1]
    rows = read_metrics(straight)
    assert [computed(row) for row in read_metrics(killed)] == [computed(row) for row in rows]
    assert weights_and_optimizers(killed) == weights_and_optimizers(straight)
    assert all(row["logprob_gap/mean_abs"] < 1e-4 for row in rows)
    distances = [row["kl"] for row in rows if row["role"] == "generator"]
    assert distances[0] == 0 and distances[-1] > 0  # the reference is the first policy, and stays that


def test_an_adapter_of_a_run_is_exported_and_added_to_its_model(adapted_runs: dict[str, Run], tmp_path: Path) -> None:
    """With `tango export`: the adapter, and the model that was trained; `tango import` makes the second from the
    first. A run that starts from the adapter has that model as its first policy and its reference.
    """
    config, directory = adapted_runs["straight"]
    for name, words in (("adapter", ["--adapter"]), ("merged", [])):
        tango("export", str(directory.path), "--role", "verifier", "--out", str(tmp_path / name), *words)
    model = config.roles["verifier"].model.path
    added = ["--adapter", str(tmp_path / "adapter"), "--dtype", "float32"]
    tango("import", str(model), "--out", str(tmp_path / "imported"), *added)
    base, merged, imported = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "merged", tmp_path / "imported")
    )
    for name, value in merged.items():
        assert torch.equal(imported[name], value)
        assert torch.equal(value, base[name]) != any(part in name for part in ("q_proj.w", "v_proj.w", "down_proj.w"))
    start = ["sft.verifier=null", f"verifier.adapter.path={tmp_path / 'adapter'}"]
    TRAIN.check_inputs(load_config(directory.config, start))
    with pytest.raises(UserError, match=r"verifier.adapter.path: .* its r is 8; set adapter.rank to that"):
        TRAIN.check_inputs(load_config(directory.config, [*start, "verifier.adapter.rank=4"]))
    with pytest.raises(UserError, match=r"generator.adapter.target_modules: lm_head: choose of q_proj, k_proj"):
        TRAIN.check_inputs(load_config(directory.config, ["generator.adapter.target_modules=[lm_head]"]))
    alone = [*start, f"run.dir={tmp_path / 'alone'}", "eval.use_verifier=true"]
    with pytest.raises(UserError, match=r"verifier.adapter.path: a model is asked without its adapter"):
        EVAL.check_inputs(load_config(directory.config, alone))


def tango(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tango_hpc.commands.cli", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("group", ["runs", "adapted_runs"])
def test_a_checkpoint_takes_what_the_plan_keeps_for_its_copy(group: str, request: pytest.FixtureRequest) -> None:
    config, directory = request.getfixturevalue(group)["killed"]
    plan = plan_memory(config, gpu_gb=0, node_gb=None, sync_bytes={})
    planned = plan.node[0].items[COPIES]
    written = 0
    for role in config.roles:
        metadata = FileSystemReader(directory.checkpoints / "train" / "step_000006" / role).read_metadata()
        tensors = [entry for entry in metadata.state_dict_metadata.values() if isinstance(entry, TensorStorageMetadata)]
        written += sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)
    assert config.checkpoint.background and written <= planned <= 1.01 * written  # shares are rounded up


def test_a_flipped_bit_is_told_everywhere_and_trained_on_nowhere(runs: dict[str, Run]) -> None:
    directory = runs["killed"][1]
    (event,) = read_events(directory)
    damaged = directory.checkpoints / "train" / event["text"].split()[1]
    assert event["event"] == "checkpoint_set_aside" and event["step"] == StepName.read(damaged.name).step - 1
    assert f"{damaged.name} is damaged (generator/__1_weights.distcp is not what was written" in event["text"]
    assert damaged.with_name(f"{damaged.name}.damaged").is_dir()
    assert event["text"] in json.loads(directory.progress.read_text())["notes"]
    assert f"set aside as damaged: {damaged.name}.damaged" in states([directory])[0].detail
    write_report(directory)
    assert f"checkpoint {damaged.name} is damaged" in directory.report.read_text()


def bytes_of_the_engines(config: Config) -> int:
    """Of one role's weights on all ranks; both models are of one size, and every rank holds a whole one."""
    shape = role_shape(config, "generator")
    layout = engine_layout(shape, tensor_size=1, tensor_rank=0)
    elements = sum(
        math.prod(stop - start for start, stop in piece.box) for param in layout.values() for piece in param.pieces
    )
    return elements * 4 * config.world_size


def test_engines_that_forget_in_their_sleep_get_their_weights_before_they_generate(runs: dict[str, Run]) -> None:
    straight, forgetful = runs["straight"][1], runs["forgetful"][1]
    assert weights_and_optimizers(forgetful) == weights_and_optimizers(straight)
    once, whenever = ([computed(row) for row in read_metrics(run)] for run in (straight, forgetful))
    for row, more in zip(once, whenever, strict=True):
        assert {key: row[key] for key in row if key not in SYNCED} == {
            key: more[key] for key in row if key not in SYNCED
        }
    # Both roles generate in every draw, of which generator steps have two, and in the evaluations before steps 1, 2 and
    # 4, whose greedy solutions are those of the first; all of either model comes back.
    moved = [row["reshard/bytes_sent"] + row["reshard/bytes_local"] for row in whenever]
    per_sync = bytes_of_the_engines(runs["straight"][0])
    assert [bytes_moved / per_sync for bytes_moved in moved] == [5, 6, 4, 6, 3, 4]


def test_a_run_in_trouble_goes_back_once_and_gives_up_when_it_meets_it_again(runs: dict[str, Run]) -> None:
    config, directory = runs["back"]
    rows = read_metrics(directory)
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert [row["trouble/steps_without_signal"] for row in rows if row["role"] == "generator"] == [1, 2, 3, 4, 5]
    assert rows[-1]["logprob_gap/mean_abs"] < 1e-4  # the engine has the weights that were loaded
    back, again = [event for event in read_events(directory) if "(groups_with_signal)" in event["text"]]
    assert (back["event"], back["step"], again["event"], again["step"]) == ("rollback", 6, "trouble", 7)
    assert "at step 7 in the last 5 steps of the generator" in back["text"]
    assert back["text"].endswith(": back from step 7 to step 6, on with other sampling seeds (1)")
    assert "the run went back 1 times already (train.max_rollbacks)" in read_failures(directory)[0].text()
    # What was sampled before it went back is in the checkpoint that it went back to, and was not taken again.
    state = json.loads((directory.checkpoints / "train/step_000006+rollout/state.json").read_text())
    before = [token_ids for token_ids, _, _ in state["pending"]["rollout"]]
    after = [row.response_ids for row in read_rollouts(directory.rollout_file("generator", 7))]
    questions = [row.question for row in read_rollouts(directory.rollout_file("generator", 7))]
    assert len(before) == len(after) and before != after
    train = read_questions(config.data.train)
    assert questions[::2] == [train[index]["question"] for index in state["pending"]["questions"]]


def test_rows_keep_the_contract_and_the_engine_agrees_with_the_trainer(runs: dict[str, Run]) -> None:
    config, directory = runs["straight"]
    assert config.algorithm.kl_coef == 0
    for row in read_metrics(directory):
        assert set(REQUIRED_KEYS) <= row.keys()
        assert row["kl"] is None  # there is no reference
        never_null = set(REQUIRED_KEYS) - {
            "alpha",
            "kl",
            "verifier/outcome_f1",
            "verifier/outcome_j",
            "verifier/step_j",
        }
        assert not [key for key in never_null if row[key] is None and not key.startswith(OF_THE_MACHINE)]
        assert row["logprob_gap/mean_abs"] < 1e-4
        assert row["reshard/bytes_sent"] == row["reshard/bytes_minimum"]
    evaluations = {row["step"]: row for row in read_evaluations(directory)}
    assert list(evaluations) == [0, 1, 3, 6]
    # Only the generator learnt in steps 2 and 3, and the verifier still judges the same solutions.
    judged = [key for key in evaluations[1] if key.startswith("verifier/")]
    verifier_keys = [key for key in judged if "/present_" not in key]
    assert len(verifier_keys) == 8 and len(judged) == 16  # the same of the present generator's solutions
    assert all(evaluations[0][key] == evaluations[0][key.replace("/", "/present_")] for key in verifier_keys)
    assert [evaluations[1][key] for key in verifier_keys] == [evaluations[3][key] for key in verifier_keys]
    summary = json.loads(directory.summary.read_text())
    assert summary["status"] == "done" and summary["generator"].keys() == {"accuracy_before", "accuracy_after"}


def test_questions_that_are_too_long_are_not_asked_but_counted_and_told(runs: dict[str, Run]) -> None:
    config, directory = runs["straight"]
    tokenizer = load_tokenizer(config.generator.model.path)
    questions = [row["question"] for row in read_rows(config.data.train, ("question",))]
    too_long = {question for question in questions if len(generator_prompt_ids(question, tokenizer)) > 15}
    count = sum(question in too_long for question in questions)
    assert 0 < count < len(questions)
    rows = read_metrics(directory)
    assert {(row["data/too_long"], row["data/rows"]) for row in rows} == {(count, len(questions))}
    for step in dumped_steps(directory.rollouts)["generator"]:
        asked = read_rollouts(directory.rollout_file("generator", step))
        assert too_long.isdisjoint(row.question for row in asked) and max(len(row.prompt_ids) for row in asked) <= 15
    told = f"{count} of {len(questions)} training questions are not asked: their prompt is longer than"
    assert any(told in note for note in json.loads(directory.progress.read_text())["notes"])
    write_report(directory)
    assert f"{count} of {len(questions)} rows are too long" in directory.report.read_text()


def test_draws_and_stop_strings(runs: dict[str, Run]) -> None:
    _, directory = runs["straight"]
    drawn = [(row["data/questions_drawn"], row["data/questions_dropped"]) for row in read_metrics(directory)[1:4]]
    assert drawn == [(8, 4)] * 3  # nothing to choose: those drawn first are trained on
    texts = [row.response_text for row in read_rollouts(directory.rollout_file("generator", 2))]
    assert {text.find("z") for text in texts if "z" not in text[-1:]} == {-1}
    assert any(text.endswith("z") for text in texts)


def test_scoring_the_dumps_again_gives_the_same_rewards_and_advantages(runs: dict[str, Run]) -> None:
    config, directory = runs["straight"]
    steps = dumped_steps(directory.rollouts)
    assert steps == {"verifier": [1, 5], "generator": [2, 3, 4, 6]}
    for role, numbers in steps.items():
        rows = read_rollouts(directory.rollout_file(role, numbers[0]))
        assert len(rows) == {"verifier": 8, "generator": 16}[role]
        assert {len(row.other_verifications) for row in rows} == {{"verifier": 0, "generator": 1}[role]}
        for old, new in zip(rows, score_rows(rows, config), strict=True):
            assert new.advantages == pytest.approx(old.advantages, abs=1e-6)
            assert (new.outcome_reward, new.reward) == (old.outcome_reward, pytest.approx(old.reward))
