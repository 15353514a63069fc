r"""Steps of a solution in free text: its paragraphs, as chat models and thinking models write them.

A paragraph ends at a blank line that stands in no code fence, LaTeX environment or displayed formula. Then

    a displayed formula stays with the paragraph before it;
    a heading, and a sentence that announces something (it ends in a colon), stay with what follows: with all items of a
    list, but for long numbered items, since many models number their steps;
    a short paragraph ("Let's see.") joins the next one, and at the end of the text the one before it;
    more than `max_steps` are joined evenly.

The thought of a thinking model is what stands in the `<think>` element that begins the response; the prompt or the
model opens it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tango_hpc.base.config.schema import ProtocolConfig
from tango_hpc.questions.protocol.solution import Solution, Step
from tango_hpc.questions.protocol.tags import last_box

SHORT_CHARS = 24  # a paragraph with fewer letters and digits is no step of its own
LONG_ITEM_CHARS = 60  # a numbered item with as many letters and digits is one

_OPEN, _CLOSE = "<think>", "</think>"
_MARK = re.compile(
    r"""
      (?P<gap>\n(?:[^\S\n]*\n)+)                              # blank lines
    | ^[ \t]*(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)           # a code fence
    | \\begin\{(?P<begin>[^{}\n]+)\}
    | \\end\{(?P<end>[^{}\n]+)\}
    | \\\\                                                    # a line break in LaTeX: the [ behind it opens nothing
    | (?P<bracket>\\[\[\]])
    | (?P<dollars>\$\$)
    """,
    re.VERBOSE | re.MULTILINE,
)
_FORMULA = re.compile(r"\s*(?:\$\$|\\\[|\\begin\{|\$[^$\n]+\$\s*[.,;]?\s*\Z)")
_BULLET = re.compile(r"\s*(?:[-*+•–]|\(?[a-z]\)|\(?[ivx]{1,4}\))\s")
_NUMBER = re.compile(r"\s*\(?\d{1,3}[.)]\s")
_HEADING = re.compile(r"\s*(?:#{1,6}\s[^\n]*|\*\*[^*\n]*\*\*)\s*\Z")


def read_free_text(text: str, protocol: ProtocolConfig) -> Solution:
    r"""Read any text as a solution in free text; linear in its length.

    The steps cover the text: step k+1 begins where step k ends. With `judge: answer`, the steps are those of the text
    after the thought, and the thought belongs to the first of them. A thought that never closes leaves no steps and no
    answer. The answer is what the last `\boxed{…}` after the thought holds. A solution is well-formed if it has steps
    and an answer.
    """
    thought_end = _thought_end(text)
    if thought_end is None:
        return Solution([], None, False, shown=text, answer_text="")
    starts = _step_starts(text, thought_end, len(text))
    if protocol.judge == "all" and _weight(text[:thought_end].replace(_OPEN, "").replace(_CLOSE, "")):
        starts = [*_step_starts(text, 0, thought_end), *starts]
    count = min(len(starts), protocol.max_steps)
    starts = [starts[k * len(starts) // count] for k in range(count)]
    ends = [*starts[1:], len(text)][:count]
    shown_from = [thought_end if protocol.judge == "answer" else 0, *starts[1:]]
    spans = zip(shown_from, [0, *starts[1:]], ends, strict=False)
    steps = [Step(text[shown:end], start, end) for shown, start, end in spans]
    after = text[thought_end:]
    answer = last_box(after)
    return Solution(
        steps,
        answer,
        bool(steps) and answer is not None,
        shown=numbered([step.text for step in steps]),
        answer_text=after,
    )


def numbered(steps: Sequence[str]) -> str:
    """Return steps as the verifier reads them."""
    return "\n\n".join(f"Step {k}:\n{step.strip()}" for k, step in enumerate(steps, start=1))


def _thought_end(text: str) -> int | None:
    """Return where the text after the thought begins, 0 where there is no thought; None where it never closes."""
    if not text.lstrip().startswith(_OPEN):
        return 0
    closing = text.find(_CLOSE)
    return None if closing < 0 else closing + len(_CLOSE)


def _step_starts(text: str, start: int, end: int) -> list[int]:
    """Return where the steps of text[start:end] begin, the first at `start`; none where it says nothing."""
    starts = _paragraph_starts(text, start, end)
    paragraphs = [text[a:b] for a, b in zip(starts, [*starts[1:], end], strict=True)]
    steps = [start]
    in_list = False
    weight = _weight(paragraphs[0])
    for previous, paragraph, begin in zip(paragraphs, paragraphs[1:], starts[1:], strict=False):
        announced = _announces(previous)
        in_list = _is_item(paragraph) and (announced or in_list)
        if announced or in_list or weight < SHORT_CHARS or _FORMULA.match(paragraph):
            weight += _weight(paragraph)
        else:
            steps.append(begin)
            weight = _weight(paragraph)
    if len(steps) > 1 and weight < SHORT_CHARS:
        steps.pop()
    return steps if _weight(text[start:end]) else []


def _announces(paragraph: str) -> bool:
    """Return whether a paragraph is a heading, or ends in a colon."""
    return _HEADING.match(paragraph) is not None or paragraph.rstrip().rstrip("*_`").endswith(":")


def _paragraph_starts(text: str, start: int, end: int) -> list[int]:
    """Return where the paragraphs of text[start:end] begin, by the blank lines that may be cut at."""
    starts = [start]
    closer: str | None = None  # what ends the fence, environment or formula that is open
    depth = 0
    for mark in _MARK.finditer(text, start, end):
        if closer is not None:
            depth += _depth_change(mark, closer)
            closer = closer if depth else None
        elif mark["gap"] is not None:
            if text[starts[-1] : mark.start()].strip() and mark.end() < end:
                starts.append(mark.end())
        else:
            closer = _closer(mark, text, end)
            depth = int(closer is not None)
    return starts


def _closer(mark: re.Match[str], text: str, end: int) -> str | None:
    """Return what closes what `mark` opens; None where it opens nothing. Only `$$` needs its end to be there."""
    if mark["fence"] is not None:
        return mark["fence"] if "`" not in mark["info"] else None
    if mark["begin"] is not None:
        return f"\\end{{{mark['begin']}}}"
    if mark["bracket"] == "\\[":
        return "\\]"
    if mark["dollars"] is not None and text.find("$$", mark.end(), end) >= 0:
        return "$$"
    return None


def _depth_change(mark: re.Match[str], closer: str) -> int:
    """Return by how much `mark` changes the depth inside of what `closer` closes."""
    if mark["fence"] is not None:
        same = mark["fence"][0] == closer[0] and len(mark["fence"]) >= len(closer)
        return -int(same and not mark["info"].strip())
    if mark["begin"] is not None:
        return int(closer == f"\\end{{{mark['begin']}}}")
    return -int(mark[0] == closer)


def _is_item(paragraph: str) -> bool:
    """Return whether a paragraph is a list item that is no step of its own."""
    is_short_number = _NUMBER.match(paragraph) is not None and _weight(paragraph) < LONG_ITEM_CHARS
    return _BULLET.match(paragraph) is not None or is_short_number


def _weight(text: str) -> int:
    """Return the number of letters and digits."""
    return sum(map(str.isalnum, text))
