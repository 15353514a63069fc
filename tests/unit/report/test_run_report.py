"""The report page and the terminal reader, on runs that ended, crashed, had no verifier, or only fine-tuned."""

from __future__ import annotations

import io
import math
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

import tango_hpc.report
from tango_hpc.base.config.schema import TAGGED
from tango_hpc.base.errors import UserError
from tango_hpc.base.formats import visible
from tango_hpc.base.run.dumps import RolloutRow, write_rollouts
from tango_hpc.base.run.metrics import MetricsWriter
from tango_hpc.base.run.progress import ProgressReporter
from tango_hpc.base.run.summary import update_summary
from tango_hpc.report import run_page
from tango_hpc.report.live_view import ProgressView
from tango_hpc.report.plots import draw_phases
from tango_hpc.report.reading import StepView, choose_examples, read_solution_of, show_rollouts, step_views
from tango_hpc.report.run_page import write_report
from tango_hpc.report.sweep import CellResult, Group, write_sweep_page
from tango_hpc.runner.enter import enter_run
from tango_hpc.runner.outcome import Outcome, write_outcome
from tango_hpc.runner.provenance import record_attempt

SOLUTION = "<think><step>lamp ends in p: p</step><step>cat < starts: pc</step></think><answer>\\boxed{pc}</answer>"
VERIFICATION = (
    "<step_verification><step>\\boxed{CORRECT}</step><step>\\boxed{INCORRECT}</step></step_verification>"
    "<final_verification>\\boxed{INCORRECT}</final_verification>"
)


def solution_row(number, *, correct, judged=True):
    ids = list(range(10))
    verified = {"verification_text": VERIFICATION, "step_judgements": [1, -1], "final_judgement": 0}
    return RolloutRow(
        step=2, role="generator", group_id="q", response_id=f"q-{number}", question="lamp <cat>", gold_answer="pt",
        prompt_ids=[1], response_ids=ids, response_text=SOLUTION, response_logprobs=[-0.5] * 10, algorithm="grpo",
        advantages=[0.75] * 4 + [0.5] * 3 + [0.25] * 3, step_end_tokens=[3, 6], step_rewards=[0.5, -0.5],
        outcome_reward=float(correct), solution_correct=correct, alpha=0.1, **(verified if judged else {}),
    )  # fmt: skip


def verification_row(*, final):
    return RolloutRow(
        step=3, role="verifier", group_id="q", response_id=f"q-{final}", question="lamp <cat>", gold_answer="pt",
        prompt_ids=[1], response_ids=[7], response_text=VERIFICATION, response_logprobs=[0.0], algorithm="grpo",
        advantages=[1.0], solution_text=SOLUTION, solution_correct=False, step_judgements=[1, -1],
        final_judgement=final, format_reward=1.0, reward=1.8, class_weight=1.0,
    )  # fmt: skip


def make_run(path, *, verifier=True, num_steps=3):
    directory, _ = enter_run(path, "algorithm: {name: grpo}\nnote: <b>\n", resume=False)
    record_attempt(directory, stage="train")
    ProgressReporter(directory, "train", total_steps=10)
    update_summary(directory, "train", "running", begins=True, results={"generator.accuracy_before": 0.1})
    with MetricsWriter(directory, "train") as metrics:
        metrics.write_evaluation(0, {"generator/accuracy": 0.1})
        for step in range(1, num_steps + 1):
            row = {"step": step, "role": "generator", "seconds/total": 2.0, "seconds/rollout": 1.0, "loss": -0.5 * step}
            row |= {"generator/accuracy": 0.2, "tokens/generated": 100, "logprob_gap/mean_abs": 1e-6, "alpha": 0.0}
            if verifier:
                row |= {"verifier/outcome_f1": 0.5, "seconds/verify": 0.5}
                row |= {"verifier/outcome_pr_f1": 0.6, "verifier/outcome_j": -0.1, "verifier/step_j": 0.1}
            metrics.write(row)
        metrics.write_evaluation(num_steps, {"generator/accuracy": 0.3})
    write_rollouts(
        directory.rollout_file("generator", 2),
        [solution_row(number, correct=number == 1, judged=verifier) for number in range(3)],
    )
    if verifier:
        write_rollouts(directory.rollout_file("verifier", 3), [verification_row(final=0), verification_row(final=1)])
    return directory


class Page(HTMLParser):
    """Checks that tags are balanced and collects headings, text and addresses."""

    VOID = ("meta", "br", "path", "use", "rect", "link", "image")

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.stack, self.headings, self.addresses, self.text = [], [], [], ""
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] in ("h2", "h3"):
            self.headings.append(data)
        if "style" not in self.stack:
            self.text += data


