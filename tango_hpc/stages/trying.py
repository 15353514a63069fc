"""Labels of steps by trying: what the generator goes on from, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tango_hpc.base.config.schema import StepLabelsConfig
from tango_hpc.base.types import Generation
from tango_hpc.method.step_labels import labels_by_trying
from tango_hpc.stages.responses import ReadSolution


@dataclass(frozen=True)
class Tried:
    """Labels of the steps of solutions, by their place among those that are judged, and the tokens written for them."""

    labels: dict[int, list[int]] = field(default_factory=dict)
    num_tokens: int = 0


NOTHING_TRIED = Tried()


@dataclass(frozen=True)
class Start:
    """A place to go on from: behind `num_tokens` of the response of a solution that is judged at `place`."""

    place: int
    read: ReadSolution
    num_tokens: int

    @property
    def prefix(self) -> list[int]:
        """The tokens of the response up to there."""
        return self.read.response.generation.token_ids[: self.num_tokens]

    @property
    def is_whole(self) -> bool:
        """Return whether the response ends there: what comes of it is known."""
        return self.num_tokens >= self.read.response.num_tokens

    def continued(self, written: Generation, most: int) -> Generation:
        """Return the response that goes on with what was `written`, cut off after `most` tokens."""
        token_ids = [*self.prefix, *written.token_ids]
        return Generation(token_ids[:most], [], "length" if len(token_ids) > most else written.finish_reason)


def starts_of(solutions_Q: Sequence[ReadSolution], settings: StepLabelsConfig) -> list[Start]:
    """Return the places to go on from: behind each step of the first solutions, and where the rule asks for it from
    their prompts.

    Solutions without steps, and of questions without an answer, have none.
    """
    with_steps = [(place, read) for place, read in enumerate(solutions_Q) if read.step_end_tokens and read.has_truth]
    return [start for place, read in with_steps[: settings.solutions] for start in _starts(place, read, settings)]


def _starts(place: int, read: ReadSolution, settings: StepLabelsConfig) -> Iterator[Start]:
    if settings.rule == "change":
        yield Start(place, read, 0)
    for end in read.step_end_tokens:
        yield Start(place, read, end + 1)


def labelled(starts: Sequence[Start], shares: Sequence[float], settings: StepLabelsConfig) -> dict[int, list[int]]:
    """Return the labels by the share of right continuations of each start."""
    by_place: dict[int, list[float]] = {}
    for start, share in zip(starts, shares, strict=True):
        by_place.setdefault(start.place, []).append(share)
    num_before = int(settings.rule == "change")
    return {
        place: labels_by_trying(found[0], found[num_before:], settings.rule, settings.max_fall)
        for place, found in by_place.items()
    }
