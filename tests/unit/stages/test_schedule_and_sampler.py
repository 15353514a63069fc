"""Algorithm 1's order of steps, and the order in which questions are drawn."""

from __future__ import annotations

from pathlib import Path

from tango_hpc.base.config import load_config
from tango_hpc.method.role_schedule import role_schedule
from tango_hpc.questions.data.sampler import QuestionSampler

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"


def initials(*overrides: str) -> str:
    return "".join(role[0] for role in role_schedule(load_config(QUICKSTART, ["run.dir=/nowhere/run", *overrides])))


def test_warm_up_then_three_to_one() -> None:
    assert initials("train.verifier_warmup_steps=2", "train.generator_steps=7") == "vv" + "gggv" + "gggv" + "g"
    assert initials("train.verifier_warmup_steps=0", "train.generator_steps=3") == "ggg"


def test_frozen_roles_take_no_steps() -> None:
    common = ("train.verifier_warmup_steps=2", "train.generator_steps=7")
    assert initials(*common, "generator.trainable=false") == "vv" + "v" + "v"
    frozen = ("verifier.trainable=false", "train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0")
    assert initials("train.generator_steps=4", *frozen) == "gggg"


def test_an_epoch_draws_each_question_once_and_the_next_in_another_order() -> None:
    sampler = QuestionSampler(10, seed=3)
    first, second = sampler.draw(10), sampler.draw(10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_without_shuffling_the_order_is_the_files_in_every_epoch() -> None:
    sampler = QuestionSampler(5, 3, shuffle=False)
    assert sampler.draw(8) == [0, 1, 2, 3, 4, 0, 1, 2]


def test_drawing_goes_on_where_the_state_was_taken() -> None:
    uninterrupted = QuestionSampler(7, seed=1)
    expected = [uninterrupted.draw(3) for _ in range(8)]
    sampler = QuestionSampler(7, seed=1)
    drawn = [sampler.draw(3) for _ in range(4)]
    resumed = QuestionSampler(7, seed=1)
    resumed.load_state_dict(sampler.state_dict())
    assert drawn + [resumed.draw(3) for _ in range(4)] == expected
