"""The token of a response in which each step ends, exactly, for any tokenizer.

I(k) of Eq. 3 is the first token after which the decoded response contains step k whole. So a token that ends a step
and begins what follows belongs to the step, and a character that is split over several tokens to the last of them.

Nearly every tokenizer spells a response as one run of bytes, a piece per token, and then adding up the pieces finds
all steps in one pass. Whether it does is checked on each response, against what the tokenizer decodes. Where it does
not (WordPiece, decoders that put spaces between words), prefixes are decoded and bisected.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from tango_hpc.base.prompts import PROTOCOL_TAGS


def response_text(token_ids: Sequence[int], tokenizer: Any) -> str:
    """Return the decoded text of a response, without special tokens such as the end of sequence.

    The protocol's tags are text, also for tokenizers in which they are special tokens.
    """
    special = _special_ids(tokenizer)
    shown = [token_id for token_id in token_ids if token_id not in special]
    return tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def step_end_tokens(token_ids: Sequence[int], tokenizer: Any, step_end_chars: Sequence[int]) -> list[int]:
    """Return for each step the index I(k) of its last token.

    `step_end_chars` are the indices just past each step in `response_text(token_ids, tokenizer)`, in rising order.
    Raises ValueError where one lies past that text.
    """
    if not step_end_chars:
        return []
    text = response_text(token_ids, tokenizer)
    if step_end_chars[-1] > len(text):
        raise ValueError(f"a step cannot end at character {step_end_chars[-1]} of a text of {len(text)}")
    special = _special_ids(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(token_ids))
    # A token outside the vocabulary (from a model whose embedding is padded) decodes to nothing, as a special one does.
    spelled = ["" if i in special or token is None else token for i, token in zip(token_ids, tokens, strict=True)]
    for spell in (_byte_level_parts, _sentence_piece_parts):
        settled_T = _settled_chars(spell(spelled), text)
        if settled_T is not None:
            return [bisect_left(settled_T, end) for end in step_end_chars]
    return _by_decoding_prefixes(token_ids, tokenizer, text, step_end_chars)


def _by_decoding_prefixes(
    token_ids: Sequence[int], tokenizer: Any, text: str, step_end_chars: Sequence[int]
) -> list[int]:
    """Find the same by its definition, by bisection: text that a prefix has brought stays when tokens follow."""
    ends: list[int] = []
    first = 0
    for end in step_end_chars:
        last = len(token_ids) - 1
        while first < last:
            middle = (first + last) // 2
            if response_text(token_ids[: middle + 1], tokenizer).startswith(text[:end]):
                last = middle
            else:
                first = middle + 1
        ends.append(first)
    return ends


def _settled_chars(parts_T: list[str], text: str) -> list[int] | None:
    """Return how many characters of `text` are complete after each token; None where the parts do not spell the
    text.
    """
    spelled = "".join(parts_T)
    stripped = 0
    if spelled != text:
        if spelled != " " + text:  # SentencePiece decoders drop the space in front of the first word
            return None
        stripped = 1
    settled, total = [], -stripped
    for part in parts_T:
        total += len(part)
        settled.append(total)
    return settled


def _byte_level_parts(tokens: list[str]) -> list[str]:
    """Return the characters that each token completes where token characters stand for bytes, as in GPT-2's BPE."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    parts = [decoder.decode(_byte_level_bytes(token)) for token in tokens]
    if parts:
        parts[-1] += decoder.decode(b"", final=True)
    return parts


@lru_cache(maxsize=2**18)  # a vocabulary
def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes that a token's characters stand for; an added token, with any other character, stands for
    itself.
    """
    byte_of = _byte_alphabet()
    if all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    return token.encode()


def _sentence_piece_parts(tokens: list[str]) -> list[str]:
    """Return the characters that each token completes in SentencePiece's spelling, and in plain concatenation.

    "▁" is a space; tokens `<0x00>` to `<0xFF>` are bytes, and a run of them that is no valid UTF-8 decodes to one
    replacement character per byte.
    """
    parts: list[str] = []
    for are_bytes, group in groupby(tokens, key=lambda token: not token or _byte_value(token) is not None):
        run = list(group)
        if not are_bytes:
            parts += [token.replace("\u2581", " ") for token in run]
            continue
        values = [_byte_value(token) for token in run]  # None for tokens that decode to nothing
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            completed = ["" if value is None else decoder.decode(bytes([value])) for value in values]
            decoder.decode(b"", final=True)
            parts += completed
        except UnicodeDecodeError:
            parts += ["" if value is None else "\ufffd" for value in values]
    return parts


def _byte_value(token: str) -> int | None:
    if len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    digits = token[3:5]
    return int(digits, 16) if all(digit in "0123456789abcdefABCDEF" for digit in digits) else None


@lru_cache(maxsize=8)
def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    marked = {token_id for token_id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    tags = {token_id for token_id, token in added.items() if token.content in PROTOCOL_TAGS}
    return frozenset(marked - tags)


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return how byte-level BPE writes bytes: printable Latin-1 characters for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}
