"""Files of a method: found, checked before anything starts, and called with their mistakes told by file and line.

A file has one function, `loss` or `correction` of some `Tokens`, or `advantages` of a whole batch. Beside it stand
`defaults`, the settings and their values; of a function of tokens also `statistics`, how each measured value is
reduced over the batch ("sum", "max", or "mean" over tokens), and `needs`, what cannot be known from some tokens alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tango_hpc.base.config.hooks import KEYS, HookConfig, HookKind
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.user_code import mistakes_in, read_source, run_source
from tango_hpc.method.batches import Advantages, Solutions, Verifications
from tango_hpc.method.equations import AVERAGES
from tango_hpc.method.tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("sum", "mean", "max")
NEEDS = frozenset({"sequence_ratio"})
# Settings that the package reads, in every file of the kind.
RESERVED: dict[HookKind, dict[str, Any]] = {
    "loss": {"average": "response"},
    "correction": {},
    "generator_advantages": {"max_draws": 1},
    "verifier_advantages": {},
}


@dataclass(frozen=True)
class Hook:
    """A file of a method, ready to be called."""

    kind: HookKind
    name: str  # of the file that the config names, without its ending
    file: str
    function: Callable[..., Any]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class TokenHook(Hook):
    """A loss or a correction."""

    statistics: Mapping[str, str]
    needs: frozenset[str]

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a number for each token and the statistics, by their names in metrics, each a number for each token.

        Raises UserError, with file and line, for a mistake in the file.
        """
        with mistakes_in(self.file):
            given = self.function(tokens, self.settings)
            if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
                raise UserError(f"{self.file}: {self.kind} must give a tensor and a dictionary")
            terms, measured = given
            if measured.keys() != self.statistics.keys():
                raise UserError(
                    f"{self.file}: {self.kind} measures {sorted(measured)}, `statistics` declares "
                    f"{sorted(self.statistics)}"
                )
            for name, values in {self.kind: terms, **measured}.items():
                if getattr(values, "shape", None) != tokens.logprobs.shape:
                    shape = list(getattr(values, "shape", ["no tensor"]))
                    raise UserError(
                        f"{self.file}: {self.kind} gives {name} of shape {shape} for {len(tokens)} tokens; it must "
                        "give one number for each token: the trainer weighs and adds them up"
                    )
        return terms, {f"{self.kind}/{name}": values.detach() for name, values in measured.items()}

    @property
    def reductions(self) -> dict[str, str]:
        """How each statistic is reduced, by its name in metrics."""
        return {f"{self.kind}/{name}": reduction for name, reduction in self.statistics.items()}


