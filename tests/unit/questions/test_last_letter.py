"""The last-letter task: rows, grading, gold labels, and that the tiny tokenizer spells all of it."""

from __future__ import annotations

import json
import re

import pytest
from transformers import AutoModelForCausalLM

from tango_hpc.base.config.roles import TinyModelConfig
from tango_hpc.base.config.tasks import TaskConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.prompts import read_prompt
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.protocol.tokenizer import load_tokenizer
from tango_hpc.questions.protocol.verification import parse_verification
from tango_hpc.questions.tasks import get_task, last_letter
from tango_hpc.questions.tasks.tiny import build_tiny_model

SHORT = {"words": (2, 4), "letters": (3, 6)}


@pytest.fixture(scope="module")
def task():
    return get_task(TaskConfig(name="last_letter"))


def labels(task, question: str, *steps: str) -> list[int]:
    text = "<think>" + "".join(f"<step>{step}</step>" for step in steps) + "</think>"
    return task.label_steps({"question": question}, parse_solution(text).steps)


def test_unknown_task_is_named():
    with pytest.raises(ValueError, match="chess"):
        get_task(TaskConfig(name="chess"))


def test_questions(task):
    rows = last_letter.rl_rows(3, 200, words=(2, 5), letters=(1, 4))
    assert rows == last_letter.rl_rows(3, 200, words=(2, 5), letters=(1, 4))
    assert rows != last_letter.rl_rows(4, 200, words=(2, 5), letters=(1, 4))
    assert {len(row["question"].split()) for row in rows} == {2, 3, 4, 5}
    assert {len(word) for row in rows for word in row["question"].split()} == {1, 2, 3, 4}
    assert len({row["id"] for row in rows}) == 200
    assert all(row["answer"] == "".join(word[-1] for word in row["question"].split()) for row in rows)


def test_grading(task):
    row = {"answer": "te"}
    answers = ["te", " t e ", "TE", "\\text{te}", "et", "tee", None, "", "{te", "\\boxed{te}"]
    grades = task.grade_all([(row, answer) for answer in answers])
    assert [grade.correct for grade in grades] == [True, True, True, True, False, False, False, False, False, False]
    assert task.grade_all([({"answer": "tE"}, "Te")])[0].correct, "of a user's own file"


def test_labels_of_right_and_wrong_steps(task):
    assert labels(task, "cat horse", "cat:t->t", "horse:e->te") == [1, 1]
    assert labels(task, "cat horse", "cat:c->c", "horse:e->ce") == [-1, 1]  # goes on rightly from a wrong step
    assert labels(task, "cat horse", "cat:t->t", "horse:e->e") == [1, -1]  # forgets the letters so far
    assert labels(task, "cat horse", "cat:t->t", "house:e->te") == [1, 1]  # spells another word with its last letter
    assert labels(task, "cat horse", "cat:c->t", "horse:e->te") == [-1, 1]  # names a letter and appends another
    assert labels(task, "cat horse", "cat:t->t", "horse:e->te", "cat:t->tet") == [1, 1, -1]  # a step too many
    assert labels(task, "cat horse", "no idea", "horse:e->te") == [-1, 1]  # after nonsense: the true letters so far
    assert labels(task, "cat horse", "", "->", ":->") == [-1, -1, -1]
    assert labels(task, "cat horse") == []


@pytest.mark.parametrize("form", ["tagged", "free"])
def test_labels_and_the_verifiers_instructions_judge_each_step_on_its_own(task, form):
    assert labels(task, "cat horse dog", "cat:t->t", "horse:h->th", "dog:g->thg") == [1, -1, 1]
    asked = read_prompt("verifier", form=form).user
    assert "Judge each step on its own: the step that goes wrong is INCORRECT" in asked
    assert "goes on rightly from what earlier steps say is CORRECT, even where they are wrong" in asked
    assert "builds on" not in asked


