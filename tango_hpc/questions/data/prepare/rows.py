"""The schema of prepared data, and the text by which two questions are recognised as one."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

# docs/data.md explains the columns. The training loop reads the first four.
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("question", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
    ]
)

LATEX_DRESS = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|quad|qquad|limits|mathrm|text|textbf|mathbf|big|Big)(?![A-Za-z])|\\[,;:!\s]"
)
_SYNONYMS = re.compile(r"\\[dt]frac(?![A-Za-z])|\\(?:leq|geq)slant|\\(?:leq|geq)(?![A-Za-z])")
_KEPT = re.compile(r"[\w+\-*/=<>^|!]|(?<=\d)\.(?=\d)")


@dataclass
class PreparedRow:
    """One prepared record; `metadata` holds what only some data sets have (level, unit, steps, ...).

    A reader leaves `source` empty: `prepare` puts the name of the data set there.
    """

    id: str
    question: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def as_columns(self) -> dict[str, str]:
        """Return the row as the schema stores it: `metadata` as a JSON object with sorted keys."""
        metadata = json.dumps(self.metadata, ensure_ascii=False, sort_keys=True)
        return {
            "id": self.id, "question": self.question, "answer": self.answer, "source": self.source, "metadata": metadata
        }  # fmt: skip


def read_metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a row; empty for rows without that column, which other programs may have written."""
    return json.loads(row["metadata"]) if row.get("metadata") else {}


def normalized(question: str) -> str:
    """Return a question without what does not change it: case, white space, punctuation, LaTeX spacing and delimiters.

    Digits, letters, decimal points, operators and relations stay, so that `x+1` and `x-1` are two questions.
    """
    text = unicodedata.normalize("NFKC", question)
    text = _SYNONYMS.sub(lambda match: "\\" + re.sub(r"^\\[dt]?|(?<=q)slant$|(?<=[lg]e)q$", "", match[0]), text)
    text = LATEX_DRESS.sub("", text).casefold()
    return "".join(_KEPT.findall(text)).replace("_", "")


def loosely_normalized(question: str) -> str:
    """Return letters and digits of a question alone. For overlap with evaluation sets: rather one question less to
    train on than a variant of an evaluation question among them."""
    return "".join(filter(str.isalnum, normalized(question))) or question


def fingerprint(text: str) -> int:
    """Return 64 bits of a text: half a million questions fit in ten megabytes."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
