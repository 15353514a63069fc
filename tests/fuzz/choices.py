"""Decisions read from bytes, so that whoever makes up the bytes makes the decisions: hypothesis, or a fuzzer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")

PIECES = (
    "1e999", "9" * 399, "-1e999", "1/0", "\\frac{1}{0}", "\\text{", "\\boxed{", "\\frac", "{", "}", "(", "[", "\\left.",
    "$", "%", ",", ";", "1,234", "½", "²", "√", "\x00", "\x1b[2J", "\x1b]0;title\x07", "\u202e", "'", "-", "~", "lambda:",
    "e9", "^{", "_", "<step>", "</step>", "<think>", "</think>", "<answer>", "</answer>", "<step_verification>",
    "</step_verification>", "<final_verification>", "</final_verification>", "\\boxed{CORRECT}", "\\boxed{INCORRECT}",
    "Step 1:", "Step 99999999999999999999:", "nan", "inf", "te", "\\boxed{te}", "\n", " ", "<script>alert(1)</script>", "\ufffd",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 5, 10**30, 1e308, float("nan"), "", "x", "1e999", "\x1b[2J", [], [None], {}, {"a": 1}, "${run.dir}",
    "${seed}", "${", [[]] * 3, "null",
)  # fmt: skip


class Choices:
    """The bytes that are left; when there are none, others that depend on them alone."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._more = random.Random(data)

    def number(self, below: int) -> int:
        """One of 0 ... below - 1."""
        size = max(1, (below - 1).bit_length() + 7 >> 3)
        part = self._data[self._at : self._at + size] or self._more.randbytes(size)
        self._at += size
        return int.from_bytes(part, "little") % below

    def pick(self, items: Sequence[Item]) -> Item:
        """One of the items."""
        return items[self.number(len(items))]

    def text(self, longest: int = 30) -> str:
        """A text of pieces and of any characters but halves of one."""
        parts = []
        for _ in range(self.number(longest + 1)):
            character = chr(self.number(0x2FF)) if self.number(4) == 3 else ""
            parts.append(character or self.pick(PIECES))
        return "".join(parts)

    def changed_text(self, text: str) -> str:
        """`text` with some of it missing, doubled, or something else in its place."""
        for _ in range(self.number(4)):
            start = self.number(len(text) + 1)
            end = start + self.number(12)
            piece = self.pick((self.pick(PIECES), text[start:end] * 2, "", self.text(3)))
            text = text[:start] + piece + text[end:]
        return text

    def changed_tree(self, tree: Any) -> Any:
        """A tree of JSON's kinds of values with one branch gone, another one, or of another name."""
        if isinstance(tree, dict) and tree and self.number(8):
            key = self.pick(sorted(tree))
            rest = {name: value for name, value in tree.items() if name != key}
            what = self.number(16)
            if what == 0:
                return rest
            if what == 1:
                return rest | {self.pick((key + "s", key.upper(), "", "a.b", "__class__")): tree[key]}
            return rest | {key: self.changed_tree(tree[key])}
        if isinstance(tree, list) and tree and self.number(4):
            index = self.number(len(tree))
            return [*tree[:index], self.changed_tree(tree[index]), *tree[index + 1 :]]
        if isinstance(tree, str) and self.number(2):
            return self.changed_text(tree)
        return self.pick(VALUES)

    def changed_bytes(self, content: bytes) -> bytes:
        """A file with a flipped bit, a piece missing, another value or branch in it, or something else altogether."""
        how, size = self.number(4), max(len(content), 1)
        if how == 0 and content:
            at = self.number(size)
            return content[:at] + bytes([content[at] ^ 1 << self.number(8)]) + content[at + 1 :]
        if how == 1:
            start = self.number(size)
            return content[:start] + content[start + self.number(size) :]
        values = list(re.finditer(rb': ?("[^"]*"|[\d.]+|null|true|false)', content))
        if how == 2 and values:
            value = self.pick(values)
            other = json.dumps(self.pick(VALUES)).encode()
            return content[: value.start(1)] + other + content[value.end(1) :]
        if how == 3 and self.number(2) and (changed := self._changed_json(content)) is not None:
            return changed
        return self.pick(
            (b"", b"[]", b"{}", b"null\n", b"5\n", b'"x"\n', b"\xff\n", b"{}\n{}\n", b"PAR1PAR1", b"[" * 9999)
        )

    def _changed_json(self, content: bytes) -> bytes | None:
        """JSON, or lines of it, with a branch changed; None where it is neither."""
        for parts in ([content], content.splitlines()):
            if not parts:
                continue
            at = self.number(len(parts))
            try:
                tree = json.loads(parts[at])
            except ValueError:
                continue
            return b"\n".join([*parts[:at], json.dumps(self.changed_tree(tree)).encode(), *parts[at + 1 :], b""])
        return None