def test_labels_of_prose_and_of_a_worded_question(task):
    question = last_letter.worded_question(["cat", "horse"])
    assert labels(task, question, "The first word is cat: t -> t", "The next is horse : e -> te.") == [1, 1]
    assert labels(task, question, "t -> t") == [1]  # does not repeat the word
    assert labels(task, question, "I take t -> t") == [-1]  # names no letter


def test_generator_teacher_slips_as_often_as_told(task):
    rows = last_letter.generator_sft_rows(0, 400, **SHORT, slip=0.5)
    assert rows == last_letter.generator_sft_rows(0, 400, **SHORT, slip=0.5)
    all_labels = [label for row in rows for label in task.label_steps(row, parse_solution(row["solution_text"]).steps)]
    # about 1200 steps; a word that begins as it ends (1 in 26) hides a slip: 0.5 · 25/26 = 0.48 ± 4 · 0.0144
    assert 0.42 < all_labels.count(-1) / len(all_labels) < 0.54
    for row in last_letter.generator_sft_rows(1, 50, **SHORT, slip=0.0):
        solution = parse_solution(row["solution_text"])
        assert solution.well_formed
        answer = "".join(word[-1] for word in row["question"].split())
        (grade,) = task.grade_all([({"answer": answer}, solution.answer)])
        assert grade.correct


def test_verifier_teacher_without_slips_is_right(task):
    rows = last_letter.verifier_sft_rows(0, 200, **SHORT, slip=0.0)
    verdicts = []
    for row in rows:
        steps = parse_solution(row["solution_text"]).steps
        verification = parse_verification(row["verification_text"], len(steps))
        assert parse_verification(row["verification_text"], len(steps), "graded").format_reward == 1.0
        assert verification.is_complete
        gold = task.label_steps(row, steps)
        assert verification.judgements == gold
        assert verification.final == int(all(label == 1 for label in gold))
        assert verification.format_reward == 1.0
        verdicts.append(verification.final)
    assert 0.35 < sum(verdicts) / len(verdicts) < 0.65


def test_verifier_teacher_flips_only_after_the_careful_share(task):
    rows = last_letter.verifier_sft_rows(2, 200, **SHORT, slip=0.5, careful=0.75)
    is_right = []
    for row in rows:
        steps = parse_solution(row["solution_text"]).steps
        is_right.append(
            parse_verification(row["verification_text"], len(steps)).judgements == task.label_steps(row, steps)
        )
    assert all(is_right[:150])
    assert sum(is_right[150:]) < 25


def test_verifier_teacher_flips_as_often_as_told_and_concludes_from_its_judgements(task):
    flips = []
    for row in last_letter.verifier_sft_rows(1, 400, **SHORT, slip=0.3):
        steps = parse_solution(row["solution_text"]).steps
        verification = parse_verification(row["verification_text"], len(steps))
        assert verification.final == int(all(judgement == 1 for judgement in verification.judgements))
        flips += [a != b for a, b in zip(task.label_steps(row, steps), verification.judgements, strict=True)]
    # About 1,200 steps: 0.3 ± 4 · 0.0132.
    assert 0.247 < sum(flips) / len(flips) < 0.353


def test_typos_are_no_mistakes_in_words_and_mistakes_in_letters_appended(task):
    rows = last_letter.verifier_sft_rows(1, 400, **SHORT, slip=0.0, typos=0.2)
    misspelt, misjoined = [], []
    for row in rows:
        steps = parse_solution(row["solution_text"]).steps
        verification = parse_verification(row["verification_text"], len(steps))
        gold = task.label_steps(row, steps)
        assert verification.judgements == gold  # by the rules that label what a model writes
        assert verification.final == int(-1 not in gold)
        before = ""
        for word, step, label in zip(row["question"].split(), steps, gold, strict=True):
            spelled, letter, letters = re.fullmatch(r"(\w+):(\w)->(\w+)", step.text).groups()
            assert letters[:-1] == before  # goes on from what is written
            before = letters
            differing = [a != b for a, b in zip(word, spelled, strict=True)]
            assert sum(differing) <= 1
            misspelt.append(any(differing))
            misjoined.append(letters[-1] != letter)
            assert not (misjoined[-1] and label == 1)
            assert (
                f"<step>{word}:{word[-1]}{letters[-1]}" in row["verification_text"]
            )  # what is there, and what should be
    # About 1,200 steps: 0.2 ± 4 · 0.0115 misspelt; 0.6 of the solutions are wrong, and 0.2 of their steps: 0.12 ± 4 ·
    # 0.01.
    assert 0.154 < sum(misspelt) / len(misspelt) < 0.246
    assert 0.08 < sum(misjoined) / len(misjoined) < 0.16


