"""The cells of the fault matrix: what goes wrong x where the run is, and what is expected of it.

Where: a call in one process of the real run, in the second optimizer step after it went on (a save: in the first one).
Expected: an exit code, and one message, as a pattern that the terminal's text must hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tango_hpc.base.run.worker import Worker


@dataclass(frozen=True)
class Point:
    """The `nth` call of `function` (module:name) by `worker`, in `phase` of its heartbeat; just before or after it."""

    worker: Worker
    phase: str
    function: str
    nth: int
    after: bool
    # The file of the newest checkpoint that is damaged while the run is here.
    damaged: str


POINTS = {
    "loading": Point(
        Worker(1, "verifier"), "loading the verifier", "tango_hpc.stages.model_worker:make_engine", 1, False,
        "generator/__0_weights.distcp",
    ),
    "rollout": Point(
        Worker(1, "generator"), "rollout", "tango_hpc.models.engine.engine:RolloutEngine.generate", 2, True,
        "verifier/__1_training.distcp",
    ),
    "verification": Point(
        Worker(0, "verifier"), "verify", "tango_hpc.models.engine.engine:RolloutEngine.generate", 2, True,
        "generator/.metadata",
    ),
    "update": Point(
        Worker(1, "generator"), "train", "tango_hpc.models.trainer.optimizer:PolicyOptimizer.step", 2, False,
        "generator/common.pt",
    ),
    "weight sync": Point(
        Worker(0, "generator"), "reshard", "tango_hpc.models.weight_sync.transfer:Transfer.run", 2, True, "state.json",
    ),
    "save": Point(
        Worker(1, "verifier"), "saving", "tango_hpc.base.run.manifest:SummedFile.write", 3, False, "generator/__1_weights.distcp",
    ),
}  # fmt: skip

FAULTS = (
    "SIGKILL",
    "SIGTERM",
    "SIGUSR2",
    "exception",
    "hang",
    "disk full",
    "flipped byte",
    "truncated file",
    "missing manifest",
    "read-only directory",
    "out of memory",
)
DAMAGES = ("flipped byte", "truncated file", "missing manifest")
NEEDS_ROOT = ("disk full", "read-only directory")  # to mount a disk

POWER_CUT = -9
FAULT_TEXT = "a fault of the matrix"


@dataclass(frozen=True)
class Expected:
    """How the attempt ends, what is told, and which attempt tells it: the one that was hit (0) or the next one (1)."""

    code: int
    message: str
    told_by: int = 0


@dataclass(frozen=True)
class Cell:
    """One fault in one place."""

    fault: str
    phase: str

    @property
    def name(self) -> str:
        """What its folder is called."""
        return f"{self.fault} in {self.phase}".replace(" ", "_")

    @property
    def point(self) -> Point:
        """Where it strikes."""
        point = POINTS[self.phase]
        if self.phase == "update" and self.fault in ("SIGTERM", "SIGUSR2"):  # in the last step they would come too late
            return replace(point, nth=1)
        if self.phase == "save" and self.fault in (
            "exception",
            "out of memory",
        ):  # before torch makes it one of its own
            return replace(point, function="tango_hpc.models.trainer.policy:Policy.begin_save", nth=1)
        return point

    @property
    def expected(self) -> Expected:
        """What must come of it."""
        point = self.point
        who = rf"^{re.escape(str(point.worker))} on \S+ failed in phase '{point.phase}': "
        if self.fault == "SIGKILL":
            return Expected(1, who + r"killed by SIGKILL \(out of memory\? see dmesg")
        if self.fault == "SIGTERM" and self.phase == "loading":
            return Expected(85, r"^SIGTERM \(preempted or cancelled\): ended while loading, there was nothing to save$")
        if self.fault == "SIGTERM":
            return Expected(85, r"^SIGTERM \(preempted or cancelled\): saving at the next safe point \(at most 20 s\)$")
        if self.fault == "SIGUSR2":
            return Expected(85, r"^a signal to the ranks: saved at the next safe point$")
        if self.fault == "exception":
            return Expected(1, who + f"ValueError: {FAULT_TEXT}$")
        if self.fault == "hang":
            return Expected(1, who + r"hangs: no progress for \d+ s \(limit launch\.\w+\)$")
        if self.fault == "disk full":
            full = r"No space left on device: '?/\S+.*; make room and continue with --resume\.?$"
            return Expected(78, full)
        if self.fault == "read-only directory":
            return Expected(
                78, r"Read-only file system: '?/\S+.*; see why it cannot be written .* and continue with --resume\.?$"
            )
        if self.fault == "out of memory":
            return Expected(
                1, who + r".*(can't allocate memory|MemoryError).*This process got no more memory: ask for more"
            )
        return self._expected_of_damage()

    def _expected_of_damage(self) -> Expected:
        file = re.escape(self.point.damaged)
        problem = {
            "flipped byte": rf"{file} is not what was written \(checksum",
            "truncated file": rf"{file} has [\d,]+ of [\d,]+ bytes",
            "missing manifest": r"manifest\.json is missing",
        }[self.fault]
        if (self.fault, self.phase) == ("truncated file", "save"):  # noticed before the checkpoint gets its name
            return Expected(78, rf"could not save .*the file system has not kept what was written: {problem}.*--resume")
        told = rf"^Note: checkpoint step_\d+ is damaged \({problem}.*\): set aside as \S+; the run goes on from step_"
        if self.phase == "loading":
            return Expected(0, told)
        return Expected(POWER_CUT, told, told_by=1)


CELLS = [Cell(fault, phase) for fault in FAULTS for phase in POINTS]
