"""One reader for each public data set: from its own fields to (id, question, answer, metadata).

A reader returns None for a record that is no part of the set (code problems in Eurus), and an empty answer where
the record lacks one; what becomes of it is for `prepare` to decide. Field names are those of the published files,
with the variants that mirrors use. Hub sets are those that the paper's authors evaluate on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tango_hpc.base.errors import UserError
from tango_hpc.questions.data.prepare.rows import PreparedRow, normalized
from tango_hpc.questions.protocol.tags import last_box

Record = Mapping[str, Any]
Reader = Callable[[Record, Path, int], PreparedRow | None]

_EURUS_REQUEST = re.compile(r"\s*Present the answer in LaTe[xX] format: ?\\boxed\{\s*Your answer\s*\}\.?\s*$")


@dataclass(frozen=True)
class DataSet:
    """A data set as `tango data` knows it. `use` says whether it is trained on, by split or as a whole."""

    reader: Reader
    hub: str
    licence: str
    use: Literal["train", "eval"] = "eval"
    default_split: str = "test"
    whole: bool = False  # its files have no splits
    part: str = ""  # what the paths of its files on the hub have in them, where others lie beside them
    authors_rows: int | None = None  # how many of the default split the paper's authors evaluate on
    train_splits: tuple[str, ...] = ("train",)
    questions_repeat: bool = False  # several records ask the same question, and each counts

    def patterns(self, split: str) -> list[str]:
        """Return which files of a folder hold `split`, in order of preference."""
        below = f"*{self.part}*" if self.part else "*"
        if self.whole and split == self.default_split:
            return list(dict.fromkeys([below, "*"]))
        return [f"{below}{split}[-._/]*", f"{split}[-._/]*", f"{below}/{split}/*"]

    def is_training(self, split: str) -> bool:
        """Return whether rows of this split are trained on, so that evaluation questions must be taken out."""
        return self.use == "train" and split in self.train_splits


def _first(record: Record, *names: str) -> Any:
    for name in names:
        if record.get(name) is not None:
            return record[name]
    raise UserError(f"a record has none of the fields {', '.join(names)}; it has {', '.join(record)}")


def _text(value: Any) -> str:
    """Return an answer as text: None and NaN are missing, 27.0 is 27, several answers are separated by commas."""
    if isinstance(value, list | tuple):
        return ", ".join(filter(None, map(_text, value)))
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


_SENTENCE_END = re.compile(r"[.!?](?:\$|\s)*\s|\n\s*\n")


def _boxed(solution: str) -> tuple[str, dict[str, Any]]:
    """Return the answer in a reference solution's last sentence that has a box; and the metadata `boxes`, their number,
    where several boxes of that sentence hold different answers: all of them are the answer, as in "-2, 1".
    """
    end = solution.rfind("\\boxed{")
    if end < 0:
        return "", {}
    start = max((match.end() for match in _SENTENCE_END.finditer(solution, 0, end)), default=0)
    boxes = [last_box(part) for part in re.split(r"(?=\\boxed\{)", solution[start:])]
    answers = list({normalized(box): box for box in boxes if box is not None}.values())
    return ", ".join(answers), {"boxes": len(answers)} if len(answers) > 1 else {}


def gsm8k(record: Record, file: Path, index: int) -> PreparedRow:
    """Answer after `####`."""
    solution = _first(record, "answer")
    reasoning, _, answer = solution.rpartition("####")
    return PreparedRow(str(index), _first(record, "question"), answer.strip(), {"solution": reasoning.strip()})


def math(record: Record, file: Path, index: int) -> PreparedRow:
    """Read a row of MATH: the answer is the last box of the solution."""
    solution = _first(record, "solution")
    subject = record.get("type", record.get("subject"))
    metadata = {"solution": solution, "level": record.get("level"), "subject": subject}
    name = record.get("unique_id") or f"{file.parent.name}-{file.stem}-{index}"
    given = _text(record.get("answer"))
    answer, boxes = (given, {}) if given else _boxed(solution)
    if not answer and (bare := re.findall(r"\\boxed\s+(\d+)", solution)):  # \boxed 9, without braces
        answer = bare[-1]
    return PreparedRow(name, _first(record, "problem"), answer, metadata | boxes)


def math500(record: Record, file: Path, index: int) -> PreparedRow:
    """Read a row of MATH-500, which gives the answer beside the solution."""
    metadata = {name: record.get(name) for name in ("solution", "level", "subject")}
    name = str(record.get("unique_id", index))
    return PreparedRow(name, _first(record, "problem"), _text(record.get("answer")), metadata)


def competition(record: Record, file: Path, index: int) -> PreparedRow:
    """Read a row of AIME or AMC: whole numbers, in some mirrors stored as floats."""
    question = _first(record, "problem", "Problem", "question")
    answer = _text(record.get("answer", record.get("Answer")))
    name = record.get("id", record.get("ID", index))
    return PreparedRow(str(name), question, answer, {"url": record.get("url")} if record.get("url") else {})


def olympiadbench(record: Record, file: Path, index: int) -> PreparedRow | None:
    """Return English open-ended mathematics without images; unit, tolerance and number of answers go to the metadata.

    Mirrors with the fields question and answer alone have none of these.
    """
    if record.get("modality", "Text-only") != "Text-only" or record.get("language", "English") != "English":
        return None
    if record.get("question_type", "Open-ended") != "Open-ended":
        return None
    if record.get("subject", "Math") not in ("Math", "Maths"):
        return None
    answers = _first(record, "final_answer", "answer")
    answer = answers if isinstance(answers, str) else ", ".join(map(_text, answers))
    context = record.get("context")
    metadata = {
        "answer_type": record.get("answer_type"), "several": record.get("is_multiple_answer"),
        "unit": record.get("unit"), "error": record.get("error"), "subfield": record.get("subfield"),
    }  # fmt: skip
    question = f"{context.strip()}\n\n{record['question']}" if context else _first(record, "question")
    return PreparedRow(str(record.get("id", index)), question, _text(answer), metadata)


def boardgameqa(record: Record, file: Path, index: int) -> PreparedRow:
    """`example` words the whole game and its question; the labels proved, disproved and unknown are answered by True,
    False and Uncertain, as the paper's authors have it.
    """
    depth = re.search(r"depth(\d)|Main-(\w+)", str(file.parent))
    metadata = {"depth": depth[1] or depth[2] if depth else None, "config": record.get("config")}
    name = f"{file.parent.name}-{file.stem}-{index}"
    label = _text(record.get("label"))
    answer = {"proved": "True", "disproved": "False", "unknown": "Uncertain"}.get(label, label)
    return PreparedRow(name, _first(record, "example"), answer, metadata)


def cruxeval(record: Record, file: Path, index: int) -> PreparedRow:
    """Return output prediction: what does f return for this input?"""
    question = f"{_first(record, 'code')}\n\nf({_first(record, 'input')})"
    return PreparedRow(str(record.get("id", index)), question, str(_first(record, "output")))


def strategyqa(record: Record, file: Path, index: int) -> PreparedRow:
    """Read a row of StrategyQA, with the facts that the answer follows from, as the authors ask it: True or False."""
    facts = _first(record, "facts")
    facts = [facts] if isinstance(facts, str) else facts
    listed = "\n".join(f"{number}. {fact}" for number, fact in enumerate(facts, start=1))
    question = f"Facts:\n{listed}\n\nQuestion: {_first(record, 'question')}"
    return PreparedRow(str(record.get("qid", index)), question, _truth(record, "True", "False"))


def strategyqa_plain(record: Record, file: Path, index: int) -> PreparedRow:
    """Return the question alone: yes or no. Harder, and no figure to set beside the paper's."""
    answer = _truth(record, "yes", "no")
    return PreparedRow(
        str(record.get("qid", index)), _first(record, "question"), answer, {"facts": record.get("facts")}
    )


