"""Names that hold a step number: checkpoint folders such as step_000012 and step_000012+rollout, and dumps of rollouts
such as generator_step_000020.parquet.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

# In which phases of a step a checkpoint can be written; a step that draws questions again passes them again, as
# rollout_2 and verify_2.
SAVED_PHASES = ("rollout", "try", "verify")

_NAME = re.compile(
    r"(?:(?P<role>generator|verifier)_)?step_(?P<step>\d{6,})(?:\+(?P<phase>(?:rollout|try|verify)(?:_\d+)?))?(?:\.parquet)?"
)


def numbered(phase: str, draw: int) -> str:
    """Return the name of a phase in the `draw`-th draw of a step, from 1."""
    return phase if draw == 1 else f"{phase}_{draw}"


class StepName(NamedTuple):
    """After how many optimizer steps something was written, and in which phase of the next one, or for which role."""

    step: int
    phase: str = ""
    role: str = ""

    def __str__(self) -> str:
        role = f"{self.role}_" if self.role else ""
        phase = f"+{self.phase}" if self.phase else ""
        return f"{role}step_{self.step:06d}{phase}"

    @classmethod
    def read(cls, name: str) -> StepName | None:
        """Return the step that the name of a file or folder holds; None for other names."""
        match = _NAME.fullmatch(name)
        return cls(int(match["step"]), match["phase"] or "", match["role"] or "") if match else None


def steps_in(folder: Path) -> list[tuple[StepName, Path]]:
    """Return the checkpoints or dumps in `folder`, the oldest first; empty where there is no folder."""
    names = ((StepName.read(path.name), path) for path in (folder.iterdir() if folder.is_dir() else []))
    found = [(name, path) for name, path in names if name is not None]
    return sorted(found, key=lambda entry: (*_order(entry[0]), entry[1].name))


def leftovers_in(folder: Path) -> list[Path]:
    """Return checkpoints in `folder` that an attempt began to write or to delete; the next one removes them as it
    starts.
    """
    return sorted(folder.glob(".step_*"))


def is_newer(name: str | None, other: str | None) -> bool:
    """Return whether the checkpoint `name` was written later in a run than `other`; None comes before the first."""
    first, second = (StepName.read(text) if text is not None else None for text in (name, other))
    return first is not None and (second is None or _order(first) > _order(second))


def _order(name: StepName) -> tuple[int, int, int]:
    return (name.step, *_place(name.phase))


def _place(phase: str) -> tuple[int, int]:
    """Return when a step passes a phase; "", between two steps, comes first."""
    kind, _, draw = phase.partition("_")
    return (int(draw or 1), SAVED_PHASES.index(kind)) if phase else (0, 0)


def damaged_in(folder: Path) -> list[str]:
    """Return names of the checkpoints in `folder` that were found damaged and set aside."""
    return sorted(path.name for path in folder.glob("step_*.damaged*"))
