"""Which run is which cell of a sweep, what is submitted of them, and in how many job arrays; with a Slurm that is made
up.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import update_summary
from tango_hpc.commands.cli import app
from tango_hpc.commands.sweep import Cell, Sweep, load_sweep
from tango_hpc.commands.sweep_results import collect, show_results
from tango_hpc.commands.sweep_submit import array_size, shared, split, submit_sweep
from tango_hpc.report.sweep import group
from tango_hpc.runner.attempts import AttemptLog, submitted_jobs
from tango_hpc.runner.enter import prepare_run
from tango_hpc.stages.stage import TRAIN
from tests.slurm.jobs import counting_config

SETTINGS = {"grid": {"algorithm.alpha_start": [0.1, 0.2]}, "seeds": [0, 1], "overrides": ["launch.nodes=1"]}
METRIC = "generator.accuracy_after"


def sweep_of(folder: Path, **keys: Any) -> Sweep:
    """A sweep file with these keys in place of those of `SETTINGS`."""
    counting_config(folder, "base")
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({"config": "base.yaml", "dir": str(folder / "out"), **SETTINGS, **keys}))
    return load_sweep(file)


def finish(cell: Cell, accuracy: float, code: int = 0) -> None:
    """The run of the cell, come to its end."""
    directory = prepare_run([TRAIN], cell.config, resume=False)
    log = AttemptLog(directory)
    log.end(log.start(TRAIN), code, "" if code == 0 else "boom")
    update_summary(directory, "train", "done" if code == 0 else "failed", results={METRIC: accuracy})


def results(sweep: Sweep) -> dict[str, tuple[str, float | None]]:
    return {f"{cell.label}, {cell.seed}": (cell.state, cell.numbers.get(METRIC)) for cell in collect(sweep)}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands that take every job, in a folder that keeps what sbatch was given; FOLDER/config is Slurm's own."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "config").write_text("MaxArraySize            = 3\nSchedulerParameters     = bf_interval=2\n")
    programs = {
        "sbatch": f"""
            if [ "$1" = --test-only ]; then
                cat >{folder}/tested; [ ! -e {folder}/refuse ] || {{ echo "invalid account" >&2; exit 1; }}; exit 0
            fi
            count=$(ls {folder} | grep -c ^script); [ ! -e {folder}/full ] || [ "$count" = 0 ] || {{ echo "QOSMaxSubmit" >&2; exit 1; }}
            cp "$1" {folder}/script$count; echo "Submitted batch job $((count + 70))" """,
        "scontrol": f'[ "$2" != config ] || cat {folder}/config',
        "squeue": "true",
    }  # fmt: skip
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def submit(sweep: Sweep, *, resubmit: bool = False) -> str:
    shown = io.StringIO()
    submit_sweep(sweep, Console(file=shown), profile=None, cluster="slurm", resubmit=resubmit)
    return shown.getvalue()


def test_a_seed_and_a_value_are_added_and_finished_cells_are_taken_over(tmp_path: Path, slurm: Path) -> None:
    for number, cell in enumerate(sweep_of(tmp_path).cells):
        finish(cell, number / 10)
    grown = sweep_of(tmp_path, seeds=[7, 0, 1], grid={"algorithm.alpha_start": [0.3, 0.1, 0.2]})
    assert results(grown) == {
        "alpha_start=0.3, 7": ("new", None), "alpha_start=0.3, 0": ("new", None), "alpha_start=0.3, 1": ("new", None),
        "alpha_start=0.1, 7": ("new", None), "alpha_start=0.1, 0": ("done", 0.0), "alpha_start=0.1, 1": ("done", 0.1),
        "alpha_start=0.2, 7": ("new", None), "alpha_start=0.2, 0": ("done", 0.2), "alpha_start=0.2, 1": ("done", 0.3),
    }  # fmt: skip
    assert "4 cells are there and stay as they are: 4 done." in submit(grown)
    jobs = [job["job"] for cell in grown.cells for job in submitted_jobs(cell.directory)]
    assert jobs == ["70_0", "70_1", "71_0", "71_1", "71_2"][: len(jobs)] and len(jobs) == 5
    assert len({cell.directory.path for cell in grown.cells}) == 9


def test_a_cell_is_done_when_it_has_done_all_stages_of_the_file(tmp_path: Path, slurm: Path) -> None:
    """A stage is added to the file, or what ran here was killed between two stages."""
    for cell in sweep_of(tmp_path).cells:
        finish(cell, 0.5)
    longer = sweep_of(tmp_path, stages=["train", "eval"])
    assert {state for state, _ in results(longer).values()} == {"stopped"}
    with pytest.raises(UserError, match="already holds all 4 cells \\(4 stopped\\); use --resubmit"):
        submit(longer)


def test_how_many_of_the_cells_have_the_metric_is_said(tmp_path: Path) -> None:
    for number, cell in enumerate(sweep_of(tmp_path).cells):
        finish(cell, 0.5)
        if number % 2:
            update_summary(cell.directory, "train", "done", results={METRIC: None})
    found = group(collect(sweep_of(tmp_path)), METRIC, "max")
    assert [one.count for one in found] == ["2 done (1 with a value)"] * 2


def test_cells_that_are_config_files(tmp_path: Path) -> None:
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods/hot.yaml").write_text("generator: {temperature: 1.5}\ntrain: {dump_every: 7}\n")
    (tmp_path / "methods/cold.yaml").write_text("base: ../base.yaml\ngenerator: {temperature: 0.5}\n")
    grid = {"config": ["methods/hot.yaml", "methods/cold.yaml"], "train.eval_every": [2, 3]}
    cells = sweep_of(tmp_path, grid=grid, seeds=[0], overrides=["train.dump_every=9"]).cells
    assert [cell.label for cell in cells] == [
        f"config={name}, eval_every={every}" for name in ("hot", "cold") for every in (2, 3)
    ]
    assert [cell.config.generator.temperature for cell in cells] == [1.5, 1.5, 0.5, 0.5]
    assert [cell.config.train.dump_every for cell in cells] == [7, 7, 9, 9]  # a cell's file over what is for all cells
    (tmp_path / "methods/hot.yaml").rename(tmp_path / "hot.yaml")  # the same cells, wherever the file lies
    again = sweep_of(tmp_path, grid=grid | {"config": ["hot.yaml", "methods/cold.yaml"]}, seeds=[0]).cells
    assert [cell.directory.path for cell in again] == [cell.directory.path for cell in cells]
    with pytest.raises(UserError, match=r"no YAML file at .*warm.yaml"):
        sweep_of(tmp_path, grid={"config": ["warm.yaml"]})


def test_the_config_of_a_sweep_may_be_several_files(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("train: {eval_every: 7}\n")
    assert {cell.config.train.eval_every for cell in sweep_of(tmp_path, config=["base.yaml", "more.yaml"]).cells} == {7}


def test_two_processes_share_the_cells_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, ran = sweep_of(tmp_path), []

    def run(directory: RunDirectory, *_: Any) -> int:
        """The first cell; meanwhile another process finishes the second."""
        ran.append(directory.path)
        if len(ran) == 1:
            finish(sweep.cells[1], 0.5)
        return 0

    monkeypatch.setattr("tango_hpc.commands.sweep_submit.run_programs", run)
    submit_sweep(sweep, Console(file=io.StringIO()), profile=None, cluster="local", resubmit=False)
    assert ran == [sweep.cells[place].directory.path for place in (0, 2, 3)]


def test_a_cell_is_known_by_its_settings_whatever_they_look_like(tmp_path: Path) -> None:
    def folders(*cells: dict[str, Any]) -> list[str]:
        return [cell.directory.path.name for cell in sweep_of(tmp_path, grid={}, cells=list(cells), seeds=[0]).cells]

    one, other = "algorithm.kl_coef", "train.generator_steps"
    assert len(set(folders({one: 0.5, other: 4}, {one: 0.5, other: 5}, {one: 0.5}, {}))) == 4
    (made,) = folders({one: 0.0, other: 4})
    prepare_run([TRAIN], load_sweep(tmp_path / "sweep.yaml").cells[0].config, resume=False)
    assert folders({other: 4.0, one: 0}) == [made]
    model = "generator.model.path"  # alike in what a file name shows of them
    assert len(set(folders({model: str(tmp_path / "model")}, {model: f"{tmp_path}//model"}))) == 2
    with pytest.raises(UserError, match=r"alpha_start=0\.1, seed 0: stands 2 times"):
        sweep_of(tmp_path, grid={"algorithm.alpha_start": [0.1, 0.1]}, seeds=[0])
    with pytest.raises(UserError, match="give seeds under `seeds`"):
        sweep_of(tmp_path, grid={"seed": [1, 2]})


def test_edited_overrides_are_noticed_and_nothing_is_submitted(tmp_path: Path, slurm: Path) -> None:
    sweep = sweep_of(tmp_path)
    for cell in sweep.cells[:2]:
        finish(cell, 0.5, code=0 if cell.seed else 1)
    for edited in ("train.questions_per_step=8", "train.generator_steps=60"):
        key, _, value = edited.partition("=")
        changed = sweep_of(tmp_path, overrides=["launch.nodes=1", edited], seeds=[0, 1, 2])
        for resubmit in (False, True):
            with pytest.raises(UserError, match="or name another `dir`") as caught:
                submit(changed, resubmit=resubmit)
            assert f"{key}: " in str(caught.value) and f"-> {value} (2 cells)" in str(caught.value)
        shown = io.StringIO()
        show_results(changed, Console(file=shown))
        elsewhere = replace(changed, settings=changed.settings.model_copy(update={"dir": tmp_path / "elsewhere"}))
        with pytest.raises(UserError, match="no cell of .* was started here: there is no folder .*elsewhere"):
            show_results(elsewhere, Console(file=shown))
        assert not (tmp_path / "elsewhere").exists()
        assert "cell alpha_start=0.1, seed 1 ran with other settings than " in shown.getvalue()
        assert results(changed)["alpha_start=0.1, 1"] == ("done", 0.5)
    assert list(slurm.glob("script*")) == [] and not sweep.cells[2].directory.path.exists()
    # Where and how fast it runs may change: the failed cell goes on with it.
    faster = sweep_of(tmp_path, overrides=["launch.nodes=1", "launch.grace_seconds=30", "checkpoint.every_steps=1"])
    assert "1 cells are there and stay as they are: 1 done." in submit(faster, resubmit=True)
    assert "every_steps: 1\n" in sweep.cells[0].directory.config.read_text()


def test_the_base_config_is_looked_at_too(tmp_path: Path, slurm: Path) -> None:
    sweep = sweep_of(tmp_path)
    finish(sweep.cells[0], 0.5)
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text() + "algorithm: {kl_coef: 0.5, alpha_start: 0.9}\n")
    with pytest.raises(UserError, match=r"algorithm\.kl_coef: 0\.001 -> 0\.5 \(1 cells\)\nGive") as caught:
        submit(load_sweep(tmp_path / "sweep.yaml"))
    assert "alpha_start" not in str(caught.value)  # which every cell sets itself


def test_more_cells_than_an_array_may_have(tmp_path: Path, slurm: Path) -> None:
    sweep = sweep_of(tmp_path, seeds=[0, 1, 2, 3], throttle=5)
    told = submit(sweep)
    for line in ("Submitted 2 cells as job array 70, 2 at once.", "Submitted 3 cells as job array 72, 1 at once."):
        assert line in told, told
    arrays = [
        line
        for number in range(3)
        for line in (slurm / f"script{number}").read_text().splitlines()
        if "--array" in line
    ]
    assert arrays == ["#SBATCH --array=0-1%2", "#SBATCH --array=0-2%2", "#SBATCH --array=0-2%1"]
    jobs = [submitted_jobs(cell.directory)[-1]["job"] for cell in sweep.cells]
    assert jobs == ["70_0", "70_1", "71_0", "71_1", "71_2", "72_0", "72_1", "72_2"]
    snapshots = {path.name for path in (tmp_path / "out").iterdir()} - {"cells", "logs"}
    assert snapshots == {"snapshot_1"} and "files, " in told and " MB in " in told
    with pytest.raises(UserError, match="throttle 2 leaves none"):
        submit(sweep_of(tmp_path, dir=str(tmp_path / "other"), seeds=[0, 1, 2, 3], throttle=2))
    assert not (tmp_path / "other").exists()


def test_how_large_an_array_may_be(tmp_path: Path, slurm: Path) -> None:
    assert array_size("MaxArraySize            = 1001\nMaxDBDMsgs = 20024\n") == 1001
    assert array_size("MaxArraySize = 5001\nSchedulerParameters = bf_window=1,max_array_tasks=1000,x\n") == 1000
    assert array_size("slurm_load_ctl_conf error: Unable to contact slurm controller") is None
    parts = split(list(range(1100)), 1001)  # type: ignore[arg-type]
    assert [len(part) for part in parts] == [550, 550] and [*parts[0], *parts[1]] == list(range(1100))
    assert shared(7, 3) == [3, 2, 2]
    (slurm / "config").write_text("")
    assert "Slurm did not say how large a job array may be" in submit(sweep_of(tmp_path))
    assert "--array=0-3%4" in (slurm / "script0").read_text()
    (slurm / "config").write_text("MaxArraySize = 0\n")
    with pytest.raises(UserError, match="takes no job arrays"):
        submit(sweep_of(tmp_path, dir=str(tmp_path / "other")))


def test_nothing_is_made_of_a_sweep_that_cannot_be_submitted(tmp_path: Path, slurm: Path) -> None:
    (slurm / "refuse").touch()
    with pytest.raises(UserError, match="Slurm would refuse the job: invalid account"):
        submit(sweep_of(tmp_path))
    (slurm / "refuse").unlink()
    with pytest.raises(UserError, match=r"no data set at .*/none\.parquet; .* \(2 of 4 cells\)"):
        data = {"data.train": [str(tmp_path / "none.parquet"), str(tmp_path / "questions.parquet")]}
        submit(sweep_of(tmp_path, grid=data))
    assert not (tmp_path / "out").exists() and list(slurm.glob("script*")) == []


def test_a_later_array_that_slurm_refuses(tmp_path: Path, slurm: Path) -> None:
    (slurm / "full").touch()
    sweep = sweep_of(tmp_path)
    with pytest.raises(UserError, match=r"QOSMaxSubmit[\s\S]*2 of 4 cells were submitted before; the same command"):
        submit(sweep)
    (slurm / "full").unlink()
    (slurm / "squeue").write_text("#!/bin/sh\nprintf '70_0|PENDING|Priority\\n70_1|RUNNING|None\\n'\n")
    assert "2 cells are there and stay as they are: 1 waiting, 1 running." in submit(load_sweep(sweep.file))
    jobs = [[job["job"] for job in submitted_jobs(cell.directory)] for cell in sweep.cells]
    assert jobs == [["70_0"], ["70_1"], ["71_0"], ["71_1"]]


def test_a_dry_run_says_what_submission_says(tmp_path: Path, slurm: Path) -> None:
    sweep_of(tmp_path)
    file = str(tmp_path / "sweep.yaml")
    done = CliRunner().invoke(app, ["sweep", file, "--dry-run"])
    assert done.exit_code == 0 and "To be submitted: 4 cells as 2 job array(s)." in done.output
    (slurm / "refuse").touch()
    for words in (["sweep", file], ["submit", "train", str(tmp_path / "base.yaml")]):
        done = CliRunner().invoke(app, [*words, "--dry-run"])
        assert isinstance(done.exception, UserError) and "Slurm would refuse the job" in str(done.exception)
        assert "cells of 1 x 1 ranks" in done.output or "#SBATCH --nodes=2" in done.output
    (slurm / "refuse").unlink()
    base = str(tmp_path / "base.yaml")
    for wrong, told in (
        (["run.dir=a%j"], "holds a %"), (["run.dir=a:b"], "a colon"), (["launch.grace_seconds=86400", "launch.hang_timeout_seconds=90000", "launch.collective_timeout_seconds=99000"], "leaves nothing"),
        (["data.train=none.parquet"], "no data set at"), (["--resume"], "there is no run to resume"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, ["submit", "train", base, *wrong, "--dry-run"])
        assert isinstance(done.exception, UserError) and told in str(done.exception), (wrong, done.output)
    assert CliRunner().invoke(app, ["submit", "train", base, "--dry-run"]).exit_code == 0
    assert not (tmp_path / "base").exists() and not (tmp_path / "out").exists()
