"""Several verifications of a solution, PROF and dynamic sampling: by hand, and by the authors' functions."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tango_hpc.base.config import Config
from tango_hpc.base.config.schema import AlgorithmConfig
from tango_hpc.base.config.tasks import TaskConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.dumps import ROLLOUT_SCHEMA, read_rollouts, write_rollouts
from tango_hpc.method.advantages.generator.prof import kept_rollouts
from tango_hpc.method.hooks import load_hook
from tango_hpc.method.steady_verifier import kept_of_each
from tango_hpc.method.vote import majority_vote
from tango_hpc.questions.protocol.verification import Verification
from tango_hpc.questions.tasks import get_task
from tango_hpc.questions.tasks.last_letter import verification_text
from tango_hpc.stages.rescore import score_rows
from tango_hpc.stages.responses import ReadVerification
from tango_hpc.stages.scoring import Moment, Scored
from tango_hpc.stages.scoring import score_solutions as score_by
from tango_hpc.stages.steps import GeneratorBatch
from tests.helpers.advantages import advantages_of, for_generator, solutions
from tests.unit.method.test_equations import scored_solution
from tests.unit.stages.test_score import WORDS, generator_row
from tests.unit.stages.test_score import make_config as config_of
from tests.unit.stages.test_verifier_scores import read

OFFICIAL = json.loads((Path(__file__).parents[2] / "data/official_several_verifications.json").read_text())


def score_solutions(read, settings, alpha, hook=None) -> Scored:
    return score_by(read, settings, hook or for_generator(), Moment(alpha=alpha))


# Several verifications


def judged(judgements: list[int], final: int = 1, num_judgements: int | None = None, form: float = 1.0) -> Verification:
    count = sum(judgement != 0 for judgement in judgements) if num_judgements is None else num_judgements
    return Verification(judgements, final, count, form, [])


@pytest.mark.parametrize(
    ("verifications", "judgements", "final"),
    [
        # 2 to 1 for each step, and 2 to 1 for "right"
        ([judged([1, -1, -1]), judged([1, 1, -1]), judged([-1, -1, 1], final=0)], [1, -1, -1], 1),
        # one of three leaves a step out and has no voice about steps, so that the first step is 1 to 1; its verdict
        # counts
        ([judged([1, -1], final=0), judged([-1, -1]), judged([1, 0], final=0)], [0, -1], 0),
        # so has one that judges something that is no step; verdicts 1 to 1
        ([judged([1], final=0), judged([-1], final=1, num_judgements=2)], [1], -1),
        # verdicts: none has a voice but the third
        ([judged([1], final=-1), judged([-1], final=-1), judged([-1], final=0)], [-1], 0),
        ([judged([0, 0], final=-1)] * 3, [0, 0], -1),
        ([judged([]), judged([], final=0), judged([])], [], 1),
    ],
)
def test_a_vote_by_hand(verifications, judgements, final):
    vote = majority_vote(verifications)
    assert (vote.judgements, vote.final) == (judgements, final)
    assert vote.is_complete == (0 not in judgements)


def test_one_verification_is_its_own_vote_and_forms_are_averaged():
    alone = judged([1, 0], final=0, num_judgements=1, form=0.2)
    assert majority_vote([alone]) is alone
    assert majority_vote([alone, judged([1, 1], form=1.0)]).format_reward == pytest.approx(0.6)


def solutions_of(batch):
    """The rows of an official batch as solutions with several verifications."""
    for row in batch["rows"]:
        first, *others = (scored_solution(row | {"judgements": judgements}) for judgements in row["judgements"])
        yield replace(first, others=[other.verification for other in others])


@pytest.mark.parametrize("batch", OFFICIAL, ids=[f"{n}-{batch['algorithm']}" for n, batch in enumerate(OFFICIAL)])
def test_the_mean_over_verifications_is_that_of_the_authors_functions(batch):
    """compute_grpo_advantage and compute_rloo_advantage of github.com/kaiwenzha/RL-Tango with 2 and 3 verifications of
    each solution, some with a judgement too few. GRPO there adds 1e-6 to each deviation, in float32.
    """
    hook = for_generator(batch["algorithm"], step_scale=batch["step_scale"])
    settings = AlgorithmConfig(combine_verifications="mean")
    result = score_solutions(list(solutions_of(batch)), settings, batch["alpha"], hook)
    for row, advantages_T in zip(batch["rows"], result.advantages_N_T, strict=True):
        np.testing.assert_allclose(advantages_T, row["advantages"], rtol=0, atol=2e-5)
    incomplete = [len(judgements) < len(row["step_ends"]) for row in batch["rows"] for judgements in row["judgements"]]
    assert any(incomplete) and not all(incomplete)


ONE_STEP = {"group": "q", "length": 2, "step_ends": [0], "outcome": 1.0}


def three_verifications(judgements, outcome=1.0):
    first, *others = (scored_solution(ONE_STEP | {"judgements": [y], "outcome": outcome}) for y in judgements)
    return replace(first, others=[other.verification for other in others])


def test_vote_and_mean_give_other_step_advantages():
    """Two right solutions of one step, judged right by 3 of 3 and by 1 of 3; their outcomes give no signal."""
    solutions = [three_verifications([1, 1, 1]), three_verifications([1, -1, -1])]
    vote = score_solutions(solutions, AlgorithmConfig(), 0.5)
    # +1 and -1: mean 0, deviation √2
    assert [rewards.tolist() for rewards in vote.step_rewards_N_K] == [[1.0], [-1.0]]
    for advantages_T, sign in zip(vote.advantages_N_T, (1, -1), strict=True):
        np.testing.assert_allclose(advantages_T, [sign * 0.5 / math.sqrt(2), 0.0])
    mean = score_solutions(solutions, AlgorithmConfig(combine_verifications="mean"), 0.5)
    # four +1 and two -1: mean 1/3, squares 4 · 4/9 + 2 · 16/9 = 16/3, over 5; the means of each are 1 and -1/3
    deviation = math.sqrt(16 / 15)
    assert [rewards.tolist() for rewards in mean.step_rewards_N_K] == [[1.0], [pytest.approx(-1 / 3)]]
    for advantages_T, relative in zip(mean.advantages_N_T, (2 / 3, -2 / 3), strict=True):
        np.testing.assert_allclose(advantages_T, [0.5 * relative / deviation, 0.0])


def test_the_verdicts_of_several_verifications_in_the_outcome_reward():
    """Half of the reward is the verifier's word on a right solution: 2 of 3 call it wrong, or have no verdict."""
    read_V = [judged([1]), judged([1], final=0), judged([1], final=0)]
    silent_V = [judged([1]), judged([1], final=-1), judged([1], final=-1)]
    base = three_verifications([1, 1, 1])
    solutions = [replace(base, verification=these[0], others=these[1:]) for these in (read_V, silent_V)]
    for combine, rewards in (("vote", [0.5, 1.0]), ("mean", [(1 + 0.5 + 0.5) / 3, 1.0])):
        settings = AlgorithmConfig(ground_truth_weight=0.5, combine_verifications=combine)
        np.testing.assert_allclose(score_solutions(solutions, settings, 0.0).rewards_N, rewards)