def report_of(directory):
    write_report(directory)
    return Page(directory.report.read_text())


def test_report_of_a_run_in_progress(tmp_path):
    directory = make_run(tmp_path / "my run")
    page = report_of(directory)
    assert {"Generator accuracy", "Verifier F1", "Time by phase", "Loss", "Log-probability gap"} <= set(page.headings)
    assert {"Verifier usefulness J", "Verifier F1, precision and recall"} <= set(page.headings)
    assert "α" in page.headings  # also where it is 0 throughout
    assert "train 0/10" in page.text and "running" in page.text
    assert "30.0%" in page.text and "after step 3, from 10.0%: +20.0 points" in page.text
    update_summary(directory, "train", "running", results={"generator.accuracy_after": 0.2})  # by an earlier evaluation
    assert "after step 3, from 10.0%: +20.0 points" in report_of(directory).text
    update_summary(directory, "train", "done", results={"generator.accuracy_after": 0.3})
    assert "after training, from 10.0%: +20.0 points" in report_of(directory).text
    assert "lamp <cat>" in page.text and "cat < starts: pc" in page.text and "note: <b>" in page.text
    assert "advantage +0.75" in page.text and "advantage +0.50" in page.text
    assert all(address.startswith("#") for address in page.addresses), "the page must be self-contained"
    assert directory.report_curves.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("seconds", "told"), [(0.2, True), (0.0001, False)])
def test_handing_a_gpu_over_is_a_part_of_the_time_of_its_own(tmp_path, seconds, told):
    directory = make_run(tmp_path / "run")
    with MetricsWriter(directory, "train") as metrics:
        row = {"step": 4, "role": "generator", "seconds/total": 2.0, "seconds/rollout": 1.0}
        metrics.write(row | dict.fromkeys(("seconds/wake", "seconds/offload"), seconds))
    assert ("wake, sleep, onload, offload" in report_of(directory).text) == told


def test_report_tells_how_well_the_machine_was_used(tmp_path):
    directory = make_run(tmp_path / "run", num_steps=0)
    with MetricsWriter(directory, "train") as metrics:
        for step, share in ((1, 0.1), (2, 0.42), (3, 0.5)):
            row = {"step": step, "role": "generator", "seconds/total": 2.0, "speed/mfu": share}
            row |= {"speed/tokens_per_second_per_rank": 1000.0 * step, "memory/generator_peak_bytes": step * 2**30}
            metrics.write(row | {"memory/verifier_peak_bytes": 2**29})
    text = report_of(directory).text
    assert "42%" in text and "of the peak in updates, median; a rank generates 2,000 tokens a second" in text
    assert "3.0 and 0.5 GiB" in text and "at most in a process of generator and verifier" in text
    assert "MFU" not in report_of(make_run(tmp_path / "without")).text


def test_colours_of_the_drawings_follow_the_page(tmp_path):
    directory = make_run(tmp_path / "run")
    write_report(directory)
    drawings = re.findall(r"<svg.*?</svg>", directory.report.read_text(), re.DOTALL)
    style = directory.report.read_text().split("</style>")[0]
    used = set(re.findall(r"var\((--\w+)\)", "".join(drawings)))
    assert used and all(f"{name}:" in style for name in used)
    leftover = set(re.findall(r"#[0-9a-f]{6}\b", "".join(drawings)))
    assert leftover <= {"#ffffff", "#000000"}


def test_scores_of_a_task_and_their_parts_have_a_chart(tmp_path):
    directory = make_run(tmp_path / "run")
    assert "Scores" not in report_of(directory).headings
    with MetricsWriter(directory, "train") as metrics:
        scores = {"generator/score": 0.5} | {f"reward_parts/{name}": 0.25 for name in ("units", "form", "length")}
        metrics.write({"step": 4, "role": "generator", **scores})
    page = report_of(directory)
    assert "Scores" in page.headings and all(name in page.text for name in ("units", "form", "length"))
    (chart,) = re.findall(r'<svg role="img" aria-label="Scores".*?</svg>', directory.report.read_text(), re.DOTALL)
    assert len(set(re.findall(r"var\((--\w+)\)", chart))) >= 4 and not re.findall(
        "#(?!ffffff|000000)[0-9a-f]{6}", chart
    )


def test_report_without_verifier(tmp_path):
    page = report_of(make_run(tmp_path / "run", verifier=False))
    assert "Generator accuracy" in page.headings and "Verifier F1" not in page.headings
    assert "solution is" in page.text and "verifier says" not in page.text


