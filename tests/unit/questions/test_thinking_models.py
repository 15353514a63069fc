r"""Published templates of thinking models: what the prompt opens, what is thought, what is judged and graded."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tango_hpc.base.config.schema import ProtocolConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.prompts import Template, read_prompt
from tango_hpc.base.types import Generation
from tango_hpc.questions.tasks.math import Math
from tango_hpc.stages.responses import ReadSolution, read_solutions, read_verifications
from tests.helpers.real_tokenizers import real_tokenizer

TEMPLATES = Path(__file__).parents[2] / "data/chat_templates"
ONE, TWO = "They have 2 boxes with 3 eggs in each one.", "So they have 2 * 3 = 6 eggs, which is \\boxed{6}."
THOUGHT = "First I guess that there are \\boxed{9} eggs.\n\nNo, that would be far too many of them."
# Template, its arguments, and the tags that the prompt then opens.
ASKED: list[tuple[str, str, dict[str, Any], str]] = [
    ("qwen3", "qwen", {}, ""),
    ("qwen3", "qwen", {"enable_thinking": False}, ""),
    ("smollm3", "qwen", {}, ""),
    ("smollm3", "qwen", {"enable_thinking": False}, ""),
    ("deepseek_r1_distill", "deepseek", {}, "<think>\n"),
]
EXCHANGE = SimpleNamespace(gather=lambda mine: [mine], number=0, size=1)


@pytest.fixture(params=ASKED, ids=lambda asked: f"{asked[0]} {asked[2]}")
def asked(request, monkeypatch) -> tuple[Any, dict[str, Template], str, bool]:
    """A tokenizer with that template, the prompts of both roles, the tags opened, and whether the model thinks."""
    template, name, arguments, opened = request.param
    tokenizer = real_tokenizer(name)
    monkeypatch.setattr(tokenizer, "chat_template", (TEMPLATES / f"{template}.jinja").read_text())
    prompts = {
        role: read_prompt(role, None, arguments, tokenizer, "free").template(tokenizer)
        for role in ("generator", "verifier")
    }
    return tokenizer, prompts, opened, arguments.get("enable_thinking", True)


def read(asked, text: str, protocol: ProtocolConfig) -> ReadSolution:
    """The solution that the model writes after the prompt, as it is read."""
    tokenizer, prompts, _opened, _ = asked
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    question = {"id": "q", "question": "q", "answer": "6", "source": "math"}
    written = [([1], Generation(ids, [0.0] * len(ids), "stop"))]
    (solution,) = read_solutions(
        Math(), [question], ["q"], written, tokenizer, EXCHANGE, prompts["generator"].opened, protocol
    )
    assert solution.step_end_tokens[-1:] in ([], [len(ids) - 1])
    return solution


def test_prompts_hold_their_fields_and_open_what_the_template_opens(asked):
    tokenizer, prompts, opened, thinks = asked
    for role, template in prompts.items():
        begins_judging = role == "verifier" and not thinks
        assert template.opened == ("<step_verification>\n<step>" if begins_judging else opened)
        assert set(template.parts[1::2]) >= {"question"} | ({"solution"} if role == "verifier" else set())
        text = tokenizer.decode(template.token_ids(tokenizer, {"question": "2+2?", "solution": ONE, "num_steps": 1}))
        text = text.removesuffix(template.opened) if begins_judging else text
        assert "2+2?" in text and text.rstrip().endswith(("assistant", "</think>", "<｜Assistant｜><think>"))
        assert thinks == (not text.rstrip().endswith("</think>"))


@pytest.mark.parametrize("judge", ["all", "answer"])
def test_what_is_judged_and_graded(asked, judge):
    _, _, opened, thinks = asked
    protocol = ProtocolConfig(solution="free", judge=judge)
    thought = f"{'' if opened else '<think>'}\n{THOUGHT}\n</think>\n\n" if thinks else ""
    solution = read(asked, f"{thought}{ONE}\n\n{TWO}", protocol)
    assert solution.answer == "6" and solution.solution.well_formed
    judged = [step.text.strip() for step in solution.solution.steps]
    assert judged[-2:] == [ONE, TWO] and len(judged) == (4 if thinks and judge == "all" else 2)
    assert ("guess" in solution.solution.shown) == (thinks and judge == "all")


def test_a_thought_that_is_cut_off_has_no_answer_and_no_steps(asked):
    _, _, opened, _ = asked
    solution = read(asked, f"{'' if opened else '<think>'}\n{THOUGHT}", ProtocolConfig(solution="free"))
    assert solution.answer is None and solution.solution.steps == [] and not solution.solution.well_formed


def test_a_verifier_may_think_first(asked):
    """A judgement and a verdict that it considers in its thought are none. One that does not think begins to judge."""
    tokenizer, prompts, opened, thinks = asked
    solution = read(
        asked,
        f"{'<think></think>' if not opened else '</think>'}{ONE}\n\n{TWO}",
        ProtocolConfig(solution="free", judge="answer"),
    )
    considered = (
        "Maybe <final_verification>\\boxed{INCORRECT}</final_verification>?\n<step>Step 1: \\boxed{INCORRECT}</step>"
    )
    told = (
        "<step_verification>\n<step>Step 1: it says so. \\boxed{CORRECT}</step>\n<step>Step 2: 2 * 3 is 6. \\boxed{CORRECT}</step>\n"
        "</step_verification>\n<final_verification>\\boxed{CORRECT}</final_verification>"
    )
    text = f"{'' if opened else '<think>'}\n{considered}\n</think>\n\n{told}"
    if not thinks:
        text = told.removeprefix(prompts["verifier"].opened)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    written = [([1], Generation(ids, [0.0] * len(ids), "stop"))]
    (verification,) = read_verifications(
        [solution], written, "authors", tokenizer, EXCHANGE, prompts["verifier"].opened
    )
    found = verification.verification
    assert found.judgements == [1, 1] and found.final == 1 and found.is_complete and found.format_reward == 1.0


def test_a_thought_is_seen_where_its_tags_are_special_tokens():
    tokenizer = real_tokenizer("deepseek").__class__(
        tokenizer_object=copy.deepcopy(real_tokenizer("deepseek")._tokenizer), eos_token="<｜end▁of▁sentence｜>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    ids = [*tokenizer(f"<think>{THOUGHT}</think>{ONE}\n\n{TWO}")["input_ids"], tokenizer.eos_token_id]
    assert {"<think>", "</think>"} <= set(tokenizer.all_special_tokens)
    question = {"id": "q", "question": "q", "answer": "6", "source": "math"}
    written = [([1], Generation(ids, [0.0] * len(ids), "stop"))]
    (solution,) = read_solutions(
        Math(), [question], ["q"], written, tokenizer, EXCHANGE, "", ProtocolConfig(solution="free", judge="answer")
    )
    assert [step.text.strip() for step in solution.solution.steps] == [ONE, TWO] and solution.answer == "6"
    assert tokenizer.decode(ids[: solution.step_end_tokens[0] + 1]).endswith("each one.\n\n")


def test_a_prompt_may_begin_the_reply(tmp_path):
    tokenizer = real_tokenizer("qwen")
    file = tmp_path / "prompt.txt"
    file.write_text("Judge {question}: {solution}\n=== assistant\n<step_verification>\n<step>\n")
    plain = read_prompt("verifier", file).template(tokenizer)
    assert plain.parts == ("Judge ", "question", ": ", "solution", "\n<step_verification>\n<step>")
    assert plain.opened == "<step_verification>\n<step>"
    file.write_text("{question} {solution}\n=== assistant\nSure! <step>\n")
    with pytest.raises(UserError, match="below === assistant may stand opening tags of the form alone"):
        read_prompt("verifier", file)
