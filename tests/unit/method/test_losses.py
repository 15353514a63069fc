"""The files of the method: shipped ones against numbers by hand and verl's functions, one's own against mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tango_hpc.base.config.hooks import CorrectionConfig, HookConfig, LossConfig, shipped_names
from tango_hpc.base.errors import UserError
from tango_hpc.method.equations import token_weights
from tango_hpc.method.hooks import check_token_hook, load_hook
from tango_hpc.method.tokens import Tokens

REFERENCE = json.loads((Path(__file__).parents[2] / "data/losses.json").read_text())
BATCH = REFERENCE["batch"]
LENGTHS = BATCH["lengths"]


def numbers(name: str) -> torch.Tensor:
    return torch.tensor(BATCH[name], dtype=torch.float64)


def over_responses(values: torch.Tensor, how: str) -> torch.Tensor:
    """The mean or the sum of the values of each response, at each of its tokens."""
    parts = values.split(LENGTHS)
    return torch.cat([getattr(part, how)().expand(len(part)) for part in parts])


def batch(logprobs: torch.Tensor, level: str = "token") -> Tokens:
    old, gap = numbers("old"), numbers("old") - numbers("engine")
    lengths = torch.repeat_interleave(torch.tensor(LENGTHS), torch.tensor(LENGTHS)).double()
    return Tokens(
        logprobs,
        old,
        numbers("advantages"),
        gap if level == "token" else over_responses(gap, "sum"),
        lengths,
        over_responses(logprobs.detach() - old, "mean"),
    )


@pytest.mark.parametrize("name", [name for name in REFERENCE["losses"] if name != "cispo, both sides"])
def test_a_loss_is_that_of_verl(name: str) -> None:
    """Loss and gradient to the 1e-8 that verl adds to its denominators; verl counts what the clip takes likewise."""
    theirs = REFERENCE["losses"][name]
    hook = load_hook(LossConfig(name=name.split(",")[0], settings=theirs["ours"]))
    logprobs = numbers("new").requires_grad_()
    terms, measured = hook(batch(logprobs))
    loss = (terms * torch.from_numpy(token_weights(LENGTHS, hook.settings["average"], BATCH["most"]))).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(theirs["loss"], rel=1e-7)
    torch.testing.assert_close(gradient, torch.tensor(theirs["gradient"], dtype=torch.float64), rtol=1e-7, atol=1e-9)
    assert 0 < theirs["clip_share"] < 1
    assert measured["loss/clip_share"].double().mean().item() == pytest.approx(theirs["clip_share"], rel=1e-6)


def test_every_shipped_loss_and_correction_has_a_reference() -> None:
    assert {name.split(",")[0] for name in REFERENCE["losses"]} == set(shipped_names("loss"))
    levels = {f"{name} {level}" for name in shipped_names("correction") for level in ("token", "sequence")}
    assert REFERENCE["corrections"].keys() == levels
    assert REFERENCE["losses"]["cispo"]["loss"] != REFERENCE["losses"]["cispo, both sides"]["loss"]


@pytest.mark.parametrize("name", REFERENCE["corrections"])
def test_a_correction_is_that_of_verl(name: str) -> None:
    theirs, (rule, level) = REFERENCE["corrections"][name], name.split()
    weights, measured = load_hook(CorrectionConfig(name=rule, settings=theirs["ours"]))(batch(numbers("new"), level))
    expected = torch.tensor(theirs["weights"], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)
    (share,) = measured.values()
    touched = (expected == 0) | (expected == theirs["ours"].get("cap"))
    assert touched.any() or level == "sequence"
    assert share.tolist() == touched.tolist()


def two_tokens(ratios: tuple[float, float], advantages: tuple[float, float]) -> Tokens:
    """A response of two tokens with these ratios, whose old log-probabilities are −1."""
    logs = torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    logprobs = (logs - 1).requires_grad_()
    return Tokens(
        logprobs, -ones, torch.tensor(advantages, dtype=torch.float64), 0 * ones, 2 * ones, logs.mean() * ones
    )


@pytest.mark.parametrize(
    ("name", "settings", "ratios", "advantages", "terms", "gradients", "clipped"),
    [
        # GRPO: 1.5 is clipped to 1.2 for A = 2; 0.5 with A = −2 to 0.8: no gradient from either
        ("grpo", {}, (1.5, 0.5), (2.0, -2.0), (-2.4, 1.6), (0.0, 0.0), (True, True)),
        # DAPO: 1.25 is within 1.28, and its gradient is −1.25 · 2
        ("dapo", {}, (1.25, 1.5), (2.0, 2.0), (-2.5, -2.56), (-2.5, 0.0), (False, True)),
        ("dr_grpo", {}, (1.1, 1.5), (1.0, 1.0), (-1.1, -1.2), (-1.1, 0.0), (False, True)),
        # GSPO: √(4 · 0.25) = 1 for both, whatever each is
        ("gspo", {}, (4.0, 0.25), (3.0, 3.0), (-3.0, -3.0), (-3.0, -3.0), (False, False)),
        # √(2 · 0.5²) … = 0.9 by ratios 1.62 and 0.5, below 1 − 0.05: clipped where A < 0 alone
        ("gspo", {"clip_low": 0.05}, (1.62, 0.5), (1.0, -1.0), (-0.9, 0.95), (-0.9, 0.0), (False, True)),
        # CISPO: min(8, 5) and 0.5, times A · log π; the gradient keeps the weight, above the bound too
        ("cispo", {}, (8.0, 0.5), (1.0, 2.0), (-5 * (math.log(8) - 1), -(math.log(0.5) - 1)), (-5.0, -1.0), (True, False)),
    ],
)  # fmt: skip
def test_losses_by_hand(name, settings, ratios, advantages, terms, gradients, clipped) -> None:
    tokens = two_tokens(ratios, advantages)
    found, measured = load_hook(LossConfig(name=name, settings=settings))(tokens)
    (gradient,) = torch.autograd.grad(found.sum(), tokens.logprobs)
    assert found.tolist() == pytest.approx(terms, abs=1e-12)
    assert gradient.tolist() == pytest.approx(gradients, abs=1e-12)
    assert measured["loss/clip_share"].tolist() == list(clipped)


MINE = "import torch\n\ndef loss(tokens, settings):\n    return {}, {{}}\n"
POLICY = "-tokens.advantages * tokens.logprobs"


def write(folder: Path, text: str, kind: str = "loss", **settings: Any) -> HookConfig:
    file = folder / "mine.py"
    file.write_text(text)
    made = {"loss": LossConfig, "correction": CorrectionConfig}[kind]
    return made(name=str(file), settings=settings)


def test_a_loss_of_ones_own_is_called_like_a_shipped_one(tmp_path: Path) -> None:
    text = "defaults = {'scale': 2.0}\nstatistics = {'most': 'max'}\n\n\ndef loss(tokens, settings):\n"
    text += f"    return settings['scale'] * {POLICY}, {{'most': tokens.advantages}}\n"
    hook = load_hook(write(tmp_path, text, scale=3))
    check_token_hook(hook)
    tokens = two_tokens((1.0, 1.0), (1.0, 2.0))
    terms, measured = hook(tokens)
    assert terms.tolist() == [3.0, 6.0] and measured["loss/most"].tolist() == [1.0, 2.0]
    assert hook.reductions == {"loss/most": "max"} and hook.settings == {"average": "response", "scale": 3}


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("x = 1", {}, r"must have a function `loss`"),
        ("def loss(", {}, r"mine.py, line 1: SyntaxError"),
        (MINE.format("1 / 0"), {}, r"mine.py, line 4, in loss: ZeroDivisionError"),
        (MINE.format("tokens.rewards"), {}, r"line 4, in loss: AttributeError: .*rewards"),
        (MINE.format(f"({POLICY}).mean()"), {}, r"gives loss of shape \[\] for 12 tokens"),
        (MINE.format("[0.0]"), {}, r"of shape \['no tensor'\]"),
        (MINE.format(f"{POLICY} / tokens.advantages.std()"), {}, r"depends on the tokens beside it|is not finite"),
        (MINE.format(f"({POLICY}).cumsum(0)"), {}, r"loss of a token depends on the tokens beside it"),
        (MINE.format("-tokens.advantages"), {}, r"loss has no gradient"),
        (MINE.format(f"{POLICY} / 0"), {}, r"loss of made-up tokens is not finite"),
        (MINE.format(f"0 * {POLICY}"), {}, r"the gradient of loss with made-up tokens is zero"),
        ("def loss(tokens, settings):\n    return tokens.logprobs\n", {}, r"must give a tensor and a dictionary"),
        (MINE.format(POLICY) + "statistics = {'a': 'mean'}\n", {}, r"measures \[\], `statistics` declares \['a'\]"),
        (MINE.format(POLICY) + "statistics = {'a': 'median'}\n", {}, r"statistics: a is 'median'; it must be sum, mean"),
        (MINE.format(POLICY) + "needs = {'batch'}\n", {}, r"needs: batch; only a loss .* a chunk of tokens"),
        (MINE.format(POLICY), {"clip": 1}, r"algorithm.loss.settings.clip: .* has no such setting; it has average"),
        (MINE.format(POLICY) + "defaults = {'clip': 0.2}\n", {"clip": "x"}, r"'x' is not of the kind of its default, 0.2"),
        (MINE.format(POLICY), {"average": "all"}, r"settings.average: 'all'; it must be response, token, constant"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_told(text: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        check_token_hook(load_hook(write(tmp_path, text, **settings)))


def test_a_correction_cannot_need_what_a_chunk_does_not_have(tmp_path: Path) -> None:
    text = "needs = {'sequence_ratio'}\n\n\ndef correction(tokens, settings):\n    return tokens.log_gap.exp(), {}\n"
    with pytest.raises(UserError, match="only a loss can need something"):
        load_hook(write(tmp_path, text, "correction"))


@pytest.mark.parametrize("kind", ["loss", "correction"])
def test_shipped_files_pass_the_check_of_ones_own(kind: str) -> None:
    made = {"loss": LossConfig, "correction": CorrectionConfig}[kind]
    for name in shipped_names(kind):
        check_token_hook(load_hook(made(name=name)))


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"must be cispo, dapo, dr_grpo, grpo, gspo or the path of a Python file"):
        LossConfig(name="ppo")
