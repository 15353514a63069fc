r"""The grammar of a solution:

    <think><step>…</step> … <step>…</step></think><answer>\boxed{…}</answer>

Parsing never fails: it reads what it can from any text and says whether the text kept the form.
"""

from __future__ import annotations

from dataclasses import dataclass

from tango_hpc.protocol.tags import find_tags, last_box


@dataclass(frozen=True)
class Step:
    """One step: the text between its tags, and the characters [start_char, end_char) it takes, tags included."""

    text: str
    start_char: int
    end_char: int


@dataclass(frozen=True)
class Solution:
    """What was read from a generator's response. `answer` is None where no closed box stands in the answer element.

    `well_formed`: exactly the grammar above, with at least one step and only white space between the elements.
    """

    steps: list[Step]
    answer: str | None
    well_formed: bool

    @property
    def step_end_chars(self) -> list[int]:
        """For each step, the index just past its closing tag."""
        return [step.end_char for step in self.steps]


def parse_solution(text: str) -> Solution:
    r"""Read any text as a solution.

    A step is what stands between `<step>` and the next `</step>`; a step that never closes (a response cut off inside
    it) is none, and an opening tag inside a step is part of its text, so that nothing can be hidden from the verifier
    by leaving tags out. Steps after the first `<answer>` are not read. The answer is what the last `\boxed{…}` of the
    first answer element holds; that element may be cut off after the box.
    """
    steps: list[Step] = []
    names: list[str] = []
    open_step = None
    answer_start = answer_end = None
    outside: list[str] = []
    outside_start = 0
    for tag in find_tags(text):
        names.append(tag.name)
        if answer_start is None:
            if tag.name == "step" and open_step is None:
                outside.append(text[outside_start : tag.start])
                open_step = tag
            elif tag.name == "/step" and open_step is not None:
                steps.append(Step(text[open_step.end : tag.start], open_step.start, tag.end))
                open_step, outside_start = None, tag.end
            elif open_step is None:
                outside.append(text[outside_start : tag.start])
                outside_start = tag.end
            if tag.name == "answer":
                answer_start = tag.end
        elif tag.name == "/answer":
            answer_end = tag.start
            outside.append(text[tag.end :])
            break
    answer = last_box(text[answer_start:answer_end]) if answer_start is not None else None
    well_formed = (
        names == ["think", *["step", "/step"] * len(steps), "/think", "answer", "/answer"]
        and len(steps) > 0
        and answer is not None
        and not any(part.strip() for part in outside)
    )
    return Solution(steps, answer, well_formed)
