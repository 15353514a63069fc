r"""Last-letter concatenation (paper, Section 4.3): join the last letters of some words, one step per word.

    question      cat horse
    solution      <think><step>cat:t->t</step><step>horse:e->te</step></think><answer>\boxed{te}</answer>
    verification  <step_verification><step>cat:tt\boxed{CORRECT}</step><step>horse:ee\boxed{CORRECT}</step>
                  </step_verification><final_verification>\boxed{CORRECT}</final_verification>   (on one line)

A step names the word, its last letter, and the letters so far. A verification names the word, its last letter as the
verifier sees it and the letter that the solution appends, side by side, to be compared. Steps can be labelled exactly,
whatever a model writes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from tango_hpc.base.errors import UserError
from tango_hpc.base.tiny_language import LETTERS
from tango_hpc.questions.grading.pool import Verdict
from tango_hpc.questions.protocol.solution import Step
from tango_hpc.questions.protocol.verification import CORRECT, INCORRECT
from tango_hpc.questions.tasks.base import PlainQuestions

Range = tuple[int, int]  # from, to; both included
WordsByLength = dict[int, list[str]]
Verdicts = Literal["judgements", "solution"]  # what a fine-tuning verdict follows from
Split = Literal["train", "eval", "sft_generator", "sft_verifier"]
SPLITS: tuple[Split, ...] = get_args(Split)

WRONG_SOLUTIONS, WRONG_STEPS = 0.6, 0.75  # of the verifier's fine-tuning data: about as many wrong steps as right ones
DRILL_WORDS = (4, 8)

_MAX_DRAWS = 1000  # of letters for a question of given lengths: no split gets too few of them by chance
_LETTERS = re.compile(r"(?:\\text[a-z]*\{)?([A-Za-z]+)\}?")


class LastLetter(PlainQuestions):
    """The task: `question` is the words with spaces between them or `worded_question` of them, `answer` their last
    letters.
    """

    name = "last_letter"

    def grade_all(self, answers: Sequence[tuple[dict[str, Any], str | None]]) -> list[Verdict]:
        """Return whether each answer is the gold string; case, white space and a surrounding `\\text{}` do not
        count.
        """
        return [Verdict(answer is not None and _plain(answer) == _plain(row["answer"])) for row, answer in answers]

    def label_all(self, solutions: Sequence[tuple[dict[str, Any], Sequence[Step]]]) -> list[list[int] | None]:
        """Return the labels of `label_steps`."""
        return [self.label_steps(row, steps) for row, steps in solutions]

    def label_steps(self, row: dict[str, Any], steps: Sequence[Step]) -> list[int]:
        """+1 where step n appends the last letter of word n to the letters of the step before it, else −1.

        A step is judged on its own, as the verifier's prompt asks (base/prompts.py): after a wrong one, the next is
        right if it goes on rightly from there. The letter that it names must be the one that it appends; how it spells
        the word does not count. Steps beyond the last word are wrong, and so are steps that do not end in `->letters`;
        what follows such a step is measured against the true letters so far.
        """
        words = row["question"].rpartition(":")[2].replace(",", " ").lower().split()
        labels: list[int] = []
        before = ""
        for n, step in enumerate(steps):
            word = words[n] if n < len(words) else ""
            claim = _read_step(step.text)
            labels.append(1 if word and claim == (word[-1], before + word[-1]) else -1)
            before = claim[1] if claim is not None else "".join(word[-1] for word in words[: n + 1])
        return labels


def worded_question(words: Sequence[str]) -> str:
    """Return the question for a model that reads instructions: what to do, the form of a step, and the words."""
    return (
        "Take the last letter of each of the words below, in their order, and join the letters. Use one step per word, "
        "of the form `word:letter->letters` with the word, its last letter, and the last letters of all words so far.\n"
        f"The words: {', '.join(words)}"
    )


def _plain(answer: str) -> str:
    match = _LETTERS.fullmatch("".join(answer.split()))
    return match[1].lower() if match else answer


def _read_step(text: str) -> tuple[str, str] | None:
    """Return (letter, letters so far) of a step such as "cat:t->t", also after other words; None for other text."""
    left, arrow, letters = text.strip().rstrip(".").lower().rpartition("->")
    letter, letters = left.rpartition(":")[2].strip(), letters.strip()
    return (letter, letters) if arrow and len(letter) == 1 and letters.isalpha() else None


def split_of(words: Sequence[str]) -> Split:
    """Return the split that may ask these words, by a hash of them: no two splits share a question, whatever their
    seeds.
    """
    digest = hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()
    return SPLITS[int.from_bytes(digest, "big") % len(SPLITS)]


def read_dictionary(path: Path) -> WordsByLength:
    """Return the words of a file with one on each line, by their length: those of lower-case letters only, each once.

    Raises `UserError` where the file cannot be read or has none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"task.last_letter.dictionary: {path} cannot be read ({error}); give a text file with one word on each"
            " line, such as /usr/share/dict/words of Debian's package wamerican"
        ) from None
    found: WordsByLength = {}
    for word in sorted({line.strip() for line in lines}):
        if word and set(word) <= set(LETTERS):
            found.setdefault(len(word), []).append(word)
    if not found:
        raise UserError(f"task.last_letter.dictionary: {path} has no words of lower-case letters")
    return found


