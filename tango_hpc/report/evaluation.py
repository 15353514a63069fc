"""The results of an evaluation as files: results.json, the same as a table, and answers.html to read them with
filters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tango_hpc.base.files import write_atomically
from tango_hpc.questions.benchmarks.records import GREEDY, Answer, read_answers
from tango_hpc.questions.benchmarks.results import model_results, summary_values
from tango_hpc.questions.data.tables import evenly_spaced
from tango_hpc.report.html import render

MAX_ANSWERS = 4000  # on the page, all of them greedy or among the first samples; Parquet holds the rest
MAX_SAMPLES = 4


def write_results(folder: Path, labels: Sequence[str], names: Sequence[str]) -> dict[str, float | None]:
    """Write results.json, results.md and answers.html; returns the summary's values, those of the last model.

    Sets whose answers are not there yet are left out.
    """
    answers = {
        label: {name: read_answers(path) for name in names if (path := folder / label / f"{name}.parquet").is_file()}
        for label in labels
    }
    results = {label: model_results(sets) for label, sets in answers.items() if sets}
    columns = list(
        dict.fromkeys(key for sets in results.values() for entry in sets.values() for key in entry["estimates"])
    )
    readable = [
        (label, name, answer)
        for label, sets in answers.items()
        for name, of_set in sets.items()
        for answer in sorted(of_set, key=lambda answer: answer.sample)
        if answer.sample < MAX_SAMPLES
    ]
    page = render(
        "answers.html",
        title="Answers",
        columns=columns,
        results=results,
        shown=[_item(*entry) for entry in evenly_spaced(readable, MAX_ANSWERS)],
        total=sum(len(of_set) for sets in answers.values() for of_set in sets.values()),
    )
    write_atomically(folder / "results.json", json.dumps(results, indent=1, allow_nan=False, default=asdict) + "\n")
    write_atomically(folder / "results.md", render("results.md", columns=columns, results=results))
    write_atomically(folder / "answers.html", page, durable=False)
    return summary_values(results)


def _item(label: str, name: str, answer: Answer) -> dict[str, Any]:
    """Return the part of an answer that answers.js shows."""
    judgements = dict(enumerate(answer.step_judgements))
    return asdict(answer) | {
        "model": label,
        "set": name,
        "id": answer.question_id,
        "sample": "greedy" if answer.sample == GREEDY else f"sample {answer.sample + 1}",
        "steps": [[step.strip(), judgements.get(k)] for k, step in enumerate(answer.steps)],
    }
