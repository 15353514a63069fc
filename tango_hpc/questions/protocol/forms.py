"""The forms of a solution (`protocol.solution`): the grammar of tags, and free text."""

from __future__ import annotations

from collections.abc import Sequence

from tango_hpc.base.config.schema import ProtocolConfig
from tango_hpc.questions.protocol.free_text import numbered, read_free_text
from tango_hpc.questions.protocol.solution import Solution, Step, parse_solution


def read_solution(text: str, protocol: ProtocolConfig) -> Solution:
    """Read any text as a solution in the form that the protocol asks for."""
    return read_free_text(text, protocol) if protocol.solution == "free" else parse_solution(text)


def given_solution(steps: Sequence[str], answer: str | None, protocol: ProtocolConfig) -> Solution:
    """Return steps that nobody of this run wrote, in the form in which the verifier reads solutions.

    Without an `answer` there is no answer element: an empty box would be a mistake that the steps have not made.
    """
    if protocol.solution == "free":
        shown = numbered(steps)
    else:
        shown = "<think>\n{}\n</think>".format("\n".join(f"<step>{step}</step>" for step in steps))
        if answer is not None:
            shown += f"\n<answer>\\boxed{{{answer}}}</answer>"
    return Solution([Step(step, 0, 0) for step in steps], answer, well_formed=True, shown=shown, answer_text=shown)
