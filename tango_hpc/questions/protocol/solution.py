r"""The grammar of a solution:

    <think><step>…</step> … <step>…</step></think><answer>\boxed{…}</answer>

Parsing never fails: it reads what it can from any text and says whether the text kept the form.
"""

from __future__ import annotations

from dataclasses import dataclass

from tango_hpc.questions.protocol.tags import Tag, find_tags, last_box


@dataclass(frozen=True)
class Step:
    """One step: the text between its tags, and the characters [start_char, end_char) it takes, tags included."""

    text: str
    start_char: int
    end_char: int


@dataclass(frozen=True)
class Solution:
    """A generator's response as it was read. `answer` is None where no closed box stands in the answer element;
    graded is what `find_answer` finds.

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
    head, _, tail = text.partition("<answer>")
    inside, closing, after = tail.partition("</answer>")
    answer = last_box(inside)
    steps, names, outside = _read_steps(head)
    well_formed = (
        names == ["think", *["step", "/step"] * len(steps), "/think"]
        and len(steps) > 0
        and answer is not None
        and bool(closing)
        and not find_tags(inside)
        and not (outside + after).strip()
    )
    return Solution(steps, answer, well_formed)


def find_answer(text: str) -> str | None:
    r"""Return the answer that a response is graded by, in training, in evaluation and by `tango score`.

    What `parse_solution` reads from the answer element, or else what the last `\boxed{…}` of the whole text holds:
    models that were never taught the format answer too. Whether the format was kept is counted apart.
    """
    return parse_solution(text).answer or last_box(text)


def _read_steps(head: str) -> tuple[list[Step], list[str], str]:
    """Return the steps of the text before the answer, the names of all its tags, and the text outside of them."""
    steps: list[Step] = []
    names: list[str] = []
    outside = ""
    open_step: Tag | None = None
    outside_start = 0
    for tag in find_tags(head):
        names.append(tag.name)
        if open_step is None:
            outside += head[outside_start : tag.start]
            outside_start = tag.end
            open_step = tag if tag.name == "step" else None
        elif tag.name == "/step":
            steps.append(Step(head[open_step.end : tag.start], open_step.start, tag.end))
            open_step, outside_start = None, tag.end
    return steps, names, outside + head[outside_start:]
