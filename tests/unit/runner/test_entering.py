"""What a command does to the run directory that it enters, or does not: refused, damaged, resumed."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import zlib
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.config.schema import SftRoleConfig, TeacherConfig
from tango_hpc.base.config.tasks import TaskConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.files import write_atomically
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import read_provenance, read_summary, update_summary
from tango_hpc.commands.status import run_state
from tango_hpc.questions.data.tables import write_rows
from tango_hpc.report.run_page import write_report
from tango_hpc.runner import provenance
from tango_hpc.runner.attempts import AttemptLog
from tango_hpc.runner.continuity import compare_with_last, fingerprint
from tango_hpc.runner.enter import check_run, prepare_run, prepared_run
from tango_hpc.runner.job import run_attempt
from tango_hpc.runner.local import run_foreground
from tango_hpc.runner.lock import RunLock
from tango_hpc.runner.masks import mask_secrets, masked_command
from tango_hpc.runner.provenance import record_attempt
from tango_hpc.stages.stage import STAGES, TRAIN, Train
from tests.slurm.jobs import counting_config


def test_a_refused_command_changes_nothing(tmp_path: Path) -> None:
    """Not even where settings may be changed: another process has the run."""
    config = counting_config(tmp_path, "run", {"nodes": 1})
    with pytest.raises(UserError, match="there is no run to resume in"):
        prepare_run([TRAIN], config, resume=True)
    assert not config.run.dir.exists()
    directory = prepare_run([TRAIN], config, resume=False)
    update_summary(directory, "train", "done")
    longer = config.model_copy(update={"train": config.train.model_copy(update={"generator_steps": 50})})

    with RunLock(directory):
        before = contents(directory.path)
        with pytest.raises(UserError, match=f"process {os.getpid()} on .* is running in"):
            prepare_run([TRAIN], longer, resume=True)
        assert contents(directory.path) == before
    with prepared_run([TRAIN], longer, resume=True) as entry:
        assert "generator_steps: 50" in directory.config.read_text()
        assert read_summary(directory)["status"] == "stopped"
        with pytest.raises(UserError, match="is running in"):  # the lock is held from then on
            prepare_run([TRAIN], config, resume=True)
        entry.lock.touch()
    assert not directory.lock_file.exists()


def contents(folder: Path) -> dict[str, str]:
    """Checksums of all files below a folder, by their path."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def enter_and_run(config: Config) -> int:
    """What `tango train --resume` does."""
    with prepared_run([TRAIN], config, resume=True) as entry:
        return run_attempt(entry.directory, TRAIN, config, Console(file=io.StringIO()), entry)


@pytest.mark.parametrize("status", ["done", "stopped"])
def test_a_resume_with_other_data_changes_no_byte_of_the_run(
    tmp_path: Path, status: Literal["done", "stopped"]
) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    log = AttemptLog(directory)
    attempt = log.start(TRAIN)
    assert attempt_with(directory, config) == ([], [])
    (directory.checkpoints / "train" / "step_000003").mkdir(parents=True)
    log.end(attempt, 0 if status == "done" else 85, "")
    update_summary(directory, "train", status, steps=200)
    write_rows(config.data.train, [{"id": "1", "question": "b?", "answer": "b", "source": "test"}])
    longer = config.model_copy(update={"train": config.train.model_copy(update={"generator_steps": 50})})
    before = contents(directory.path)
    refused = r"(?s)would compute something else:\n  data.train .* -> .*run\.dir=PATH"
    with pytest.raises(UserError, match=refused) as caught:
        enter_and_run(longer)
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match=refused):
        check_run([TRAIN], longer, resume=True)
    assert contents(directory.path) == before
    with pytest.raises(UserError, match=refused):  # a job, which was submitted before the data were changed
        update_summary(directory, "train", "stopped")
        run_attempt(directory, TRAIN, config, Console(file=io.StringIO()))
    assert read_summary(directory)["status"] == "stopped" and run_state(directory, {}).state == "failed"


def test_a_finished_run_with_other_data_is_done_already(tmp_path: Path) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    assert attempt_with(directory, config) == ([], [])
    (directory.checkpoints / "train" / "step_000003").mkdir(parents=True)
    update_summary(directory, "train", "done", steps=200)
    write_rows(config.data.train, [{"id": "1", "question": "b?", "answer": "b", "source": "test"}])
    assert enter_and_run(config) == 0