def test_verdicts_about_the_solution_do_not_follow_from_the_judgements(task):
    rows = last_letter.verifier_sft_rows(1, 400, **SHORT, slip=0.3, careful=0.5, verdicts="solution")
    tied = last_letter.verifier_sft_rows(1, 400, **SHORT, slip=0.3, careful=0.5)
    assert [row["solution_text"] for row in rows][:1] == [row["solution_text"] for row in tied][:1]
    flips, untied = [], 0
    for row in rows:
        steps = parse_solution(row["solution_text"]).steps
        verification = parse_verification(row["verification_text"], len(steps))
        flips.append(verification.final != all(label == 1 for label in task.label_steps(row, steps)))
        untied += verification.final != all(judgement == 1 for judgement in verification.judgements)
    assert not any(flips[:200])  # the careful ones
    assert 0.17 < sum(flips[200:]) / 200 < 0.43  # 0.3 ± 4 · 0.0324
    assert untied > 40


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_tiny_model_and_its_tokenizer(family, tmp_path):
    dims = TinyModelConfig(
        family=family, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2
    )
    build_tiny_model(tmp_path / "a", dims, seed=7)
    build_tiny_model(tmp_path / "b", dims, seed=7)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert json.loads((tmp_path / "a/config.json").read_text())["model_type"] == family
    tokenizer = load_tokenizer(tmp_path / "a")
    row = last_letter.verifier_sft_rows(0, 1, words=(12, 12), letters=(3, 12), slip=0.2)[0]
    for text in row.values():
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(token_ids) == text
        assert tokenizer.unk_token_id not in token_ids
    # one token per letter and per tag: <think><step>ab:b->b</step></think>
    assert len(tokenizer("<think><step>ab:b->b</step></think>", add_special_tokens=False)["input_ids"]) == 10
    assert max(tokenizer.get_vocab().values()) < AutoModelForCausalLM.from_pretrained(tmp_path / "a").config.vocab_size


def test_words_of_a_dictionary(tmp_path):
    file = tmp_path / "words"
    file.write_text("cat\ndog\nhorse\nZoe\nit's\nhorse\n\nbee\nmouse\n")
    words = last_letter.read_dictionary(file)
    assert words == {3: ["bee", "cat", "dog"], 5: ["horse", "mouse"]}
    rows = last_letter.rl_rows(0, 50, words=(3, 5), letters=(3, 3), dictionary=words)
    assert rows == last_letter.rl_rows(0, 50, words=(3, 5), letters=(3, 3), dictionary=words)
    used = {word for row in rows for word in row["question"].split()}
    assert used == {"bee", "cat", "dog"}
    with pytest.raises(UserError, match="no word of 4 letters"):
        last_letter.rl_rows(0, 50, words=(3, 5), letters=(3, 5), dictionary=words)
    # drills keep their words of one letter
    drill = last_letter.verifier_sft_rows(0, 2, words=(3, 5), letters=(3, 3), slip=0.0, drill=0.5, dictionary=words)
    assert {len(word) for word in drill[0]["question"].split()} == {1}
    assert {word for word in drill[1]["question"].split()} <= used
    with pytest.raises(UserError, match=r"task.last_letter.dictionary: .*/none cannot be read"):
        last_letter.read_dictionary(tmp_path / "none")
    file.write_text("Zoe\n")
    with pytest.raises(UserError, match="has no words of lower-case letters"):
        last_letter.read_dictionary(file)
