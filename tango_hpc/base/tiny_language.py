"""The language of tiny models that start from random weights: one token per character and per tag."""

from __future__ import annotations

TAGS = (
    "<question>", "<solve>", "<solution>", "<verify>", "<think>", "</think>", "<step>", "</step>",
    "<answer>", "</answer>",
    "<step_verification>", "</step_verification>", "<final_verification>", "</final_verification>",
    "\\boxed{CORRECT}", "\\boxed{INCORRECT}", "\\boxed{", "}", "->", ":", ",", " ",
)  # fmt: skip
END, PAD, UNKNOWN = "<eos>", "<pad>", "<unk>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def vocabulary(characters: str = LETTERS) -> tuple[str, ...]:
    """Return the tokens of a model that knows these characters, in the order of their ids."""
    return (PAD, END, UNKNOWN, *TAGS, *characters)
