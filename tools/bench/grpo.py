"""`python -m tools.bench grpo`, `tango`: whole training steps, as runs of `tango train`, against TRL and against each
other.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.metrics import PHASES, TURNS
from tools.bench.measure import Measurement, speeds
from tools.bench.workload import GROUP_SIZE, QUICKSTART, SMALL, make_model, read_config, run_config, run_training

_QUESTIONS, _MAX_TOKENS = 32, 128
_WARMUP = 2  # steps of a run that do not count
# Where tools/bench_trl.sh makes it, seen from the root of a checkout.
TRL_PYTHON = Path(".venv-trl/bin/python")
TRL_SCRIPT = Path("tools/bench_trl.py")


def measure_trl(folder: Path, repeats: int) -> list[Measurement]:
    """Completion tokens a second of GRPO steps, ours and TRL's, in runs that take turns."""
    missing = [str(path) for path in (TRL_PYTHON, TRL_SCRIPT) if not path.exists()]
    if missing:
        raise UserError(f"no {missing[0]} here: run this in a checkout, after bash tools/bench_trl.sh")
    rows = []
    for label, sizes, goal in (("grpo-small", SMALL, 4.0), ("grpo-quickstart", QUICKSTART, 3.0)):
        model = make_model(folder / label, sizes)
        ours: list[float] = []
        # TRL's best: every thread of the machine or one, all completions in one batch or in four.
        variants = [(threads, batch) for threads in sorted({1, _cores()}) for batch in (160, 40)]
        theirs: dict[tuple[int, int], list[float]] = {variant: [] for variant in variants}
        for turn in range(2):
            ours += _rates(our_run(folder / f"{label}-{turn}", model, verifier=False, steps=repeats + _WARMUP))
            for variant in variants:
                # The second turn is for the best of the first.
                if turn == 0 or variant == max(variants, key=lambda v: statistics.median(theirs[v])):
                    theirs[variant] += _trl_run(folder, model, variant, steps=repeats + 1)
        best = max(variants, key=lambda v: statistics.median(theirs[v]))
        rows.append(
            speeds(
                label,
                f"GRPO step, {_QUESTIONS * GROUP_SIZE} responses of up to {_MAX_TOKENS} tokens",
                f"TRL 1.16, {best[0]} threads, batches of {best[1]}",
                "tokens/s",
                *_paired(ours, theirs[best]),
                goal,
                variants={f"{threads} threads, batches of {batch}": values
                          for (threads, batch), values in theirs.items()},
            )
        )  # fmt: skip
    return rows


def measure_tango(folder: Path, repeats: int) -> list[Measurement]:
    """A generator step with and without a verifier, and what of it lies outside the phases."""
    model = make_model(folder / "quickstart", QUICKSTART)
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for turn in range(2):
        for verifier in (True, False) if turn else (False, True):
            run = folder / f"tango-{turn}-{verifier}"
            rows[verifier] += our_run(run, model, verifier=verifier, steps=repeats + _WARMUP)[_WARMUP:]
    with_verifier, without = rows[True], rows[False]
    share = [_outside(row) / row["seconds/total"] for row in with_verifier]
    # Random models: the verifier writes as many tokens as it likes, the generator the same as in the other run.
    written = [row["generator/response_tokens"] * _QUESTIONS * GROUP_SIZE for row in with_verifier]
    judged = [row["tokens/generated"] - mine for row, mine in zip(with_verifier, written, strict=True)]
    bounds = [1 + 1.1 * other / mine for other, mine in zip(judged, written, strict=True)]
    ratios = [
        (a["seconds/total"] / mine) / (b["seconds/total"] / b["tokens/generated"])
        for a, b, mine in zip(with_verifier, without, written, strict=True)
    ]
    bound = statistics.median(bounds)
    return [
        Measurement(
            "tango-step", "Tango generator step", "GRPO step, per generator token", "s",
            [row["seconds/total"] for row in with_verifier], [row["seconds/total"] for row in without], ratios, bound,
            False, {"verification_tokens": judged, "generation_tokens": written},
        ),
        Measurement(
            "outside", "rewards, advantages, all else", "the whole step", "s", [_outside(row) for row in with_verifier],
            [row["seconds/total"] for row in with_verifier], share, 0.02, False,
        ),
    ]  # fmt: skip


def our_run(folder: Path, model: Path, *, verifier: bool, steps: int, **settings: Any) -> list[dict[str, Any]]:
    """The rows of metrics of a run's steps."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    arguments: dict[str, Any] = {"max_tokens": _MAX_TOKENS, "ranks": min(2, _cores()), "questions": _QUESTIONS}
    return run_training(run_config(folder, model, verifier=verifier, steps=steps, **(arguments | settings)))


def _rates(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["tokens/generated"] / row["seconds/total"] for row in rows[_WARMUP:]]


def _outside(row: dict[str, Any]) -> float:
    return row["seconds/total"] - sum(row.get(f"seconds/{phase}") or 0.0 for phase in PHASES + TURNS)


def _trl_run(folder: Path, model: Path, variant: tuple[int, int], *, steps: int) -> list[float]:
    """Completion tokens a second of TRL's steps, the first left out."""

    config = next(folder.glob("*/config.yaml"), None)
    assert config is not None, "our own run comes first"
    from tango_hpc.questions.data.tables import QUESTION_COLUMNS, read_rows

    questions = read_rows(read_config(config).data.train, QUESTION_COLUMNS)
    settings = {
        "model": str(model), "prompts": [f"<question>{row['question']}<solve>" for row in questions], "steps": steps,
        "questions": _QUESTIONS, "group_size": GROUP_SIZE, "max_tokens": _MAX_TOKENS, "learning_rate": 1e-6,
        "threads": variant[0], "micro_batch": variant[1], "folder": str(folder / "trl"),
    }  # fmt: skip
    file = folder / "trl.json"
    file.write_text(json.dumps(settings))
    environment = os.environ | {"OMP_NUM_THREADS": str(variant[0]), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    ended = subprocess.run([TRL_PYTHON, TRL_SCRIPT, file], capture_output=True, text=True, env=environment)
    if ended.returncode:
        raise RuntimeError(f"TRL's side ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"')]  # Trainer prints others
    return [row["tokens"] / row["seconds"] for row in rows[1:]]


def _paired(ours: list[float], theirs: list[float]) -> tuple[list[float], list[float]]:
    """As many of each, in the order of measuring."""
    count = min(len(ours), len(theirs))
    return ours[:count], theirs[:count]


def _cores() -> int:
    return len(os.sched_getaffinity(0))
