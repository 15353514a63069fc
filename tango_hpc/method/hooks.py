"""Files of a method: found, checked before anything starts, and called with their mistakes told by file and line.

A file has a function with the name of its kind, `loss` or `correction`, called with some `Tokens` and settings:

    def loss(tokens, settings) -> (terms, {name: values})

`terms`, of shape (T,), is the loss of each token, or its weight. Beside the function stand `defaults`, the settings
and their values; `statistics`, how each of the values is reduced over the batch: "sum", "max", or "mean" over tokens;
and `needs`, what cannot be known from some tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tango_hpc.base.config.hooks import HookConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.user_code import mistakes_in, read_source, run_source
from tango_hpc.method.equations import AVERAGES
from tango_hpc.method.tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("sum", "mean", "max")
NEEDS = frozenset({"sequence_ratio"})


@dataclass(frozen=True)
class Hook:
    """A file of a method, ready to be called."""

    kind: str
    file: str
    function: Callable[..., Any]
    settings: Mapping[str, Any]
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


def load_hook(config: HookConfig, file: Path | None = None) -> Hook:
    """Return the hook of a file of `config`, or of a copy of it in `file`. Raises UserError for what is none."""
    kind, path = config.kind(), str(file or config.file)
    module = run_source(path, read_source(path), f"tango_hpc_own_{kind}")
    function = getattr(module, kind, None)
    if not callable(function):
        raise UserError(f"{path} must have a function `{kind}` (docs/your_own_method.md)")
    statistics, needs = getattr(module, "statistics", {}), frozenset(getattr(module, "needs", ()))
    for name, reduction in statistics.items():
        if reduction not in REDUCTIONS:
            raise UserError(f"{path}: statistics: {name} is {reduction!r}; it must be {', '.join(REDUCTIONS)}")
    if needs - NEEDS or (needs and kind != "loss"):
        raise UserError(
            f"{path}: needs: {', '.join(sorted(needs))}; only a loss can need something, and only "
            f"{', '.join(sorted(NEEDS))}. A {kind} sees a chunk of tokens, not their responses or the batch"
        )
    settings = _settings(config, kind, path, dict(getattr(module, "defaults", {})))
    return Hook(kind, path, function, settings, statistics, needs)


def _settings(config: HookConfig, kind: str, path: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the file's settings as the config has them."""
    if kind == "loss":
        defaults = {"average": "response", **defaults}
    key = f"algorithm.{kind}.settings"
    for name, value in config.settings.items():
        if name not in defaults:
            known = ", ".join(sorted(defaults)) or "none"
            raise UserError(f"{key}.{name}: {path} has no such setting; it has {known}")
        default = defaults[name]
        alike = isinstance(value, (int, float)) and not isinstance(value, bool) if _is_number(default) else (
            default is None or isinstance(value, type(default))
        )  # fmt: skip
        if not alike:
            raise UserError(f"{key}.{name}: {value!r} is not of the kind of its default, {default!r}")
    settings = {**defaults, **config.settings}
    if kind == "loss" and settings["average"] not in AVERAGES:
        raise UserError(f"{key}.average: {settings['average']!r}; it must be {', '.join(AVERAGES)}")
    return settings


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_hook(hook: Hook) -> None:
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
