"""The prompts of both roles, as token ids.

The text of a prompt stands in a file with named fields (`read_prompt`), which a user may replace: `generator.prompt`
and `verifier.prompt`. A tokenizer with a chat template gets its messages through it; one without gets them as plain
text. `load_tokenizer` settles whether it has one. The tiny models that are built from scratch know tags and letters
alone, no instructions: their tokenizer is known by its `<solve>` token, and their prompts are `<question>…<solve>` and
`<question>…<solution>…<verify>`.

Text is text: what a question, a solution or a reference holds never becomes a token that ends a turn or begins one,
however it is spelled. The template's text may hold such tokens, the fields' values may not (`encode`).

A step is judged on its own, given what the steps before it say: a mistake costs the step that makes it, and a right
continuation of it is right. Gold labels (`Task.label_all`) and the verifier's instructions agree in this. The first
step that is INCORRECT, which ProcessBench asks for, is the same either way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError

from tango_hpc.base.errors import UserError
from tango_hpc.base.files import read_json

QUESTION, SOLVE, SOLUTION, VERIFY = "<question>", "<solve>", "<solution>", "<verify>"

# The fields of each role's prompt; all but the optional ones have to stand in it.
FIELDS = {"generator": ("question",), "verifier": ("question", "solution", "num_steps")}
OPTIONAL = {"num_steps"}
USER_LINE, ASSISTANT_LINE = "=== user", "=== assistant"
# What day it is to chat templates that say so, as those of Llama 3.1 and 3.2: a run must not depend on when it is made.
TODAY = datetime(2024, 7, 26)
_FIELD = re.compile(rf"(?<![\w\\^])\{{({'|'.join(FIELDS['verifier'])})\}}")
# A name in braces that are not the argument of a TeX command: {answer}, but not \boxed{answer} or \frac{a}{b}.
_NAME = re.compile(r"(?<![\w\\}^])\{([a-z_]+)\}")


# Tags of the protocol. Some tokenizers have tokens for them; they structure a response, not the conversation.
PROTOCOL_TAGS = frozenset(
    f"<{slash}{name}>"
    for name in ("think", "step", "answer", "step_verification", "final_verification")
    for slash in ("", "/")
)
_OPENED = re.compile(r"(?:<(?:think|step|answer|step_verification|final_verification)>\s*)+\Z")
# Stand for the fields' values while a chat template is rendered: private-use characters, which no template changes.
_MARKS = {name: chr(0xE000 + i) for i, name in enumerate(FIELDS["verifier"])}
_MARK = re.compile(f"([{''.join(_MARKS.values())}])")


@dataclass(frozen=True)
class Template:
    """A prompt around its fields: `parts` alternates between text and names of fields, beginning and ending with text.

    `opened`: the tags of the protocol in which the text ends, such as `<think>`: the response begins inside of them.
    `adds_special_tokens`: whether the tokenizer puts its own special tokens (a beginning of sequence) around the text.
    """

    parts: tuple[str, ...]
    adds_special_tokens: bool = False

    @property
    def opened(self) -> str:
        """Return the opening tags at the end, with the white space between and behind them; "" where there are none."""
        match = _OPENED.search(self.parts[-1])
        return match[0] if match else ""

    def token_ids(self, tokenizer: Any, values: Mapping[str, object]) -> list[int]:
        """Return the prompt with the fields' values."""
        texts = [part if i % 2 == 0 else str(values[part]) for i, part in enumerate(self.parts)]
        return encode(texts, tokenizer, self.adds_special_tokens)


