"""`tango teacher`: a large model writes solutions in steps; those that keep the form and are right are fine-tuned on.

OUTPUT/
  parts/SHARD_of_SHARDS/000000.parquet   one file for each chunk of questions, written whole
  train.parquet test.parquet             question, solution_text, question_id; made when the last chunk of all is there
  report.json                            how many questions were asked, and what became of the attempts
  settings.json                          what decides the content of the parts; other settings need another folder

Several jobs share the questions by `shard` and `num_shards`; each goes on after the chunks that are there. The one
that finishes last puts everything together.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tango_hpc.base.config import Config
from tango_hpc.base.config.load import read_tree
from tango_hpc.base.config.paths import same_value
from tango_hpc.base.config.schema import TeacherConfig
from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.files import write_atomically, write_parquet
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.questions.data.tables import read_questions
from tango_hpc.questions.tasks import get_task
from tango_hpc.runner.process import RankProcess
from tango_hpc.stages.journal import Journal
from tango_hpc.stages.responses import FailureWatch, ReadSolution, settled
from tango_hpc.stages.role import Generator, load_models, request_seeds
from tango_hpc.stages.stage import TEACHER

STAGE = "teacher"
DEFAULT_TEST_ROWS = 500
# Settings of the generator's section that decide what it writes, beside its model and those of the teacher's section.
ASKED_WITH = ("max_prompt_tokens", "max_response_tokens", "stop", "prompt", "chat_template", "chat_template_arguments")
OUTCOMES = ("right", "wrong", "malformed", "cut_off", "too_long_to_ask")
_PART = pa.schema(
    [("question_id", pa.string()), ("question", pa.string()), ("solution_text", pa.string()), ("outcome", pa.string())]
)


def teach(config: Config, directory: RunDirectory, process: RankProcess, exchange: Exchange) -> None:
    """Write the solutions of this shard. Raises `StoppedEarly` between chunks when told to stop."""
    settings = config.teacher
    assert settings is not None, "checked before the ranks start"
    if exchange.is_first:
        _claim(config, settings, read_tree(directory.config)["generator"]["model"]["path"])
    chunks = question_chunks(settings)
    todo = [index for index in range(len(chunks)) if not _part(settings, index).is_file()]
    todo = exchange.all_gather(todo)[0]  # where NFS is late, processes see different folders
    writes, trackers = exchange.is_first, config.run.trackers
    journal = Journal(directory, STAGE, process, len(chunks), len(chunks) - len(todo), writes=writes, trackers=trackers)
    if todo:
        process.heart.enter("loading the teacher")
        teacher = Teacher(config, exchange, process, journal.note)
    for index in todo:
        journal.begin(f"chunk {index + 1} of {len(chunks)}", stopped=f"stopped after {index} of {len(chunks)} chunks")
        rows = teacher.solve(chunks[index], index)
        if exchange.is_first:
            write_parquet(_part(settings, index), pa.Table.from_pylist(rows, _PART))
        exchange.barrier()
        journal.part_done()
    if exchange.is_first and all_parts(settings) is not None:
        journal.results({f"teacher.{name}": float(count) for name, count in merge(settings).items()})
    journal.ended("done")


def question_chunks(settings: TeacherConfig) -> list[list[dict[str, Any]]]:
    """Return this shard's questions in chunks: every num_shards-th question, so that shards are alike."""
    rows = read_questions(settings.questions, settings.max_questions)[settings.shard :: settings.num_shards]
    size = settings.chunk_questions
    return [rows[start : start + size] for start in range(0, len(rows), size)]


class Teacher:
    """The model of `generator`, asked for solutions at the teacher's sampling settings."""

    def __init__(self, config: Config, exchange: Exchange, process: RankProcess, tell: Callable[[str], None]) -> None:
        """Write to the log, through `tell`, what grading failed at."""
        assert config.teacher is not None
        self.settings, self.seed, self._tell = config.teacher, config.seed, tell
        self.task = get_task(config.task)
        self._failures = FailureWatch(self.task)
        greedy = self.settings.temperature == 0
        config = TEACHER.taking_part(config)
        sampling = {"top_p": self.settings.top_p} | ({} if greedy else {"temperature": self.settings.temperature})
        role = config.generator.model_copy(update=sampling)
        config = config.model_copy(update={"generator": role})
        models = load_models(config.models, config, exchange, process)
        self.generator = Generator("generator", config, exchange, models["generator"])
        self._greedy = greedy

    def solve(self, questions: Sequence[dict[str, Any]], chunk: int) -> list[dict[str, Any]]:
        """Return one row for each question: the first attempt that keeps the form and is right, or what came of the
        last.
        """
        rows: list[dict[str, Any]] = [
            {"question_id": question["id"], "question": question["question"], "solution_text": None, "outcome": ""}
            for question in questions
        ]
        left = list(range(len(questions)))
        for attempt in range(self.settings.samples):
            seeds = request_seeds(self.seed, chunk, f"shard {self.settings.shard} attempt {attempt}", len(questions))
            asked = [questions[i] for i in left]
            prompts = self.generator.prompts(self.task, asked)
            texts = self.generator.write(prompts, [seeds[i] for i in left], greedy=self._greedy)
            solutions = settled(self.generator.read(self.task, asked, prompts, texts))
            self._failures.observe(solutions, f"in chunk {chunk + 1}", self._tell)
            for i, solution in zip(left, solutions, strict=True):
                rows[i]["outcome"] = _outcome(solution)
                if rows[i]["outcome"] == "right":
                    rows[i]["solution_text"] = solution.response.text.strip()
            left = [i for i in left if rows[i]["outcome"] not in ("right", "too_long_to_ask")]
            if not left:
                break
        return rows