def rl_rows(
    seed: int,
    count: int,
    *,
    words: Range,
    letters: Range,
    split: Split = "train",
    worded: bool = False,
    dictionary: WordsByLength | None = None,
) -> list[dict[str, str]]:
    """Return `count` questions of random words: columns id, question, answer, source. The same seed, the same rows.

    `words` and `letters` are how many words a question and how many letters a word may have. `worded`: the question
    says what to do (`worded_question`), as a pretrained model needs; without it, it is the words alone. `dictionary`:
    the words to choose from; without it they are random letters. Raises
    `UserError` where the ranges leave too few questions to share out between the splits.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        sampled = _sample_words(rng, words, letters, split, dictionary)
        rows.append(
            {
                "id": f"last_letter-{split}-{seed}-{index}",
                "question": _question(sampled, worded),
                "answer": "".join(word[-1] for word in sampled),
                "source": "last_letter",
            }
        )
    return rows


def generator_sft_rows(
    seed: int,
    count: int,
    *,
    words: Range,
    letters: Range,
    slip: float,
    worded: bool = False,
    dictionary: WordsByLength | None = None,
) -> list[dict[str, str]]:
    """Return `count` solutions of a teacher that takes the first letter, not the last, with probability `slip` a step.

    Columns question, solution_text. The same seed, the same rows.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        sampled = _sample_words(rng, words, letters, "sft_generator", dictionary)
        chosen = [word[0] if rng.random() < slip else word[-1] for word in sampled]
        rows.append({"question": _question(sampled, worded), "solution_text": solution_text(sampled, chosen)})
    return rows


def verifier_sft_rows(
    seed: int,
    count: int,
    *,
    words: Range,
    letters: Range,
    slip: float,
    careful: float = 0.0,
    drill: float = 0.0,
    typos: float = 0.0,
    verdicts: Verdicts = "judgements",
    worded: bool = False,
    dictionary: WordsByLength | None = None,
) -> list[dict[str, str]]:
    """Return `count` verifications of a teacher that flips each step's judgement with probability `slip`.

    The rows are a curriculum. The first `drill` of them have `DRILL_WORDS` words of one letter, which teach to compare
    two letters. The first `careful` have no flips; the careless rows that follow make a verifier that knows better than
    it judges.

    `WRONG_SOLUTIONS` of the solutions are wrong: in them each step is wrong with probability `WRONG_STEPS`, at least
    one step is, and a wrong step has the first letter or, as often, any other of the word. With probability `typos` a
    step misspells its word, which is no mistake (`label_steps`), and a step of a wrong solution appends another letter
    than it names, which is one: RL leads generators to both, and a verifier that was never shown either misses them.

    The teacher names both letters rightly, and its final verdict follows from its own judgements, so that rewards for
    verdicts reach the judgements. With `verdicts` "solution" the verdict is the truth about the solution, flipped with
    probability `slip` by itself.
    Columns question, solution_text, verification_text. The same seed, the same rows.
    """
    rng, rows = np.random.default_rng(seed), []
    for index in range(count):
        drills = index < drill * count
        lengths = (DRILL_WORDS, (1, 1)) if drills else (words, letters)
        sampled = _sample_words(rng, *lengths, "sft_verifier", None if drills else dictionary)
        chosen = [word[-1] for word in sampled]
        misjoins = np.zeros(len(sampled), bool)
        if rng.random() < WRONG_SOLUTIONS:
            chosen = _letters_with_mistakes(rng, sampled)
            if typos and not drills:
                misjoins = rng.random(len(sampled)) < typos
        appended = [
            _other_letter(rng, letter) if other else letter for letter, other in zip(chosen, misjoins, strict=True)
        ]
        spelled = sampled
        if typos and not drills:
            spelled = [_misspelt(rng, word) if rng.random() < typos else word for word in sampled]
        flip = slip if index >= careful * count else 0.0
        judgements = _flipped(rng, sampled, chosen, appended, flip)
        verdict = all(judgements)
        if verdicts == "solution":
            verdict = (appended == [word[-1] for word in sampled]) != (rng.random() < flip)
        rows.append(
            {
                "question": _question(sampled, worded),
                "solution_text": solution_text(spelled, chosen, appended),
                "verification_text": verification_text(sampled, appended, judgements, verdict),
            }
        )
    return rows