def test_a_task_that_makes_no_rows_leaves_the_run_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})

    def make(_: object, config: Config) -> None:
        raise UserError("questions gave no rows")

    monkeypatch.setattr(Train, "make_inputs", make)
    with pytest.raises(UserError, match="gave no rows"):
        prepare_run([TRAIN], config, resume=False)
    assert not config.run.dir.exists()
    monkeypatch.undo()
    directory = prepare_run([TRAIN], config, resume=False)
    update_summary(directory, "train", "done", steps=200)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"generator_steps": 50})})
    before = contents(directory.path)
    monkeypatch.setattr(Train, "make_inputs", make)
    with pytest.raises(UserError, match="gave no rows"):
        prepare_run([TRAIN], longer, resume=True)
    assert contents(directory.path) == before


def test_more_nodes_than_there_are_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    before = contents(directory.path)
    with pytest.raises(UserError, match="launch.nodes is 2, but this is one machine"):
        run_foreground(TRAIN, directory.config, ["launch.nodes=2"], resume=True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("tango_hpc.runner.local._become_job", lambda *_: pytest.fail("the run was entered"))
    monkeypatch.setattr("tango_hpc.runner.environment.shutil.which", lambda *_, **__: "srun")
    with pytest.raises(UserError, match="launch.nodes is 2, but job 7 has 1"):
        run_foreground(TRAIN, directory.config, ["launch.nodes=2"], resume=True)
    assert contents(directory.path) == before


def test_a_setting_that_came_later_has_its_default_in_a_run_from_before(tmp_path: Path) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    update_summary(directory, "train", "stopped", steps=2)
    text = directory.config.read_text()
    earlier = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("  updates_per_batch:"))
    assert earlier != text
    directory.config.write_text(earlier)
    prepare_run([TRAIN], config, resume=True)
    assert directory.config.read_text() == text
    directory.config.write_text(earlier)
    other = config.model_copy(update={"train": config.train.model_copy(update={"updates_per_batch": 2})})
    with pytest.raises(UserError, match="train.updates_per_batch: 1 -> 2"):
        prepare_run([TRAIN], other, resume=True)
    assert directory.config.read_text() == earlier


@pytest.mark.parametrize("name", ["summary.json", "provenance.json", "progress.json", "control/jobs.json"])
@pytest.mark.parametrize("content", ["", '{"status": "ru'])
def test_a_damaged_file_that_only_shows_things_ends_nothing(tmp_path: Path, name: str, content: str) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    log = AttemptLog(directory)
    log.end(log.start(TRAIN), 85, "Ctrl-C")
    record_attempt(directory, stage="train")
    update_summary(directory, "train", "stopped", steps=2)
    (directory.path / name).write_text(content)
    with pytest.raises(UserError, match="already holds a run"):
        prepare_run([TRAIN], config, resume=False)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"generator_steps": 50})})
    prepare_run([TRAIN], longer, resume=True)
    record_attempt(directory, stage="train")
    update_summary(directory, "train", "running", begins=True)
    assert read_provenance(directory)["attempts"][-1]["config_changes"] == ["train.generator_steps: 200 -> 50"]
    assert read_summary(directory)["status"] == "running"
    assert run_state(directory, {}).state == "stopped"
    write_report(directory)
    if name in ("summary.json", "provenance.json"):
        assert (directory.path / f"{name}.damaged").read_text() == content


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_is_there_is_named_before_its_inputs(tmp_path: Path, resume: bool) -> None:
    """What is wrong with its data under other settings is no reason to remove them."""
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    AttemptLog(directory).start(TRAIN)
    (tmp_path / "model" / "config.json").unlink()
    other = config.model_copy(update={"seed": 7})
    what = "cannot be resumed with these settings changed" if resume else "already holds a run"
    for check in (prepare_run, check_run):
        with pytest.raises(UserError, match=what) as caught:
            check([TRAIN], other, resume=resume)
        assert "seed" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"run: {dir: [", b"[1, 2]"])