@dataclass(frozen=True)
class AdvantagesHook(Hook):
    """Advantages of the generator's or of the verifier's responses."""

    def __call__(self, batch: Solutions | Verifications, state: Any) -> Advantages:
        """Return one float64 array of shape (T,) for each response, None for one that is not trained on, and the state.

        `state` is what the call before returned, None before the first. Raises UserError, with file and line, for a
        mistake in the file.
        """
        with mistakes_in(self.file):
            given = self.function(batch, self.settings, state)
            if not (isinstance(given, tuple) and len(given) == 2):
                raise UserError(f"{self.file}: advantages must give a list and the state")
            found, state = given
            if len(found) != len(batch.lengths):
                raise UserError(f"{self.file}: advantages gives {len(found)} arrays for {len(batch.lengths)} responses")
            arrays: list[Any] = [None if one is None else np.asarray(one, dtype=np.float64) for one in found]
            try:
                state = json.loads(json.dumps(state, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise UserError(f"{self.file}: the state of advantages must be JSON: {error}") from error
        for number, (array, length) in enumerate(zip(arrays, batch.lengths, strict=True)):
            if array is not None and array.shape != (length,):
                raise UserError(
                    f"{self.file}: advantages gives an array of shape {list(array.shape)} for response {number}, which "
                    f"has {length} tokens"
                )
            if array is not None and not np.isfinite(array).all():
                raise UserError(f"{self.file}: an advantage of response {number} is not finite")
        return arrays, state


def kept_file(run_dir: Path, config: HookConfig) -> Path:
    """Return the file that the run in `run_dir` computes by: its copy of a user's, or the shipped one."""
    return RunDirectory(run_dir).method / f"{config.kind}.py" if config.is_own else config.file


def known_hook(run_dir: Path, config: HookConfig) -> Any:
    """Return the hook of the file that the run computes by, or will compute by."""
    kept = kept_file(run_dir, config)
    return load_hook(config, kept if kept.is_file() else None)


def known_settings(run_dir: Path, config: HookConfig) -> Mapping[str, Any]:
    """Return the settings of the file that the run computes by, or will compute by."""
    return known_hook(run_dir, config).settings


def load_hook(config: HookConfig, file: Path | None = None) -> Any:
    """Return the `TokenHook` or `AdvantagesHook` of a file of `config`, or of a copy of it in `file`.

    Raises UserError for what is none.
    """
    kind, path = config.kind, str(file or config.file)
    name = kind if kind in ("loss", "correction") else "advantages"
    module = run_source(path, read_source(path), f"tango_hpc_own_{kind}")
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{path} must have a function `{name}` (docs/your_own_method.md)")
    settings = _settings(config, path, {**RESERVED[kind], **getattr(module, "defaults", {})})
    if name == "advantages":
        return AdvantagesHook(kind, config.file.stem, path, function, settings)
    statistics, needs = getattr(module, "statistics", {}), frozenset(getattr(module, "needs", ()))
    for measured, reduction in statistics.items():
        if reduction not in REDUCTIONS:
            raise UserError(f"{path}: statistics: {measured} is {reduction!r}; it must be {', '.join(REDUCTIONS)}")
    if needs - NEEDS or (needs and kind != "loss"):
        raise UserError(
            f"{path}: needs: {', '.join(sorted(needs))}; only a loss can need something, and only "
            f"{', '.join(sorted(NEEDS))}. A {kind} sees a chunk of tokens, not their responses or the batch"
        )
    return TokenHook(kind, config.file.stem, path, function, settings, statistics, needs)


def _settings(config: HookConfig, path: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the file's settings as the config has them."""
    key = f"{KEYS[config.kind]}.settings"
    for name, value in config.settings.items():
        if name not in defaults:
            known = ", ".join(sorted(defaults)) or "none"
            raise UserError(f"{key}.{name}: {path} has no such setting; it has {known}")
        default = defaults[name]
        alike = _is_number(value) if _is_number(default) else default is None or isinstance(value, type(default))
        if not alike:
            raise UserError(f"{key}.{name}: {value!r} is not of the kind of its default, {default!r}")
    settings = {**defaults, **config.settings}
    if "average" in settings and settings["average"] not in AVERAGES:
        raise UserError(f"{key}.average: {settings['average']!r}; it must be {', '.join(AVERAGES)}")
    if "max_draws" in settings and not (isinstance(settings["max_draws"], int) and settings["max_draws"] >= 1):
        raise UserError(f"{key}.max_draws: {settings['max_draws']!r}; it must be a whole number from 1 on")
    return settings


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_token_hook(hook: TokenHook) -> None:
    """Call it as the trainer does, with made-up tokens. Raises UserError for a mistake that shows.

    The result must be finite and may not depend on the chunk in which a token comes; a loss needs a gradient.
    """
    import torch

    def made(scale: float, seed: int) -> Tensor:
        return scale * torch.randn(12, generator=torch.Generator().manual_seed(seed))

    logprobs = (made(1.0, 0).abs() + 0.1).neg().requires_grad_()
    old = logprobs.detach() + made(0.4, 1)
    gap, lengths = made(0.4, 3), torch.full((12,), 6.0)
    tokens = Tokens(logprobs, old, made(1.0, 2), gap, lengths, (logprobs.detach() - old).mean().expand(12))
    whole, measured = hook(tokens)
    for name, values in {hook.kind: whole, **measured}.items():
        if not torch.isfinite(values.double()).all():
            raise UserError(f"{hook.file}: {name} of made-up tokens is not finite")
    for cut in (0, 5):
        parts = [hook(tokens[:cut]), hook(tokens[cut:])]
        for name, values in {hook.kind: whole, **measured}.items():
            found = [part[0] if name == hook.kind else part[1][name] for part in parts]
            if not torch.allclose(torch.cat(found).double(), values.double(), rtol=1e-5, atol=1e-6):
                raise UserError(
                    f"{hook.file}: {name} of a token depends on the tokens beside it; the trainer calls {hook.kind} "
                    "with a chunk of tokens at a time, so it must not take means or sums over them"
                )
    if hook.kind == "loss":
        if not whole.requires_grad:
            raise UserError(f"{hook.file}: loss has no gradient; it must be computed from tokens.logprobs")
        with mistakes_in(hook.file):
            (gradient,) = torch.autograd.grad(whole.sum(), logprobs)
        if not torch.isfinite(gradient).all() or not gradient.any():
            raise UserError(f"{hook.file}: the gradient of loss with made-up tokens is zero or not finite")


def check_advantages(hook: AdvantagesHook, *, rollouts: int, alpha: float, judged: bool) -> None:
    """Call it twice, with made-up batches of as many rollouts a question. Raises UserError for a mistake that shows.

    `judged`: the solutions have verifications.
    """
    state = None
    for step in range(2):
        random = np.random.default_rng(step)
        count = 2 * rollouts
        groups, lengths = [number // rollouts for number in range(count)], random.integers(3, 9, count).tolist()
        correct = random.random(count) < 0.5
        rewards, common = correct.astype(np.float64), {"step": step, "total_steps": 2}
        if hook.kind == "generator_advantages":
            batch: Solutions | Verifications = Solutions(
                groups,
                rewards,
                correct,
                [[random.choice([-0.5, 0.5], 2)] if judged else [] for _ in range(count)],
                [[0, 2]] * count,
                lengths,
                np.zeros(count, dtype=bool),
                alpha,
                **common,
                max_response_tokens=8,
            )
        else:
            verdicts, ones = random.integers(-1, 2, count), np.ones(count)
            batch = Verifications(groups, rewards, correct, verdicts, ones, ones, lengths, **common)
        _, state = hook(batch, state)
