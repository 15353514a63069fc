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
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Literal

from tango_hpc.questions.protocol.solution import Solution
from tango_hpc.questions.protocol.tags import read_elements, without_elements

FormatRule = Literal["authors", "graded"]
CORRECT, INCORRECT = "\\boxed{CORRECT}", "\\boxed{INCORRECT}"

_JUDGEMENT = re.compile(r"\\boxed\{\s*(?:\\text\{\s*)?(CORRECT|INCORRECT)\s*\}", re.IGNORECASE)
_HEADING = re.compile(r"[^\w\\]*step[^\w\\]*([0-9]{1,6})[^\w\\]*(?:analysis)?", re.IGNORECASE)

GRAMMAR = {"": ("think", "step_verification", "step", "final_verification"), "step_verification": ("step",)}
# A quotation of at most a few lines; a single quotation mark inside a word is an apostrophe.
_QUOTED = re.compile(r""""[^"]{0,300}"|“[^”]{0,300}”|`[^`]{0,300}`|(?<!\w)'[^']{0,300}'(?!\w)|‘[^’]{0,300}’""")

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
    is_closed: bool = True

    @property
    def judgement(self) -> int:
        return _agreed(self.boxes, missing=0)


@dataclass(frozen=True)
class _Parts:
    """The parts of a verification: its step elements, the final one, and the text outside of both.

    `between`: the text in the first element outside of its steps. `in_form`: exactly the elements of the grammar, each
    closed, and no stray tags. `is_bare`: nothing but the two closed elements and white space.
    """

    elements: list[_StepText]
    final_text: str
    outside: str
    between: str
    in_form: bool
    is_bare: bool


def parse_verification(
    text: str, num_steps: int, rule: FormatRule = "authors", *, answered: bool = True
) -> Verification:
    r"""Read any text as a verification of a solution with `num_steps` steps.

    A step element judges the step whose number stands in its heading. Where no element has a number (the tiny models'
    format has none) the k-th judges step k; beside numbered ones, an element without a number judges nothing, so that
    a step that was left out never shifts the judgements of others. Elements of one number that contradict each other
    are no judgement of it, nor are boxes that do so in one element, nor numbers outside 1 to `num_steps`.
    An element whose closing tag was forgotten ends at the next step or at the end of the section: that costs format
    reward but no judgement.

    What stands inside an open element is its content, tags and all: a verdict that a step quotes is none, nor is one in
    a leading `<think>` element, which is passed over. Boxes in quotation marks, or in an element that a step quotes,
    are no judgements. The verdict is that of the final element after the last judged step.

    `answered` False: the solution has no answer in a box. The authors' rule then takes nothing off for a wrong number
    of judgements, nor does it for a solution without steps; but no step element at all is a wrong number always.
    """
    parts = _split(text)
    elements, final_text = parts.elements, parts.final_text
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
    take_off(_STRUCTURE, float(not parts.in_form), "sections or tags missing, unclosed or out of order")
    take_off(_OUTSIDE_TEXT, float(bool(parts.outside.strip())), "text outside the tags")
    take_off(_FINAL, float(len(final_boxes) != 1), "not exactly one final judgement")
    if rule == "authors":
        penalty = _authors_penalty(parts, num_steps if answered and num_steps else None)
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


def _authors_penalty(parts: _Parts, num_steps: int | None) -> float:
    """Return the penalty of the authors' rule: 1 where the text is more than the two elements and white space.

    A judgement is what an element ends in, but for a full stop. `num_steps` None: any number of judgements will do, if
    there is a step element.
    """
    if not parts.is_bare:
        return 1.0
    steps = [element.text for element in parts.elements if element.is_closed]
    num_judged = sum(_ends_in_judgement(step) for step in steps)
    penalty = 0.0
    if not _ends_in_judgement(parts.final_text):
        penalty += _NO_VERDICT
    if not steps or num_steps not in (None, num_judged):
        penalty += _WRONG_COUNT
    if parts.between.strip():
        penalty += _BETWEEN_STEPS
    return penalty


def _ends_in_judgement(text: str) -> bool:
    """Return whether the last that `text` says is a judgement, which no other one in it contradicts."""
    tail = _JUDGEMENT.split(text)[-1].strip()
    return _agreed(_boxes(text), missing=0) != 0 and tail in ("", ".")


def _split(text: str) -> _Parts:
    """Return the parts of a verification, by its structure."""
    judgement_ends = [match.end() for match in _JUDGEMENT.finditer(text)]

    def starts_anew(start: int, tag_start: int, tag_end: int) -> bool:
        """Return whether a step in an open step is the next one: the open one has judged, or the new one a number."""
        judged = bisect_right(judgement_ends, tag_start) > bisect_left(judgement_ends, start)
        return judged or _HEADING.match(text, tag_end) is not None

    read = read_elements(text, GRAMMAR, starts_anew)
    parts = list(read.children)
    if parts and parts[0].name == "think" and not text[: parts[0].start].strip():
        del parts[0]  # the verifier may think first
    sections = [part for part in parts if part.name == "step_verification"]
    steps = [step for part in parts for step in ([part] if part.name == "step" else part.children)]
    judged_until = max((step.end for step in steps), default=0)
    finals = [part for part in parts if part.name == "final_verification"]
    final = next((part for part in finals if part.start >= judged_until), None)
    others = [part for part in parts if part.name == "think" or (part in finals and part is not final)]
    between = "".join(section.between(text) for section in sections)
    outside = read.between(text) + "".join(part.inside(text) for part in others)
    names = [part.name for part in parts]
    are_two = names == ["step_verification", "final_verification"] and not read.strays
    are_two = are_two and all(part.is_closed for part in parts)
    return _Parts(
        elements=[_StepText(step.inside(text), _boxes(step.inside(text)), step.is_closed) for step in steps],
        final_text="" if final is None else final.inside(text),
        outside=outside + between,
        between=between + "".join(text[step.start : step.end] for step in steps if not step.is_closed),
        in_form=are_two and all(step.is_closed for step in steps) and not any(part.strays for part in sections),
        is_bare=are_two and not outside.strip(),
    )


def _boxes(text: str) -> list[int]:
    """Return the judgements in `text`, +1 and −1, in order; quoted ones only where there are no others."""
    own = without_elements(text)
    for words in (_QUOTED.sub("", own), own):
        boxes = [1 if match[1].upper() == "CORRECT" else -1 for match in _JUDGEMENT.finditer(words)]
        if boxes:
            return boxes
    return []


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
