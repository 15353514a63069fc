"""`tango eval`: benchmarks asked of a model, its checkpoints or any Hugging Face folder, and judged by a verifier.

RUN/eval/
  LABEL/NAME.parquet   every answer (benchmarks/records.py); LABEL is "model" or a checkpoint such as step_000200
  results.json results.md answers.html   written after each set, from the Parquet files that are there

A set whose file is there is not asked again: a stopped evaluation goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tango_hpc import benchmarks
from tango_hpc.benchmarks import processbench
from tango_hpc.benchmarks.base import Benchmark, Row
from tango_hpc.benchmarks.records import GREEDY, Answer, write_answers
from tango_hpc.config import Config
from tango_hpc.config.schema import RoleConfig
from tango_hpc.data.prepare.metadata import read_metadata
from tango_hpc.data.tables import evenly_spaced, read_rows
from tango_hpc.errors import StoppedEarly
from tango_hpc.grading.pool import GradingPool, Verdict
from tango_hpc.policy.policy import Policy
from tango_hpc.protocol.alignment import response_text
from tango_hpc.protocol.prompts import generator_prompt_ids, verifier_prompt_ids
from tango_hpc.protocol.solution import parse_solution
from tango_hpc.protocol.verification import Verification, parse_verification
from tango_hpc.report.evaluation import write_results
from tango_hpc.reshard.sync import WeightSync
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.interrupt import StopSignal
from tango_hpc.stages.eval_inputs import evaluated_checkpoints, evaluated_columns, evaluated_file, evaluated_roles
from tango_hpc.stages.journal import Journal
from tango_hpc.stages.role import Role, request_seeds
from tango_hpc.stages.sharing import on_all_ranks
from tango_hpc.tasks import get_task

STAGE = "eval"
AS_THEY_ARE = "model"
_COMPARED_ANSWERS = 16

Verdicts = Callable[[Sequence[tuple[Row, str]]], list[Verdict]]


def run(config: Config, directory: RunDirectory, stop: StopSignal) -> None:
    """Evaluate what the config's `eval` section names. Raises `StoppedEarly` between sets when told to stop."""
    Evaluation(config, directory, stop).run()