@dataclass(frozen=True)
class Prompt:
    """The prompt of a role: the user's message with fields in braces, and the system's, if there is one.

    `opening`: the tags with which the reply begins, so that the model goes on inside of them; not for a model that
    thinks first, by its chat template.
    """

    user: str
    system: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    opening: str = ""

    def template(self, tokenizer: Any) -> Template:
        """Return the prompt in the tokenizer's chat template, or as plain text, around its fields.

        Raises UserError for a chat template that cannot put it.
        """
        if not tokenizer.chat_template:
            text = self.user if self.system is None else f"{self.system}\n\nUser: {self.user}\n\nAssistant:\n"
            if self.opening and self.system is None:
                text += "\n"
            return Template(tuple(_FIELD.split(text + self.opening)), adds_special_tokens=True)
        messages = [{"role": "user", "content": _FIELD.sub(lambda match: _MARKS[match[1]], self.user)}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        arguments = {"strftime_now": TODAY.strftime, **self.template_arguments}
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"the chat template of {tokenizer.name_or_path} cannot put this prompt: {error}; give another one "
                "(chat_template of the role: a file, or none), or a prompt without a system message"
            ) from None
        thinks = "<think>" in tokenizer.chat_template and not text.rstrip().endswith("</think>")
        text += "" if thinks else self.opening
        names = {mark: name for name, mark in _MARKS.items()}
        return Template(tuple(names.get(part, part) for part in _MARK.split(text)))

    def token_ids(self, tokenizer: Any, **values: object) -> list[int]:
        """Return the prompt with the fields' values, in the tokenizer's chat template or as plain text."""
        return self.template(tokenizer).token_ids(tokenizer, values)


def read_prompt(
    role: str,
    path: Path | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    form: Literal["tagged", "free"] = "tagged",
) -> Prompt:
    """Return the prompt of a role from a file; without a path the shipped one for solutions of that `form`.

    What stands above the line `=== user` is the system's message, what stands below it the user's; in a file without
    that line all is the user's, and without a chat template such a file is the whole prompt as it stands. Tags below a
    last line `=== assistant` begin the reply. Fields are `{question}`, and for the verifier those of `verifier_values`.
    Raises UserError for a file that cannot be read, lacks a field that is needed or names one that there is not, or
    that the model of `tokenizer` cannot be asked with.
    """
    if path is not None and tokenizer is not None and speaks_tags_only(tokenizer):
        raise UserError(f"{role}.prompt: a tiny model knows no words, so {path} cannot be put to it; leave it out")
    shipped = f"{role}.txt" if form == "tagged" else f"{role}_{form}.txt"
    source = path if path is not None else Path(__file__).parent / "shipped_prompts" / shipped
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{role}.prompt: {source} cannot be read: {error}") from None
    text, _, opening = f"\n{text}".rstrip("\n").partition(f"\n{ASSISTANT_LINE}\n")
    if opening and not _OPENED.fullmatch(opening):
        raise UserError(f"{role}.prompt: {source}: below {ASSISTANT_LINE} may stand opening tags of the form alone")
    above, line, below = text.partition(f"\n{USER_LINE}\n")
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
    return Prompt(user, system, template_arguments or {}, opening)


@cache
def shipped_prompt(role: str) -> Prompt:
    """Return the prompt of a role that comes with the package, for tagged solutions."""
    return read_prompt(role)


def generator_template(tokenizer: Any, prompt: Prompt | None = None) -> Template:
    """Return the prompt that asks for a solution, with the field question; by the shipped text without a `prompt`."""
    if speaks_tags_only(tokenizer):
        return Template((QUESTION, "question", SOLVE))
    return (prompt or shipped_prompt("generator")).template(tokenizer)


def verifier_template(tokenizer: Any, prompt: Prompt | None = None) -> Template:
    """Return the prompt that asks for a verification, with the fields of `verifier_values`."""
    if speaks_tags_only(tokenizer):
        return Template((QUESTION, "question", SOLUTION, "solution", VERIFY))
    return (prompt or shipped_prompt("verifier")).template(tokenizer)


# How each role is asked.
TEMPLATES = {"generator": generator_template, "verifier": verifier_template}


def generator_prompt_ids(question: str, tokenizer: Any, prompt: Prompt | None = None) -> list[int]:
    """Return the prompt that asks for a solution of `question`; by the shipped text without a `prompt`."""
    return generator_template(tokenizer, prompt).token_ids(tokenizer, {"question": question})


def verifier_prompt_ids(
    question: str, solution_text: str, num_steps: int, tokenizer: Any, prompt: Prompt | None = None
) -> list[int]:
    """Return the prompt that asks for a verification of `solution_text`, in which `num_steps` steps were found."""
    values = verifier_values(question, solution_text, num_steps)
    return verifier_template(tokenizer, prompt).token_ids(tokenizer, values)


def verifier_values(question: str, solution_text: str, num_steps: int) -> dict[str, object]:
    """Return the fields of the verifier's prompt."""
    return {"question": question, "solution": solution_text, "num_steps": num_steps}


