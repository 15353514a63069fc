"""What is kept of an evaluation's turns answers what was asked then, and nothing else; all ranks have the same."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.ranks import run_ranks

SOLVED, OTHER = ["<step>1</step>", "è"], ["<step>1</step>", "e"]


def on_rank(folder: Path) -> list[tuple[list[str], list[list[int]], list[str]]]:
    """For each attempt: the turns that were begun here, the token ids given, and what was told."""
    import torch.distributed as dist

    from tango_hpc.base.types import Generation
    from tango_hpc.models.parallel.exchange import Exchange
    from tango_hpc.stages.eval_progress import EvalProgress

    found = []
    exchange = Exchange(["verifier"], "verifier")
    attempts: list[tuple[dict[str, object], list[str]]] = [
        ({"seed": 0}, SOLVED),
        ({"seed": 0}, SOLVED),
        ({"seed": 0}, OTHER),
        ({"seed": 1, "samples": (1,)}, OTHER),
    ]
    for number, (made_with, about) in enumerate(attempts):
        begun: list[str] = []
        told: list[str] = []
        turns = EvalProgress(folder, made_with, exchange, begin=begun.append, tell=told.append)
        given: list[list[int]] = []
        for turn, of in (("greedy", []), ("judging greedy, time 1 of 2", about)):
            made = Generation([number, 7], [0.0, 0.0], "stop")
            given += [one.token_ids for one in turns.once(turn, lambda made=made: [made], about=of)]
        found.append((begun, given, told))
        dist.barrier()
    return found


def test_a_turn_that_was_asked_otherwise_or_about_other_texts_is_asked_again(tmp_path: Path) -> None:
    first, second = run_ranks(on_rank, 2, tmp_path)
    greedy, judging = tmp_path / "greedy.parquet", tmp_path / "judging_greedy_time_1_of_2.parquet"
    again = "was asked for otherwise, and is asked for again"
    both = ["greedy", "judging greedy, time 1 of 2"]
    assert first == [
        (both, [[0, 7], [0, 7]], []),
        ([], [[0, 7], [0, 7]], []),
        (both[1:], [[0, 7], [2, 7]], [f"{judging} {again}"]),
        (both, [[3, 7], [3, 7]], [f"{greedy} {again}", f"{judging} {again}"]),
    ]
    assert [(begun, given) for begun, given, _ in second] == [(begun, given) for begun, given, _ in first]
