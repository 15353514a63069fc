"""The prompts of both roles, as token ids.

What is asked stands in files with named fields (`read_prompt`), which a user may replace: `generator.prompt` and
`verifier.prompt`. A tokenizer with a chat template gets its messages through it; one without gets them as plain text.
Whether it has one is settled where it is loaded (`load_tokenizer`). The tiny models
that are built from scratch speak a language of tags and letters in which no instructions can be written: their
tokenizer is known by its `<solve>` token, and their prompts are `<question>…<solve>` and
`<question>…<solution>…<verify>`.

A step is judged on its own, given what the steps before it say: a mistake costs the step that makes it, and a right
continuation of it is right. Gold labels (`Task.label_all`) and the verifier's instructions agree in this. The first
step that is INCORRECT, which ProcessBench asks for, is the same either way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from tango_hpc.base.errors import UserError

QUESTION, SOLVE, SOLUTION, VERIFY = "<question>", "<solve>", "<solution>", "<verify>"

# The fields of each role's prompt; all but the optional ones have to stand in it.
FIELDS = {"generator": ("question",), "verifier": ("question", "solution", "num_steps")}
OPTIONAL = {"num_steps"}
USER_LINE = "=== user"
# What day it is to chat templates that say so, as those of Llama 3.1 and 3.2: a run must not depend on when it is made.
TODAY = datetime(2024, 7, 26)
_FIELD = re.compile(rf"(?<![\w\\^])\{{({'|'.join(FIELDS['verifier'])})\}}")
# A name in braces that are not the argument of a TeX command: {answer}, but not \boxed{answer} or \frac{a}{b}.
_NAME = re.compile(r"(?<![\w\\}^])\{([a-z_]+)\}")


@dataclass(frozen=True)
class Prompt:
    """The prompt of a role: the user's message with fields in braces, and the system's, if there is one."""

    user: str
    system: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def token_ids(self, tokenizer: Any, **values: object) -> list[int]:
        """Return the prompt with the fields' values, in the tokenizer's chat template or as plain text."""
        user = _FIELD.sub(lambda match: str(values[match[1]]), self.user)
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": user}]
            if self.system is not None:
                messages.insert(0, {"role": "system", "content": self.system})
            arguments = {"strftime_now": TODAY.strftime, **self.template_arguments}
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
            except TemplateError as error:
                raise UserError(
                    f"the chat template of {tokenizer.name_or_path} cannot put this prompt: {error}; give another one "
                    "(chat_template of the role: a file, or none), or a prompt without a system message"
                ) from None
            return _encode(text, tokenizer)
        text = user if self.system is None else f"{self.system}\n\nUser: {user}\n\nAssistant:\n"
        return tokenizer(text)["input_ids"]


def read_prompt(
    role: str,
    path: Path | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> Prompt:
    """Return the prompt of a role from a file; the shipped one without a path.

    What stands above the line `=== user` is the system's message, what stands below it the user's; in a file without
    that line all is the user's, and without a chat template such a file is the whole prompt as it stands. Fields are
    `{question}`, and for the verifier `{solution}` and `{num_steps}`. Raises UserError for a file that cannot be read,
    lacks a field that is needed or names one that there is not, or that the model of `tokenizer` cannot be asked with.
    """
    if path is not None and tokenizer is not None and speaks_tags_only(tokenizer):
        raise UserError(f"{role}.prompt: a tiny model knows no words, so {path} cannot be put to it; leave it out")
    source = path if path is not None else Path(__file__).parent / "shipped_prompts" / f"{role}.txt"
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{role}.prompt: {source} cannot be read: {error}") from None
    above, line, below = f"\n{text}".rstrip("\n").partition(f"\n{USER_LINE}\n")
    system, user = (above[1:] or None, below) if line else (None, above[1:])
    found, above_found = set(_FIELD.findall(user)), set(_FIELD.findall(system or ""))
    known = ", ".join(f"{{{name}}}" for name in FIELDS[role])
    if missing := set(FIELDS[role]) - OPTIONAL - found:
        raise UserError(
            f"{role}.prompt: {source} lacks {{{min(missing)}}} in the user's message; its fields are {known}"
        )
    unknown = {*found, *above_found, *_NAME.findall(text)} - set(FIELDS[role])
    if unknown or above_found:
        name = min(unknown or above_found)
        why = "names no field" if unknown else "stands in the system's message, which is the same for all questions"
        raise UserError(f"{role}.prompt: {source}: {{{name}}} {why}; the fields of the user's message are {known}")
    return Prompt(user, system, template_arguments or {})


@cache
def shipped_prompt(role: str) -> Prompt:
    """Return the prompt of a role that comes with the package."""
    return read_prompt(role)


def generator_prompt_ids(question: str, tokenizer: Any, prompt: Prompt | None = None) -> list[int]:
    """Return the prompt that asks for a solution of `question`; by the shipped text without a `prompt`."""
    if speaks_tags_only(tokenizer):
        return _encode(f"{QUESTION}{question}{SOLVE}", tokenizer)
    return (prompt or shipped_prompt("generator")).token_ids(tokenizer, question=question)


def verifier_prompt_ids(
    question: str, solution_text: str, num_steps: int, tokenizer: Any, prompt: Prompt | None = None
) -> list[int]:
    """Return the prompt that asks for a verification of `solution_text`, in which `num_steps` steps were found."""
    if speaks_tags_only(tokenizer):
        return _encode(f"{QUESTION}{question}{SOLUTION}{solution_text}{VERIFY}", tokenizer)
    chosen = prompt or shipped_prompt("verifier")
    return chosen.token_ids(tokenizer, question=question, solution=solution_text, num_steps=num_steps)


def response_ids(text: str, tokenizer: Any) -> list[int]:
    """Return the tokens of `text` and the end of sequence."""
    return [*_encode(text, tokenizer), tokenizer.eos_token_id]


def stop_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a response: the end of sequence, and the ends of a turn that Qwen and Llama 3
    write.
    """
    known = (_token_id(token, tokenizer) for token in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>"))
    ends_of_turn = [token_id for token_id in known if token_id is not None]
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *ends_of_turn]))


def speaks_tags_only(tokenizer: Any) -> bool:
    """Return whether this is the tokenizer of a tiny model, which has tokens for tags and letters only."""
    return _token_id(SOLVE, tokenizer) is not None


def _token_id(token: str, tokenizer: Any) -> int | None:
    """Return the id of a token; None where the tokenizer has no such token. Copies no vocabulary."""
    token_id = tokenizer.convert_tokens_to_ids(token)
    return None if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != token else token_id


def _encode(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
