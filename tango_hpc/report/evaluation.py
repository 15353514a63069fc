"""What an evaluation's answers come to: results.json, the same as a table, and answers.html to read them with filters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tango_hpc.benchmarks.metrics import Estimate
from tango_hpc.benchmarks.records import GREEDY, Answer, read_answers
from tango_hpc.benchmarks.results import model_results, summary_values
from tango_hpc.data.tables import evenly_spaced
from tango_hpc.files import write_atomically
from tango_hpc.protocol.solution import parse_solution
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
    rows = [_row(label, entry, columns) for label, sets in results.items() for entry in sets.values()]
    named = [
        (label, name, answer)
        for label, sets in answers.items()
        for name, of_set in sets.items()
        for answer in sorted(of_set, key=lambda answer: answer.sample)
    ]
    readable = [_item(label, name, answer) for label, name, answer in named if answer.sample < MAX_SAMPLES]
    shown = evenly_spaced(readable, MAX_ANSWERS)
    page = render("answers.html", title="Answers", columns=columns, rows=rows, shown=shown, total=len(named))
    write_atomically(folder / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_atomically(folder / "results.md", render("results.md", columns=columns, rows=rows))
    write_atomically(folder / "answers.html", page, durable=False)
    return summary_values(results)


def _row(label: str, entry: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """One model and set in the tables, every number as `value [low, high]` in percent."""
    estimates, about = entry["estimates"], ["", "", ""]
    if facts := entry.get("facts"):
        about = [f"{100 * facts['well_formed']:.0f}%", f"{facts['mean_tokens']:.0f}", f"{100 * facts['cut_off']:.0f}%"]
    return {
        "model": label,
        "title": entry["title"],
        "questions": entry["questions"],
        "cells": [str(Estimate(**estimates[key])) if key in estimates else "" for key in columns],
        "about": about,
    }


def _item(label: str, name: str, answer: Answer) -> dict[str, Any]:
    """What answers.js shows of one answer."""
    judgements = dict(enumerate(answer.step_judgements))
    steps = parse_solution(answer.response).steps
    return {
        "model": label,
        "set": name,
        "id": answer.question_id,
        "question": answer.question,
        "gold": answer.gold,
        "sample": "greedy" if answer.sample == GREEDY else f"sample {answer.sample + 1}",
        "answer": answer.answer,
        "correct": answer.correct,
        "outcome": answer.outcome,
        "verdict": answer.verdict,
        "score": answer.score,
        "finished": answer.finished,
        "tokens": answer.num_tokens,
        "steps": [[step.text.strip(), judgements.get(k)] for k, step in enumerate(steps)],
        "response": answer.response,
        "verification": answer.verification,
    }
