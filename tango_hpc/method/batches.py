"""The responses of a step as the files of advantages see them, and what these files share. NumPy only.

Shape suffixes: `base.types`. The fields have none: files of a user's read them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tango_hpc.method import equations
from tango_hpc.method.equations import FloatArray

Relative = Callable[[FloatArray], FloatArray]
# One array per response, of shape (T,); None for a response that is not trained on. And the state for the next step.
Advantages = tuple[list[FloatArray | None], Any]


@dataclass(frozen=True)
class Solutions:
    """The N solutions of a generator step, over all ranks.

    groups               (N,): the same for the solutions of one question
    rewards              (N,): Eq. 2
    correct              (N,): whether the answer is right
    step_rewards         N lists, one array of shape (K,) for each verification: Eq. 3; empty where the verification
                         does not judge every step once. No arrays without a verifier
    step_ends            N arrays of shape (K,): I(k), the last token of each step
    lengths              (N,): tokens of each solution
    truncated            (N,): whether it was cut off at `max_response_tokens`
    alpha                weight of the step advantages in this step (Eq. 7)
    step, total_steps    generator steps before this one, and of the run
    max_response_tokens
    """

    groups: Sequence[Hashable]
    rewards: FloatArray
    correct: NDArray[np.bool_]
    step_rewards: Sequence[Sequence[FloatArray]]
    step_ends: Sequence[Sequence[int]]
    lengths: Sequence[int]
    truncated: NDArray[np.bool_]
    alpha: float
    step: int
    total_steps: int
    max_response_tokens: int

    def __post_init__(self) -> None:
        columns = (self.rewards, self.correct, self.step_rewards, self.step_ends, self.lengths, self.truncated)
        _check_lengths(len(self.groups), *columns)

    def mean_step_rewards(self) -> list[FloatArray]:
        """Return the step rewards of each solution, the mean over the verifications that give any; (K,) each."""
        return [_mean([one for one in given if len(one)] or [np.zeros(0)]) for given in self.step_rewards]


@dataclass(frozen=True)
class Verifications:
    """The N verifications of a verifier step, over all ranks.

    groups               (N,): the same for the verifications of one solution
    rewards              (N,): Eq. 8
    correct              (N,): whether the judged solution's answer is right
    verdicts             (N,): 1 right, 0 wrong, −1 missing
    format_rewards       (N,)
    class_weights        (N,): s of Eq. 9, by `correct`
    lengths              (N,): tokens of each verification
    step, total_steps    verifier steps before this one, and of the run
    """

    groups: Sequence[Hashable]
    rewards: FloatArray
    correct: NDArray[np.bool_]
    verdicts: NDArray[np.int64]
    format_rewards: FloatArray
    class_weights: FloatArray
    lengths: Sequence[int]
    step: int
    total_steps: int

    def __post_init__(self) -> None:
        columns = (self.rewards, self.correct, self.verdicts, self.format_rewards, self.class_weights, self.lengths)
        _check_lengths(len(self.groups), *columns)


def members(groups: Sequence[Hashable]) -> list[list[int]]:
    """Return the places of the responses of each group."""
    found: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        found.setdefault(group, []).append(i)
    return list(found.values())


def within_groups(groups: Sequence[Hashable], values: FloatArray, relative: Relative) -> FloatArray:
    """Return `relative` of each group's values. Shape (N,)."""
    result = np.zeros(len(groups))
    for group in members(groups):
        result[group] = relative(values[group])
    return result


def every_token(batch: Solutions | Verifications, values: FloatArray) -> list[FloatArray | None]:
    """Return each response's number of (N,) at all of its tokens."""
    return [np.full(length, value) for length, value in zip(batch.lengths, values, strict=True)]


def step_sums(batch: Solutions, relative: Relative) -> list[list[FloatArray]]:
    """Eqs. 5 and 6: N lists, one array of shape (T,) for each verification.

    `relative` of all step rewards of a question, of all verifications together.
    """
    relative_rewards = [list(given) for given in batch.step_rewards]
    for group in members(batch.groups):
        places = [(i, v) for i in group for v in range(len(batch.step_rewards[i]))]
        flat = np.concatenate([np.zeros(0), *(batch.step_rewards[i][v] for i, v in places)])
        cuts = np.cumsum([len(batch.step_rewards[i][v]) for i, v in places])[:-1]
        for (i, v), part in zip(places, np.split(relative(flat), cuts) if places else (), strict=True):
            relative_rewards[i][v] = part
    return [
        [equations.step_advantages(one, ends if len(one) else (), length) for one in given]
        for given, ends, length in zip(relative_rewards, batch.step_ends, batch.lengths, strict=True)
    ]


def blended(
    batch: Solutions, outcomes: FloatArray, sums: Sequence[Sequence[FloatArray]], scale: float = 1.0
) -> list[FloatArray | None]:
    """Eq. 7 for each solution; of several verifications the mean, in which one without step rewards counts as 0."""
    return [
        equations.generator_advantages(outcome, _mean(given or [np.zeros(length)]), batch.alpha, scale)
        for outcome, given, length in zip(outcomes, sums, batch.lengths, strict=True)
    ]


def _mean(arrays: Sequence[FloatArray]) -> FloatArray:
    """Return the mean of arrays of one length. NumPy's own takes ten times as long for the one or the few that there
    are.
    """
    if len({len(array) for array in arrays}) > 1:
        raise ValueError(f"verifications of one solution differ in length: {[len(array) for array in arrays]}")
    return sum(arrays[1:], start=arrays[0]) / len(arrays)


def _check_lengths(num_responses: int, *columns: Sequence[object] | NDArray[Any]) -> None:
    lengths = [len(column) for column in columns]
    if num_responses == 0 or any(length != num_responses for length in lengths):
        raise ValueError(f"a batch needs as many entries in every column, got {[num_responses, *lengths]}")