def test_damaged_settings_end_it_and_are_named(tmp_path: Path, content: bytes) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    directory.config.write_bytes(content)
    with pytest.raises(UserError, match=r"config.yaml is damaged: it holds no settings"):
        prepare_run([TRAIN], config, resume=True)
    assert directory.config.read_bytes() == content


def attempt_with(directory: RunDirectory, config: Config, stage: str = "train") -> tuple[list[str], list[str]]:
    """What is refused, and what is noted, of an attempt with `config`."""
    entry, refused = compare_with_last(directory, STAGES[stage], config)
    record_attempt(directory, stage=stage, computes_with=entry)
    return refused, read_provenance(directory)["attempts"][-1]["changes"]


def test_what_changed_between_attempts_is_refused_or_told(tmp_path: Path) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    questions, weights = config.data.train, config.generator.model.path / "model.safetensors"
    assert attempt_with(directory, config) == ([], [])
    original = questions.read_bytes()
    questions.write_bytes(original + b" ")  # nothing is trained yet: mending the data is no harm
    size, crc = len(original), zlib.crc32(original)
    told = f"data.train ({questions}): {size:,} bytes, checksum {crc:08x} -> {size + 1:,} bytes, checksum "
    refused, changes = attempt_with(directory, config)
    assert refused == [] and any(change.startswith(told) for change in changes)
    (directory.checkpoints / "train" / "step_000003").mkdir(parents=True)
    assert attempt_with(directory, config) == ([], [])
    os.utime(questions, (1, 1))
    assert attempt_with(directory, config) == ([], []), "another time, the same contents"
    questions.write_bytes(original)
    weights.write_bytes(b"other weights")
    for _ in range(2):  # a refused attempt is not what the next one is compared with
        refused, _ = attempt_with(directory, config)
        assert [line.partition(" ")[0] for line in refused] == ["data.train", "data.eval", "generator.model.path"]
    with pytest.raises(UserError, match=r"(?s)would compute something else:\n  data.train .* -> .*run\.dir=PATH"):
        run_attempt(directory, TRAIN, config, Console(file=io.StringIO()))
    questions.write_bytes(original + b" ")
    weights.write_bytes(b"")
    edited = config.model_copy(
        update={
            "algorithm": config.algorithm.model_copy(update={"kl_coef": 0.5}),
            "launch": config.launch.model_copy(update={"tasks_per_node": 2}),
        }
    )
    refused, changes = attempt_with(directory, edited)
    assert refused == [f"algorithm.kl_coef: {config.algorithm.kl_coef} -> 0.5"]
    assert changes == [*refused, "launch.tasks_per_node: 1 -> 2"]
    more_ranks = config.model_copy(update={"launch": edited.launch})
    assert attempt_with(directory, more_ranks) == ([], ["launch.tasks_per_node: 1 -> 2"])
    write_report(directory)
    page = directory.report.read_text()
    assert "from step_000003 on: launch.tasks_per_node: 1 -&gt; 2" in page and "refused: algorithm.kl_coef" in page


@pytest.mark.parametrize("key", ["prompt", "chat_template"])
@pytest.mark.parametrize("stage", ["train", "sft"])
def test_another_prompt_in_the_same_file_is_refused_like_the_setting(tmp_path: Path, key: str, stage: str) -> None:
    file = tmp_path / "text"
    whole = "{% for m in messages %}{{ m.content }}{% endfor %}" if key == "chat_template" else ""
    file.write_text(f"{whole}Solve {{question}}")
    config = counting_config(tmp_path, "run", {"nodes": 1})
    value = file if key == "prompt" else str(file)
    solutions = tmp_path / "solutions.parquet"
    write_rows(solutions, [{"question": "a?", "solution_text": "a"}])
    tuned = SftRoleConfig(data=solutions, output=tmp_path / "tuned", init=config.generator.model)
    config = config.model_copy(
        update={
            "generator": config.generator.model_copy(update={key: value}),
            "sft": config.sft.model_copy(update={"generator": tuned}),
        }
    )
    directory = prepare_run([TRAIN], config, resume=False)
    assert attempt_with(directory, config, stage) == ([], [])
    file.write_text(f"{whole}Solve this: {{question}}")  # before the first checkpoint anything may change
    refused, changes = attempt_with(directory, config, stage)
    assert refused == [] and [line.partition(" ")[0] for line in changes] == [f"generator.{key}"]
    (directory.checkpoints / stage / "step_000003").mkdir(parents=True)
    file.write_text(f"{whole}Write nonsense about {{question}}")
    refused, changes = attempt_with(directory, config, stage)
    assert refused == changes and [line.partition(" ")[0] for line in refused] == [f"generator.{key}"]
    with pytest.raises(UserError, match=rf"would compute something else:\n  generator\.{key} .* -> "):
        check_run([STAGES[stage]], config, resume=True)