class Evaluation:
    """The roles that are asked, and where their answers go."""

    def __init__(self, config: Config, directory: RunDirectory, stop: StopSignal) -> None:
        self.config, self.settings, self.stop = config, config.eval, stop
        self.directory = directory
        self.folder = directory.path / "eval"
        self.checkpoints = evaluated_checkpoints(config)
        self.task = get_task(config.task.name)
        self.pool = GradingPool()
        self.roles: dict[str, Role] = {}
        for name in evaluated_roles(config):
            stop.enter(f"loading the {name}")
            self.roles[name] = Role(name, _for_evaluation(config), total_steps=0)
        self.generator, self.verifier = self.roles.get("generator"), self.roles.get("verifier")
        self._policies: dict[str, tuple[Policy, WeightSync]] = {}

    def run(self) -> None:
        """All sets of all models; results are written as they come."""
        labels = {AS_THEY_ARE: None} if not self.checkpoints else {path.name: path for path in self.checkpoints}
        units = [(label, name) for label in labels for name in self.settings.benchmarks]
        todo = [(label, name) for label, name in units if not self._file(label, name).is_file()]
        journal = Journal(self.directory, STAGE, self.stop, len(units), len(units) - len(todo))
        loaded = AS_THEY_ARE
        for label, name in todo:
            if self.stop.check(f"{name} of {label}"):
                journal.ended("stopped")
                raise StoppedEarly(f"stopped with {len(todo)} of {len(units)} sets to ask")
            if label != loaded:
                journal.phase(f"loading {label}")
                self._load(labels[label])
                loaded = label
            journal.phase(f"{name} of {label}")
            answers = self._ask(name)
            if dist.get_rank() == 0:
                write_answers(self._file(label, name), answers)
                write_results(self.folder, list(labels), self.settings.benchmarks)
            dist.barrier()
        if dist.get_rank() == 0:
            journal.results(write_results(self.folder, list(labels), self.settings.benchmarks))
        journal.ended("done")
        self.pool.close()

    def _file(self, label: str, name: str) -> Path:
        return self.folder / label / f"{name}.parquet"

    def _load(self, checkpoint: Path | None) -> None:
        """Bring a training checkpoint's weights into the engines, from whatever layout wrote them."""
        assert checkpoint is not None
        for name, role in self.roles.items():
            if not (checkpoint / name).is_dir():
                continue  # a role that was not trained keeps the weights that it has
            if name not in self._policies:
                policy = Policy(
                    role.settings.model.path,
                    parallel=role.settings.parallel,
                    optimizer=None,
                    dtype=self.config.launch.dtype,
                    micro_batch_tokens=role.settings.micro_batch_tokens,
                    with_reference=False,
                    total_steps=0,
                )
                self._policies[name] = policy, WeightSync(policy, role.engine, self.config.reshard)
            policy, sync = self._policies[name]
            policy.onload(weights_only=True)
            policy.load(checkpoint / name)
            role.engine.wake()
            sync.sync()
            role.engine.sleep()
            policy.offload()

    # -- asking ----------------------------------------------------------------------------------------------

    def _ask(self, name: str) -> list[Answer]:
        rows = evenly_spaced(
            read_rows(evaluated_file(self.config, name), evaluated_columns(name)), self.settings.max_questions
        )
        if name == "processbench":
            return self._ask_verifier(rows)
        if name == "task":
            benchmark, verdicts = Benchmark("task", self.task.name, "math"), self._task_verdicts
        else:
            benchmark = benchmarks.get_benchmark(name)
            verdicts = partial(self._pool_verdicts, benchmark)
        answers = self._solve(benchmark, rows, greedy=True)
        for sample in range(self.settings.samples):
            answers += self._solve(benchmark, rows, greedy=False, sample=sample)
        by_id = {row["id"]: row for row in rows}
        _grade(verdicts, by_id, answers)
        _cluster(verdicts, by_id, [one for one in answers if one.sample != GREEDY])
        if self.verifier is not None and self.settings.use_verifier:
            self._verify(answers)
        if name == "task":
            for one in answers:
                one.step_labels = (
                    self.task.label_steps(by_id[one.question_id], parse_solution(one.response).steps) or []
                )
        return answers

    def _pool_verdicts(self, benchmark: Benchmark, given: Sequence[tuple[Row, str]]) -> list[Verdict]:
        return self.pool.grade([benchmark.grade(row, answer) for row, answer in given])

    def _task_verdicts(self, given: Sequence[tuple[Row, str]]) -> list[Verdict]:
        return [Verdict(correct) for correct in self.task.grade_all([(dict(row), answer) for row, answer in given])]

    def _solve(
        self, benchmark: Benchmark, rows: Sequence[dict[str, Any]], *, greedy: bool, sample: int = GREEDY
    ) -> list[Answer]:
        """One response to each row; a question that does not fit the context gets an empty one."""
        generator = self.generator
        assert generator is not None
        statements = [benchmark.statement(row) for row in rows]
        prompts = [generator_prompt_ids(statement, generator.tokenizer) for statement in statements]
        fits = [len(prompt) <= generator.settings.max_prompt_tokens for prompt in prompts]
        seeds = request_seeds(self.config.seed, max(sample, 0), f"{benchmark.name} sample", len(prompts))
        kept = [index for index, one_fits in enumerate(fits) if one_fits]
        generations = generator.generate([prompts[i] for i in kept], [seeds[i] for i in kept], greedy=greedy)
        generated = dict(zip(kept, generations, strict=True))
        answers = []
        for index, (row, statement) in enumerate(zip(rows, statements, strict=True)):
            generation = generated.get(index)
            text = response_text(generation.token_ids, generator.tokenizer) if generation else ""
            answers.append(
                Answer(
                    question_id=row["id"],
                    question=statement,
                    gold=row["answer"],
                    sample=sample,
                    response=text,
                    num_tokens=len(generation.token_ids) if generation else 0,
                    finished=generation is not None and generation.finish_reason == "stop",
                    well_formed=parse_solution(text).well_formed,
                    answer=benchmark.extract(text),
                    correct=False,
                )
            )
        return answers

    # -- judging -----------------------------------------------------------------------------------------------

    def _verify(self, answers: Sequence[Answer]) -> None:
        """One verdict for each answer, and a score: half the verdict, half the share of steps judged right."""
        counts = [len(parse_solution(one.response).steps) for one in answers]
        totals = [0.0] * len(answers)
        rounds = self.settings.verifier_samples
        for turn in range(rounds):
            texts = self._judge([(one.question, one.response) for one in answers], counts, turn)
            for index, (one, text) in enumerate(zip(answers, texts, strict=True)):
                verification = parse_verification(text, counts[index])
                totals[index] += verifier_score(verification) / rounds
                if turn == 0:
                    one.verification, one.verdict = text, verification.final
                    one.step_judgements = verification.judgements
        for one, total in zip(answers, totals, strict=True):
            one.score = round(total, 6)

    def _ask_verifier(self, rows: Sequence[dict[str, Any]]) -> list[Answer]:
        """ProcessBench: greedy judgements of solutions that come with their steps."""
        solutions = [processbench.solution_text(row) for row in rows]
        counts = [processbench.num_steps(row) for row in rows]
        texts = self._judge([(row["question"], text) for row, text in zip(rows, solutions, strict=True)], counts, 0)
        answers = []
        for row, solution, count, text in zip(rows, solutions, counts, texts, strict=True):
            verification = parse_verification(text, count)
            prediction = processbench.first_wrong_step(verification.judgements)
            answers.append(
                Answer(
                    question_id=row["id"],
                    question=row["question"],
                    gold=row["answer"],
                    sample=GREEDY,
                    response=solution,
                    num_tokens=len(self._verifier_tokens(text)),
                    finished=verification.final != -1,
                    well_formed=not verification.problems,
                    answer=None if prediction is None else str(prediction),
                    correct=prediction is not None and str(prediction) == row["answer"],
                    verification=text,
                    verdict=verification.final,
                    step_judgements=verification.judgements,
                    split=read_metadata(row).get("split", ""),
                )
            )
        return answers

    def _verifier_tokens(self, text: str) -> list[int]:
        assert self.verifier is not None
        return self.verifier.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _judge(self, solutions: Sequence[tuple[str, str]], counts: Sequence[int], turn: int) -> list[str]:
        """A verification of each (statement, solution); empty where the context is too short."""
        verifier = self.verifier
        assert verifier is not None
        prompts = [
            verifier_prompt_ids(statement, text, count, verifier.tokenizer)
            for (statement, text), count in zip(solutions, counts, strict=True)
        ]
        kept = [i for i, prompt in enumerate(prompts) if len(prompt) <= verifier.settings.max_prompt_tokens]
        seeds = request_seeds(self.config.seed, turn, "verification", len(prompts))
        greedy = self.settings.verifier_samples == 1
        generations = verifier.generate([prompts[i] for i in kept], [seeds[i] for i in kept], greedy=greedy)
        texts = [""] * len(prompts)
        for index, generation in zip(kept, generations, strict=True):
            texts[index] = response_text(generation.token_ids, verifier.tokenizer)
        return texts