def _letters_with_mistakes(rng: np.random.Generator, words: Sequence[str]) -> list[str]:
    """Return a letter of each word: the last one, or a wrong one with probability `WRONG_STEPS`, and at least once."""
    wrong = rng.random(len(words)) < WRONG_STEPS
    wrong[rng.integers(len(words))] = True
    return [_wrong_letter(rng, word) if is_wrong else word[-1] for word, is_wrong in zip(words, wrong, strict=True)]


def _flipped(
    rng: np.random.Generator, words: Sequence[str], chosen: Sequence[str], appended: Sequence[str], slip: float
) -> list[bool]:
    """Return the right judgement of each step, flipped with probability `slip`."""
    flips = rng.random(len(words)) < slip
    return [
        (letter == joined == word[-1]) != flip
        for word, letter, joined, flip in zip(words, chosen, appended, flips, strict=True)
    ]


def solution_text(words: Sequence[str], chosen: Sequence[str], appended: Sequence[str] | None = None) -> str:
    """Return the solution whose n-th step takes the letter `chosen[n]` from `words[n]` and appends it, or
    `appended[n]`.
    """
    letters = "".join(chosen if appended is None else appended)
    steps = "".join(
        f"<step>{word}:{letter}->{letters[: n + 1]}</step>"
        for n, (word, letter) in enumerate(zip(words, chosen, strict=True))
    )
    return f"<think>{steps}</think><answer>\\boxed{{{letters}}}</answer>"


def verification_text(
    words: Sequence[str], appended: Sequence[str], judgements: Sequence[bool], verdict: bool | None = None
) -> str:
    """Return the verification of the solution whose steps append these letters, with these judgements; without a
    `verdict` it is CORRECT if all of them are.
    """
    steps = "".join(
        f"<step>{word}:{word[-1]}{letter}{CORRECT if judgement else INCORRECT}</step>"
        for word, letter, judgement in zip(words, appended, judgements, strict=True)
    )
    final = CORRECT if (all(judgements) if verdict is None else verdict) else INCORRECT
    return f"<step_verification>{steps}</step_verification><final_verification>{final}</final_verification>"


def _question(words: Sequence[str], worded: bool) -> str:
    return worded_question(words) if worded else " ".join(words)


def _sample_words(
    rng: np.random.Generator, words: Range, letters: Range, split: Split, dictionary: WordsByLength | None
) -> list[str]:
    """Return words of random lengths, their letters, or they from the dictionary, drawn until the words belong to
    `split`.
    """
    lengths = rng.integers(*letters, size=rng.integers(*words, endpoint=True), endpoint=True)
    ends = np.cumsum(lengths).tolist()
    if dictionary is not None and (missing := set(lengths.tolist()) - dictionary.keys()):
        raise UserError(f"task.last_letter.dictionary has no word of {min(missing)} letters")
    for _ in range(_MAX_DRAWS):
        if dictionary is None:
            drawn = (rng.integers(len(LETTERS), size=ends[-1], dtype=np.uint8) + ord(LETTERS[0])).tobytes().decode()
            sampled = [drawn[start:end] for start, end in pairwise([0, *ends])]
        else:
            sampled = [dictionary[length][rng.integers(len(dictionary[length]))] for length in lengths.tolist()]
        if split_of(sampled) == split:
            return sampled
    raise UserError(
        f"{len(lengths)} word(s) of {', '.join(map(str, lengths))} letters make too few questions for the split "
        f"{split!r}; allow more words or letters"
    )


def _wrong_letter(rng: np.random.Generator, word: str) -> str:
    """Return a letter of `word` that is not its last: half of the time the first, else any; where all are equal, any
    other.
    """
    others = [letter for letter in word if letter != word[-1]]
    if not others:
        return str(rng.choice([letter for letter in LETTERS if letter != word[-1]]))
    if word[0] != word[-1] and rng.random() < 0.5:
        return word[0]
    return str(rng.choice(others))


def _other_letter(rng: np.random.Generator, letter: str) -> str:
    return str(rng.choice([other for other in LETTERS if other != letter]))


def _misspelt(rng: np.random.Generator, word: str) -> str:
    """Return `word` with one letter, at any place, replaced by another."""
    place = int(rng.integers(len(word)))
    return word[:place] + _other_letter(rng, word[place]) + word[place + 1 :]