def _truth(record: Record, true: str, false: str) -> str:
    """Return the answer of a record in these words; empty where it has none."""
    answer = record.get("answer")
    if isinstance(answer, str):
        answer = {"true": True, "yes": True, "false": False, "no": False}.get(answer.casefold())
    return "" if answer is None else (true if answer else false)


def tablebench(record: Record, file: Path, index: int) -> PreparedRow | None:
    """Return number reasoning and fact checking, whose answers can be compared; the table is written out in
    Markdown.
    """
    if record.get("qtype") not in ("NumericalReasoning", "FactChecking"):
        return None
    table = _first(record, "table")
    if isinstance(table, str):  # as older files have it
        try:
            table = json.loads(table)
        except ValueError as error:
            raise UserError(f"{file}: the field table is not JSON: {error}") from None
    if not isinstance(table, Mapping):
        raise UserError(f"{file}: the field table must be an object with columns and data, not {type(table).__name__}")
    lines = [table["columns"], ["---"] * len(table["columns"]), *table["data"]]
    markdown = "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
    metadata = {"qtype": record["qtype"], "qsubtype": record.get("qsubtype")}
    question = f"{markdown}\n\n{_first(record, 'question')}"
    return PreparedRow(str(record.get("id", index)), question, _text(record.get("answer")), metadata)


