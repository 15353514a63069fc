r"""The grammar of a solution:

    <think><step>…</step> … <step>…</step></think><answer>\boxed{…}</answer>

Parsing never fails: it reads what it can from any text and says whether the text kept the form.
"""

from __future__ import annotations

from dataclasses import dataclass

from tango_hpc.questions.protocol.tags import last_box, read_elements

GRAMMAR = {"": ("think", "step", "answer"), "think": ("step",)}


@dataclass(frozen=True)
class Step:
    """One step: its text, without tags, and the characters [start_char, end_char) it takes, tags included."""

    text: str
    start_char: int
    end_char: int


@dataclass(frozen=True)
class Solution:
    """A generator's response as it was read. `answer` is None where it has none in its form; graded is what the task
    finds (`Task.answer`), by default with `find_answer`.

    `well_formed`: it keeps its form whole, with at least one step and an answer. `shown`: the text that the verifier
    reads. `answer_text`: the text in which the task looks for the answer.
    """

    steps: list[Step]
    answer: str | None
    well_formed: bool
    shown: str
    answer_text: str

    @property
    def step_end_chars(self) -> list[int]:
        """For each step, the index just past it."""
        return [step.end_char for step in self.steps]


def parse_solution(text: str) -> Solution:
    r"""Read any text as a solution in the grammar above.

    A step is what stands between `<step>` and `</step>`, whatever it says: other tags in it, whole quoted steps and
    opening tags are text, so that nothing can be hidden from the verifier by leaving tags out. A step that never closes
    (a response cut off inside it) is none. Steps after the answer element are not read. The answer is what the last
    `\boxed{…}` of the first answer element holds; that element may be cut off after the box.
    """
    read = read_elements(text, GRAMMAR)
    parts = list(read.children)
    names = [part.name for part in parts]
    thought_at = names.index("think") if "think" in names else 0
    answer_at = next((i for i in range(thought_at, len(parts)) if names[i] == "answer"), len(parts))
    answer_element = parts[answer_at] if answer_at < len(parts) else None
    found = [
        step
        for part in parts[:answer_at]
        if part.name != "answer"
        for step in (part.children if part.name == "think" else [part])
    ]
    steps = [Step(step.inside(text), step.start, step.end) for step in found if step.is_closed]
    answer = None if answer_element is None else last_box(answer_element.inside(text))
    well_formed = (
        names == ["think", "answer"]
        and all(part.is_closed and not part.strays for part in [read, *parts, *found])
        and len(steps) > 0
        and answer is not None
        and not (read.between(text) + parts[0].between(text)).strip()
    )
    return Solution(steps, answer, well_formed, shown=text, answer_text=text)


def find_answer(solution: Solution) -> str | None:
    r"""Return the answer that a response is graded by, in training, in evaluation and by `tango score`.

    The answer in its form, or else what the last `\boxed{…}` of the text holds: models that were never taught the
    format answer too. Whether the format was kept is counted apart.
    """
    return solution.answer or last_box(solution.answer_text)
