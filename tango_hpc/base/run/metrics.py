"""metrics.jsonl and evaluations.jsonl: one flat JSON object per optimizer step, and per evaluation in the loop.

A value that was not measured at a step is null. A value that was measured and is not finite is null too, since JSON
has no NaN, and its key stands in the row's `nonfinite` list, so that a diverging run can be told from a quiet one.
Rows of several stages share the files; `stage` tells them apart, and `step` counts optimizer steps of a stage from 1,
over both roles. In evaluations.jsonl step 0 is the evaluation before training.

A row of metrics.jsonl with the key `event` is no optimizer step: it says what happened to the run at `step` (`EVENTS`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tango_hpc.base.files import (
    json_object,
    naming,
    parse_json_lines,
    read_json_lines,
    read_replaced,
    warn_once,
    write_atomically,
)
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.step_names import steps_in
from tango_hpc.base.run.trackers import Trackers
from tango_hpc.base.types import TrackerName

MetricsRow = dict[str, Any]

# What can stand under `event`; `text` has it in words.
EVENTS = {
    "checkpoint_set_aside": "a checkpoint was found damaged; the run went on from an older one, after `step`",
    "trouble": "something went wrong in training, of a kind of `train.on_trouble`, and is said once",
    "rollback": "the run went back to the checkpoint of `step` and goes on with other sampling seeds",
    "rows_lost": "the rows of the steps `first_step` to `last_step` are missing, the steps themselves are not",
    "lines_lost": (
        "so many `lines` of this file, besides `rows_lost`, or of evaluations.jsonl were no rows and are put aside"
    ),
}
# Those that a resume from an older checkpoint does not repeat.
_LASTING = ("checkpoint_set_aside", "lines_lost")
# Stages of optimizer steps: they write a row for each, so that a missing one is a loss, and checkpoints. The others
# keep
# results part by part.
STEPPED_STAGES = ("sft", "train")

PHASES = ("rollout", "try", "verify", "train", "logprobs", "reshard")
# Giving a GPU from one role, or from trainer to engine, to the other: phases of their own; on a CPU next to nothing.
TURNS = ("wake", "sleep", "onload", "offload")

# Every row of metrics.jsonl has these, null where they were not measured.
REQUIRED_KEYS = (
    "step", "role", "seconds/total", *(f"seconds/{phase}" for phase in (*PHASES, "score", *TURNS)),
    "tokens/generated", "tokens/trained",
    "reshard/bytes_sent", "reshard/bytes_local", "reshard/bytes_minimum",
    "logprob_gap/mean_abs", "generator/accuracy",
    "verifier/outcome_f1", "verifier/outcome_j", "verifier/step_j", "verifier/correct_share", "verifier/parse_failures",
    "loss", "grad_norm", "kl", "entropy", "alpha", "groups_with_signal",
)  # fmt: skip


class MetricsWriter:
    """Writes the metrics of one stage; lives on rank 0 only.

    Rows of this stage after `resumed_step` are dropped when it opens, and TensorBoard drops them too, so that a
    resumed run's files read like those of one that was never interrupted. Every row is on its way to the disk when
    its call returns. `gaps`: rows of any stage that had been lost when it opened, and lines that were no rows, in
    words; an event marks each in the file. Scalars also go to `trackers`; `tell` gets a line for one that fails, and
    for lines that are lost later.
    """

    def __init__(
        self,
        directory: RunDirectory,
        stage: str,
        *,
        resumed_step: int = 0,
        trackers: Sequence[TrackerName] = ("tensorboard",),
        tell: Callable[[str], None] = print,
    ) -> None:
        self.stage = stage
        files = (directory.metrics, directory.evaluations)
        lost = {path: _keep_rows(path, lambda row: _outlives(row, stage, resumed_step)) for path in files}
        self._evaluated = {(row["step"], *sorted(row)) for row in read_evaluations(directory, stage)}
        self._directory = directory
        self._metrics: IO[str] = directory.metrics.open("a", encoding="utf-8", buffering=1)
        self._evaluations: IO[str] = directory.evaluations.open("a", encoding="utf-8", buffering=1)
        self._trackers = Trackers(trackers, directory, stage, resumed_step, tell)
        self._tell = tell
        self.gaps: list[str] = []
        for stepped in STEPPED_STAGES:
            steps_done = resumed_step if stepped == stage else _steps_done(directory, stepped)
            self._mark_gaps(stepped, steps_done)
        self.gaps += [self._mark_lost(path, count, resumed_step) for path, count in lost.items() if count > 0]

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the row of one optimizer step; contract keys it does not have are written as null."""
        assert row.get("step") is not None and row.get("role") is not None, f"a row needs step and role: {row}"
        complete = {"stage": self.stage, **dict.fromkeys(REQUIRED_KEYS), **row}
        self._add_metrics(complete)
        self._track(row, prefix="")

    def write_event(self, event: str, step: int, text: str, **more: int) -> None:
        """Add what happened to the run when `step` optimizer steps were done; `event` is one of `EVENTS`.

        An attempt that repeats what an interrupted one did adds nothing.
        """
        row = {"stage": self.stage, "step": step, "event": event, "text": text, **more}
        if not any(row.items() <= known.items() for known in read_events(self._directory, self.stage)):
            self._add_event(self.stage, event, step, text, **more)

    def _add_event(self, stage: str, event: str, step: int, text: str, **more: int) -> None:
        assert event in EVENTS, event
        self._add_metrics({"stage": stage, "step": step, "event": event, "text": text, **more, "time": time.time()})

    def _add_metrics(self, row: Mapping[str, Any]) -> None:
        with naming(self._directory.metrics):
            self._metrics.write(_as_json(row))

    def _mark_gaps(self, stage: str, steps_done: int) -> None:
        there = [(row["step"], row["step"]) for row in read_metrics(self._directory, stage)]
        marked = [event for event in read_events(self._directory, stage) if event["event"] == "rows_lost"]
        there += [(event["first_step"], event["last_step"]) for event in marked]
        of_stage = "" if stage == self.stage else f" of {stage}"
        for first, last in _gaps(there, steps_done):
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            text = f"metrics.jsonl has no row of {steps}{of_stage}: lost, while the weights have them"
            self._add_event(stage, "rows_lost", last, text, first_step=first, last_step=last)
            self.gaps.append(text)

    def _mark_lost(self, path: Path, count: int, step: int) -> str:
        lines = "1 line that is no row" if count == 1 else f"{count} lines that are no rows"
        text = f"{path.name} had {lines}: damaged, kept in {_aside(path).name}"
        self._add_event(self.stage, "lines_lost", step, text, lines=count)
        return text

    def write_evaluation(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Add one evaluation on held-out data after optimizer step `step`; keys as in metrics.jsonl.

        An evaluation of the same things at the same step, which an interrupted attempt left, is replaced.
        """
        row = {"stage": self.stage, "step": step, **values}
        if (step, *sorted(row)) in self._evaluated:
            self._evaluations.close()
            path, known = self._directory.evaluations, (self.stage, step, row.keys())
            lost = _keep_rows(path, lambda old: (old["stage"], old["step"], old.keys()) != known)
            self._evaluations = path.open("a", encoding="utf-8", buffering=1)
            if lost:
                self._tell(self._mark_lost(path, lost, step))
        with naming(self._directory.evaluations):
            self._evaluations.write(_as_json(row))
        self._track(row, prefix="eval/")

    def close(self) -> None:
        """Flush and close all files."""
        self._metrics.close()
        self._evaluations.close()
        self._trackers.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _track(self, row: Mapping[str, Any], prefix: str) -> None:
        values = {key: value for key, value in row.items() if key != "step" and isinstance(value, int | float)}
        finite = {prefix + key: float(value) for key, value in values.items() if math.isfinite(value)}
        self._trackers.log(finite, row["step"])


def read_metrics(directory: RunDirectory, stage: str | None = None) -> list[MetricsRow]:
    """Return the rows of all optimizer steps, or those of one stage. A last line that is being written is left out."""
    return [row for row in _read_rows(directory.metrics, stage) if "event" not in row]


def read_events(directory: RunDirectory, stage: str | None = None) -> list[MetricsRow]:
    """Return the events of a run, or of one stage."""
    return [row for row in _read_rows(directory.metrics, stage) if "event" in row]


def read_evaluations(directory: RunDirectory, stage: str | None = None) -> list[MetricsRow]:
    """Return all rows of evaluations.jsonl, or those of one stage."""
    return _read_rows(directory.evaluations, stage)


class RowTail:
    """Reads the rows that were added to a file since the last look, from another process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def new_rows(self) -> tuple[list[MetricsRow], bool]:
        """Return the complete new rows, and whether the file was rewritten since, so that these are all of its rows."""
        if not self._path.exists():
            return [], False
        status = os.stat(self._path)
        rewritten = self._inode != 0 and (status.st_ino != self._inode or status.st_size < self._offset)
        if rewritten:
            self._offset = 0
        self._inode = status.st_ino
        with self._path.open("rb") as file:
            file.seek(self._offset)
            block = file.read()
        end = block.rfind(b"\n") + 1
        self._offset += end
        return _rows_of(parse_json_lines(block[:end], self._path), self._path), rewritten


def _as_json(row: Mapping[str, Any]) -> str:
    nonfinite = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    if nonfinite:
        row = {**row, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return json.dumps(row, allow_nan=False) + "\n"


def _read_rows(path: Path, stage: str | None = None) -> list[MetricsRow]:
    rows = _rows_of(read_json_lines(path), path)
    return [row for row in rows if stage is None or row["stage"] == stage]


def _rows_of(objects: Sequence[MetricsRow], path: Path) -> list[MetricsRow]:
    rows = [row for row in objects if _is_row(row)]
    if len(rows) < len(objects):
        warn_once(f"{path}: lines that are no rows, passed over: {len(objects) - len(rows)}")
    return rows


def _is_row(row: MetricsRow) -> bool:
    """Return whether a line is what we write; one that lost its middle may still be JSON."""
    measured = (value for key, value in row.items() if "/" in key or (key in REQUIRED_KEYS and key != "role"))
    return (
        isinstance(row.get("step"), int)
        and isinstance(row.get("stage"), str)
        and all(value is None or isinstance(value, int | float) for value in measured)
        and (_is_event(row) if "event" in row else isinstance(row.get("role", ""), str))
    )


def _is_event(row: MetricsRow) -> bool:
    steps = ("first_step", "last_step") if row["event"] == "rows_lost" else ()
    return isinstance(row.get("text"), str) and all(isinstance(row.get(key), int) for key in steps)


def _outlives(row: MetricsRow, stage: str, resumed_step: int) -> bool:
    """Return whether a row stays when `stage` goes on after `resumed_step`: not what comes again."""
    if row.get("event") in _LASTING or row["stage"] != stage:
        return True
    return row["step"] <= resumed_step


def _keep_rows(path: Path, keep: Callable[[MetricsRow], bool]) -> int:
    """Rewrite a file with those of its rows; how many of its lines were no rows, which a file beside it has then."""
    if not path.exists():
        return 0
    content = read_replaced(path) + b"\n"  # the last line may lack its end
    rows = _rows_of(parse_json_lines(content, path), path)
    lines = [line for line in content.split(b"\n") if line.strip()]
    lost = [] if len(rows) == len(lines) else [line for line in lines if not _is_row(json_object(line) or {})]
    if lost:
        with naming(_aside(path)), _aside(path).open("ab") as file:
            file.writelines(line + b"\n" for line in lost)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows if keep(row)))
    return len(lost)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _steps_done(directory: RunDirectory, stage: str) -> int:
    """Return how many steps of a stage the run has: of its newest checkpoint, or where there is none of its
    last row.
    """
    saved = steps_in(directory.checkpoints / stage)
    return saved[-1][0].step if saved else max((row["step"] for row in read_metrics(directory, stage)), default=0)


def _gaps(there: Sequence[tuple[int, int]], last: int) -> Iterator[tuple[int, int]]:
    """Return first and last of the steps from 1 to `last` that none of the spans `there` has."""
    before = 0
    for first, final in sorted([*there, (last + 1, last + 1)]):
        if first > last + 1:
            break
        if first > before + 1:
            yield before + 1, first - 1
        before = max(before, final)
