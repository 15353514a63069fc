"""Submitting the cells of a sweep: which of them, after which checks, in how many job arrays."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tango_hpc.base.errors import StoppedEarly, UserError
from tango_hpc.base.formats import say
from tango_hpc.commands.dry_run import check_with_slurm
from tango_hpc.commands.profiles import Profile, load_profile
from tango_hpc.commands.resources import Memory, asked_of_a_node, node_memory
from tango_hpc.commands.submit import (
    Cluster,
    batch_python,
    check_cluster,
    check_log_folder,
    check_time,
    executor,
    job_environment,
    refused_by_slurm,
    sbatch_options,
    slurm_parameters,
    take_job_files,
)
from tango_hpc.commands.sweep import Cell, Sweep, cell_states, check_unchanged, known_states
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import remember_job
from tango_hpc.runner.enter import RunBackup, check_run, prepare_run
from tango_hpc.runner.job import run_programs
from tango_hpc.runner.snapshot import describe_snapshot
from tango_hpc.stages.job import run_job

MAX_PROBLEMS = 10  # that are shown, of as many as there are cells
SLURMS_ARRAY_SIZE = 1001  # MaxArraySize, unless the cluster has its own
# Cells that come to their end by themselves are left alone.
TO_RESUBMIT = ("new", "failed", "lost", "stopped")


def submit_sweep(sweep: Sweep, console: Console, *, profile: str | None, cluster: Cluster, resubmit: bool) -> int:
    """Submit cells as job arrays; on "local" and "debug" run them here in turn. Returns the exit code.

    Without `resubmit`: those that were never submitted. With it: also those that failed, stopped or were lost. Raises
    UserError for what cannot be submitted, before anything is made.
    """
    cells = cells_to_submit(sweep, console, resubmit=resubmit)
    if not cells:
        say(console, "Every cell is done, waiting or running.")
        return 0
    chosen = load_profile(profile)
    arrays = check_sweep(sweep, cells, console, chosen, cluster)
    if cluster != "slurm":
        return _run_here(sweep, cells, console)
    home = sweep.settings.dir
    memory = node_memory([cell.config for cell in cells], sweep.stages, chosen)
    # Cells of an earlier submission may still wait or run: they keep the code that they were submitted with.
    snapshot = home / f"snapshot_{len(list(home.glob('snapshot_*'))) + 1}"
    take_job_files(chosen, snapshot, [cell.config for cell in cells])
    say(console, describe_snapshot(snapshot))
    for number, (array, at_once) in enumerate(zip(arrays, shared(sweep.settings.throttle, len(arrays)), strict=True)):
        backups = [RunBackup(cell.directory, was_there=cell.directory.path.exists()) for cell in array]
        try:
            for cell in array:
                _enter(sweep, cell)
            jobs = _submit_array(sweep, array, at_once, chosen, memory, snapshot)
        except UserError as error:
            for backup in backups:
                backup.restore()
            sent = sum(map(len, arrays[:number]))
            again = f"\n{sent} of {len(cells)} cells were submitted before; the same command submits the others"
            raise UserError(f"{error}{again if sent else ''}") from None
        for cell, job in zip(array, jobs, strict=True):
            remember_job(cell.directory, ",".join(sweep.settings.stages), cluster, job, profile)
        job_id = jobs[0].job_id.partition("_")[0]
        say(console, f"Submitted {len(array)} cells as job array {job_id}, {at_once} at once.")
    say(console, f"Watch them with: tango status {shlex.quote(str(home))}")
    return 0


def cells_to_submit(sweep: Sweep, console: Console, *, resubmit: bool) -> list[Cell]:
    """Return the cells that are to be submitted; says what becomes of the others. Raises UserError where only
    --resubmit helps.
    """
    known = known_states(sweep)
    unknown = [state for state in known.values() if state.state == "unknown"]
    if unknown:
        raise UserError(
            f"whether {len(unknown)} of {len(sweep.cells)} cells wait or run is not known, so nothing was submitted; "
            f"try again later. {unknown[0].run}: {unknown[0].detail}"
        )
    wanted = TO_RESUBMIT if resubmit else ("new",)
    cells = [cell for cell in sweep.cells if cell.index not in known or known[cell.index].state in wanted]
    chosen = {cell.index for cell in cells}
    kept = Counter(state.state for index, state in known.items() if index not in chosen)
    check_unchanged(sweep, sweep.cells)
    told = ", ".join(f"{count} {state}" for state, count in kept.items())
    if not cells and any(state in TO_RESUBMIT for state in kept):
        raise UserError(
            f"{sweep.settings.dir} already holds all {len(sweep.cells)} cells ({told}); use --resubmit for those that "
            "are not done, --results for those that are, or another `dir`"
        )
    if cells and kept:
        say(console, f"{sum(kept.values())} cells are there and stay as they are: {told}.")
    return cells


def check_sweep(
    sweep: Sweep, cells: Sequence[Cell], console: Console, profile: Profile, cluster: Cluster
) -> list[list[Cell]]:
    """Return the job arrays of `cells`. Raises UserError for all that would be refused; makes nothing."""
    home, stages = sweep.settings.dir, sweep.stages
    check_cluster(cluster)
    check_log_folder(home)
    memory = node_memory([cell.config for cell in cells], stages, profile)
    if len({json.dumps(sbatch_options(cell.config, profile, memory)) for cell in cells}) > 1:
        raise UserError(
            "the cells of a sweep are one job array and must ask Slurm for the same: launch.nodes, "
            "launch.tasks_per_node, launch.threads_per_rank, launch.device and launch.grace_seconds cannot vary"
        )
    check_time(cells[0].config, profile)
    if profile.requeue == "chain" and cluster == "slurm":
        raise UserError(
            "requeue: chain is for single runs: the cells of a sweep are one job array, and jobs that follow its tasks "
            "would run beside others of them, more than `throttle` at once. Use a profile with requeue: true, or with "
            "false and `tango sweep … --resubmit` for cells that their time has stopped"
        )
    problems: Counter[str] = Counter()
    for cell in cells:
        try:
            check_run(stages, cell.config, resume=cell.exists)
        except UserError as error:
            problems[str(error)] += 1
    if problems:
        lines = [f"{text} ({count} of {len(cells)} cells)" for text, count in problems.most_common(MAX_PROBLEMS)]
        more = len(problems) - len(lines)
        raise UserError("\n".join([*lines, *([f"and {more} more"] if more else [])]))
    if cluster != "slurm":
        return [list(cells)]
    arrays = split(cells, _largest_array(console))
    at_once = shared(sweep.settings.throttle, len(arrays))
    parameters = slurm_parameters(cells[0].config, profile, memory, f"sweep-{home.name}", home / "snapshot_1")
    check_with_slurm(batch_python(profile), home / "logs", parameters, len(arrays[0]), at_once[0])
    return arrays


def _largest_array(console: Console) -> int:
    size = array_size(slurm.run_command("scontrol", "show", "config", check=False))
    if size == 0:
        raise UserError("this cluster takes no job arrays (MaxArraySize=0); submit the cells one by one: tango submit")
    if size is None:
        say(
            console,
            "Slurm did not say how large a job array may be (scontrol show config): "
            f"taking its default, {SLURMS_ARRAY_SIZE} tasks.",
        )
    return SLURMS_ARRAY_SIZE if size is None else size


def array_size(settings: str) -> int | None:
    """Return how many tasks an array may have, by what `scontrol show config` says; None where it does not say."""
    found = re.findall(r"^MaxArraySize\s*=\s*(\d+)|\bmax_array_tasks=(\d+)", settings, re.MULTILINE)
    return min((int(size or tasks) for size, tasks in found), default=None)


def split(cells: Sequence[Cell], size: int) -> list[list[Cell]]:
    """Return the cells in their order, in as few arrays of at most `size` as there can be, all about as long."""
    count = -(-len(cells) // size)
    ends = [len(cells) * number // count for number in range(count + 1)]
    return [list(cells[start:end]) for start, end in itertools.pairwise(ends)]


def shared(throttle: int, num_arrays: int) -> list[int]:
    """Return how many cells of each array run at once, `throttle` in all. Raises UserError where an array would have
    none.
    """
    if throttle < num_arrays:
        raise UserError(
            f"the cells need {num_arrays} job arrays on this cluster, and throttle {throttle} leaves none at once for "
            f"some of them; set throttle to {num_arrays} or more, or split the sweep"
        )
    return [throttle // num_arrays + (number < throttle % num_arrays) for number in range(num_arrays)]


def _enter(sweep: Sweep, cell: Cell) -> None:
    prepare_run(sweep.stages, cell.config, resume=cell.exists)


def _submit_array(
    sweep: Sweep, cells: Sequence[Cell], at_once: int, profile: Profile, memory: Memory, snapshot: Path
) -> list[Any]:
    """Submit the cells as an array and return submitit's job of each; files in DIR/logs name each task's cell."""
    home, config = sweep.settings.dir, cells[0].config
    made = executor(config, profile, memory, home / "logs", f"sweep-{home.name}", "slurm", snapshot)
    made.update_parameters(array_parallelism=at_once)
    stages = [",".join(sweep.settings.stages)] * len(cells)
    with job_environment(profile, snapshot, "slurm"), refused_by_slurm(asked_of_a_node(config, profile, memory)):
        return made.map_array(
            run_job, [str(cell.directory.path) for cell in cells], stages, [str(snapshot)] * len(cells)
        )


def _run_here(sweep: Sweep, cells: Sequence[Cell], console: Console) -> int:
    """Run the cells one after the other, also after one that failed; a stop ends it. The exit code is the worst.

    A cell that another process has taken meanwhile is left to that process.
    """
    failed = []
    for cell in cells:
        if cell.exists and cell_states([cell])[0].state not in TO_RESUBMIT:
            continue
        _enter(sweep, cell)
        say(console, f"cell {cell.name}")
        code = run_programs(cell.directory, sweep.stages, console)
        if code == StoppedEarly.exit_code:
            return code
        if code != 0:
            failed.append(cell.name)
    if failed:
        say(console, f"{len(failed)} of {len(cells)} cells failed: {'; '.join(failed)}")
    return 1 if failed else 0
