"""The documented script of the whole pipeline, run as a user runs it: prepare, teacher, SFT, Tango, eval, report."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import read_metrics
from tango_hpc.base.run.summary import read_summary
from tango_hpc.questions.benchmarks.records import GREEDY, read_answers
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.runner.environment import free_port
from tests.helpers.extra_packages import install_beside

ROOT = Path(__file__).parents[2]
TINY = "A tiny model and a task of its own"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script leaves behind, with this interpreter's package as the `tango` on the PATH."""
    folder = tmp_path_factory.mktemp("pipeline")
    command = folder / "bin/tango"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m tango_hpc.commands.cli "$@"\n')
    command.chmod(0o755)
    said = run_script(folder, "bash", str(ROOT / "tools/pipeline.sh"), str(folder / "out"))
    (folder / "out/said.txt").write_text(said)
    return folder / "out"


def run_script(bin_in: Path, *words: str, cwd: Path | None = None, beside: Path | None = None) -> str:
    """What a script says, run with the commands of `bin_in` and of packages `beside` on the PATH; it must succeed."""
    places = [str(folder / "bin") for folder in (bin_in, beside) if folder is not None]
    python_path = [str(ROOT), str(beside or ""), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "HF_HOME": str(bin_in / "huggingface"),  # where `datasets` keeps what it reads
        "PATH": os.pathsep.join([*places, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
    }
    done = subprocess.run(words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.timeout(900)
def test_the_teacher_keeps_what_is_right(folder: Path) -> None:
    report = json.loads((folder / "teacher/report.json").read_text())
    assert report["questions"] == 256
    assert report["right"] == report["train"] + report["test"] >= 64
    rows = pq.read_table(folder / "teacher/train.parquet").to_pylist()
    assert len(rows) == report["train"]
    for row in rows:
        letters = "".join(word[-1] for word in row["question"].split())
        solution = parse_solution(row["solution_text"])
        assert solution.well_formed and solution.answer == letters


def test_both_models_are_trained_after_it(folder: Path) -> None:
    run = RunDirectory.open(folder / "tango")
    summary = read_summary(run)
    assert summary["status"] == "done" and summary["stages"].keys() == {"sft", "train"}
    rows = read_metrics(run, "train")
    assert [row["role"] for row in rows].count("generator") == 6
    assert run.report.is_file()


def test_the_last_checkpoint_is_evaluated_with_votes_and_the_verifiers_choice(folder: Path) -> None:
    results = json.loads((folder / "eval/eval/results.json").read_text())
    [(label, sets)] = results.items()
    assert label.startswith("step_")
    estimates = sets["task"]["estimates"]
    assert {"pass@1", "avg@4", "pass@4 of 4", "maj@4", "best of 4", "weighted vote@4"} <= estimates.keys()
    assert estimates["pass@1"]["value"] > 0.3
    answers = read_answers(folder / f"eval/eval/{label}/task.parquet")
    assert len(answers) == 64 * 5 and all(one.verdict is not None for one in answers)
    assert any(one.step_labels for one in answers)
    assert (folder / "eval/eval/answers.html").is_file()
    solving = ["greedy", *(f"sample {number} of 4" for number in range(1, 5))]
    turns = [*solving, *(f"judging {turn}" for turn in solving)]
    said = re.findall(rf"\[eval\] task of {label}(?:, )?(.*)\n", (folder / "said.txt").read_text())
    # The display looks once a second, so that short ones pass by.
    assert said and said == [turn for turn in turns if turn in said]


def test_the_exported_generator_loads_in_transformers(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "models/trained")
    assert model.config.hidden_size == 128


@pytest.fixture(scope="module")
def elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the page's commands for tiny models run, as after the quick start."""
    here = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(folder / "tango", here / "runs/quickstart")
    shutil.copytree(folder / "data", here / "runs/quickstart/data")
    (here / "tango_hpc").symlink_to(ROOT / "tango_hpc")
    return here


def of_the_page(language: str, heading: str) -> list[str]:
    """The blocks of code below a heading of docs/your_models_elsewhere.md."""
    section = (ROOT / "docs/your_models_elsewhere.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def test_lm_evaluation_harness_finds_the_same_accuracy_by_the_commands_of_the_page(
    folder: Path, elsewhere: Path, tmp_path: Path
) -> None:
    """Another program's questions, generation (transformers) and grading, at the exported folder."""
    beside = install_beside(tmp_path / "packages", "lm-eval[hf]")
    (task,) = of_the_page("yaml", TINY)
    (elsewhere / "letters.yaml").write_text(task)
    commands = of_the_page("bash", TINY)[0]
    run_script(folder.parent, "bash", "-euo", "pipefail", "-c", commands, cwd=elsewhere, beside=beside)
    (found,) = elsewhere.glob("letters/**/results_*.json")
    scores = json.loads(found.read_text())["results"]["letters"]
    [sets] = json.loads((folder / "eval/eval/results.json").read_text()).values()
    assert scores["exact_match,box"] == pytest.approx(sets["task"]["estimates"]["pass@1"]["value"], abs=1e-9)


@contextmanager
def served(command: str, cwd: Path, log: Path) -> Iterator[str]:
    """The address of the server that `command` starts, once it answers; it ends with the block."""
    address = f"http://localhost:{free_port()}"
    words = [sys.executable, *shlex.split(command)[1:], "--port", address.rpartition(":")[2]]
    settings = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"HOME": str(log.parent)}  # vLLM's own server needs one, and the tests have none
    with log.open("wb") as into:
        server = subprocess.Popen(words, cwd=cwd, env=os.environ | settings, stdout=into, stderr=subprocess.STDOUT)
    try:
        while not answers(f"{address}/health"):
            assert server.poll() is None, log.read_text()[-6000:]
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=60)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def test_vllms_server_gives_the_answers_of_the_evaluation_by_the_commands_of_the_page(
    folder: Path, elsewhere: Path, tmp_path: Path
) -> None:
    """The server as it is installed, with the exported folder, asked over HTTP; chats by a template given beside it."""
    export = of_the_page("bash", TINY)[0].splitlines()[0]
    serve, ask = of_the_page("bash", TINY)[1:]
    chat = of_the_page("bash", "vLLM's server")[1]
    shutil.rmtree(elsewhere / "models", ignore_errors=True)
    run_script(folder.parent, "bash", "-c", export, cwd=elsewhere)
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content[:3] }}<question>{{ messages[1].content }}<solve>")
    serve = f"{serve.strip()} mine --chat-template {tmp_path / 'chat.jinja'}"  # a second name, which the chat asks for
    with served(serve, elsewhere, tmp_path / "server.log") as address:
        said, chatted = (
            run_script(folder.parent, "bash", "-euc", block.replace("http://localhost:8000", address), cwd=elsewhere)
            for block in (ask, chat)
        )
    [label] = json.loads((folder / "eval/eval/results.json").read_text())
    greedy = [one for one in read_answers(folder / f"eval/eval/{label}/task.parquet") if one.sample == GREEDY]
    assert json.loads(said) == [one.response for one in greedy]
    assert chatted.startswith("<think>")
