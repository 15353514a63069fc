"""`tango eval`: benchmarks asked of a model, its checkpoints or any Hugging Face folder, and judged by a verifier.

RUN/eval/
  LABEL/NAME.parquet   every answer (questions/benchmarks/records.py); LABEL is "model" or a checkpoint such as
  step_000200 LABEL/NAME.turns/    what a set that is not complete has been answered (stages/eval_progress.py)
  results.json results.md answers.html   written after each set, from the Parquet files that are there

A set whose file is there is not asked again: a stopped evaluation goes on with the next turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.config.load import read_tree
from tango_hpc.base.config.schema import ProtocolConfig
from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.weights_alone import is_for_readers
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.models.trainer.checkpoints import find_damage
from tango_hpc.questions import benchmarks
from tango_hpc.questions.benchmarks import processbench
from tango_hpc.questions.benchmarks.records import GREEDY, Answer, write_answers
from tango_hpc.questions.data.prepare.rows import read_metadata
from tango_hpc.questions.data.tables import evenly_spaced, read_questions, read_rows
from tango_hpc.questions.grading.pool import GradingPool, Verdict
from tango_hpc.questions.protocol.verification import Verification
from tango_hpc.questions.tasks import Task, get_task
from tango_hpc.questions.tasks.evaluated import BenchmarkTask
from tango_hpc.report.evaluation import write_results
from tango_hpc.runner.process import RankProcess
from tango_hpc.stages.eval_inputs import (
    AS_THEY_ARE,
    answers_file,
    evaluated_columns,
    evaluated_file,
    evaluated_models,
    evaluated_roles,
    unanswered,
)
from tango_hpc.stages.eval_progress import EvalProgress
from tango_hpc.stages.journal import Journal
from tango_hpc.stages.responses import NOT_ASKED, FailureWatch, ReadSolution, ReadVerification, Response, settled
from tango_hpc.stages.role import Generator, Role, Verifier, load_models, request_seeds
from tango_hpc.stages.sharing import in_shares
from tango_hpc.stages.stage import EVAL

STAGE = "eval"
_COMPARED_ANSWERS = 16
# What of a role's section does not decide what it answers.
_HOW = {"parallel", "optimizer", "rollout", "trainable", "micro_batch_tokens", "recompute"}


def evaluate(config: Config, directory: RunDirectory, process: RankProcess, exchange: Exchange) -> None:
    """Evaluate what the config's `eval` section names. Raises `StoppedEarly` between turns when told to stop."""
    Evaluation(config, directory, process, exchange).evaluate()