def test_solutions_with_unequal_numbers_of_verifications_are_refused():
    with pytest.raises(ValueError, match=r"as many verifications, got \[1, 3\]"):
        score_solutions(
            [three_verifications([1, 1, 1]), replace(three_verifications([1, 1, 1]), others=[])],
            AlgorithmConfig(combine_verifications="mean"),
            0.5,
        )


# PROF


@pytest.mark.parametrize(
    ("num_right", "num_wrong", "num_kept", "kept"),
    [
        (4, 4, 4, (2, 2)),
        (7, 1, 4, (3, 1)),
        (1, 7, 4, (1, 3)),
        (5, 3, 5, (2, 3)),  # of an odd number the wrong ones have one more
        (8, 0, 4, (4, 0)),
        (0, 8, 4, (0, 4)),
        (2, 1, 4, (2, 1)),
    ],
)
def test_prof_keeps_right_and_wrong_in_balance(num_right, num_wrong, num_kept, kept):
    assert kept_of_each(num_right, num_wrong, num_kept) == kept
    products = [k * (num_kept - k) for k in range(num_right + 1) if 0 <= num_kept - k <= num_wrong]
    assert not products or kept[0] * kept[1] == max(products)  # how the paper words it


def test_prof_keeps_what_is_judged_as_its_outcome_is():
    """One question, right solutions with mean judgements 1/3, 1, -1 and none, wrong ones with 1, -1/3 and -1."""
    judgements = [[1, 1, -1], [1], [-1, -1], [], [1], [-1, 1, -1], [-1]]
    correct = [True] * 4 + [False] * 3
    rewards = [np.array(judgements_K) / max(len(judgements_K), 1) for judgements_K in judgements]
    kept = kept_rollouts(["q"] * 7, correct, rewards, 4)
    assert np.flatnonzero(kept).tolist() == [0, 1, 5, 6]
    # one more right solution: that without judgements, which lies between those judged right and those judged wrong
    kept = kept_rollouts(["q"] * 5, correct[:5], rewards[:5], 4)
    assert np.flatnonzero(kept).tolist() == [0, 1, 3, 4]
    # each question by itself; of equals the first
    kept = kept_rollouts(["a", "b", "a", "b", "a", "b"], [True, False] * 3, [np.ones(1)] * 6, 2)
    assert np.flatnonzero(kept).tolist() == [0, 1, 2, 3]