def _grade(verdicts: Verdicts, by_id: Mapping[str, Row], answers: Sequence[Answer]) -> None:
    """Fill in what is right; no answer is wrong. Collective."""
    given = [one for one in answers if one.answer is not None]
    pairs = [(by_id[one.question_id], one.answer or "") for one in given]
    for one, verdict in zip(given, on_all_ranks(verdicts, pairs), strict=True):
        one.correct, one.outcome = verdict.correct, verdict.outcome


def _cluster(verdicts: Verdicts, by_id: Mapping[str, Row], samples: Sequence[Answer]) -> None:
    """Number the different answers to each question; two are one if the second is right where the first is gold.

    The first `_COMPARED_ANSWERS` spellings of a question are compared with each other, later ones stand alone: a
    model that never repeats itself wins no vote anyway. Collective.
    """
    spellings: dict[str, list[str]] = {}
    for one in samples:
        known = spellings.setdefault(one.question_id, [])
        if one.answer is not None and one.answer not in known:
            known.append(one.answer)
    pairs = [
        (question, first, second)
        for question, known in spellings.items()
        for first, second in combinations(range(min(len(known), _COMPARED_ANSWERS)), 2)
    ]
    graded = [({**by_id[q], "answer": spellings[q][first]}, spellings[q][second]) for q, first, second in pairs]
    number = {question: list(range(len(known))) for question, known in spellings.items()}
    for (question, first, second), verdict in zip(pairs, on_all_ranks(verdicts, graded), strict=True):
        if verdict.correct and number[question][second] == second:
            number[question][second] = number[question][first]
    for one in samples:
        if one.answer is not None:
            one.cluster = number[one.question_id][spellings[one.question_id].index(one.answer)]


def verifier_score(verification: Verification) -> float:
    """A verification as one number in [0, 1]: its verdict and the share of steps that it finds right, half each."""
    judgements = verification.judgements
    steps = sum(one == 1 for one in judgements) / len(judgements) if judgements else float(verification.final == 1)
    return 0.5 * (verification.final == 1) + 0.5 * steps


def _for_evaluation(config: Config) -> Config:
    """The same roles, frozen, at the evaluation's sampling settings."""

    def frozen(role: RoleConfig, **sampling: float) -> RoleConfig:
        return role.model_copy(update={"trainable": False, **sampling})

    settings = config.eval
    update: dict[str, Any] = {
        "generator": frozen(config.generator, temperature=settings.temperature, top_p=settings.top_p)
    }
    if config.verifier is not None:
        update["verifier"] = frozen(config.verifier)
    return config.model_copy(update=update)
