r"""Steps of free text: where paragraphs may be cut, thoughts, answers, and the token in which each step ends."""

from __future__ import annotations

import random
import re
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tango_hpc.base.config.schema import ProtocolConfig
from tango_hpc.base.types import Generation
from tango_hpc.questions.protocol.alignment import response_text
from tango_hpc.questions.protocol.forms import read_solution
from tango_hpc.questions.tasks.math import Math
from tango_hpc.stages.responses import read_solutions
from tests.helpers.real_tokenizers import SOURCES, real_tokenizer

FREE = ProtocolConfig(solution="free")
ANSWER = ProtocolConfig(solution="free", judge="answer")
A, B, C, D = (f"{name} is a sentence that is long enough." for name in ("Alpha", "Beta", "Gamma", "Delta"))
BLOCKS = {
    "fence": "```python\nx = 1\n\n\ny = 2\n```",
    "tilde fence": "~~~\nx\n\n```\n\ny\n~~~",
    "environment": "\\begin{align}\na &= b \\\\[2pt]\n\n\\begin{cases} 1\n\n2 \\end{cases}\n\nc &= d\n\\end{align}",
    "nested environment": "\\begin{array}{c} a\n\n\\begin{array}{c} b\n\n\\end{array}\n\nc\n\\end{array}",
    "brackets": "\\[\na = b\n\n+ c\n\\]",
    "dollars": "$$\na = b\n\n+ c\n$$",
}
PIECES = [
    A, B, "Yes.", "So:", "\n", "\n\n", "\n \t\n", "\r\n\r\n", "\n\n\n", "- item", "1. item", "2) " + C, "### Step 2", "**Sum**",
    "```", "```py\n", "~~~", "$$", "$x$", "\\[", "\\]", "\\\\[2pt]", "\\begin{align}", "\\end{align}", "<think>",
    "</think>", "<step>", "\\boxed{4}", "\\boxed{", "}", "é", "🙂", " ", "7", "\u3000", "\u2028",
]  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
PROTOCOLS = st.builds(
    ProtocolConfig, solution=st.just("free"), judge=st.sampled_from(["all", "answer"]), max_steps=st.integers(1, 6)
)


def steps(text: str, protocol: ProtocolConfig = FREE) -> list[str]:
    return [step.text.strip() for step in read_solution(text, protocol).steps]


def test_paragraphs_are_steps_and_the_last_box_the_answer():
    read = read_solution(f"{A}\n\n{B} \\boxed{{3}}\n \n\n{C} \\boxed{{4}}", FREE)
    assert [step.text.strip() for step in read.steps] == [A, f"{B} \\boxed{{3}}", f"{C} \\boxed{{4}}"]
    assert read.answer == "4" and read.well_formed
    assert read.shown == f"Step 1:\n{A}\n\nStep 2:\n{B} \\boxed{{3}}\n\nStep 3:\n{C} \\boxed{{4}}"


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_nothing_is_cut_inside_of_a_block(block):
    assert steps(f"{A}\n{block}\n\n{B}") == [f"{A}\n{block}", B]
    assert len(steps(f"{A}\n\n{B}\n{block.splitlines()[0]}\n\n{C}\n\n{D}")) <= 4  # cut off: never raises


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{A}\n\n\\[ x = 2 \\]\n\n{B}", [f"{A}\n\n\\[ x = 2 \\]", B]),  # a displayed formula stays
        (f"{A}\n\n$x = 2$.\n\n{B}", [f"{A}\n\n$x = 2$.", B]),
        (f"We know this:\n\n- {A}\n\n- {B}\n\n{C}", [f"We know this:\n\n- {A}\n\n- {B}", C]),
        (f"{A}\n\n- {B}\n\n- {C}", [A, f"- {B}", f"- {C}"]),  # which nobody announced
        ("We know this:\n\n1. one egg\n\n2. two eggs\n\n" + C, ["We know this:\n\n1. one egg\n\n2. two eggs", C]),
        (f"Step by step:\n\n1. {A} {B}\n\n2. {C} {D}", [f"Step by step:\n\n1. {A} {B}", f"2. {C} {D}"]),
        (
            f"### Step 1: the number of all the eggs\n\n{A}\n\n{B}",
            [f"### Step 1: the number of all the eggs\n\n{A}", B],
        ),
        (f"**The total number of eggs**\n\n{A}\n\n{B}", [f"**The total number of eggs**\n\n{A}", B]),
        (f"Let's see.\n\n{A}\n\n{B}\n\nDone.", [f"Let's see.\n\n{A}", f"{B}\n\nDone."]),
        ("4", ["4"]),
        ("Yes.\n\nNo.", ["Yes.\n\nNo."]),
        ("", []),
        (" \n\n\t", []),
        ("...\n\n---", []),
        (f"It costs $$5.\n\n{A}", ["It costs $$5.\n\n" + A]),  # a short paragraph, not an open formula
        (f"{A} $$5\n\n{B}\n\n{C}", [f"{A} $$5", B, C]),
    ],
)
def test_what_stays_together(text, found):
    assert steps(text) == found


