"""Rollout dumps: one Parquet file per role and dumped step, one row per response.

A dump holds all that rewards and advantages are computed from, so that `tango score` can recompute them, and all that
a person needs to read along. Columns that have no meaning for a role are null.

Lengths of lists: T response tokens, K steps of the solution (`base.types`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tango_hpc.base.errors import UserError
from tango_hpc.base.files import write_parquet
from tango_hpc.base.run.step_names import steps_in

ROLLOUT_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("role", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("response_id", pa.string(), nullable=False),
        pa.field("question_id", pa.string(), nullable=False),
        pa.field("question", pa.string(), nullable=False),
        pa.field("gold_answer", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("metadata", pa.string()),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_text", pa.string(), nullable=False),
        pa.field("response_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("step_end_tokens", pa.list_(pa.int32())),
        pa.field("solution_text", pa.string()),
        pa.field("solution_correct", pa.bool_()),
        pa.field("score", pa.float32()),
        pa.field("reward_parts", pa.string()),
        pa.field("verification_text", pa.string()),
        pa.field("step_judgements", pa.list_(pa.int8())),
        pa.field("step_labels", pa.list_(pa.int8())),
        pa.field("final_judgement", pa.int8()),
        pa.field("outcome_reward", pa.float32()),
        pa.field("step_rewards", pa.list_(pa.float32())),
        pa.field("format_reward", pa.float32()),
        pa.field("reward", pa.float32()),
        pa.field("class_weight", pa.float32()),
        pa.field("alpha", pa.float32()),
        pa.field("algorithm", pa.string(), nullable=False),
        pa.field("state", pa.string()),
        pa.field("advantages", pa.list_(pa.float32()), nullable=False),
    ],
    metadata={"tango_hpc.rollout_dump": "1"},
)

# Beside these where a solution has several verifications.
OTHER_VERIFICATIONS = pa.field("other_verifications", pa.list_(pa.string()))


@dataclass
class RolloutRow:
    """One response with what became of it. `role` is "generator" or "verifier".

    In a generator row `verification_text` is the verification of this solution, `other_verifications` are its others,
    and `step_judgements` and `final_judgement` what they say, by vote (null and empty without a verifier). In a
    verifier row `response_text` is the verification and
    `solution_text` and `solution_correct` are what it judged.
    """

    step: int
    role: str
    group_id: str
    response_id: str
    question: str
    gold_answer: str | None
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]  # T
    response_text: str
    response_logprobs: Sequence[float]  # T, of the engine at the sampling temperature
    algorithm: str
    advantages: Sequence[float]  # T
    step_end_tokens: Sequence[int] = field(default_factory=list)  # K, indices into response_ids: I(k)
    solution_text: str | None = None
    solution_correct: bool | None = None
    score: float | None = None  # of the answer, generator rows: 1 or 0 where the task does not score
    reward_parts: str | None = None  # of the score, JSON
    verification_text: str | None = None
    other_verifications: Sequence[str] = field(default_factory=list)
    step_judgements: Sequence[int] = field(default_factory=list)  # K, of +1, -1, 0 for missing
    step_labels: Sequence[int] = field(default_factory=list)  # K, of +1 and -1 by trying; verifier rows
    final_judgement: int | None = None  # 1, 0, -1 for missing
    outcome_reward: float | None = None
    step_rewards: Sequence[float] = field(default_factory=list)  # K
    format_reward: float | None = None
    reward: float | None = None  # Eq. 8, verifier rows
    class_weight: float | None = None  # s_+ or s_-, verifier rows
    alpha: float | None = None  # generator rows
    state: str | None = None  # of the file of advantages before the step, JSON
    question_id: str = ""
    source: str = ""  # of the question, which may say how its answers are graded
    metadata: str | None = None  # of the question, JSON

    def __post_init__(self) -> None:
        assert self.role in ("generator", "verifier"), self.role
        num_tokens = len(self.response_ids)
        assert len(self.response_logprobs) == len(self.advantages) == num_tokens, (
            f"response {self.response_id}: {num_tokens} tokens, {len(self.response_logprobs)} log-probabilities, "
            f"{len(self.advantages)} advantages"
        )


assert {column.name for column in fields(RolloutRow)} == {*ROLLOUT_SCHEMA.names, OTHER_VERIFICATIONS.name}


def write_rollouts(path: Path, rows: Sequence[RolloutRow]) -> None:
    """Write one dump; readers see the whole file or none."""
    schema = ROLLOUT_SCHEMA
    if any(row.other_verifications for row in rows):
        schema = schema.append(OTHER_VERIFICATIONS)
    columns = [pa.array([getattr(row, column.name) for row in rows], type=column.type) for column in schema]
    write_parquet(path, pa.Table.from_arrays(columns, schema=schema))


def read_rollouts(path: Path) -> list[RolloutRow]:
    """Read one dump. Raises UserError, naming the columns, where the file is not one."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} as Parquet: {error}") from error
    missing = [name for name in ROLLOUT_SCHEMA.names if name not in table.column_names]
    if missing:
        raise UserError(
            f"{path} is not a rollout dump: it has no column {', '.join(missing)}. "
            "Dumps lie in the rollouts folder of a run."
        )
    schema = ROLLOUT_SCHEMA
    if OTHER_VERIFICATIONS.name in table.column_names:
        schema = schema.append(OTHER_VERIFICATIONS)
    try:
        rows = table.select(schema.names).cast(schema).to_pylist()
        return [RolloutRow(**row) for row in rows]
    except (pa.ArrowException, ValueError, TypeError, AssertionError) as error:
        raise UserError(f"{path} is not a rollout dump, or damaged: {error}") from error


def dumped_steps(folder: Path) -> dict[str, list[int]]:
    """Return the steps that were dumped, ascending, by role; `folder` is the rollouts folder of a run."""
    steps: dict[str, list[int]] = {}
    for name, _ in steps_in(folder):
        steps.setdefault(name.role, []).append(name.step)
    return steps
