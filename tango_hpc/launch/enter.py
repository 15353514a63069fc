"""What comes before the first attempt, in the foreground and at submission alike."""

from __future__ import annotations

from collections.abc import Sequence

from tango_hpc.config import Config, config_to_yaml
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.summary import read_summary, update_summary
from tango_hpc.stages.preflight import check_inputs, synthesise_data


def prepare_run(stages: Sequence[str], config: Config, *, resume: bool) -> RunDirectory:
    """Checks the inputs of all `stages`, makes or enters the run directory, and writes data sets that are made, not found.

    Raises UserError for what is missing or in the way.
    """
    for number, stage in enumerate(stages):
        check_inputs(config, stage, after=stages[:number])
    directory, changes = RunDirectory.create(config.run.dir, config_to_yaml(config), resume=resume, stage=stages[0])
    for stage in stages:
        if changes and is_done(directory, stage):
            update_summary(directory, stage, "stopped")  # done under the old settings, not under the new ones
    synthesise_data(config)
    return directory


def is_done(directory: RunDirectory, stage: str) -> bool:
    """Whether `stage` has run to its end there."""
    return read_summary(directory).get("stages", {}).get(stage, {}).get("status") == "done"
