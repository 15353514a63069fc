"""Files of advantages, and batches for them from columns."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from tango_hpc.base.config.hooks import GeneratorAdvantagesConfig, VerifierAdvantagesConfig
from tango_hpc.method import equations
from tango_hpc.method.batches import Solutions, Verifications
from tango_hpc.method.hooks import AdvantagesHook, load_hook


def for_generator(name: str = "grpo", **settings: Any) -> AdvantagesHook:
    return load_hook(GeneratorAdvantagesConfig(name=name, settings=settings))


def for_verifier(name: str = "grpo", **settings: Any) -> AdvantagesHook:
    return load_hook(VerifierAdvantagesConfig(name=name, settings=settings))


def solutions(
    groups: Sequence[Hashable],
    correct: Sequence[bool],
    judgements: Sequence[Sequence[int]],
    ends: Sequence[Sequence[int]],
    lengths: Sequence[int],
    alpha: float,
    **others: Any,
) -> Solutions:
    """Solutions with one verification each, rewarded by Eqs. 2 and 3."""
    columns: dict[str, Any] = {
        "truncated": np.zeros(len(groups), dtype=bool), "step": 0, "total_steps": 1, "max_response_tokens": 100,
    }  # fmt: skip
    return Solutions(
        groups=groups,
        rewards=equations.outcome_rewards(correct),
        correct=np.array(correct),
        step_rewards=[[equations.step_rewards(judged)] for judged in judgements],
        step_ends=ends,
        lengths=lengths,
        alpha=alpha,
        **(columns | others),
    )


def verifications(
    groups: Sequence[Hashable],
    correct: Sequence[bool],
    verdicts: Sequence[int],
    forms: Sequence[float],
    lengths: Sequence[int],
    weights: equations.ClassWeights,
    gamma: float,
) -> Verifications:
    """Verifications rewarded by Eq. 8."""
    columns = zip(verdicts, correct, forms, strict=True)
    return Verifications(
        groups=groups,
        rewards=np.array([equations.verifier_reward(*column, gamma) for column in columns]),
        correct=np.array(correct),
        verdicts=np.array(verdicts),
        format_rewards=np.array(forms),
        class_weights=np.where(correct, weights.right, weights.wrong),
        lengths=lengths,
        step=0,
        total_steps=1,
    )


def advantages_of(hook: AdvantagesHook, batch: Solutions | Verifications) -> list[Any]:
    """What the file gives, without the checks around it."""
    found, _ = hook.function(batch, hook.settings, None)
    return found
