"""Files of advantages: against verl's functions, by hand, and mistakes in a file of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tango_hpc.base.config.hooks import GeneratorAdvantagesConfig, VerifierAdvantagesConfig, shipped_names
from tango_hpc.base.errors import UserError
from tango_hpc.method.equations import ClassWeights
from tango_hpc.method.hooks import check_advantages, load_hook
from tests.helpers.advantages import advantages_of, for_generator, for_verifier, solutions, verifications

REFERENCE = json.loads((Path(__file__).parents[2] / "data/losses.json").read_text())
REWARDS, GROUPS = REFERENCE["outcomes"]["rewards"], REFERENCE["outcomes"]["groups"]


def outcomes(rewards: list[float], groups: list[int], lengths: list[int] | None = None, **others: Any) -> Any:
    """Solutions without steps."""
    none: list[list[int]] = [[] for _ in rewards]
    correct = [reward == 1.0 for reward in rewards]
    batch = solutions(groups, correct, none, none, lengths or [1] * len(rewards), 0.0, **others)
    return type(batch)(**vars(batch) | {"rewards": np.array(rewards)})


@pytest.mark.parametrize("name", REFERENCE["advantages"])
def test_outcome_advantages_are_those_of_verl(name: str) -> None:
    """verl adds 1e-6 to the deviation."""
    found = advantages_of(for_generator(name), outcomes(REWARDS, GROUPS))
    np.testing.assert_allclose(np.concatenate(found), REFERENCE["advantages"][name], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("name", REFERENCE["advantages"])
def test_verifier_advantages_are_those_of_verl_times_the_class_weight(name: str) -> None:
    count = len(REWARDS)
    weights = ClassWeights(right=1.5, wrong=0.5)
    correct = [True] * 4 + [False] * 4
    batch = verifications(GROUPS, correct, [1] * count, [1.0] * count, [1] * count, weights, 0.0)
    batch = type(batch)(**vars(batch) | {"rewards": np.array(REWARDS)})
    found = np.concatenate(advantages_of(for_verifier(name), batch))
    expected = np.array(REFERENCE["advantages"][name]) * np.where(correct, 1.5, 0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-12)


def test_dr_grpo_compares_steps_without_a_deviation() -> None:
    # steps 1, −1/2, −1/2 of the question: mean 0. At the tokens 1 1 0 and −1 −1/2 −1/2; outcomes 1/2 and −1/2
    batch = solutions(["q"] * 2, [True, False], [[1], [-1, -1]], [[1], [0, 2]], [3, 3], 0.5)
    first, second = advantages_of(for_generator("dr_grpo"), batch)
    assert first.tolist() == [0.75, 0.75, 0.25] and second.tolist() == [-0.75, -0.5, -0.5]


def test_dapo_takes_from_long_solutions_and_leaves_out_questions_without_a_difference() -> None:
    # at most 10 tokens, a buffer of 4: 8 tokens reach half of it, 10 all of it, 6 none
    batch = outcomes([1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [6, 8, 10, 6, 3, 10], max_response_tokens=10)
    found = advantages_of(for_generator("dapo", overlong_buffer=4), batch)
    assert found[4:] == [None, None]
    shaped = np.array([1.0, 0.5, -1.0, 0.0])
    expected = (shaped - shaped.mean()) / shaped.std(ddof=1)
    assert [one[0] for one in found[:4]] == pytest.approx(expected) and [len(one) for one in found[:4]] == [6, 8, 10, 6]
    plain = advantages_of(for_generator("dapo"), batch)  # without a buffer nothing is taken
    assert [one[0] for one in plain[:4]] == pytest.approx(np.array([1, 1, -1, -1]) * np.sqrt(3) / 2)
    assert for_generator("dapo").settings["max_draws"] == 3


@pytest.mark.parametrize("name", shipped_names("generator_advantages"))
def test_shipped_files_pass_the_check(name: str) -> None:
    alpha = 0.0 if name == "prof" else 0.3
    check_advantages(for_generator(name), rollouts=4, alpha=alpha, judged=True)
    if name != "prof":
        check_advantages(for_generator(name), rollouts=4, alpha=0.0, judged=False)


@pytest.mark.parametrize("name", shipped_names("verifier_advantages"))
def test_shipped_files_of_the_verifier_pass_the_check(name: str) -> None:
    check_advantages(for_verifier(name), rollouts=4, alpha=0.3, judged=True)


def test_reinforce_plus_plus_draws_no_questions_again() -> None:
    with pytest.raises(
        UserError, match=r"settings.max_draws: reinforce_plus_plus compares over the batch.*set it to 1"
    ):
        check_advantages(for_generator("reinforce_plus_plus", max_draws=2), rollouts=4, alpha=0.1, judged=True)


HEAD = "import numpy as np\n\n\ndef advantages(batch, settings, state):\n"
ZEROS = "[np.zeros(n) for n in batch.lengths]"


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("x = 1", {}, r"must have a function `advantages`"),
        (HEAD + "    return 1 / 0, state\n", {}, r"mine.py, line 5, in advantages: ZeroDivisionError"),
        (HEAD + "    return batch.scores, state\n", {}, r"line 5, in advantages: AttributeError: .*scores"),
        (HEAD + f"    return {ZEROS}\n", {}, r"must give a list and the state"),
        (HEAD + f"    return {ZEROS}[1:], state\n", {}, r"gives 7 arrays for 8 responses"),
        (HEAD + "    return [np.zeros(2)] * 8, state\n", {}, r"array of shape \[2\] for response \d+, which has \d tokens"),
        (HEAD + "    return list(batch.rewards), state\n", {}, r"array of shape \[\] for response 0"),
        (HEAD + f"    return [one + np.nan for one in {ZEROS}], state\n", {}, r"an advantage of response 0 is not finite"),
        (HEAD + f"    return {ZEROS}, np.zeros(1)\n", {}, r"the state of advantages must be JSON"),
        (HEAD + f"    return {ZEROS}, state['x']\n", {}, r"line 5, in advantages: TypeError"),
        (HEAD + f"    return {ZEROS}, state\n", {"decay": 1}, r"algorithm.advantages.generator.settings.decay: .* no such"),
        (HEAD + f"    return {ZEROS}, state\n", {"max_draws": 0}, r"max_draws: 0; it must be a whole number from 1 on"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_told(text: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        hook = load_hook(GeneratorAdvantagesConfig(name=str(file), settings=settings))
        check_advantages(hook, rollouts=4, alpha=0.1, judged=True)


def test_the_state_comes_back_as_json_has_it(tmp_path: Path) -> None:
    """Tuples are lists after a checkpoint, so they are before one too."""
    file = tmp_path / "mine.py"
    file.write_text(HEAD + f"    assert state in (None, [1, 2.5])\n    return {ZEROS}, (1, 2.5)\n")
    hook = load_hook(VerifierAdvantagesConfig(name=str(file)))
    check_advantages(hook, rollouts=2, alpha=0.0, judged=True)