def processbench(record: Record, file: Path, index: int) -> PreparedRow:
    """Read a row of ProcessBench: `answer` is the first wrong step's index, -1 for none; metadata has the steps."""
    metadata = {
        "split": file.stem.split("-")[0], "steps": list(_first(record, "steps")),
        "final_answer_correct": record.get("final_answer_correct"), "generator": record.get("generator"),
    }  # fmt: skip
    return PreparedRow(str(record.get("id", index)), _first(record, "problem"), str(_first(record, "label")), metadata)


def eurus_rl(record: Record, file: Path, index: int) -> PreparedRow | None:
    """Read a row of Eurus-2-RL, mathematics only: the last user turn without its final request for a box."""
    if _first(record, "ability") != "math":
        return None
    turns = [turn["content"] for turn in _first(record, "prompt") if turn["role"] == "user"]
    truth = _first(record, "reward_model").get("ground_truth")
    truth = truth[0] if isinstance(truth, list) and truth else truth
    extra = record.get("extra_info") or {}
    metadata = {"data_source": record.get("data_source")}
    question = _EURUS_REQUEST.sub("", turns[-1]) if turns else ""
    return PreparedRow(f"{extra.get('split', file.stem)}-{extra.get('index', index)}", question, _text(truth), metadata)


def eurus_sft(record: Record, file: Path, index: int) -> PreparedRow | None:
    """Read a row of Eurus-2-SFT, mathematics only: the answer is the last box of the reply, which is dropped."""
    if str(_first(record, "task")).casefold() != "math":
        return None
    turns = {turn["from"]: turn["value"] for turn in _first(record, "conversations")}
    question = _EURUS_REQUEST.sub("", turns.get("human", turns.get("user", "")))
    answer, boxes = _boxed(turns.get("gpt", turns.get("assistant", "")))
    metadata = {"data_source": record.get("dataset"), **boxes}
    return PreparedRow(str(record.get("id") or index), question, answer, metadata)


DATA_SETS: dict[str, DataSet] = {
    "eurus_sft": DataSet(eurus_sft, "PRIME-RL/Eurus-2-SFT-Data", "MIT", "train", "train", whole=True),
    "eurus_rl": DataSet(eurus_rl, "PRIME-RL/Eurus-2-RL-Data", "MIT", "train", "train"),
    "gsm8k": DataSet(gsm8k, "openai/gsm8k", "MIT", "train", part="main"),
    "math": DataSet(math, "EleutherAI/hendrycks_math", "MIT", "train", "train", train_splits=("train", "val")),
    "math500": DataSet(math500, "HuggingFaceH4/MATH-500", "MIT", authors_rows=500),
    "aime24": DataSet(competition, "Maxwell-Jia/AIME_2024", "MAA (text)", whole=True, authors_rows=30),
    "aime25": DataSet(competition, "yentinglin/aime_2025", "MAA (text)", whole=True, part="data/", authors_rows=30),
    "amc23": DataSet(competition, "math-ai/amc23", "MAA (text)", whole=True, authors_rows=40),
    "olympiadbench": DataSet(
        olympiadbench, "knoveleng/OlympiadBench", "MIT", whole=True, part="OE_TO_maths_en_COMP", authors_rows=675
    ),
    "boardgameqa": DataSet(boardgameqa, "tasksource/Boardgame-QA", "CC-BY-4.0", authors_rows=15_000),
    "cruxeval": DataSet(cruxeval, "cruxeval-org/cruxeval", "MIT", whole=True, authors_rows=800),
    "strategyqa": DataSet(
        strategyqa,
        "voidful/StrategyQA",
        "MIT",
        whole=True,
        part="strategyqa_train.json",
        authors_rows=2290,
        questions_repeat=True,
    ),
    "strategyqa_plain": DataSet(strategyqa_plain, "ChilleD/StrategyQA", "MIT"),
    "tablebench": DataSet(
        tablebench,
        "Multilingual-Multimodal-NLP/TableBench",
        "Apache-2.0",
        whole=True,
        part="TableBench.jsonl",
        authors_rows=493,
    ),
    "processbench": DataSet(processbench, "Qwen/ProcessBench", "Apache-2.0", whole=True, questions_repeat=True),
}