def test_what_an_evaluation_and_a_teacher_read_stands_in_provenance(tmp_path: Path) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    prompt, questions, model = tmp_path / "prompt.txt", config.data.eval, config.generator.model.path
    prompt.write_text("Solve {question}")
    config = config.model_copy(
        update={
            "generator": config.generator.model_copy(update={"prompt": prompt}),
            "eval": config.eval.model_copy(update={"benchmarks": ("task", "gsm8k"), "data": tmp_path}),
            "teacher": TeacherConfig(questions=questions, output=tmp_path / "out"),
        }
    )
    shutil.copy(questions, tmp_path / "gsm8k.parquet")
    directory = prepare_run([TRAIN], config, resume=False)
    asked = {"generator.model.path": str(model), "generator.prompt": str(prompt)}
    read = {"eval": {"data.eval": str(questions), "eval.data.gsm8k": f"{tmp_path}/gsm8k.parquet", **asked}}
    read["teacher"] = {"teacher.questions": str(questions), **asked}
    for stage, expected in read.items():
        assert attempt_with(directory, config, stage) == ([], [])
        inputs = read_provenance(directory)["attempts"][-1]["inputs"]
        assert {key: found["path"] for key, found in inputs.items()} == expected
    (directory.checkpoints / "train" / "step_000003").mkdir(parents=True)
    manifest = directory.checkpoints / "train" / "step_000003" / "manifest.json"
    manifest.write_text("{}")
    assert attempt_with(directory, config, "eval") == ([], [])
    assert (
        str(manifest) in read_provenance(directory)["attempts"][-1]["inputs"]["eval.checkpoints.step_000003"]["files"]
    )
    prompt.write_text("Write nonsense about {question}")
    for stage in read:  # neither goes on from a checkpoint: it is told
        refused, changes = attempt_with(directory, config, stage)
        assert refused == [] and [line.partition(" ")[0] for line in changes] == ["generator.prompt"]


