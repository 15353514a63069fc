r"""The grammar of a verification of a solution with K steps, and the format reward of Eq. 8:

    <step_verification>
    <step>Step 1: why … \boxed{CORRECT}</step> … K of them, each with CORRECT or INCORRECT …
    </step_verification>
    <final_verification>\boxed{CORRECT}</final_verification>

Parsing never fails: it reads what it can from any text and lists what did not keep the form. How much of a format
reward is left to a text that departs from the form is a choice (`FormatRule`):

    authors   1, less 0.8 without a verdict, 0.8 for a wrong number of judgements and 0.4 for text in the first element
              that is outside of its steps; 0 where there is anything but the two elements. As the authors' code has it.
    graded    1, less a small share for each thing that is amiss, in proportion to the steps that it concerns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tango_hpc.questions.protocol.solution import Solution
from tango_hpc.questions.protocol.tags import Tag, find_tags

FormatRule = Literal["authors", "graded"]
CORRECT, INCORRECT = "\\boxed{CORRECT}", "\\boxed{INCORRECT}"

_JUDGEMENT = re.compile(r"\\boxed\{\s*(?:\\text\{\s*)?(CORRECT|INCORRECT)\s*\}", re.IGNORECASE)
_HEADING = re.compile(r"[^\w\\]*step[^\w\\]*([0-9]{1,6})[^\w\\]*(?:analysis)?", re.IGNORECASE)

_OF_A_SOLUTION = ("think", "/think", "answer", "/answer", "step_verification")  # in a step: quoted

# What each unmet criterion takes from a format reward of 1.0 under the graded rule; the shares add up to 1. A criterion
# about steps takes its part in proportion to the steps that do not meet it.
_STEP_COUNT = 0.25
_STEP_JUDGEMENT = 0.2
_STEP_REASON = 0.1
_STEP_NUMBER = 0.05
_STRUCTURE = 0.1
_OUTSIDE_TEXT = 0.05
_FINAL = 0.25

# The same under the authors' rule.
_NO_VERDICT = 0.8
_WRONG_COUNT = 0.8
_BETWEEN_STEPS = 0.4


@dataclass(frozen=True)
class Verification:
    """A verifier's response to a solution with K steps, as it was read.

    `judgements` has K entries: +1 correct, −1 incorrect, 0 missing. `final` is 1, 0 or −1 (missing).
    `num_judgements` counts the step elements that judge, whichever step they name. `format_reward` lies in [0, 1];
    `problems` says in words what departs from the form: what the graded rule takes off, whatever the rule.
    """

    judgements: list[int]
    final: int
    num_judgements: int
    format_reward: float
    problems: list[str]

    @property
    def is_complete(self) -> bool:
        """Return whether each of the K steps has exactly one judgement, and nothing else is judged."""
        return self.num_judgements == len(self.judgements) and 0 not in self.judgements


@dataclass(frozen=True)
class _StepText:
    text: str
    boxes: list[int]

    @property
    def judgement(self) -> int:
        return _agreed(self.boxes, missing=0)


def parse_verification(
    text: str, num_steps: int, rule: FormatRule = "authors", *, answered: bool = True
) -> Verification:
    r"""Read any text as a verification of a solution with `num_steps` steps.

    A step element judges the step whose number stands in its heading. Where no element has a number (the tiny models'
    format has none) the k-th judges step k; beside numbered ones, an element without a number judges nothing, so that
    a step that was left out never shifts the judgements of others. Elements of one number that contradict each other
    are no judgement of it, nor are boxes that do so in one element, nor numbers outside 1 to `num_steps`.
    An element ends at its closing tag, at the next step or at the end of the section, so that a forgotten tag costs
    format reward but no judgement.

    `answered` False: the solution has no answer in a box. The authors' rule then takes nothing off for a wrong number
    of judgements, nor does it for a solution without steps; but no step element at all is a wrong number always.
    """
    elements, final_text, structure_kept, outside = _split(text)
    judgements = _judgements(elements, num_steps)
    final_boxes = _boxes(final_text)
    final = _agreed(final_boxes, missing=-1)

    problems: list[str] = []
    penalty = 0.0

    def take_off(amount: float, share: float, problem: str) -> None:
        nonlocal penalty
        if share > 0:
            penalty += amount * share
            problems.append(problem)

    steps = max(num_steps, 1)
    checked = elements[:num_steps]
    absent = num_steps - len(checked)
    take_off(
        _STEP_COUNT,
        min(abs(len(elements) - num_steps) / steps, 1.0),
        f"{len(elements)} step verifications for {num_steps} steps",
    )
    unjudged = absent + sum(len(element.boxes) != 1 for element in checked)
    take_off(_STEP_JUDGEMENT, unjudged / steps, f"{unjudged} of {num_steps} steps without exactly one judgement")
    unreasoned = absent + sum(not _has_reason(element.text) for element in checked)
    take_off(_STEP_REASON, unreasoned / steps, f"{unreasoned} of {num_steps} steps without a justification")
    misnumbered = sum(_number(element.text) not in (None, k) for k, element in enumerate(checked, start=1))
    take_off(_STEP_NUMBER, misnumbered / steps, f"{misnumbered} of {num_steps} steps with a wrong number")
    take_off(_STRUCTURE, float(not structure_kept), "sections or tags missing, unclosed or out of order")
    take_off(_OUTSIDE_TEXT, float(bool(outside.strip())), "text outside the tags")
    take_off(_FINAL, float(len(final_boxes) != 1), "not exactly one final judgement")
    if rule == "authors":
        penalty = _authors_penalty(text, num_steps if answered and num_steps else None)
    num_judgements = sum(element.judgement != 0 for element in elements)
    return Verification(judgements, final, num_judgements, max(round(1.0 - penalty, 6), 0.0), problems)


def read_verification(text: str, solution: Solution, rule: FormatRule) -> Verification:
    """Return `parse_verification` of `text` as a verification of `solution`."""
    return parse_verification(text, len(solution.steps), rule, answered=solution.answer is not None)


def _judgements(elements: list[_StepText], num_steps: int) -> list[int]:
    """Return the judgement of each step, 0 where there is none."""
    numbers = [_number(element.text) for element in elements]
    if all(number is None for number in numbers):
        numbers = list(range(1, len(elements) + 1))
    boxes_K: list[list[int]] = [[] for _ in range(num_steps)]
    for number, element in zip(numbers, elements, strict=True):
        if number is not None and 1 <= number <= num_steps:
            # An element that contradicts itself leaves both judgements here, so that no other settles its step.
            boxes_K[number - 1] += element.boxes
    return [_agreed(boxes, missing=0) for boxes in boxes_K]


def _authors_penalty(text: str, num_steps: int | None) -> float:
    """Return the penalty of the authors' rule: 1 where the text is more than the two elements and white space.

    A judgement is what an element ends in, but for a full stop. `num_steps` None: any number of judgements will do, if
    there is a step element.
    """
    section, closing, rest = text.strip().partition("</step_verification>")
    final_text, final_closing, after = rest.lstrip().partition("</final_verification>")
    opened = section.startswith("<step_verification>") and final_text.startswith("<final_verification>")
    if not (opened and closing and final_closing) or after:
        return 1.0
    steps, between = _closed_steps(section.removeprefix("<step_verification>"))
    num_judged = sum(_ends_in_judgement(step) for step in steps)
    penalty = 0.0
    if not _ends_in_judgement(final_text):
        penalty += _NO_VERDICT
    if not steps or num_steps not in (None, num_judged):
        penalty += _WRONG_COUNT
    if between.strip():
        penalty += _BETWEEN_STEPS
    return penalty


def _closed_steps(section: str) -> tuple[list[str], str]:
    """Return the text in each `<step>…</step>` of `section`, and the text outside of them."""
    steps: list[str] = []
    outside: list[str] = []
    position = 0
    while (start := section.find("<step>", position)) >= 0 and (end := section.find("</step>", start)) >= 0:
        outside.append(section[position:start])
        steps.append(section[start + len("<step>") : end])
        position = end + len("</step>")
    return steps, "".join([*outside, section[position:]])


def _ends_in_judgement(text: str) -> bool:
    """Return whether the last that `text` says is a judgement, which no other one in it contradicts."""
    tail = _JUDGEMENT.split(text)[-1].strip()
    return _agreed(_boxes(text), missing=0) != 0 and tail in ("", ".")


def _split(text: str) -> tuple[list[_StepText], str, bool, str]:
    """Return the step elements, the text of the final element, whether all tags are in place, the text outside
    of tags.
    """
    head, _, tail = text.partition("<final_verification>")
    final_text, closing, after = tail.partition("</final_verification>")
    elements: list[_StepText] = []
    names: list[str] = []
    outside = after
    open_end: int | None = None  # where the text of the open step starts
    outside_start = 0
    for tag in [*find_tags(head), Tag("", len(head), len(head))]:  # the end closes an open step as a tag does
        names.append(tag.name)
        if open_end is not None and tag.name in _OF_A_SOLUTION:
            continue
        if open_end is not None:
            inner = head[open_end : tag.start]
            elements.append(_StepText(inner, _boxes(inner)))
        else:
            outside += head[outside_start : tag.start]
        outside_start = tag.end
        open_end = tag.end if tag.name == "step" else None
    expected = ["step_verification", *["step", "/step"] * len(elements), "/step_verification", ""]
    structure_kept = names == expected and bool(closing) and not find_tags(final_text)
    return elements, final_text, structure_kept, outside


def _boxes(text: str) -> list[int]:
    """Return the judgements in `text`, +1 and −1, in order."""
    return [1 if match[1].upper() == "CORRECT" else -1 for match in _JUDGEMENT.finditer(text)]


def _agreed(boxes: list[int], missing: int) -> int:
    """Return the one judgement that all boxes share, as +1 or, for a wrong one, what the caller's scale says."""
    if not boxes or len(set(boxes)) > 1:
        return missing
    if missing == -1:
        return int(boxes[0] > 0)
    return boxes[0]


def _number(text: str) -> int | None:
    heading = _HEADING.match(text)
    return int(heading[1]) if heading else None


def _has_reason(text: str) -> bool:
    """Return whether anything but the heading and the judgement is said."""
    heading = _HEADING.match(text)
    rest = _JUDGEMENT.sub("", text[heading.end() :] if heading else text)
    return any(character.isalnum() for character in rest)
