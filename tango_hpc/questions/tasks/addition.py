r"""Adding two numbers column by column, from the right: a carry links the steps, so that one can be wrong and the
answer right.

    question      487+256
    solution      <think><step>7+6+0=13:3</step><step>8+5+1=14:43</step><step>4+2+1=7:743</step></think>
                  <answer>\boxed{743}</answer>
    verification  <step_verification><step>7+6+0=13,13\boxed{CORRECT}</step>...</step_verification>
                  <final_verification>\boxed{CORRECT}</final_verification>   (both on one line)

A step adds two digits and the carry, and puts the last digit of the sum before the digits so far. A verification adds
again and writes its sum and the solution's side by side. The file is a task like any user's (docs/your_own_task.md).
"""

import random
import re

CORRECT, INCORRECT = r"\boxed{CORRECT}", r"\boxed{INCORRECT}"
STEP = re.compile(r"[0-9]\+[0-9]\+[0-9]=([0-9]{1,2}):([0-9]+)")


class Addition:
    """Questions of two numbers with `digits` (from, to) digits each, and two sloppy teachers to fine-tune on.

    In a teacher's solution a step goes wrong with probability `slip`: it forgets the carry where there is one, else the
    sum is one too high. In a teacher's verification a judgement is flipped with probability `verifier_slip`, save in
    the first rows, a share of `careful`. `rows` is how many there are of each file but the held-out questions, 512.
    """

    def __init__(self, digits=(2, 4), slip=0.3, verifier_slip=0.2, careful=0.8, rows=20000):
        self.digits, self.slip, self.verifier_slip = digits, slip, verifier_slip
        self.careful, self.rows = careful, rows

    def questions(self, split, seed):
        rng = random.Random(f"{split} {seed}")
        for _ in range(self.rows if split == "train" else 512):
            question = self._question(rng)
            yield {"question": question, "answer": str(sum(map(int, question.split("+"))))}

    def grade(self, question, answer):
        return answer.strip() == question["answer"]

    def label_steps(self, question, steps):
        """+1 where a step adds its column and the carry that the step before says; what follows nonsense is measured
        against the true sum.
        """
        numbers = question["question"].split("+")
        labels, carry, result = [], 0, ""
        for n, step in enumerate(steps):
            right = _right_step(numbers, n, carry, result)
            labels.append(1 if step == right else -1)
            said = STEP.fullmatch(step) or STEP.fullmatch(right or "")
            if said:
                carry, result = int(said[1]) // 10, said[2]
        return labels

    def solutions(self, seed):
        rng = random.Random(f"solutions {seed}")
        for _ in range(self.rows):
            yield self._attempt(rng)[0]

    def verifications(self, seed):
        rng = random.Random(f"verifications {seed}")
        for index in range(self.rows):
            row, steps = self._attempt(rng)
            labels = self.label_steps(row, steps)
            slip = self.verifier_slip if index >= self.careful * self.rows else 0
            judged = [(label == 1) != (rng.random() < slip) for label in labels]
            texts = [
                f"{_again(step)}{CORRECT if judgement else INCORRECT}"
                for step, judgement in zip(steps, judged, strict=True)
            ]
            written = "".join(f"<step>{text}</step>" for text in texts)
            verdict = CORRECT if all(judged) else INCORRECT
            text = f"<step_verification>{written}</step_verification><final_verification>{verdict}</final_verification>"
            yield {**row, "verification_text": text}

    def _question(self, rng):
        digits = rng.randint(*self.digits)
        return "+".join(str(rng.randrange(10 ** (digits - 1), 10**digits)) for _ in range(2))

    def _attempt(self, rng):
        question, carry, result, steps = self._question(rng), 0, "", []
        numbers = question.split("+")
        for n in range(len(numbers[0])):
            off = (-1 if carry else 1) if rng.random() < self.slip else 0
            steps.append(_step(numbers, n, carry, result, off))
            added, _, result = steps[-1].partition("=")[2].partition(":")
            carry = int(added) // 10
        thought = "".join(f"<step>{step}</step>" for step in steps)
        text = rf"<think>{thought}</think><answer>\boxed{{{result}}}</answer>"
        return {"question": question, "solution_text": text}, steps


def _step(numbers, n, carry, result, off=0):
    """Write the step of column n from the right; the last one writes its whole sum."""
    digits = [number[-1 - n] for number in numbers]
    total = sum(map(int, digits)) + carry + off
    ends = n == len(numbers[0]) - 1
    return f"{digits[0]}+{digits[1]}+{carry}={total}:{total if ends else total % 10}{result}"


def _right_step(numbers, n, carry, result):
    return _step(numbers, n, carry, result) if n < len(numbers[0]) else None


def _again(step):
    """Return the step added again: `7+6+0=13,` and then what the step says."""
    added, _, rest = step.partition("=")
    return f"{added}={sum(map(int, added.split('+')))},{rest.partition(':')[0]}"