def test_report_of_a_crash_names_the_failure_and_what_was_not_finite(tmp_path):
    directory = make_run(tmp_path / "run")
    with MetricsWriter(directory, "train", resumed_step=3) as metrics:
        metrics.write({"step": 4, "role": "generator", "loss": math.nan})
    with directory.metrics.open("a") as file:
        file.write('{"step": 5, "ro')
    write_outcome(directory, Outcome(1, "generator", "ValueError: <boom>"))
    update_summary(directory, "train", "failed", steps=4)
    page = report_of(directory)
    assert "ValueError: <boom>" in page.text and "failed" in page.text and "step 4: loss" in page.text


def test_a_truncated_dump_is_passed_over_and_the_one_before_it_shown(tmp_path):
    directory = make_run(tmp_path / "run")
    path = directory.rollout_file("generator", 6)
    path.write_bytes(directory.rollout_file("generator", 2).read_bytes()[:-100])
    page = report_of(directory)
    assert f"passed over: cannot read {path} as Parquet" in page.text
    assert "Solutions of the generator, step 2" in page.headings
    with MetricsWriter(directory, "train", resumed_step=3) as metrics:
        metrics.write_event("checkpoint_set_aside", 3, "checkpoint step_000004 is <damaged>")
    assert "train, step 3: checkpoint step_000004 is <damaged>." in report_of(directory).text


def test_a_page_that_cannot_be_made_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise KeyError("no such thing")

    directory = make_run(tmp_path / "run")
    monkeypatch.setattr(run_page, "drawings", broken)
    shown = io.StringIO()
    with ProgressView(directory, Console(file=shown)) as view:
        view.finish()
    assert "report.html was not written: KeyError" in shown.getvalue()
    assert "in broken" in capsys.readouterr().err


def test_a_models_text_commands_no_terminal(tmp_path):
    directory, _ = enter_run(tmp_path / "run", "seed: 0\n", resume=False)
    evil = "\x1b]0;title\x07\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\u202eright\r\x7f\ttab"
    shown_as = "␛]0;title␇␛]52;c;aGk=␇␛[2J<U+009B>31m<U+202E>right␍␡"
    judged = f"<step_verification><step>{evil} \\boxed{{CORRECT}}</step></step_verification>"
    row = replace(
        solution_row(0, correct=False, judged=True), question=f"q {evil}", gold_answer=f"g {evil}", verification_text=judged,
        response_text=f"<think><step>s {evil}</step></think><answer>\\boxed{{a {evil}}}</answer>",
    )  # fmt: skip
    write_rollouts(directory.rollout_file("generator", 1), [row, replace(row, response_text=f"r {evil}")])
    shown = io.StringIO()
    show_rollouts(directory, console=Console(file=shown, width=400))
    text = shown.getvalue()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    for start in ("q", "g", "s", "a", "<step>", "r"):
        assert re.search(rf"{start} ?{re.escape(shown_as)} +tab", text), start
    write_report(directory)
    page = directory.report.read_text()
    assert re.search(r"\.question, \.text, [^{]* pre, [^{]*\{ unicode-bidi: isolate; \}", page)
    assert visible("\ud800 \n é 漢 \u200f") == "<U+D800> \n é 漢 <U+200F>"


def test_report_of_fine_tuning_alone(tmp_path):
    directory, _ = enter_run(tmp_path / "run", "seed: 0\n", resume=False)
    with MetricsWriter(directory, "sft") as metrics:
        for step in range(1, 101):
            metrics.write({"step": step, "role": "generator", "loss": 1 / step, "seconds/total": 0.5})
        metrics.write_evaluation(100, {"generator/eval_loss": 0.5})
    page = report_of(directory)
    assert "Supervised fine-tuning" in page.headings and "Loss" in page.headings
    assert "Generator accuracy" not in page.headings


def test_report_of_a_run_that_has_not_begun(tmp_path):
    directory, _ = enter_run(tmp_path / "run", "seed: 0\n", resume=False)
    assert "No optimizer step has been written yet" in report_of(directory).text
    assert not directory.report_curves.exists()


def test_report_of_an_evaluation(tmp_path):
    directory, _ = enter_run(tmp_path / "run", "seed: 0\n", resume=False)
    (directory.path / "eval").mkdir()
    (directory.path / "eval/results.md").write_text("| model | GSM8K |\n")
    update_summary(directory, "eval", "done", begins=True, steps=1)
    text = report_of(directory).text
    assert "No optimizer step" not in text and "eval: sets of questions done: 1" in text and "| model | GSM8K |" in text


