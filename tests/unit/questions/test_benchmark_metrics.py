"""Metrics of an evaluation against numbers computed by hand."""

from __future__ import annotations

import pytest

from tango_hpc.questions.benchmarks import estimates as metrics
from tango_hpc.questions.benchmarks.records import (
    GREEDY,
    Answer,
    facts,
    generator_estimates,
    read_answers,
    verifier_estimates,
    write_answers,
)


def test_wilson_interval_of_published_examples():
    # Newcombe 1998, Table I, method 3 (score without continuity correction).
    for hits, count, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]:  # fmt: skip
        estimate = metrics.share([True] * hits + [False] * (count - hits))
        assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-5)


def test_bootstrap_intervals_are_the_same_every_time_and_shrink_with_data():
    few, many = [0.0, 1.0] * 10, [0.0, 1.0] * 1000
    assert metrics.mean(few) == metrics.mean(few)
    assert metrics.mean(few).value == 0.5
    # The standard error of a mean of 2000 fair coins is 0.0112.
    assert metrics.mean(many).high - metrics.mean(many).low == pytest.approx(2 * 1.96 * 0.0112, rel=0.1)
    assert metrics.mean(few).high - metrics.mean(few).low > 0.3


def test_pass_at_k_is_the_chance_of_a_right_one_among_k():
    correct = [True, False, False, False]
    assert [metrics.pass_at_k(correct, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert metrics.pass_at_k([False] * 3, 2) == 0.0


def test_votes():
    assert metrics.majority_vote([0, 1, 1, -1]) == 1
    assert metrics.majority_vote([2, 5, 5, 2]) == 0  # a tie goes to the answer that came first
    assert metrics.majority_vote([-1, -1]) is None
    assert metrics.majority_vote([0, 0, 1], [0.2, 0.2, 0.9]) == 2
    assert metrics.best_of([0.1, 0.7, 0.7]) == 1


def test_f1_is_the_harmonic_mean_of_both_accuracies():
    right, hits = [True, True, False, False, False], [True, False, True, True, False]
    judged, flattered = list(zip("abcde", right, hits, strict=True)), list(zip("abcde", right, right, strict=True))
    estimate = metrics.harmonic_mean_f1(judged)
    assert estimate.value == pytest.approx(2 * 0.5 * (2 / 3) / (0.5 + 2 / 3))
    assert metrics.harmonic_mean_f1(flattered).value == 0.0  # always says right
    assert metrics.harmonic_mean_f1([("a", True, True)]) is None
    both = metrics.harmonic_mean_f1(judged, flattered)
    assert both.value == pytest.approx(estimate.value / 2) and both.count == 10


def test_the_interval_of_f1_is_over_questions():
    """Items of one question are alike: a hundred copies of each say no more than one."""
    once = [(str(i), i % 2 == 0, i % 3 > 0) for i in range(30)]
    one, many = metrics.harmonic_mean_f1(once), metrics.harmonic_mean_f1(once * 100)
    assert (one.value, one.low, one.high, one.count) == (many.value, many.low, many.high, 30)
    assert one.high - one.low > 0.3


def test_averages_weigh_each_set_the_same():
    assert metrics.mean_of_means([[1.0] * 10, [0.0] * 1000]).value == 0.5


def answer(question: str, sample: int, correct: bool, **more) -> Answer:
    defaults = {"cluster": int(correct), "answer": "a"} | more
    return Answer(question, "q", "g", sample, "text", 10, True, True, correct=correct, **defaults)


def test_a_generator_benchmark_from_its_answers(tmp_path):
    answers = [answer("1", GREEDY, True, verdict=1), answer("2", GREEDY, False, verdict=0)]
    answers += [answer("1", s, s == 3, score=0.9 if s == 3 else 0.1, verdict=int(s == 3)) for s in range(4)]
    answers += [answer("2", s, s < 2, cluster=0 if s < 2 else 1 + s, score=0.5, verdict=1) for s in range(4)]
    estimates = generator_estimates(answers)
    values = {name: one.value for name, one in estimates.items()}
    assert values["pass@1"] == 0.5
    assert values["avg@4"] == (0.25 + 0.5) / 2
    assert values["pass@2 of 4"] == pytest.approx((0.5 + (1 - 1 / 6)) / 2)
    assert values["maj@4"] == 0.5  # question 1 has three wrong votes against one
    assert values["best of 4"] == 1.0
    assert values["weighted vote@4"] == 1.0
    assert values["verifier F1"] == pytest.approx(2 * 1.0 * (4 / 6) / (1.0 + 4 / 6))
    write_answers(tmp_path / "a.parquet", answers)
    assert read_answers(tmp_path / "a.parquet") == answers
    assert facts(answers)["answers"] == 10 and facts(answers)["cut_off"] == 0


def test_processbench_from_its_answers():
    def judged(split, gold, correct):
        return Answer("1", "q", gold, GREEDY, "", 1, True, True, "0", correct, split=split)

    answers = [judged("gsm8k", "-1", True), judged("gsm8k", "2", True), judged("gsm8k", "0", False)]
    answers += [judged("math", "-1", False), judged("math", "3", True)]
    values = {name: one.value for name, one in verifier_estimates(answers).items()}
    assert values["F1 gsm8k"] == pytest.approx(2 / 3)
    assert (values["accuracy on right gsm8k"], values["accuracy on wrong gsm8k"]) == (1.0, 0.5)
    assert values["F1 math"] == 0.0
    assert values["F1 average"] == pytest.approx(1 / 3)
