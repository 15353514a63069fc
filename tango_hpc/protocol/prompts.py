"""The prompts of both roles, as token ids.

A tokenizer with a chat template gets its messages through it; one without gets them as plain text. The tiny models
that are built from scratch speak a language of tags and letters in which no instructions can be written: their
tokenizer is known by its `<solve>` token, and their prompts are `<question>…<solve>` and
`<question>…<solution>…<verify>`.

A step is judged on its own, given what the steps before it say: a mistake costs the step that makes it, and a right
continuation of it is right. Gold labels (`Task.label_steps`) and the verifier's instructions agree in this. The first
step that is INCORRECT, which ProcessBench asks for, is the same either way.
"""

from __future__ import annotations

from typing import Any

QUESTION, SOLVE, SOLUTION, VERIFY = "<question>", "<solve>", "<solution>", "<verify>"

GENERATOR_SYSTEM = r"""You solve problems in small, explicit steps. Your whole reply has this form:

<think>
<step>the first step of your reasoning</step>
<step>the second step</step>
</think>
<answer>\boxed{the final answer}</answer>

What matters:
- Put each step of the reasoning, one logical step at a time, between <step> and </step>, and all steps between <think> and </think>.
- Never put one step inside another, and close every tag that you open.
- Give the final answer once, inside \boxed{} between <answer> and </answer>. It is read by a program.
- Write nothing before <think>, nothing between the elements and nothing after </answer>.

For example, to "A pen costs 3 dollars. What do 4 pens and a 5 dollar book cost?" you reply:

<think>
<step>The 4 pens cost 4 * 3 = 12 dollars.</step>
<step>Together with the book that makes 12 + 5 = 17 dollars.</step>
</think>
<answer>\boxed{17}</answer>"""

VERIFIER_SYSTEM = r"""You check solutions to problems, step by step. For every <step> of the solution you say in your own words whether it is right and why, and then judge it. At the end you judge whether the final answer is right. Your whole reply has this form:

<step_verification>
<step>Step 1: your reasoning about the first step. \boxed{CORRECT}</step>
<step>Step 2: your reasoning about the second step. \boxed{INCORRECT}</step>
</step_verification>
<final_verification>\boxed{INCORRECT}</final_verification>

What matters:
- There is exactly one <step> element for each step of the solution, in the same order and with its number.
- Each holds your reasoning first and then exactly one judgement, \boxed{CORRECT} or \boxed{INCORRECT}.
- Judge each step on its own: the step that goes wrong is INCORRECT; a later step that goes on rightly from what earlier steps say is CORRECT, even where they are wrong.
- <final_verification> holds exactly one judgement of the final answer and nothing else.
- Write nothing before <step_verification> and nothing after </final_verification>."""


def generator_prompt_ids(question: str, tokenizer: Any) -> list[int]:
    """The prompt that asks for a solution of `question`."""
    if speaks_tags_only(tokenizer):
        return _encode(f"{QUESTION}{question}{SOLVE}", tokenizer)
    return _render(GENERATOR_SYSTEM, question, tokenizer)


def verifier_prompt_ids(question: str, solution_text: str, num_steps: int, tokenizer: Any) -> list[int]:
    """The prompt that asks for a verification of `solution_text`, in which `num_steps` steps were found."""
    if speaks_tags_only(tokenizer):
        return _encode(f"{QUESTION}{question}{SOLUTION}{solution_text}{VERIFY}", tokenizer)
    steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
    request = (
        f"The problem:\n\n{question}\n\nThe solution to check:\n\n{solution_text}\n\n"
        f"The solution has {steps} in <step> tags. Write {num_steps} <step> element{'s' * (num_steps != 1)} inside "
        "<step_verification>, then your judgement of the final answer inside <final_verification>."
    )
    return _render(VERIFIER_SYSTEM, request, tokenizer)


def response_ids(text: str, tokenizer: Any) -> list[int]:
    """`text` as a model should write it: its tokens and the end of sequence."""
    return [*_encode(text, tokenizer), tokenizer.eos_token_id]


def stop_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response: the end of sequence, and the ends of a turn that Qwen and Llama 3 write."""
    known = tokenizer.get_vocab()
    ends_of_turn = [known[token] for token in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>") if token in known]
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *ends_of_turn]))


def speaks_tags_only(tokenizer: Any) -> bool:
    """Whether this is the tokenizer of a tiny model, which has tokens for tags and letters only."""
    return SOLVE in tokenizer.get_vocab()


def _render(system: str, user: str, tokenizer: Any) -> list[int]:
    if tokenizer.chat_template:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return _encode(text, tokenizer)
    return tokenizer(f"{system}\n\nUser: {user}\n\nAssistant:\n")["input_ids"]


def _encode(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
