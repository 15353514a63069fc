"""answers.html: one self-contained page to read the answers of an evaluation, with filters. Nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from tango_hpc.benchmarks.metrics import Estimate
from tango_hpc.benchmarks.records import GREEDY, Answer
from tango_hpc.files import write_atomically
from tango_hpc.protocol.solution import parse_solution

MAX_ANSWERS = 4000  # on the page, all of them greedy or among the first samples; Parquet holds the rest
MAX_SAMPLES = 4


def write_page(
    path: Path, answers: Mapping[str, Mapping[str, list[Answer]]], results: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the page for `answers` by model and set, with the table of `results` on top."""
    shown = [
        _item(label, name, one)
        for label, sets in answers.items()
        for name, of_set in sets.items()
        for one in sorted(of_set, key=lambda one: one.sample)
        if one.sample < MAX_SAMPLES
    ]
    total = sum(len(of_set) for sets in answers.values() for of_set in sets.values())
    kept = _spread(shown, MAX_ANSWERS)
    note = "" if len(kept) == total else f"{len(kept):,} of {total:,} answers are shown; the Parquet files hold all."
    style = resources.files("tango_hpc.run").joinpath("report.css").read_text(encoding="utf-8")
    own = resources.files("tango_hpc.benchmarks")
    data = json.dumps(kept, ensure_ascii=False).replace("<", "\\u003c")  # no answer can end the element
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Answers</title>'
        f"<style>{style}{own.joinpath('answers.css').read_text(encoding='utf-8')}</style></head><body><main>"
        f"<h1>Answers</h1>{_table(results)}"
        f'<h2>Read them</h2><p class="muted">{escape(note)}</p><div id="filters"></div><div id="list"></div>'
        f'</main><script type="application/json" id="data">{data}</script>'
        f"<script>{own.joinpath('answers.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )
    write_atomically(path, page, durable=False)


def _spread(items: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """At most `limit` items, evenly from all of them, in order."""
    if len(items) <= limit:
        return items
    return [items[index * len(items) // limit] for index in range(limit)]


def _item(label: str, name: str, one: Answer) -> dict[str, Any]:
    judgements = dict(enumerate(one.step_judgements))
    return {
        "model": label,
        "set": name,
        "id": one.question_id,
        "question": one.question,
        "gold": one.gold,
        "sample": "greedy" if one.sample == GREEDY else f"sample {one.sample + 1}",
        "answer": one.answer,
        "correct": one.correct,
        "outcome": one.outcome,
        "verdict": one.verdict,
        "score": one.score,
        "finished": one.finished,
        "tokens": one.num_tokens,
        "steps": [[step.text.strip(), judgements.get(k)] for k, step in enumerate(parse_solution(one.response).steps)],
        "response": one.response,
        "verification": one.verification,
    }


def _table(results: Mapping[str, Mapping[str, Any]]) -> str:
    columns = list(
        dict.fromkeys(key for sets in results.values() for entry in sets.values() for key in entry["estimates"])
    )
    head = "".join(f'<th class="number">{escape(column)}</th>' for column in columns)
    body = ""
    for label, sets in results.items():
        for entry in sets.values():
            cells = "".join(
                f'<td class="number">{escape(str(Estimate(**entry["estimates"][key])))}</td>'
                if key in entry["estimates"]
                else "<td></td>"
                for key in columns
            )
            title, count = escape(entry["title"]), entry["questions"]
            body += f'<tr><td>{escape(label)}</td><td>{title}</td><td class="number">{count}</td>{cells}</tr>'
    return (
        '<p class="muted">Percent, with 95% confidence intervals.</p><div class="box scroll"><table>'
        f'<tr><th>model</th><th>set</th><th class="number">questions</th>{head}</tr>{body}</table></div>'
    )