def test_reports_load_neither_torch_nor_vllm_nor_what_runs_them():
    modules = [f"tango_hpc.report.{module.name}" for module in pkgutil.iter_modules(tango_hpc.report.__path__)]
    assert "tango_hpc.report.run_page" in modules
    unwanted = {"torch", "vllm", "megatron", "transformers", "tango_hpc.runner.job", "tango_hpc.stages"}
    code = f"import sys, {', '.join(modules)}; print({unwanted} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_page_of_a_sweep(tmp_path):
    groups = [Group("name=<rloo>", [0.25, 0.75], ["done", "done"]), Group("name=grpo", [], ["failed"])]
    cells = [
        CellResult(0, {"name": "<rloo>"}, 0, "run", "done", "", {"accuracy": 0.25}),
        CellResult(2, {"name": "grpo"}, 0, "run", "failed", "rank 0 & <why>", {}),
    ]
    write_sweep_page(tmp_path / "results.html", tmp_path / "a <sweep>", "accuracy", groups, cells)
    page = Page((tmp_path / "results.html").read_text())
    assert "a <sweep>, best first" in page.text and "rank 0 & <why>" in page.text and "2 done" in page.text
    assert "0.25" in page.text and "name=<rloo>" in page.text
    assert "0.5" in page.text and "0.3536" in page.text  # mean and spread of 0.25 and 0.75
    assert all(address.startswith("#") for address in page.addresses), "the page must be self-contained"


def test_step_views_pair_steps_with_judgements_rewards_and_advantages():
    def views_of(row: RolloutRow) -> list[StepView]:
        return step_views(row, read_solution_of(row, TAGGED))

    views = views_of(solution_row(0, correct=False))
    assert [(view.judgement, view.reward, view.advantage) for view in views] == [(1, 0.5, 0.75), (-1, -0.5, 0.5)]
    judged = views_of(verification_row(final=0))
    assert [(view.text, view.judgement, view.advantage) for view in judged] == [
        ("lamp ends in p: p", 1, None),
        ("cat < starts: pc", -1, None),
    ]


def test_examples_show_right_and_wrong_of_a_group_first():
    rows = [solution_row(number, correct=number == 2) for number in range(4)]
    assert [row.response_id for row in choose_examples(rows, 4)] == ["q-2", "q-0"]


def test_reader_prints_steps_with_marks(tmp_path):
    directory = make_run(tmp_path / "run")
    output = io.StringIO()
    console = Console(file=output, width=110)
    show_rollouts(directory, limit=1, console=console)
    shown = output.getvalue()
    assert re.search(r"✓\s+lamp ends in p: p\s+\+0\.500\s+\+0\.750", shown)
    assert re.search(r"✗\s+cat < starts: pc\s+-0\.500\s+\+0\.500", shown)
    assert "verifier says wrong" in shown and "solution is wrong" in shown and "--limit 3" in shown
    show_rollouts(directory, role="verifier", step=3, console=console)


def test_reader_names_the_steps_there_are(tmp_path):
    directory = make_run(tmp_path / "run", verifier=False)
    with pytest.raises(UserError, match="step 7 of the generator was not dumped; there are: 2"):
        show_rollouts(directory, step=7)
    with pytest.raises(UserError, match="no dumped rollouts of the verifier"):
        show_rollouts(directory, role="verifier")
    with pytest.raises(UserError, match="neither generator nor verifier"):
        show_rollouts(directory, role="critic")


def test_rollouts_without_any_step_show_the_response(tmp_path):
    directory, _ = enter_run(tmp_path / "run", "seed: 0\n", resume=False)
    row = solution_row(0, correct=False, judged=False)
    row.response_text, row.step_end_tokens, row.step_rewards = "[no tags] at all", [], []
    write_rollouts(directory.rollout_file("generator", 2), [row])
    output = io.StringIO()
    show_rollouts(directory, console=Console(file=output, width=110))
    assert "[no tags] at all" in output.getvalue() and "answer none" in output.getvalue()
    assert "[no tags] at all" in report_of(directory).text


@pytest.mark.parametrize("steps", [1, 60, 61, 62, 307])
def test_bars_of_phases_stand_side_by_side(steps):
    axes = Figure().add_subplot()
    rows = [{"step": step, "seconds/total": 2.0, "seconds/rollout": 1.0 + step % 2} for step in range(1, steps + 1)]
    assert draw_phases(axes, rows)
    left = [bar.get_x() for bar in axes.containers[0]]
    assert len(left) <= 60
    assert max(np.diff(left[:-1]), default=1) == pytest.approx(min(np.diff(left[:-1]), default=1))
