"""Questions whose prompt is longer than the generator's context are left out, and a run without any other is refused.

The ranks are those of another role, to which the generator is a tokenizer and its settings: no engine is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tango_hpc.base.config.load import validate_tree
from tango_hpc.base.errors import CheckFailed
from tango_hpc.questions.data.tables import write_rows
from tango_hpc.questions.tasks.tiny import build_tokenizer
from tests.helpers.ranks import run_ranks

# A tiny model's prompt has a token for each character and two for its tags: 4, 8, 11 and 13 tokens.
QUESTIONS = ["ab", "abc de", "cat horse", "abc def ghi"]
CASES = {
    "some": {"train": QUESTIONS[::-1], "eval": QUESTIONS, "limit": 11},
    "all": {"train": QUESTIONS, "eval": QUESTIONS, "limit": 13},
    "no training question": {"train": QUESTIONS[1:], "eval": QUESTIONS, "limit": 7},
    "no evaluation question": {"train": QUESTIONS, "eval": QUESTIONS[2:], "limit": 10},
}


def tree(folder: Path, limit: int) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder / "run")},
        "task": {"name": "last_letter"},
        "data": {"train": str(folder / "train.parquet"), "eval": str(folder / "eval.parquet")},
        "generator": {
            "model": {"path": str(folder / "model")},
            "max_prompt_tokens": limit,
            "rollout": {"kv_cache_gb": 0.1},
        },
        "verifier": None,
        "algorithm": {"alpha_start": 0.0},
        "train": {"verifier_warmup_steps": 0, "verifier_steps_per_cycle": 0},
        "launch": {"device": "cpu", "dtype": "float32"},
    }


def on_rank(folder: Path) -> dict[str, Any]:
    """What the start of a training run comes to in each case."""
    import sys

    import torch.distributed as dist

    from tango_hpc.base.run.directory import RunDirectory
    from tango_hpc.base.run.worker import Worker
    from tango_hpc.models.parallel.exchange import Exchange
    from tango_hpc.runner.process import RankProcess
    from tango_hpc.stages.tango import Tango

    found: dict[str, Any] = {}
    for name, case in CASES.items():
        config = validate_tree(tree(folder / name, case["limit"]), "config")
        directory, exchange = RunDirectory(config.run.dir), Exchange(["verifier"], "verifier")
        process = RankProcess(directory, Worker(dist.get_rank(), "verifier"), reads_file=False)
        try:
            run = Tango(config, directory, process, exchange)
        except CheckFailed as error:
            found[name] = str(error)
        else:
            asked = run.questions
            kept = [row["question"] for row in asked.at(range(asked.num_rows - asked.num_too_long))]
            found[name] = (kept, asked.num_too_long, run.held_out.num_questions, run.held_out.num_too_long)
    assert "vllm" not in sys.modules
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    for name, case in CASES.items():
        build_tokenizer(folder / name / "model")
        for part in ("train", "eval"):
            rows = [
                {"id": f"{part}-{number}", "question": question, "answer": "x", "source": "last_letter"}
                for number, question in enumerate(case[part])
            ]
            write_rows(folder / name / f"{part}.parquet", rows)
    return folder


@pytest.fixture(scope="module")
def on_ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_rank, 2, folder, preloaded=False)


def test_questions_that_are_too_long_are_left_out_and_counted(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        assert found["all"] == (QUESTIONS, 0, 4, 0)
        assert found["some"] == (["cat horse", "abc de", "ab"], 1, 4, 1)


def test_a_run_whose_questions_are_all_too_long_is_refused(on_ranks: list[dict[str, Any]], folder: Path) -> None:
    train = folder / "no training question" / "train.parquet"
    for found in on_ranks:
        assert found["no training question"] == (
            f"none of the 3 questions in {train} fits generator.max_prompt_tokens, 7"
        )
        assert found["no evaluation question"] == (
            "none of the 2 evaluation questions fits generator.max_prompt_tokens, 10"
        )
