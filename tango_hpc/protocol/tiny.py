"""The language of tiny models that start from random weights: one token per letter and per tag."""

from __future__ import annotations

TAGS = (
    "<question>", "<solve>", "<solution>", "<verify>", "<think>", "</think>", "<step>", "</step>", "<answer>", "</answer>",
    "<step_verification>", "</step_verification>", "<final_verification>", "</final_verification>",
    "\\boxed{CORRECT}", "\\boxed{INCORRECT}", "\\boxed{", "}", "->", ":", ",", " ",
)  # fmt: skip
END, PAD, UNKNOWN = "<eos>", "<pad>", "<unk>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = (PAD, END, UNKNOWN, *TAGS, *LETTERS)