class Evaluation:
    """The roles that are asked, and where their answers go."""

    def __init__(self, config: Config, directory: RunDirectory, process: RankProcess, exchange: Exchange) -> None:
        self.config, self.settings, self.exchange = config, config.eval, exchange
        self.directory = directory
        self.folder = directory.path / "eval"
        tree = read_tree(directory.config)
        self.models = {name: tree[config.model_of(name)]["model"] for name in evaluated_roles(config)}
        # The run that they are of may be going on, and NFS may be late.
        self.labels = exchange.all_gather(evaluated_models(config))[0]
        self.todo = exchange.all_gather(unanswered(config, self.labels))[0]
        self.pool = GradingPool()
        frozen = _for_evaluation(config)
        self.loaded = load_models(EVAL.roles(config), frozen, exchange, process)
        self.roles: dict[str, Role] = {
            name: (Generator if name == "generator" else Verifier)(
                name, frozen, exchange, self.loaded[config.model_of(name)]
            )
            for name in evaluated_roles(config)
        }
        self.num_units = len(self.labels) * len(self.settings.benchmarks)
        self.num_left = len(self.todo)
        self.journal = Journal(
            directory,
            STAGE,
            process,
            self.num_units,
            self.num_units - len(self.todo),
            writes=exchange.is_first,
            trackers=config.run.trackers,
        )

    def evaluate(self) -> None:
        """Evaluate all models on all sets; results are written as they come."""
        loaded = AS_THEY_ARE
        for label, name in self.todo:
            if label != loaded:
                self._begin(f"loading {label}")
                checkpoint = self.labels[label]
                assert checkpoint is not None, "the models as they are come first"
                damage = find_damage(checkpoint, self.exchange, is_for_readers)
                if damage is not None:
                    raise CheckFailed(f"the checkpoint {checkpoint} is damaged: {damage}")
                for model in self.loaded.values():
                    if (checkpoint / model.name).is_dir():  # one that was not trained keeps the weights that it has
                        model.take_weights(checkpoint / model.name)
                loaded = label
            file = evaluated_file(self.config, name)
            asked = read_questions(file) if name == "task" else read_rows(file, evaluated_columns(name))
            rows = evenly_spaced(asked, self.settings.max_questions)
            turns = self._turns(label, name, rows)
            answers = self._ask_verifier(rows, turns) if name == "processbench" else self._ask(name, rows, turns)
            if self.exchange.is_first:
                write_answers(self._file(label, name), answers)
                turns.drop()
                write_results(self.folder, self._answered(), self.settings.benchmarks)
            self.exchange.barrier()
            self.num_left -= 1
            self.journal.part_done()
        if self.exchange.is_first:
            self.journal.results(write_results(self.folder, self._answered(), self.settings.benchmarks))
        self.journal.ended("done")
        self.pool.close()

    def _answered(self) -> list[str]:
        """Return all models that were asked, those of this attempt last; of earlier ones the checkpoints may be
        gone.
        """
        folders = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        return [*(name for name in folders if name not in self.labels), *self.labels]

    def _begin(self, phase: str) -> None:
        self.journal.begin(phase, stopped=f"stopped with {self.num_left} of {self.num_units} sets to ask")

    def _turns(self, label: str, name: str, rows: Sequence[dict[str, Any]]) -> EvalProgress:
        """Return the turns of one set."""
        made_with = {
            "seed": self.config.seed,
            "task": self.config.task.model_dump(mode="json"),
            "eval": self.settings.model_dump(
                mode="json", include={"samples", "temperature", "top_p", "verifier_samples"}
            ),
            "roles": {
                # Which model by the path that the run knows: what was loaded may be a copy on this node's disk.
                key: role.settings.model_dump(mode="json", exclude=_HOW) | {"model": self.models[key]}
                for key, role in self.roles.items()
            },
            "questions": [row["id"] for row in rows],
        }
        return EvalProgress(
            self._file(label, name).with_suffix(".turns"),
            made_with,
            self.exchange,
            begin=lambda turn: self._begin(f"{name} of {label}, {turn}"),
            tell=self.journal.note,
        )

    def _file(self, label: str, name: str) -> Path:
        return answers_file(self.folder, label, name)

    # -- asking ----------------------------------------------------------------------------------------------

    def _ask(self, name: str, rows: Sequence[dict[str, Any]], turns: EvalProgress) -> list[Answer]:
        """Return the answers to a set that a generator solves, with what the verifier says of them."""
        task: Task = (
            get_task(self.config.task) if name == "task" else BenchmarkTask(benchmarks.get_benchmark(name), self.pool)
        )
        generator = self.roles["generator"]
        assert isinstance(generator, Generator)
        failures, prompts = FailureWatch(task), generator.prompts(task, rows)
        solved: dict[str, list[ReadSolution]] = {}
        answers: list[Answer] = []
        for sample in (GREEDY, *range(self.settings.samples)):
            turn = "greedy" if sample == GREEDY else f"sample {sample + 1} of {self.settings.samples}"
            seeds = request_seeds(self.config.seed, max(sample, 0), f"{name} sample", len(rows))
            write = partial(generator.write, prompts, seeds, greedy=sample == GREEDY)
            solved[turn] = settled(generator.read(task, rows, prompts, turns.once(turn, write)))
            answers += [_answer(solution, sample) for solution in solved[turn]]
        solutions = [solution for of_turn in solved.values() for solution in of_turn]
        _cluster(
            self.exchange,
            task,
            {row["id"]: row for row in rows},
            [answer for answer in answers if answer.sample != GREEDY],
        )
        if "verifier" in self.roles and self.settings.use_verifier:
            self._verify(solved, answers, turns)
        labels = task.label_all([(solution.question, solution.solution.steps) for solution in solutions])
        for answer, step_labels in zip(answers, labels, strict=True):
            answer.step_labels = step_labels or []
        failures.observe(solutions, f"for {name}", self.journal.note)
        return answers

    # -- judging -----------------------------------------------------------------------------------------------

    def _verify(self, solved: Mapping[str, list[ReadSolution]], answers: Sequence[Answer], turns: EvalProgress) -> None:
        """Set a verdict for each answer, and a score: half the verdict, half the share of steps judged right."""
        rounds = self.settings.verifier_samples
        judged = [self._judge(solved, number, rounds, turns) for number in range(rounds)]
        for answer, *readings in zip(answers, *judged, strict=True):
            first = readings[0]
            answer.verification, answer.verdict = first.response.text, first.verification.final
            answer.step_judgements = first.verification.judgements
            answer.score = round(sum(verifier_score(reading.verification) / rounds for reading in readings), 6)

    def _judge(
        self, solved: Mapping[str, list[ReadSolution]], number: int, rounds: int, turns: EvalProgress
    ) -> list[ReadVerification]:
        """Return the `number`-th of `rounds` verifications of every solution, greedy where it is the only one; those of
        a generator's turn are a turn of the verifier.
        """
        verifier = self.roles["verifier"]
        assert isinstance(verifier, Verifier)
        seeds = iter(request_seeds(self.config.seed, number, "verification", sum(map(len, solved.values()))))
        read: list[ReadVerification] = []
        for turn, solutions in solved.items():
            name = f"judging {turn}" + (f", time {number + 1} of {rounds}" if rounds > 1 else "")
            prompts, of_turn = verifier.prompts(solutions), list(islice(seeds, len(solutions)))
            write = partial(verifier.write, prompts, of_turn, greedy=rounds == 1)
            texts = turns.once(name, write, about=[solution.response.text for solution in solutions])
            read += verifier.read(solutions, prompts, texts)
        return read

    def _ask_verifier(self, rows: Sequence[dict[str, Any]], turns: EvalProgress) -> list[Answer]:
        """Have the verifier judge ProcessBench's solutions, greedily."""
        answers = []
        for read in self._judge(
            {"solutions": [_given_solution(row, self.config.protocol) for row in rows]}, 0, 1, turns
        ):
            row, verification = read.judged.question, read.verification
            prediction = processbench.first_wrong_step(verification.judgements)
            answers.append(
                Answer(
                    question_id=row["id"],
                    question=row["question"],
                    gold=row["answer"],
                    sample=GREEDY,
                    response=read.judged.response.text,
                    steps=[step.text for step in read.judged.solution.steps],
                    num_tokens=read.response.num_tokens,
                    finished=read.response.generation.finish_reason == "stop",
                    well_formed=not verification.problems,
                    answer=None if prediction is None else str(prediction),
                    correct=prediction is not None and str(prediction) == row["answer"],
                    verification=read.response.text,
                    verdict=verification.final,
                    step_judgements=verification.judgements,
                    split=read_metadata(row).get("split", ""),
                    asked=read.response.was_asked,
                )
            )
        return answers


