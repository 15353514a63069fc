"""The load of a run: how long prompts and responses are, how often a step draws; assumed, given, or learned from a run.

A few long responses decide how long a generation takes, so that a mean is not enough. Responses are taken to be
log-normal and cut at the longest that is allowed.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import read_metrics
from tango_hpc.method.hooks import known_settings

# Where no run is given: of what is allowed, the mean of prompts and of responses; standard deviation of the logarithm
# of a response's length (0.5 to 0.7 in the rollouts of this package's experiments).
PROMPT_SHARE, RESPONSE_SHARE, SPREAD = 0.25, 0.4, 0.6


@dataclass(frozen=True)
class Lengths:
    """Tokens of one role's prompts and responses."""

    prompt: float  # mean
    response: float  # mean
    longest: int  # response that is allowed
    spread: float = SPREAD  # standard deviation of the logarithm of a response's length, before the cut

    def responses(self, count: int) -> tuple[float, ...]:
        """Return `count` lengths of responses, ascending: evenly spaced quantiles, with the mean that is asked for."""
        return _quantiles(count, self.response, self.longest, self.spread)


@functools.lru_cache(maxsize=64)
def _quantiles(count: int, mean: float, longest: int, spread: float) -> tuple[float, ...]:
    normal = statistics.NormalDist()
    shape = [math.exp(spread * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]

    def cut(scale: float) -> tuple[float, ...]:
        return tuple(min(max(scale * value, 1.0), float(longest)) for value in shape)

    low, high = 0.0, longest / shape[0]
    for _ in range(50):  # bisection: the mean grows with the scale
        middle = (low + high) / 2
        low, high = (middle, high) if statistics.fmean(cut(middle)) < mean else (low, middle)
    return cut(high)


@dataclass(frozen=True)
class Load:
    """The work of a run's steps: `lengths` by role, and draws of questions in a step by the step's role."""

    lengths: Mapping[str, Lengths]
    draws: Mapping[str, float]


def assumed_load(config: Config) -> Load:
    """Return the load where nothing has been measured: lengths are shares of what is allowed, and draws half of what
    is allowed beyond the first. A verifier reads the question and the solution.
    """
    found: dict[str, Lengths] = {}
    for name, role in config.roles.items():
        prompt = PROMPT_SHARE * role.max_prompt_tokens
        if name == "verifier":
            prompt = min(prompt + found["generator"].response, float(role.max_prompt_tokens))
        found[name] = Lengths(prompt, RESPONSE_SHARE * role.max_response_tokens, role.max_response_tokens)
    most = known_settings(config.run.dir, config.algorithm.advantages.generator)["max_draws"]
    return Load(found, {"generator": (1 + most) / 2, "verifier": (1 + config.train.verifier_draws) / 2})


def given_load(config: Config, means: Sequence[float]) -> Load:
    """Return the load with these means of responses, the generator's first. Raises UserError for others."""
    roles = list(config.roles)
    if len(means) != len(roles):
        raise UserError(f"give one mean for each of {' and '.join(roles)}, not {len(means)}")
    assumed = assumed_load(config)
    found = {}
    for name, mean in zip(roles, means, strict=True):
        longest = config.roles[name].max_response_tokens
        if not 0 < mean <= longest:
            raise UserError(f"{name}: a mean of {mean:g} tokens is not between 1 and max_response_tokens, {longest}")
        found[name] = Lengths(assumed.lengths[name].prompt, mean, longest)
    return Load(found, assumed.draws)


def measured_load(config: Config, rows: Sequence[Mapping[str, Any]]) -> Load:
    """Return the load by the rows of `metrics.jsonl`; what is assumed of a role that has none."""
    assumed = assumed_load(config)
    found, draws = dict(assumed.lengths), dict(assumed.draws)
    for name, role in config.roles.items():
        own = [row for row in rows if row.get(f"{name}/prompt_tokens") is not None]
        if not own:
            continue
        prompt, response = (
            statistics.fmean(row[f"{name}/{text}_tokens"] for row in own) for text in ("prompt", "response")
        )
        cut = [row[f"{name}/truncated_share"] for row in own if row.get(f"{name}/truncated_share") is not None]
        longest = role.max_response_tokens
        found[name] = Lengths(prompt, response, longest, _spread(response, longest, statistics.fmean(cut or [0.0])))
        drawn = [row["data/questions_drawn"] for row in own if row["role"] == name and "data/questions_drawn" in row]
        if drawn:
            draws[name] = statistics.fmean(drawn) / config.train.questions_per_step
    return Load(found, draws)


def load_of_run(config: Config, directory: RunDirectory) -> Load:
    """Return the load that a run has measured. Raises UserError where it has trained no step."""
    rows = read_metrics(directory, "train")
    if not rows:
        raise UserError(f"{directory.path} has no step of training in metrics.jsonl from which to learn lengths")
    return measured_load(config, rows)


def choose_load(config: Config, means: str | None, run: Path | None) -> Load:
    """Return the load by the mean tokens that a user gives, as "900,600", by those of a run, or as assumed.

    Raises UserError for both, and for what is neither.
    """
    if means is not None and run is not None:
        raise UserError("lengths are given, or those of a run: not both")
    if run is not None:
        return load_of_run(config, RunDirectory.open(run))
    if means is None:
        return assumed_load(config)
    try:
        return given_load(config, [float(mean) for mean in means.split(",")])
    except ValueError:
        raise UserError(f"mean tokens {means!r} are no numbers: 900, or 900,600 with a verifier") from None


def _spread(mean: float, longest: int, truncated: float) -> float:
    """Return the spread with which a share `truncated` of log-normal lengths of this mean is as long as allowed."""
    if not 0.0 < truncated < 1.0 or mean >= longest:
        return SPREAD
    options = [step / 20 for step in range(2, 41)]

    def error(spread: float) -> float:
        lengths = Lengths(0.0, mean, longest, spread).responses(200)
        return abs(sum(length >= longest for length in lengths) / 200 - truncated)

    return min(options, key=error)