def test_another_version_of_ones_own_task_is_another_run(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(
        "class Task:\n    def grade(self, question, answer):\n        return answer == question['answer']\n"
    )
    config = counting_config(tmp_path, "run", {"nodes": 1})
    config = config.model_copy(update={"task": TaskConfig(name=str(task))})
    directory = prepare_run([TRAIN], config, resume=False)
    (directory.checkpoints / "train" / "step_000003").mkdir(parents=True)
    assert attempt_with(directory, config) == ([], [])
    task.write_text(task.read_text().replace("==", "!="))
    assert [line.partition(" ")[0] for line in attempt_with(directory, config)[0]] == ["task.name"]


def test_a_run_that_was_moved_is_the_same_run(tmp_path: Path) -> None:
    directory = prepare_run([TRAIN], counting_config(tmp_path, "run", {"nodes": 1}), resume=False)
    (directory.checkpoints / "train" / "step_000003").mkdir(parents=True)
    inside = directory.path / "questions.parquet"
    shutil.copy(load_config(directory.config).data.train, inside)
    text = directory.config.read_text()
    write_atomically(directory.config, text.replace(f"train: {tmp_path}/questions.parquet", f"train: {inside}"))
    assert attempt_with(directory, load_config(directory.config)) == ([], [])
    there = RunDirectory(directory.path.rename(tmp_path / "elsewhere"))
    config = load_config(there.config)
    assert config.run.dir == there.path and config.data.train == there.path / "questions.parquet"
    assert attempt_with(there, config) == ([], [])
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval": tmp_path / "other.parquet"})})
    assert [line.partition(":")[0] for line in attempt_with(there, config)[0]] == ["data.eval"]


def test_a_change_anywhere_in_a_small_file_is_seen_and_a_large_one_is_sampled(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    content = bytearray(range(256)) * (3 * 4096)  # 3 MiB
    small.write_bytes(content)
    whole = fingerprint(small, {})["files"][str(small)]
    assert whole["crc32"] == zlib.crc32(content)
    content[2 * 2**20 + 7] ^= 1
    small.write_bytes(content)
    assert fingerprint(small, {})["files"][str(small)]["crc32"] != whole["crc32"]
    with large.open("wb") as file:
        file.truncate(200 * 2**20)
    before = fingerprint(large, {})["files"][str(large)]
    for place in (0, 200 * 2**20 - 1):  # the ends are always among what is read
        with large.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        after = fingerprint(large, {})["files"][str(large)]
        assert after["crc32"] != before["crc32"]
        before = after
    known = {str(large): before | {"crc32": 7}}
    assert fingerprint(large, known)["files"][str(large)]["crc32"] == 7, "known by path, size and time"


def test_secrets_are_in_no_file_that_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert masked_command(["tango", "--token", "abc", "--hf-api-key=xyz", "a.token=1", "--tokens", "5"]) == [
        "tango", "--token", "***", "--hf-api-key=***", "a.token=***", "--tokens", "5",
    ]  # fmt: skip
    code = """
+os.environ["HF_TOKEN"] = "hf_abcdefghijklmnop"
+password: 'let me in'
+key = "sk-0123456789abcdef0123"
+API_KEY=s3cr3tvalue9
+eos_token = tokenizer.eos_token
+token_ids = row.token_ids
"""
    masked = mask_secrets(code)
    for secret in ("abcdefghijklmnop", "let me in", "0123456789abcdef", "s3cr3tvalue9"):
        assert secret not in masked
    assert "+eos_token = tokenizer.eos_token\n+token_ids = row.token_ids" in masked
    state = {"commit": "a" * 40, "changed": [" M a.py"], "diff": masked}
    monkeypatch.setattr(provenance, "code_state", lambda _: dict(state))
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    assert directory.path.stat().st_mode & 0o777 == 0o750
    record_attempt(directory, stage="train", record_diff=False)
    assert not list(directory.path.glob("*.diff"))
    record_attempt(directory, stage="train")
    (file,) = directory.path.glob("uncommitted_*.diff")
    assert file.read_text() == masked and file.stat().st_mode & 0o777 == 0o600
    write_report(directory)
    for shown in (directory.provenance, directory.report):
        assert "eos_token" not in shown.read_text() and file.name in shown.read_text()


@pytest.mark.parametrize("call", ["open", "stat", "iterdir", "is_file"])
def test_an_attempt_at_what_cannot_be_read_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    model, plain = config.generator.model.path, getattr(Path, call)

    def forbidden(path: Path, *args: Any, **options: Any) -> Any:  # the system does not forbid root
        if path == model or (path.parent == model and path.suffix == ".safetensors"):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *args, **options)

    monkeypatch.setattr(Path, call, forbidden)
    with pytest.raises(UserError, match=f"{model}.* cannot be read: Permission denied; make it readable for you"):
        run_attempt(directory, TRAIN, config, Console(file=io.StringIO()))
    [attempt] = AttemptLog(directory).read()
    assert attempt.code == 2 and "cannot be read: Permission denied" in attempt.reason


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("of a task")]
)
def test_what_ends_an_entry_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*_: object) -> None:
        raise error

    config = counting_config(tmp_path, "run", {"nodes": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Train, "make_inputs", fails)
        with pytest.raises(type(error)):
            prepare_run([TRAIN], config, resume=False)
    assert not Path(config.run.dir).exists()
    directory = prepare_run([TRAIN], config, resume=False)
    before = {file: file.read_bytes() for file in directory.path.rglob("*") if file.is_file()}
    longer = counting_config(tmp_path, "run", {"nodes": 1, "tasks_per_node": 2})
    monkeypatch.setattr(Train, "make_inputs", fails)
    with pytest.raises(type(error)):
        prepare_run([TRAIN], longer, resume=True)
    assert {file: file.read_bytes() for file in directory.path.rglob("*") if file.is_file()} == before