def _outcome(read: ReadSolution) -> str:
    """Return which of `OUTCOMES` became of an attempt."""
    if not read.response.was_asked:
        return "too_long_to_ask"
    if read.response.generation.finish_reason != "stop":
        return "cut_off"
    if not read.solution.well_formed:
        return "malformed"
    return "right" if read.correct else "wrong"


def _claim(config: Config, settings: TeacherConfig, model: str) -> None:
    """Note in the folder what its parts are made with; refuse a folder whose parts were made otherwise.

    `model`: its path as the run knows it; what is loaded may be a copy on this node's disk.
    """
    made_with = settings.model_dump(mode="json", exclude={"output", "shard", "test_rows", "test_share"})
    asked = config.generator.model_dump(mode="json", include=set(ASKED_WITH))
    made_with |= {"model": model, "seed": config.seed, **asked}
    made_with["task"] = config.task.model_dump(mode="json")
    file = settings.output / "settings.json"
    if not file.is_file():
        settings.output.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(made_with, indent=1) + "\n")
        return
    before = json.loads(file.read_text())
    keys = sorted(made_with.keys() | before.keys())
    changed = [key for key in keys if not same_value(before.get(key), made_with.get(key))]
    if changed:
        difference = ", ".join(f"{key} {before.get(key)!r} -> {made_with.get(key)!r}" for key in changed)
        raise CheckFailed(
            f"{settings.output} holds solutions made with other settings ({difference}); set teacher.output to another"
            " folder"
        )


def all_parts(settings: TeacherConfig) -> list[Path] | None:
    """Return the files of all chunks of all shards, in order; None while one is missing."""
    parts: list[Path] = []
    for shard in range(settings.num_shards):
        of_shard = settings.model_copy(update={"shard": shard})
        count = len(question_chunks(of_shard))
        parts += [_part(of_shard, index) for index in range(count)]
    return parts if all(path.is_file() for path in parts) else None


def merge(settings: TeacherConfig) -> dict[str, int]:
    """Put the right solutions into train.parquet and test.parquet; how many there were of each outcome.

    Which ones are for testing depends on the question's id alone, so all shards and repetitions agree.
    """
    parts = all_parts(settings)
    assert parts is not None, "a chunk is missing"
    rows = [row for path in parts for row in pq.read_table(path).to_pylist()]
    counts = Counter(row["outcome"] for row in rows)
    kept = [
        {k: row[k] for k in ("question", "solution_text", "question_id")} for row in rows if row["outcome"] == "right"
    ]
    if not kept:
        raise CheckFailed(
            f"none of the {len(rows)} questions got a right solution in our format ({dict(counts)}): is this model "
            "able to keep the format? Look at the outcomes in parts/, raise generator.max_response_tokens or "
            "teacher.samples, or take a larger model, in a run and a teacher.output of their own"
        )
    kept.sort(key=lambda row: hashlib.blake2b(row["question_id"].encode(), digest_size=8).digest())
    num_test = _num_test(settings, len(kept))
    schema = pa.schema([("question", pa.string()), ("solution_text", pa.string()), ("question_id", pa.string())])
    write_parquet(settings.output / "test.parquet", pa.Table.from_pylist(kept[:num_test], schema))
    write_parquet(settings.output / "train.parquet", pa.Table.from_pylist(kept[num_test:], schema))
    report = {
        "questions": len(rows),
        **{name: counts.get(name, 0) for name in OUTCOMES},
        "train": len(kept) - num_test,
        "test": num_test,
    }
    write_atomically(settings.output / "report.json", json.dumps(report, indent=1) + "\n")
    return report


def _num_test(settings: TeacherConfig, num_kept: int) -> int:
    """Return how many solutions are for testing: a share, rounded up, or a number, but then at most half of them."""
    if settings.test_share is not None:
        return math.ceil(Fraction(str(settings.test_share)) * num_kept)  # 0.1 of 70 is 7, not 7.000000000000001
    return min(DEFAULT_TEST_ROWS if settings.test_rows is None else settings.test_rows, num_kept // 2)


def _part(settings: TeacherConfig, index: int) -> Path:
    return settings.parts / f"{index:06d}.parquet"
