r"""The grammar of a verification of a solution with K steps, and the format reward of Eq. 8:

    <step_verification>
    <step>Step 1: why … \boxed{CORRECT}</step> … K of them, each with CORRECT or INCORRECT …
    </step_verification>
    <final_verification>\boxed{CORRECT}</final_verification>

Parsing never fails: it reads what it can from any text and lists what did not keep the form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tango_hpc.protocol.tags import Tag, find_tags

CORRECT, INCORRECT = "\\boxed{CORRECT}", "\\boxed{INCORRECT}"

_JUDGEMENT = re.compile(r"\\boxed\{\s*(?:\\text\{\s*)?(CORRECT|INCORRECT)\s*\}", re.IGNORECASE)
_HEADING = re.compile(r"[^\w\\]*step[^\w\\]*([0-9]{1,6})[^\w\\]*(?:analysis)?", re.IGNORECASE)

_OF_A_SOLUTION = ("think", "/think", "answer", "/answer", "step_verification")  # in a step: quoted

# What each unmet criterion takes from a format reward of 1.0; the shares add up to 1. A criterion about steps takes
# its part in proportion to the steps that do not meet it.
_STEP_COUNT = 0.25
_STEP_JUDGEMENT = 0.2
_STEP_REASON = 0.1
_STEP_NUMBER = 0.05
_STRUCTURE = 0.1
_OUTSIDE_TEXT = 0.05
_FINAL = 0.25


@dataclass(frozen=True)
class Verification:
    """What was read from a verifier's response to a solution with K steps.

    `judgements` has K entries: +1 correct, −1 incorrect, 0 missing. `final` is 1, 0 or −1 (missing). `format_reward`
    lies in [0, 1]; `problems` says in words what was taken off.
    """

    judgements: list[int]
    final: int
    format_reward: float
    problems: list[str]

    @property
    def is_complete(self) -> bool:
        """Whether every step of the solution has a judgement."""
        return bool(self.judgements) and 0 not in self.judgements


@dataclass(frozen=True)
class _StepText:
    text: str
    boxes: list[int]

    @property
    def judgement(self) -> int:
        return _agreed(self.boxes, missing=0)


def parse_verification(text: str, num_steps: int) -> Verification:
    r"""Read any text as a verification of a solution with `num_steps` steps.

    The k-th step element judges step k, whatever number it gives itself; elements beyond `num_steps` judge nothing.
    An element ends at its closing tag, at the next step or at the end of the section, so that a forgotten tag costs
    format reward but no judgement. Boxes that contradict each other in one element are no judgement. Numbering is
    checked where an element gives a number; a format without numbers (the tiny models') keeps to the order anyway.
    """
    elements, final_text, structure_kept, outside = _split(text)
    judgements = [element.judgement for element in elements[:num_steps]]
    judgements += [0] * (num_steps - len(judgements))
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
    return Verification(judgements, final, max(round(1.0 - penalty, 6), 0.0), problems)


def _split(text: str) -> tuple[list[_StepText], str, bool, str]:
    """The step elements, the text of the final element, whether all tags are in place, the text outside of tags."""
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
    """The judgements in `text`, +1 and −1, in order."""
    return [1 if match[1].upper() == "CORRECT" else -1 for match in _JUDGEMENT.finditer(text)]


def _agreed(boxes: list[int], missing: int) -> int:
    """The one judgement that all boxes share, as +1 or, for a wrong one, what the caller's scale says."""
    if not boxes or len(set(boxes)) > 1:
        return missing
    if missing == -1:
        return int(boxes[0] > 0)
    return boxes[0]


def _number(text: str) -> int | None:
    heading = _HEADING.match(text)
    return int(heading[1]) if heading else None


def _has_reason(text: str) -> bool:
    """Whether anything but the heading and the judgement is said."""
    heading = _HEADING.match(text)
    rest = _JUDGEMENT.sub("", text[heading.end() :] if heading else text)
    return any(character.isalnum() for character in rest)