def response_ids(text: str, tokenizer: Any, template: Template | None = None, folder: Path | None = None) -> list[int]:
    """Return the tokens of the response `text` to a prompt, and the end of sequence.

    The prompt's own opening tags (`Template.opened`), with which `text` may begin, are no tokens of the response.
    """
    template = template or Template(("",))
    opened = template.opened.strip()
    if opened and text.lstrip().startswith(opened):
        text = text.lstrip().removeprefix(opened).lstrip()
    template_text = "".join(template.parts[::2])
    return [*encode(["", text], tokenizer, template_text=template_text), stop_token_ids(tokenizer, folder)[0]]


def encode(
    texts: Sequence[str], tokenizer: Any, add_special_tokens: bool = False, template_text: str | None = None
) -> list[int]:
    """Return the tokens of `texts` joined, of which the first, third, … are a template's and the others contents.

    Contents have no tokens of structure: special tokens, and added ones that the template's text (`template_text`,
    else that of `texts`) uses. A content that spells one is cut inside of it, so that it becomes ordinary tokens; any
    other text has the tokens that it has as a whole.
    """
    text = "".join(texts)
    structure = structure_ids(tokenizer, "".join(texts[::2]) if template_text is None else template_text)
    is_content = bytearray()
    for i, part in enumerate(texts):
        is_content += bytes([i % 2]) * len(part)
    ids: list[int] = []
    start = 0
    while True:
        encoded = tokenizer(
            text[start:], add_special_tokens=add_special_tokens and start == 0, return_offsets_mapping=True
        )
        spans = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        cut = next(
            (
                start + first + 1
                for token_id, (first, last) in spans
                if token_id in structure and last - first > 1 and any(is_content[start + first : start + last])
            ),
            None,
        )
        if cut is None:
            return [*ids, *encoded["input_ids"]]
        # What stands in front of the cut holds no such token any more, but part of one.
        ids += tokenizer(text[start:cut], add_special_tokens=add_special_tokens and start == 0)["input_ids"]
        start = cut


def structure_ids(tokenizer: Any, template_text: str) -> frozenset[int]:
    """Return the tokens that only a template may use: special ones, and added ones in its text that are no tags."""
    if speaks_tags_only(tokenizer):
        names = (QUESTION, SOLVE, SOLUTION, VERIFY, *tokenizer.all_special_tokens)
        return frozenset(tokenizer.convert_tokens_to_ids(list(names)))
    return _structure_ids(tokenizer, template_text)


@lru_cache(maxsize=64)
def _structure_ids(tokenizer: Any, template_text: str) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    special = {token_id for token_id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    used = set(tokenizer(template_text, add_special_tokens=False)["input_ids"])
    found = special | {token_id for token_id in added if token_id in used}
    return frozenset(i for i in found if tokenizer.convert_ids_to_tokens(i) not in PROTOCOL_TAGS)


def stop_token_ids(tokenizer: Any, folder: Path | None = None) -> tuple[int, ...]:
    """Return the tokens that end a response, the tokenizer's end of sequence first.

    These are the ends that the tokenizer, config.json and generation_config.json of the model's `folder` name, and the
    ends of a turn that Qwen and Llama 3 write. Raises UserError where there is none.
    """
    named = [tokenizer.eos_token_id]
    for file in [] if folder is None else [folder / "config.json", folder / "generation_config.json"]:
        ends = read_json(file).get("eos_token_id")
        named += ends if isinstance(ends, list) else [ends]
    named += [_token_id(token, tokenizer) for token in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")]
    found = tuple(dict.fromkeys(token for token in named if isinstance(token, int)))
    if not found:
        raise UserError(
            f"{folder or tokenizer.name_or_path} names no token that ends a response: set eos_token in"
            " tokenizer_config.json, or eos_token_id in generation_config.json"
        )
    return found


def speaks_tags_only(tokenizer: Any) -> bool:
    """Return whether this is the tokenizer of a tiny model, which has tokens for tags and letters only."""
    return _token_id(SOLVE, tokenizer) is not None


def _token_id(token: str, tokenizer: Any) -> int | None:
    """Return the id of a token; None where the tokenizer has no such token. Copies no vocabulary."""
    token_id = tokenizer.convert_tokens_to_ids(token)
    return None if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != token else token_id