def test_prof_learns_from_the_outcome_of_what_it_keeps():
    """Right, right, right, wrong with steps judged right, wrong, right, wrong: the first, third or none of equals."""
    batch = solutions(["q"] * 5, [True] * 3 + [False] * 2, [[1], [-1], [1], [-1], [1]], [[0]] * 5, [2] * 5, 0.0)
    found = advantages_of(for_generator("prof", trained_rollouts=3), batch)
    # rewards 1, 0, 0: mean 1/3, deviation 1/√3
    relative = [2 / math.sqrt(3), None, None, -1 / math.sqrt(3), -1 / math.sqrt(3)]
    for advantages_T, value in zip(found, relative, strict=True):
        assert advantages_T is None if value is None else advantages_T == pytest.approx([value, value])


@pytest.mark.parametrize(
    ("kept", "alpha", "judged_by", "message"),
    [
        (3, 0.1, [[np.ones(1)]], "prof takes no step advantages; set algorithm.alpha_start to 0"),
        (5, 0.0, [[np.ones(1)]], r"settings.trained_rollouts: 5 leaves nothing to choose"),
        (3, 0.0, [[]], "needs a verifier"),
    ],
)
def test_prof_refuses_what_it_cannot_do(kept, alpha, judged_by, message):
    batch = solutions(["q"] * 5, [True] * 5, [[1]] * 5, [[0]] * 5, [2] * 5, alpha)
    with pytest.raises(UserError, match=message):
        advantages_of(for_generator("prof", trained_rollouts=kept), replace(batch, step_rewards=judged_by * 5))


# A generator step


