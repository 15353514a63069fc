"""Who has the GPU: each rule of the order in which trainers and engines of two roles hand its memory to each other.

Whole stages are rehearsed (`tests/helpers/rehearsal.py`); the rules are asked of what happened in them. That each rule
can fail is seen in rehearsals of code that breaks it.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tango_hpc.base.config import Config, config_to_yaml
from tango_hpc.base.run.dumps import dumped_steps
from tango_hpc.base.run.metrics import read_evaluations, read_metrics
from tango_hpc.base.run.step_names import is_newer, steps_in
from tango_hpc.models.engine.engine import RolloutEngine
from tango_hpc.models.trainer import saved_state
from tango_hpc.models.trainer.offload import DeviceMemory
from tango_hpc.models.trainer.policy import Policy
from tango_hpc.models.weight_sync.sync import SyncStats
from tango_hpc.questions.tasks.made_files import make_missing_files
from tango_hpc.questions.tasks.tiny import build_tokenizer
from tango_hpc.runner.enter import enter_run
from tango_hpc.stages import evaluate as benchmark
from tango_hpc.stages import sft, tango
from tango_hpc.stages.model_worker import ModelWorker
from tango_hpc.stages.role import Model, request_seeds
from tango_hpc.stages.stage import STAGES
from tests.helpers.rehearsal import ENGINE, FOR_A_SYNC, RANKS, TRAINER, Event, Rehearsal, make_stand_ins, replay
from tests.helpers.runs import ONE_MODEL, small_config

Events = Sequence[Event]
Attempts = Sequence[tuple[str, tuple[str, int] | None]]

# -- the rules: what breaks them, in order -----------------------------------------------------------------------------


def nothing_wakes_before_the_other_role_has_given_its_memory_back(events: Events) -> list[str]:
    return [
        f"rank {event.rank}: {sorted(event.parts)} of the {event.role} beside {sorted(parts)} of the {role}"
        for event, held in replay(events)
        if event.kind == "take"
        for (rank, role), parts in held.items()
        if rank == event.rank and role != event.role and parts
    ]


def trainer_and_engine_are_there_together_only_for_a_sync(events: Events) -> list[str]:
    broken = []
    for event, held in replay(events):
        parts = held[event.rank, event.role] | event.parts
        if event.kind == "take" and parts & TRAINER and parts & ENGINE and not parts <= FOR_A_SYNC:
            broken.append(f"{event.role}: {sorted(parts)}")
    return broken


def the_next_role_is_fine_tuned_when_the_last_one_is_gone(events: Events) -> list[str]:
    return [
        f"{sorted(event.parts)} beside {sorted(held[event.rank, event.role])}"
        for event, held in replay(events)
        if event.kind == "take" and "trainer weights of trainer 2" in event.parts
        if held[event.rank, event.role]
    ]


def work_finds_what_it_needs(events: Events) -> list[str]:
    return [
        f"{event.role}: {event.name} without {sorted(event.parts - held[event.rank, event.role])}"
        for event, held in replay(events)
        if event.kind == "work" and not event.parts <= held[event.rank, event.role]
    ]


def no_collective_while_a_peer_sleeps(events: Events) -> list[str]:
    return [
        f"{event.role}: {event.name} while rank {rank} lacks {sorted(event.parts - held[rank, event.role])}"
        for event, held in replay(events)
        if event.kind == "together"
        for rank in range(RANKS)
        if not event.parts <= held[rank, event.role]
    ]


def engines_generate_with_the_trainers_weights(events: Events) -> list[str]:
    return [
        f"{event.role}: weights of update {event.versions[0]} after {event.versions[1]}"
        for event in events
        if event.kind == "generate" and event.versions[0] != event.versions[1]
    ]


def engines_go_to_sleep_whole_and_wake_what_sleeps(events: Events) -> list[str]:
    return [
        f"{event.role}: {event.kind} {sorted(event.parts)}"
        for event in events
        if event.kind in ("sleep", "wake") and event.parts
    ]


def all_is_given_back_in_the_end(events: Events) -> list[str]:
    """But for the engine of an only model, which nobody waits for."""
    held = [held for _, held in replay([*events, Event("work", "")])][-1]
    kept = ENGINE if len({event.role for event in events}) == 1 else set()
    return [f"rank {rank}: {sorted(parts)} of the {role}" for (rank, role), parts in held.items() if parts - kept]


Rule = Callable[[Events], list[str]]
RULES: tuple[Rule, ...] = (
    nothing_wakes_before_the_other_role_has_given_its_memory_back,
    trainer_and_engine_are_there_together_only_for_a_sync,
    the_next_role_is_fine_tuned_when_the_last_one_is_gone,
    work_finds_what_it_needs,
    no_collective_while_a_peer_sleeps,
    engines_generate_with_the_trainers_weights,
    engines_go_to_sleep_whole_and_wake_what_sleeps,
    all_is_given_back_in_the_end,
)

# -- the rehearsals ----------------------------------------------------------------------------------------------------

ON_A_GPU = ("launch.device=cuda", "launch.dtype=bfloat16", "eval.benchmarks=[task]", "train.dump_every=0")
SHORT = (*ON_A_GPU, "train.verifier_warmup_steps=1", "train.generator_steps=1", "train.eval_every=0")
LONGER = (*ON_A_GPU, "train.generator_steps=3", "train.generator_steps_per_cycle=2", "train.eval_every=1")
NO_STEPS = ("train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0")

THROUGH: Attempts = (("train", None), ("eval", None))
# Settings, and the attempts at stages: where each is told to stop.
SCENARIOS: dict[str, tuple[Sequence[str], Attempts]] = {
    "both roles are trained": (LONGER, THROUGH),
    "both roles are fine-tuned": (ON_A_GPU, (("sft", ("between steps", 5)), ("sft", None))),
    "a batch has two updates and a reference": (
        (*SHORT, "train.updates_per_batch=2", "algorithm.kl_coef=0.01"),
        (("train", None),),
    ),
    "the verifier is frozen": ((*LONGER, *NO_STEPS, "verifier.trainable=false"), THROUGH),
    "the generator is frozen": ((*LONGER, "generator.trainable=false"), THROUGH),
    "there is no verifier": ((*LONGER, *NO_STEPS, "verifier=null", "sft.verifier=null"), THROUGH),
    "one model takes both roles": (
        (*LONGER, *ONE_MODEL, "train.updates_per_batch=2", "algorithm.kl_coef=0.01"),
        (("train", ("rollout", 1)), ("train", ("verify", 2)), ("train", ("verify", 1)), *THROUGH),
    ),
    "one model takes both roles in joint updates": (
        (*LONGER, *ONE_MODEL, "train.joint=true", "train.verifier_steps_per_cycle=0", "train.joint_solutions=3"),
        (("train", ("verify_2", 1)), ("train", ("verify", 1)), *THROUGH),
    ),
    "one model is fine-tuned for both roles": (
        (*ON_A_GPU, *ONE_MODEL),
        (("sft", ("between steps", 3)), ("sft", None)),
    ),
    "one model takes both roles and learns from one": (
        (*LONGER, *ONE_MODEL, "generator.trainable=false"),
        (("train", ("verify", 1)), *THROUGH),
    ),
    "stopped and resumed among draws and several verifications": (
        (*LONGER, "algorithm.advantages.generator.settings.max_draws=3", "train.verifications_per_solution=2"),
        (
            ("train", ("verify", 2)),
            ("train", ("rollout_2", 1)),
            ("train", ("verify_2", 1)),
            ("train", ("verify_3", 2)),
            ("train", None),
        ),
    ),
    "stopped and resumed among the draws of a verifier's step": (
        (*LONGER, "train.verifier_draws=3"),
        (("train", ("rollout_3", 1)), ("train", ("verify_3", 1)), ("train", None)),
    ),
    "checkpoints are written while training goes on": (
        (*LONGER, "checkpoint.every_steps=1", "checkpoint.background=true"),
        (("train", ("rollout", 2)), *THROUGH),
    ),
    "stopped, resumed, all checkpoints evaluated": (
        (*LONGER, "checkpoint.every_steps=1", "checkpoint.keep=9", "eval.checkpoints=all", "eval.samples=1"),
        (
            ("train", ("rollout", 1)),
            ("train", ("verify", 1)),
            ("train", ("between steps", 2)),
            ("train", ("rollout", 1)),
            *THROUGH,
        ),
    ),
}


class Run:
    """A run directory ready for its stages, which are rehearsed in it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.config = small_config(folder / "run", *overrides)
        self.directory, _ = enter_run(folder / "run", config_to_yaml(self.config), resume=False, stage="train")
        make_missing_files(self.config)
        for model in self.config.models.values():
            build_tokenizer(model.model.path)
        if self.config.sft.generator is not None:
            build_tokenizer(self.config.sft.generator.init.path)
        self._monkeypatch = monkeypatch

    def rehearse(self, stage: str, stop: tuple[str, int] | None = None, gap: bool = False) -> tuple[Events, list[str]]:
        """What happened in one attempt at a stage, and what its processes raised."""
        rehearsal = Rehearsal(stop, gap)
        make_stand_ins(rehearsal, self._monkeypatch)
        bodies: dict[str, Any] = {"sft": sft.fine_tune, "train": tango.train, "eval": benchmark.evaluate}
        errors = rehearsal.play(self.config, self.directory, bodies[stage], STAGES[stage].roles(self.config))
        return rehearsal.events, errors


