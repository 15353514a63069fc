"""Rollouts for people: steps with the verifier's judgements, in the terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tango_hpc.base.config.load import read_protocol
from tango_hpc.base.config.schema import ProtocolConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.formats import visible
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import RolloutRow, dumped_steps, read_rollouts
from tango_hpc.questions.protocol.forms import read_solution
from tango_hpc.questions.protocol.solution import Solution, find_answer

JUDGEMENT_NAMES = {1: "right", -1: "wrong", 0: "not judged"}
MARKS = {1: ("✓", "green"), -1: ("✗", "red"), 0: ("?", "yellow"), None: ("·", "dim")}


@dataclass(frozen=True)
class StepView:
    """One step of a solution. `judgement` is None where no verifier judged; `advantage` is that of its last token."""

    text: str
    judgement: int | None
    reward: float | None
    advantage: float | None

    @property
    def numbers(self) -> list[str]:
        """Judgement, reward and advantage, as far as there are any."""
        shown = [] if self.judgement is None else [JUDGEMENT_NAMES[self.judgement]]
        named = (("reward", self.reward), ("advantage", self.advantage))
        return [*shown, *(f"{name} {value:+.2f}" for name, value in named if value is not None)]


def read_solution_of(row: RolloutRow, protocol: ProtocolConfig) -> Solution:
    """Return the solution of a generator row, or the one that a verifier row judged."""
    return read_solution(row.response_text if row.role == "generator" else row.solution_text or "", protocol)


def step_views(row: RolloutRow, solution: Solution) -> list[StepView]:
    """Return the steps of the `solution` of a row."""
    is_solution = row.role == "generator"
    views = []
    for k, step in enumerate(solution.steps):
        ends = row.step_end_tokens if is_solution else ()
        views.append(
            StepView(
                text=step.text.strip(),
                judgement=row.step_judgements[k] if k < len(row.step_judgements) else None,
                reward=row.step_rewards[k] if k < len(row.step_rewards) else None,
                advantage=row.advantages[ends[k]] if k < len(ends) else None,
            )
        )
    return views


def facts(row: RolloutRow, solution: Solution) -> list[tuple[str, str, bool | None]]:
    """Yield the facts of a response beside its text: (name, value, good or bad or neither)."""
    known: list[tuple[str, str, bool | None]] = []
    answer = find_answer(solution)
    known.append(("answer", "none" if answer is None else answer, None))
    known.append(("gold answer", str(row.gold_answer), None))
    correct = row.solution_correct
    if correct is not None:
        known.append(("solution is", "right" if correct else "wrong", correct))
    if row.final_judgement is not None:
        agrees = None if correct is None or row.final_judgement < 0 else bool(row.final_judgement) == correct
        verdict = {1: "right", 0: "wrong", -1: "nothing"}[row.final_judgement]
        known.append(("verifier says", verdict, agrees if row.final_judgement >= 0 else False))
    for name in ("format_reward", "reward", "class_weight", "alpha"):
        value = getattr(row, name)
        if value is not None:
            known.append((name.replace("_", " "), f"{value:.3g}", None))
    if row.advantages:
        known.append(("advantage of the first token", f"{row.advantages[0]:+.3f}", None))
    known.append(("tokens", str(len(row.response_ids)), None))
    return known


def choose_examples(rows: Sequence[RolloutRow], limit: int) -> list[RolloutRow]:
    """Return `limit` rows worth reading: first one right and one wrong of each group that has both."""
    groups: dict[str, list[RolloutRow]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row)

    def is_good(row: RolloutRow) -> bool:
        if row.role == "generator":
            return bool(row.solution_correct)
        return row.final_judgement == int(bool(row.solution_correct))

    first_of_kind = [{is_good(row): row for row in reversed(group)} for group in groups.values()]
    first_of_kind.sort(key=len, reverse=True)  # keeps the order of equals
    return [kinds[good] for kinds in first_of_kind for good in (True, False) if good in kinds][:limit]


def load_step(directory: RunDirectory, role: str, step: int | None) -> tuple[int, list[RolloutRow]]:
    """Return the dump of `role` at `step`, or the last one; raises UserError naming the steps there are."""
    steps = dumped_steps(directory.rollouts).get(role, [])
    if not steps:
        raise UserError(
            f"{directory.path} has no dumped rollouts of the {role}. "
            "They are written at step 1 and every train.dump_every steps; 0 turns them off."
        )
    if step is not None and step not in steps:
        shown = ", ".join(map(str, steps))
        raise UserError(f"step {step} of the {role} was not dumped; there are: {shown}")
    number = steps[-1] if step is None else step
    return number, read_rollouts(directory.rollout_file(role, number))


def show_rollouts(
    directory: RunDirectory,
    *,
    step: int | None = None,
    role: str = "generator",
    limit: int = 4,
    console: Console | None = None,
) -> None:
    """Print up to `limit` responses of one dumped step, the last one unless `step` says which."""
    if role not in ("generator", "verifier"):
        raise UserError(f"role {role!r} is neither generator nor verifier")
    console = console or Console()
    number, rows = load_step(directory, role, step)
    protocol = read_protocol(directory.config)
    others = ", ".join(map(str, dumped_steps(directory.rollouts)[role]))
    console.print(Text(f"{role}, step {number}: {len(rows)} responses (dumped steps: {others})", style="bold"))
    for row in rows[:limit]:
        console.print(_rollout_panel(row, protocol))
    if len(rows) > limit:
        console.print(Text(f"{len(rows) - limit} more; show them with --limit {len(rows)}", style="dim"))


def _rollout_panel(row: RolloutRow, protocol: ProtocolConfig) -> RenderableType:
    solution = read_solution_of(row, protocol)
    steps = Table(box=None, padding=(0, 1), show_header=True, header_style="dim", expand=True)
    steps.add_column("", width=1)
    steps.add_column("step", ratio=1)
    steps.add_column("reward", justify="right")
    steps.add_column("advantage", justify="right")
    for view in step_views(row, solution):
        mark, color = MARKS[view.judgement]
        numbers = ("" if value is None else f"{value:+.3f}" for value in (view.reward, view.advantage))
        steps.add_row(Text(mark, style=f"bold {color}"), Text(visible(view.text), style=color), *numbers)
    known = Text()
    for name, value, good in facts(row, solution):
        known.append(f"{name} ", style="dim")
        known.append(f"{visible(value)}   ", style={True: "bold green", False: "bold red", None: ""}[good])
    parts: list[RenderableType] = [Text(visible(row.question.strip()), style="bold"), steps, known]
    if not solution.steps:
        parts.insert(1, Text(visible(row.response_text.strip()) or "(empty response)", style="dim"))
    verification = row.response_text if row.role == "verifier" else row.verification_text
    for text in filter(None, [verification, *row.other_verifications]):
        parts += [Text("verification", style="dim"), Text(visible(text.strip()))]
    return Panel(Group(*parts), title=Text(visible(row.response_id)), title_align="left", border_style="dim")