def _answer(read: ReadSolution, sample: int) -> Answer:
    """Return the record of a response; a question that does not fit the context has an empty one, which is wrong."""
    return Answer(
        question_id=read.question["id"],
        question=read.statement,
        gold=read.question["answer"],
        sample=sample,
        response=read.response.text,
        steps=[step.text for step in read.solution.steps],
        num_tokens=read.response.num_tokens,
        finished=read.response.generation.finish_reason == "stop",
        well_formed=read.solution.well_formed,
        answer=read.answer,
        correct=read.correct,
        outcome=read.verdict.outcome,
        asked=read.response.was_asked,
    )


def _given_solution(row: dict[str, Any], protocol: ProtocolConfig) -> ReadSolution:
    """Return a ProcessBench sample's solution, as if a generator had written it."""
    solution = processbench.solution(row, protocol)
    return ReadSolution(
        row, row["question"], Response([], NOT_ASKED, solution.shown), solution, None, [], Verdict(False)
    )


def _cluster(exchange: Exchange, task: Task, by_id: Mapping[str, dict[str, Any]], samples: Sequence[Answer]) -> None:
    """Number the different answers to each question; the task decides which answers are one.

    The first `_COMPARED_ANSWERS` spellings of a question are compared with each other, later ones stand alone: a
    model that never repeats itself wins no vote anyway. Collective.
    """
    spellings: dict[str, list[str]] = {}
    for sample in samples:
        known = spellings.setdefault(sample.question_id, [])
        if sample.answer is not None and sample.answer not in known:
            known.append(sample.answer)
    pairs = [
        (question, first, second)
        for question, known in spellings.items()
        for first, second in combinations(range(min(len(known), _COMPARED_ANSWERS)), 2)
    ]
    compared = [(by_id[q], spellings[q][first], spellings[q][second]) for q, first, second in pairs]
    number = {question: list(range(len(known))) for question, known in spellings.items()}
    for (question, first, second), same in zip(pairs, in_shares(exchange, task.same_all, compared), strict=True):
        if same and number[question][second] == second:
            number[question][second] = number[question][first]
    for sample in samples:
        if sample.answer is not None:
            sample.cluster = number[sample.question_id][spellings[sample.question_id].index(sample.answer)]


def verifier_score(verification: Verification) -> float:
    """Return a verification as one number in [0, 1]: its verdict and the share of steps that it finds right,
    half each.
    """
    judgements = verification.judgements
    steps = judgements.count(1) / len(judgements) if judgements else float(verification.final == 1)
    return 0.5 * (verification.final == 1) + 0.5 * steps


def _for_evaluation(config: Config) -> Config:
    """Return the roles that are asked, frozen, the generator at the evaluation's sampling settings."""
    config = EVAL.taking_part(config)
    sampling = {"temperature": config.eval.temperature, "top_p": config.eval.top_p}
    return config.model_copy(update={"generator": config.generator.model_copy(update=sampling)})
