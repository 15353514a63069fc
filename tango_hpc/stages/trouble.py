"""Trouble in a run, found in what its steps measured: a metric for each kind, and one line when it begins.

| kind          | trouble is                                                        | metric                     |
| ------------- | ----------------------------------------------------------------- | -------------------------- |
| nonfinite     | an update that was left out: its loss or gradient was not finite  | skipped                    |
| gap           | engine and trainer differ by half of `train.max_logprob_gap`, or  | logprob_gap/mean_abs,      |
|               | `GAP_GROWTH` times as much as at first and a tenth of the limit   | trouble/gap_growth         |
| entropy       | below `ENTROPY_LEFT` of what it was at first                      | trouble/entropy_left       |
| equal_rewards | no group of the last `WINDOW` steps had a signal                  | groups_with_signal,        |
|               |                                                                   | trouble/steps_without_signal |
| verifier      | J of its verdicts is 0 or below, or it says the same to nearly    | trouble/verifier_j,        |
|               | everything                                                        | trouble/same_verdict_share |

"At first" are a role's first `WINDOW` steps; what it is compared with are the last `WINDOW`. What is done about each
kind is set by `train.on_trouble` and done by `stages.tango`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tango_hpc.base.config.trouble import TroubleConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.files import read_replaced, write_atomically
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import MetricsRow
from tango_hpc.stages.judgement_counts import JudgementCounts, RecentVerdicts

Action = Literal["warn", "stop", "rollback", "give up"]
WINDOW = RecentVerdicts.WINDOW
GAP_SHARE, GAP_GROWTH, GAP_FLOOR = 0.5, 4.0, 0.1  # of the limit; times the first steps; of the limit
ENTROPY_LEFT = 0.02
SAME_SHARE, GOOD_J = 0.98, 0.5  # who says "wrong" to nearly everything is right where nearly everything is


@dataclass(frozen=True)
class Trouble:
    """Something that began: its kind, a key of `train.on_trouble`, and what to tell."""

    kind: str
    text: str


class TroubleWatch:
    """Looks at every training step. It tells of a trouble when it begins, and again only after it was over in between.

    `recent`: the verdicts of the last steps. `active`: the troubles that last, in words, by what is troubled.
    """

    def __init__(self, max_logprob_gap: float | None) -> None:
        self._max_gap = max_logprob_gap
        self.recent = RecentVerdicts()
        self.active: dict[str, str] = {}
        # Of each role: the values of its first and of its last steps, and its steps without a signal up to now.
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, list[float]] = {}
        self._without_signal: dict[str, int] = {}

    def observe(
        self, row: MetricsRow, verdicts: JudgementCounts | None
    ) -> tuple[dict[str, float | None], list[Trouble]]:
        """Take in the row of a step and how its verdicts fit the truth; the step's metrics of this, and what began."""
        role, step = row["role"], row["step"]
        metrics: dict[str, float | None] = {}
        found: dict[str, Trouble | None] = {f"{role}, nonfinite": self._nonfinite(row)}
        metrics["trouble/gap_growth"] = growth = self._change(f"{role} gap", row["logprob_gap/mean_abs"])
        found[f"{role}, gap"] = self._gap(row, growth)
        metrics["trouble/entropy_left"] = left = self._change(f"{role} entropy", row["entropy"])
        if left is not None and left < ENTROPY_LEFT:
            text = f"the entropy of the {role} has collapsed to {left:.1%} of that of its first steps (entropy)"
            found[f"{role}, entropy"] = Trouble("entropy", text)
        silent = 0 if row["groups_with_signal"] else self._without_signal.get(role, 0) + 1
        metrics["trouble/steps_without_signal"] = self._without_signal[role] = silent
        if silent >= WINDOW:
            text = (
                f"in the last {silent} steps of the {role} all rewards of each group were equal "
                "(groups_with_signal): nothing is learnt"
            )
            found[f"{role}, equal_rewards"] = Trouble("equal_rewards", text)
        if verdicts is not None:
            self.recent.add(verdicts)
            pooled = self.recent.pooled()
            metrics["trouble/verifier_j"], metrics["trouble/same_verdict_share"] = pooled.j, pooled.same_share
            found["verdicts"] = _verdict_trouble(pooled) if self.recent.is_full else None
        new = [
            Trouble(trouble.kind, f"at step {step} {trouble.text}")
            for what, trouble in found.items()
            if trouble is not None and what not in self.active
        ]
        for what in (f"{role}, {kind}" for kind in ("nonfinite", "gap", "entropy", "equal_rewards")):
            found.setdefault(what, None)
        for what, trouble in found.items():
            if trouble is None:
                self.active.pop(what, None)
            else:
                self.active.setdefault(what, f"since step {step} {trouble.text}")
        return metrics, new

    def _nonfinite(self, row: MetricsRow) -> Trouble | None:
        if not row["skipped"]:
            return None
        text = f"the loss or a gradient of the {row['role']} was not finite; the update was left out (skipped)"
        return Trouble("nonfinite", text)

    def _gap(self, row: MetricsRow, growth: float | None) -> Trouble | None:
        role, gap, limit = row["role"], row["logprob_gap/mean_abs"], self._max_gap
        if limit is None or gap is None:
            return None
        grown = growth is not None and growth >= GAP_GROWTH and gap >= GAP_FLOOR * limit
        if gap < GAP_SHARE * limit and not grown:
            return None
        times = f", {growth:.1f} times as much as in its first steps" if growth is not None and grown else ""
        return Trouble(
            "gap",
            f"engine and trainer of the {role} differ by {gap:.3g} in the mean log-probability of a sampled token "
            f"(logprob_gap/mean_abs){times}; above {limit:g} (train.max_logprob_gap) the run ends",
        )

    def _change(self, name: str, value: float | None) -> float | None:
        """Take in a value; the mean of the last `WINDOW` over that of the first, None before there are as many."""
        first, last = self._first.setdefault(name, []), self._last.setdefault(name, [])
        if value is not None and math.isfinite(value):
            first += [value] if len(first) < WINDOW else []
            last[:] = [*last, value][-WINDOW:]
        if len(first) < WINDOW or not (base := statistics.fmean(first)):
            return None
        return statistics.fmean(last) / base

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; JSON."""
        return {
            "recent": self.recent.state_dict(),
            "active": self.active,
            "first": self._first,
            "last": self._last,
            "without_signal": self._without_signal,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.recent.load_state_dict(state["recent"])
        self.active = dict(state["active"])
        self._first = {name: list(values) for name, values in state["first"].items()}
        self._last = {name: list(values) for name, values in state["last"].items()}
        self._without_signal = dict(state["without_signal"])


def _verdict_trouble(pooled: JudgementCounts) -> Trouble | None:
    j, same = pooled.j, pooled.same_share
    if j is not None and j <= 0:
        return Trouble(
            "verifier",
            "the verifier's verdicts do not tell right solutions from wrong ones: true-positive less false-positive"
            f" rate (verifier/outcome_j) is {j:.3f} over the last {WINDOW} steps; at 0 or below, learning from it"
            " stands still or turns around",
        )
    if same is not None and same >= SAME_SHARE and (j is None or j < GOOD_J):
        right = pooled.right_judged_right + pooled.wrong_judged_right
        verdict = "correct" if right > pooled.right_judged_wrong + pooled.wrong_judged_wrong else "incorrect"
        measured = "undefined" if j is None else f"{j:.3f}"
        return Trouble(
            "verifier",
            f"the verifier says {verdict!r} to {same:.1%} of all solutions of the last {WINDOW} steps "
            f"(verifier/correct_share; J is {measured}): where all verdicts agree it learns nothing",
        )
    return None


def what_to_do(
    troubles: Sequence[Trouble], settings: TroubleConfig, num_rollbacks: int, max_rollbacks: int
) -> tuple[Action, str]:
    """Return the gravest action that the new troubles of a step ask for, and the text of the end or the rollback.

    "give up": the run should go back, and has done so `max_rollbacks` times.
    """
    asked: dict[str, list[Trouble]] = {"warn": [], "stop": [], "rollback": []}
    for trouble in troubles:
        asked[getattr(settings, trouble.kind)].append(trouble)
    if asked["stop"]:
        never = " ".join(f"train.on_trouble.{trouble.kind}=warn" for trouble in asked["stop"])
        return (
            "stop",
            (
                f"{_texts(asked['stop'])}. The state is saved; --resume goes on with it until this begins anew,"
                f" --resume {never} never stops for it again"
            ),
        )
    if asked["rollback"] and num_rollbacks >= max_rollbacks:
        return (
            "give up",
            (
                f"{_texts(asked['rollback'])}; the run went back {num_rollbacks} times already (train.max_rollbacks)."
                " It needs other settings in a new run, or train.on_trouble.KIND=warn with --resume"
            ),
        )
    if asked["rollback"]:
        return "rollback", _texts(asked["rollback"])
    return "warn", ""


def read_rollbacks(directory: RunDirectory) -> int:
    """Return how often the run has gone back; checkpoints from before do not know. Raises UserError for a file that is
    damaged.
    """
    try:
        content = read_replaced(directory.rollbacks_file)
    except FileNotFoundError:
        return 0
    if not re.fullmatch(rb"[0-9]{1,6}\n?", content):
        raise UserError(
            f"{directory.rollbacks_file} is damaged: it holds how often the run has gone back (train.on_trouble), which"
            " its seeds depend on; write that number into it, or remove it to take the number of the newest checkpoint"
        )
    return int(content)


def write_rollbacks(directory: RunDirectory, count: int) -> None:
    """Keep how often the run has gone back, before it goes on: it may be killed before its next checkpoint."""
    write_atomically(directory.rollbacks_file, f"{count}\n")


def _texts(troubles: Sequence[Trouble]) -> str:
    return "; ".join(trouble.text for trouble in troubles)