def test_more_steps_than_may_be_are_joined_evenly():
    text = "\n\n".join(f"Paragraph {i} is a sentence that is long enough." for i in range(50))
    counts = [len(re.findall("Paragraph", step)) for step in steps(text)]
    assert len(counts) == 24 and sum(counts) == 50 and set(counts) == {2, 3}
    assert len(steps(text, ProtocolConfig(solution="free", max_steps=50))) == 50


@pytest.mark.parametrize(
    ("text", "all_steps", "answer_steps", "answer"),
    [
        (f"<think>\n{A}\n\n{B} \\boxed{{9}}\n</think>\n\n{C}\n\n{D} \\boxed{{4}}",
         [f"<think>\n{A}", f"{B} \\boxed{{9}}\n</think>", C, f"{D} \\boxed{{4}}"], [C, f"{D} \\boxed{{4}}"], "4"),
        (f"<think>\n{A}\n\n{B} \\boxed{{9}}", [], [], None),  # cut off in the thought
        (f"<think>\n\n</think>\n\n{A}\n\n{B}", [f"<think>\n\n</think>\n\n{A}", B], [A, B], None),
        (f"<think>{A} \\boxed{{9}}</think>", [f"<think>{A} \\boxed{{9}}</think>"], [], None),
        (f"{A} A <think> is mentioned.\n\n{B} \\boxed{{4}}", [f"{A} A <think> is mentioned.", f"{B} \\boxed{{4}}"],
         [f"{A} A <think> is mentioned.", f"{B} \\boxed{{4}}"], "4"),
    ],
)  # fmt: skip
def test_thoughts(text, all_steps, answer_steps, answer):
    for protocol, expected in ((FREE, all_steps), (ANSWER, answer_steps)):
        read = read_solution(text, protocol)
        assert [step.text.strip() for step in read.steps] == expected
        assert read.answer == answer == Math().answer(read)
        assert read.well_formed == (bool(expected) and answer is not None)


@given(TEXTS, PROTOCOLS)
@settings(max_examples=400, deadline=None)
def test_steps_cover_the_text(text, protocol):
    read = read_solution(text, protocol)
    assert len(read.steps) <= protocol.max_steps
    if not read.steps:
        return
    assert "".join(text[step.start_char : step.end_char] for step in read.steps) == text
    thought = text.find("</think>") + len("</think>") if text.lstrip().startswith("<think>") else 0
    shown = text[thought:] if protocol.judge == "answer" else text
    assert "".join(step.text for step in read.steps) == shown
    assert all(any(map(str.isalnum, step.text)) for step in read.steps)


@pytest.mark.parametrize("name", SOURCES)
@given(text=TEXTS, protocol=PROTOCOLS, seed=st.integers(0, 9), opened=st.sampled_from(["", "<think>\n"]))
@settings(max_examples=120, deadline=None)
def test_every_token_belongs_to_one_step(name, text, protocol, seed, opened):
    """Tokens as they are sampled: not those that the tokenizer would choose for the text."""
    tokenizer = real_tokenizer(name)
    ids = sampled(tokenizer, text, seed)
    question = {"id": "q", "question": "q", "answer": "4", "source": "math"}
    exchange = SimpleNamespace(gather=lambda mine: [mine], number=0, size=1)
    (read,) = read_solutions(
        Math(), [question], ["q"], [([1], Generation(ids, [0.0] * len(ids), "stop"))], tokenizer, exchange,
        opened, protocol,
    )  # fmt: skip
    ends = read.step_end_tokens
    assert len(ends) == len(read.solution.steps)
    if not ends:
        return
    assert ends == sorted(ends) and ends[-1] == len(ids) - 1
    for step, end in zip(read.solution.steps[:-1], ends, strict=False):  # by the definition of I(k)
        whole = read.response.text[: step.end_char]
        assert (opened + response_text(ids[: end + 1], tokenizer)).startswith(whole)
        assert end == 0 or not (opened + response_text(ids[:end], tokenizer)).startswith(whole)


def sampled(tokenizer, text: str, seed: int) -> list[int]:
    """Tokens of `text` cut at random places, with some tokens of any kind between, and an end of sequence."""
    chance = random.Random(seed)
    cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(4)))
    ids: list[int] = []
    for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True):
        ids += tokenizer(text[first:last], add_special_tokens=False)["input_ids"]
        ids += [chance.randrange(len(tokenizer)) for _ in range(chance.randrange(3))] if seed > 4 else []
    return [*ids, tokenizer.eos_token_id]


@pytest.mark.parametrize("piece", [*PIECES, "\n\n" + A, "\\begin{a}", "$$\n\n", ": ", "\n" + " " * 50])
def test_reading_is_linear(piece):
    text = "".join(piece for _ in range(200_000 // len(piece)))
    started = time.process_time()
    read_solution(text, FREE)
    read_solution("<think>" + text, ANSWER)
    assert time.process_time() - started < 4