def work_of(events: Events, role: str, rank: int = 0) -> list[str]:
    """What a process did with its GPU, in order."""
    return [event.name for event in events if (event.kind, event.rank, event.role) == ("work", rank, role)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_rule_holds_in_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    overrides, attempts = SCENARIOS[scenario]
    run = Run(tmp_path, monkeypatch, *overrides)
    saved: dict[str, str] = {}
    for stage, stop in attempts:
        events, errors = run.rehearse(stage, stop)
        assert [error.partition(":")[0] for error in errors] == ([] if stop is None else ["StoppedEarly"]), errors
        # A process that fine-tunes ends with what it has where it is stopped.
        rules = RULES[:-1] if stage == "sft" and stop else RULES
        assert {rule.__name__: rule(events) for rule in rules} == {rule.__name__: [] for rule in rules}
        for role in {event.role for event in events}:
            assert work_of(events, role, 0) == work_of(events, role, 1) != []
        if stage != "eval":  # what an attempt saved last is what the next one goes on with
            newest = steps_in(run.directory.path / "checkpoints" / stage)[-1][1].name
            assert is_newer(newest, saved.get(stage))
            saved[stage] = newest


def test_a_step_of_either_role_is_what_the_rules_are_asked_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation, verifier step, generator step, evaluation, save; then the evaluation of that checkpoint."""
    run = Run(tmp_path, monkeypatch, *SHORT)
    events, _ = run.rehearse("train")
    made = ["take the stream", "load the trainer", "load the engine", "connect"]
    asked, trained = ["sync", "generate"], ["prepare", "update"]
    assert work_of(events, "generator") == [*made, *asked, *asked, *asked, *trained, *asked, "save"]
    assert work_of(events, "verifier") == [*made, *asked, *asked, *trained, *asked, *asked, "save"]
    assert [row["role"] for row in read_metrics(run.directory)] == ["verifier", "generator"]
    saves = [held[event.rank, event.role] for event, held in replay(events) if event.name == "save" and event.rank >= 0]
    assert len(saves) == 2 * RANKS and not any(held & TRAINER for held in saves), "a save brought the trainer back"
    events, _ = run.rehearse("eval")
    evaluated = ["take the stream", "load the engine", "load the trainer", "connect", "load", *asked]
    assert work_of(events, "generator") == work_of(events, "verifier") == evaluated
    assert {event.versions for event in events if event.kind == "generate"} == {(1, 1)}


def test_one_model_solves_and_judges_with_the_weights_of_one_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one evaluation too; an update comes between any two syncs."""
    run = Run(tmp_path, monkeypatch, *SHORT, *ONE_MODEL)
    events, errors = run.rehearse("train")
    assert errors == [] and {event.role for event in events if event.rank >= 0} == {"generator"}
    made = ["take the stream", "load the trainer", "load the engine", "connect"]
    both, trained = ["generate", "generate"], ["prepare", "update"]
    # Evaluation and a verifier step; a generator step; the last evaluation.
    steps = ["sync", *both, *both, *trained, "sync", *both, *trained, "sync", *both]
    assert work_of(events, "generator") == [*made, *steps, "save"]
    assert [row["role"] for row in read_metrics(run.directory)] == ["verifier", "generator"]
    (saved,) = steps_in(run.directory.path / "checkpoints/train")
    assert sorted(path.name for path in saved[1].iterdir() if path.is_dir()) == ["generator"]


def test_weights_are_compared_by_the_rules_when_trainer_and_engine_disagree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, errors = Run(tmp_path, monkeypatch, *SHORT).rehearse("train", gap=True)
    assert any("they compute differently" in error for error in errors), errors
    assert work_of(events, "verifier")[-3:] == ["update", "sync", "compare"]
    for rule in RULES[:-1]:  # the processes end with what they hold
        assert rule(events) == []


def test_the_rules_hold_where_a_run_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing carries a signal here: after five generator steps to the checkpoint of the fourth, and there it
    gives up.
    """
    back = ("train.on_trouble.equal_rewards=rollback", "train.max_rollbacks=1", "checkpoint.every_steps=4")
    settings = (*ON_A_GPU, *NO_STEPS, *back, "train.generator_steps=6", "train.eval_every=0")
    events, errors = Run(tmp_path, monkeypatch, *settings).rehearse("train")
    assert errors and all(error.startswith("CheckFailed: at step 5 in the last 5 steps") for error in errors), errors
    work = work_of(events, "generator")
    assert work.count("update") == 6 and work.count("save") == 2 and work.count("load") == 1
    place = work.index("load")
    assert work[place - 1 : place + 5] == ["update", "load", "sync", "generate", "prepare", "update"]
    for rule in RULES[:-1]:  # the processes end with what they hold
        assert rule(events) == []


def test_how_often_a_run_went_back_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after it went back, before it saved again: it goes on with the seeds that it had, and not back
    once more.
    """
    back = ("train.on_trouble.equal_rewards=rollback", "train.max_rollbacks=1", "checkpoint.every_steps=4")
    run = Run(tmp_path, monkeypatch, *NO_STEPS, *back, "train.generator_steps=6", "train.eval_every=0")
    first, _ = run.rehearse("train")
    events, errors = run.rehearse("train")
    assert work_of(first, "generator").count("load") == 1 and run.directory.rollbacks_file.read_text() == "1\n"
    assert work_of(events, "generator").count("load") == 1, "when it was started"
    assert errors and all("the run went back 1 times already" in error for error in errors), errors
    for damage in ("one\n", "-3\n", ""):
        run.directory.rollbacks_file.write_text(damage)
        _, errors = run.rehearse("train")
        assert errors and all("control/rollbacks is damaged" in error and "remove it" in error for error in errors), (
            errors
        )


def test_all_ranks_go_by_the_rollbacks_that_the_first_one_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS another node may not see the file yet that was written just before the run was killed."""
    answers, used = itertools.cycle([1, 0]), set()

    def seeds(*arguments: int) -> list[int]:
        used.add(arguments[-1])
        return request_seeds(*arguments)

    monkeypatch.setattr(tango, "read_rollbacks", lambda _: next(answers))
    monkeypatch.setattr(tango, "request_seeds", seeds)
    run = Run(tmp_path, monkeypatch, *NO_STEPS, "train.generator_steps=1", "train.eval_every=0")
    _, errors = run.rehearse("train")
    assert errors == [] and used in ({0}, {1})


def test_a_run_that_is_to_stop_evaluates_where_it_was_due_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = ("train.on_trouble.equal_rewards=stop", "train.eval_every=5", "checkpoint.every_steps=0")
    run = Run(tmp_path, monkeypatch, *NO_STEPS, *stop, "train.generator_steps=6")
    events, errors = run.rehearse("train")
    assert errors and all(
        "The state is saved; --resume goes on with it until this begins anew, --resume train" in error
        for error in errors
    ), errors
    assert work_of(events, "generator")[-4:] == ["update", "sync", "generate", "save"]
    assert [row["step"] for row in read_evaluations(run.directory)] == [0, 5]


# -- code that breaks them ---------------------------------------------------------------------------------------------


def sync_before_waking(worker: ModelWorker) -> Any:
    worker.policy.onload(weights_only=True)
    assert worker._sync is not None
    stats = worker._sync.sync()
    worker.engine.wake(weights_only=True)
    worker.policy.offload(weights_changed=False)
    return stats


def wake_before_offload(worker: ModelWorker) -> Any:
    worker.policy.onload()
    return SYNC(worker)


def sleep_half_awake(engine: RolloutEngine) -> None:
    engine.llm.sleep(level=2 if engine.forgets_when_asleep else 1)
    engine._awake = ()


def wake_twice(engine: RolloutEngine, *, weights_only: bool = False) -> None:
    engine._awake = ()
    WAKE(engine, weights_only=weights_only)


def forget_what_changed(policy: Policy, *, keep_weights: bool = False, weights_changed: bool = True) -> None:
    OFFLOAD(policy, keep_weights=keep_weights, weights_changed=False)


def sync_nothing(model: Model) -> SyncStats:
    model.stale = False
    return SyncStats()


def keep_the_last_save(policy: Policy, folder: Path, *, background: bool) -> None:
    policy.onload()
    policy._saving = saved_state.Save(policy._state(), folder, background=background)


SYNC, WAKE, OFFLOAD = ModelWorker.sync, RolloutEngine.wake, Policy.offload
# What is replaced, by what, in which stage, and the rule that must notice.
SABOTAGE: list[tuple[Any, str, Any, str, Rule]] = [
    (ModelWorker, "_give_back", lambda _: None, "train", RULES[0]),
    (RolloutEngine, "sleep", lambda _: None, "train", RULES[0]),
    (DeviceMemory, "offload", lambda *_, **__: None, "train", RULES[0]),
    (ModelWorker, "sync", wake_before_offload, "train", RULES[1]),
    (gc, "collect", lambda: 0, "sft", RULES[2]),
    (DeviceMemory, "onload", lambda *_, **__: None, "train", RULES[3]),
    (ModelWorker, "sync", sync_before_waking, "train", RULES[3]),
    (ModelWorker, "sync", sync_before_waking, "train", RULES[4]),
    (Model, "sync_weights", sync_nothing, "train", RULES[5]),
    (Policy, "offload", forget_what_changed, "train", RULES[5]),
    (RolloutEngine, "sleep", sleep_half_awake, "eval", RULES[6]),
    (RolloutEngine, "wake", wake_twice, "train", RULES[6]),
    (Policy, "begin_save", keep_the_last_save, "train", RULES[7]),
]


@pytest.mark.parametrize(("owner", "name", "replacement", "stage", "rule"), SABOTAGE)
def test_each_rule_notices_code_that_breaks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, replacement: Any, stage: str, rule: Rule
) -> None:
    run = Run(tmp_path, monkeypatch, *SHORT)
    if stage == "eval":
        run.rehearse("train")
    monkeypatch.setattr(owner, name, replacement)
    events, _ = run.rehearse(stage)
    assert rule(events) != []


def test_first_and_last_step_of_either_role_are_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, *LONGER, "train.dump_every=100")
    _, errors = run.rehearse("train")
    assert errors == []
    steps: dict[str, list[int]] = {}
    for row in read_metrics(run.directory):
        steps.setdefault(row["role"], []).append(row["step"])
    assert len(steps["verifier"]) > 1 and len(steps["generator"]) > 2
    for role, of_role in steps.items():
        assert dumped_steps(run.directory.rollouts)[role] == [of_role[0], of_role[-1]]


def with_steps(config: Config, role: str, steps: int) -> Config:
    """With another number of steps of fine-tuning; not read anew, as the models that were made here are none."""
    settings = getattr(config.sft, role).model_copy(update={"steps": steps})
    return config.model_copy(update={"sft": config.sft.model_copy(update={role: settings})})


@pytest.mark.parametrize(
    ("stop", "role", "steps", "message"),
    [
        (None, "generator", 5, "sft.generator.steps: the generator was done after 4, it is 5 now"),
        (("between steps", 5), "generator", 9, "sft.generator.steps: the generator was done after 4, it is 9 now"),
        (("between steps", 3), "generator", 2, "sft.generator.steps: 2, and 3 are done already"),
        (("between steps", 5), "verifier", 1, "sft.verifier.steps: 1, and 2 are done already"),
    ],
)
def test_fine_tuning_that_was_done_is_not_counted_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, int] | None, role: str, steps: int, message: str
) -> None:
    run = Run(tmp_path, monkeypatch, *ON_A_GPU, "sft.generator.steps=4", "sft.verifier.steps=4")
    _, errors = run.rehearse("sft", stop)
    assert {error.partition(":")[0] for error in errors} == ({"StoppedEarly"} if stop else set())
    run.config = with_steps(run.config, role, steps)
    _, errors = run.rehearse("sft")
    assert errors and all(error.startswith(f"CheckFailed: {message}") for error in errors), errors


def test_a_role_whose_fine_tuning_was_done_can_have_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, *ON_A_GPU, "sft.generator.steps=4", "sft.verifier.steps=4")
    run.rehearse("sft")
    run.config = with_steps(run.config, "verifier", 6)
    before = read_metrics(run.directory, "sft")
    _, errors = run.rehearse("sft")
    rows = read_metrics(run.directory, "sft")
    assert errors == [] and rows[: len(before)] == before and len(before) == 8  # nothing was done again
    assert [(row["step"], row["role"]) for row in rows[8:]] == [(9, "verifier"), (10, "verifier")]