def make_config(**changes) -> Config:
    """Two questions, four rollouts of each; `train__key` and `algorithm__key` for sections, `hook__key` for settings of
    the generator's advantages and `hook__name`.
    """
    tree = {
        "run": {"dir": "unused"},
        "task": {"name": "last_letter"},
        "data": {"train": "unused", "eval": "unused"},
        "generator": {"model": {"path": "unused"}},
        "verifier": {"model": {"path": "unused"}},
        "train": {"questions_per_step": 2, "rollouts_per_question": 4},
        "algorithm": {},
        "hook": {},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree[section][name] = value
    hook = tree.pop("hook")
    name = hook.pop("name", "grpo")
    tree["algorithm"]["advantages"] = {"generator": {"name": name, "settings": hook}}
    return Config.model_validate(tree)


RIGHT, WRONG = "te", "ce"  # of "cat horse"
GOOD, FIRST_BAD, BAD = [True, True], [False, True], [False, False]


def verifications(*solutions: tuple[str, list[bool]]) -> list[ReadVerification]:
    """Each solution with what its verification says of its two steps, which end in the first and second of 3 tokens."""
    made = [read(letters, judgements) for letters, judgements in solutions]
    for number, entry in enumerate(made):
        response = replace(
            entry.judged.response,
            prompt_ids=[7],
            generation=replace(entry.judged.response.generation, token_ids=[number, 1, 2], logprobs=[-1.0] * 3),
            text=f"<think><step>cat:{solutions[number][0][0]}</step><step>{number}</step></think>",
        )
        solution = replace(entry.judged, response=response, step_end_tokens=[0, 1])
        made[number] = replace(entry, judged=solution, response=replace(entry.response, prompt_ids=[7]))
    return made


def score(config: Config, *groups: list[ReadVerification], per_solution: int = 1) -> GeneratorBatch:
    every = [entry for group in groups for entry in group]
    return GeneratorBatch.score(
        [entry.judged for entry in every[::per_solution]],
        every,
        step=3,
        config=config,
        hook=load_hook(config.algorithm.advantages.generator),
        moment=Moment(alpha=config.algorithm.alpha_start),
    )


BY_OUTCOME = [(RIGHT, GOOD), (WRONG, GOOD), (RIGHT, GOOD), (WRONG, GOOD)]
BY_STEPS = [(RIGHT, GOOD), (RIGHT, FIRST_BAD), (RIGHT, GOOD), (RIGHT, GOOD)]
SILENT = [(WRONG, BAD)] * 4


def test_without_further_draws_nothing_is_dropped():
    batch = score(make_config(), verifications(*BY_OUTCOME), verifications(*SILENT))
    assert (batch.trained, batch.num_missing) == (list(range(8)), 0)
    metrics = batch.metrics(get_task(TaskConfig(name="last_letter")))
    assert (metrics["data/questions_drawn"], metrics["data/questions_dropped"]) == (2, 0)


def test_questions_without_a_signal_are_dropped_and_as_many_are_missing():
    config = make_config(hook__max_draws=3)
    batch = score(config, verifications(*SILENT), verifications(*BY_STEPS))
    assert (batch.trained, batch.num_missing) == ([4, 5, 6, 7], 1)
    # what is drawn in its place carries a signal by its outcomes
    batch = score(config, verifications(*SILENT), verifications(*BY_STEPS), verifications(*BY_OUTCOME))
    assert (batch.trained, batch.num_missing) == (list(range(4, 12)), 0)
    assert [sequence.response_ids[0] for sequence in batch.sequences()] == [0, 1, 2, 3] * 2
    assert all(np.any(sequence.advantages) for sequence in batch.sequences())
    metrics = batch.metrics(get_task(TaskConfig(name="last_letter")))
    assert (metrics["data/questions_drawn"], metrics["data/questions_dropped"]) == (3, 1)
    assert metrics["generator/trained_responses"] == 8
    # all that was sampled counts: 4 + 2 of 12 are right, of the 8 that are trained on 6
    assert (metrics["generator/accuracy"], metrics["generator/trained_accuracy"]) == (6 / 12, 6 / 8)
    assert len(batch.dump_rows()) == 12 and batch.dump_rows()[8].group_id == "3-2"


def test_no_more_questions_are_trained_on_than_a_step_has():
    """A verifier that begins to be listened to after the first draw gives its questions a signal that they had not."""
    config = make_config(hook__max_draws=3)
    batch = score(config, verifications(*BY_STEPS), verifications(*BY_OUTCOME), verifications(*BY_OUTCOME))
    assert (config.train.questions_per_step, batch.num_missing) == (2, 0)
    assert batch.trained == list(range(8))


def test_steps_are_no_signal_where_they_have_no_weight():
    config = make_config(hook__max_draws=3, algorithm__alpha_start=0.0)
    assert score(config, verifications(*BY_OUTCOME), verifications(*BY_STEPS)).trained == [0, 1, 2, 3]


def test_if_no_question_has_a_signal_those_drawn_first_are_trained_on():
    config = make_config(hook__max_draws=2)
    batch = score(config, *[verifications(*SILENT)] * 4)
    assert (batch.trained, batch.num_missing) == (list(range(8)), 2)
    assert not any(np.any(sequence.advantages) for sequence in batch.sequences())
    assert batch.metrics(get_task(TaskConfig(name="last_letter")))["data/questions_dropped"] == 2


def test_prof_and_further_draws_together():
    """PROF keeps two of four; a question whose kept rollouts are equally good has no signal."""
    config = make_config(hook__max_draws=2, hook__name="prof", hook__trained_rollouts=2, algorithm__alpha_start=0.0)
    batch = score(
        config, verifications(*BY_STEPS), verifications((RIGHT, BAD), (RIGHT, GOOD), (WRONG, BAD), (WRONG, GOOD))
    )
    assert (batch.trained, batch.num_missing) == ([5, 6], 1)
    assert [float(sequence.advantages[0]) for sequence in batch.sequences()] == pytest.approx(
        [1 / math.sqrt(2), -1 / math.sqrt(2)]
    )


def test_several_verifications_are_voted_on_counted_and_dumped():
    config = make_config(
        train__questions_per_step=1, train__rollouts_per_question=2, train__verifications_per_solution=3
    )
    right, wrong = [(RIGHT, GOOD), (RIGHT, FIRST_BAD), (RIGHT, GOOD)], [(WRONG, BAD), (WRONG, GOOD), (WRONG, FIRST_BAD)]
    batch = score(config, verifications(*right), verifications(*wrong), per_solution=3)
    assert len(batch.solutions_N) == 2
    assert [rewards.tolist() for rewards in batch.scored.step_rewards_N_K] == [[0.5, 0.5], [-0.5, 0.5]]
    metrics = batch.metrics(get_task(TaskConfig(name="last_letter")))
    # verdicts one by one: 2 of 3 on the right solution, 2 of 3 on the wrong one; by vote both
    assert metrics["verifier/outcome_f1"] == pytest.approx(2 / 3) and metrics["verifier/voted_outcome_f1"] == 1.0
    # steps by vote: "te" right, right; "ce" wrong, right: all as labelled
    assert metrics["verifier/voted_step_f1"] == 1.0
    first = batch.dump_rows()[0]
    assert first.step_judgements == [1, 1] and first.final_judgement == 1 and len(first.other_verifications) == 2
    assert [first.verification_text, *first.other_verifications] == [
        entry.response.text for entry in verifications(*right)
    ]


def test_a_dump_with_several_verifications_is_read_back_and_scored_the_same(tmp_path):
    others = [verification_text(WORDS, "te", [True, False]), verification_text(WORDS, "te", [True, False])]
    wrong = [verification_text(WORDS, "ch", [False, False])] * 2
    rows = [
        generator_row(0, "te", [True, True], other_verifications=others),
        generator_row(1, "ch", [False, False], other_verifications=wrong),
    ]
    write_rollouts(tmp_path / "several.parquet", rows)
    assert pq.read_schema(tmp_path / "several.parquet").names == [*ROLLOUT_SCHEMA.names, "other_verifications"]
    rows = read_rollouts(tmp_path / "several.parquet")
    assert [row.other_verifications for row in rows] == [others, wrong]
    (voted, _), (mean, _) = (score_rows(rows, config_of(combine_verifications=way)) for way in ("vote", "mean"))
    assert voted.step_judgements == [1, -1] == mean.step_judgements
    assert voted.step_rewards == [0.5, -0.5] and mean.step_rewards == pytest.approx([0.5, -1 / 6])


# Rewards merged before they are normalised


def test_merged_rewards_are_normalised_as_one():
    """Right, judged 1 of 2 steps right; wrong, judged all right; wrong, not judged. α = 0.25, so that the rewards are
    0.75 · 1 + 0.25 · 0, 0.75 · 0 + 0.25 · 1 and 0: of mean 1/3 and variance (25 + 1 + 16) / 144 / 2 = 7/48.
    """
    batch = solutions(["q"] * 3, [True, False, False], [[1, -1], [1, 1], []], [[0, 2], [1, 2], []], [3, 4, 2], 0.25)
    merged = advantages_of(for_generator("merged"), batch)
    for advantages_T, reward, length in zip(merged, (0.75, 0.25, 0.0), (3, 4, 2), strict=True):
        np.testing.assert_allclose(advantages_T, [(reward - 1 / 3) / math.sqrt(7 / 48)] * length)
    apart = advantages_of(for_generator(), batch)
    assert len(set(apart[0].tolist())) > 1  # Eq. 7 tells its tokens apart
