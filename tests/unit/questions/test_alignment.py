"""Step ends in tokens, against the definition: the first prefix of tokens that decodes to the whole step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tango_hpc.questions.protocol.alignment import response_text, step_end_tokens
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.protocol.tokenizer import load_tokenizer
from tango_hpc.questions.tasks.tiny import build_tokenizer

TAGS = ["<think>", "</think>", "<step>", "</step>", "<answer>", "</answer>"]
CORPUS = ["<think><step>one é 漢字 🎉</step><step>two</step></think><answer>\\boxed{5}</answer>"] * 9 + [
    "</step><step>", "</step>\n<step>", "step>é", "a b c d 0 1 2 + = < > / \\ { } . , the first then so"
]  # fmt: skip
SPECIAL = ["<|end|>", "<|pad|>"]
KINDS = ["byte_bpe", "byte_bpe_merged", "sentence_piece_bpe", "unigram", "word_level", "word_piece", "tiny"]


@cache
def tokenizer_of(kind: str, folder: str) -> PreTrainedTokenizerFast:
    """A trained tokenizer of each kind that models come with."""
    if kind == "tiny":
        build_tokenizer(Path(folder))
        return load_tokenizer(Path(folder))
    if kind in ("byte_bpe", "byte_bpe_merged"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.decoder = decoders.ByteLevel()
        # "merged" may join anything, tags with what stands beside them; the other splits words as GPT-2 does
        use_regex = kind == "byte_bpe"
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
        trainer = trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
    elif kind == "sentence_piece_bpe":  # Llama 2's: "▁" for spaces, bytes for what has no token
        pieces = [
            *SPECIAL,
            "<unk>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *"▁abcdeghinopstwx<>/\\{}5.",
            "st",
            "</",
            "</st",
        ]
        merges = [("s", "t"), ("<", "/"), ("</", "st")]
        model = models.BPE(
            {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.train_from_iterator(
            CORPUS, trainers.UnigramTrainer(vocab_size=120, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>")
        )
    elif kind == "word_level":  # no decoder: words are joined with spaces
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=[*SPECIAL, "<unk>"]))
        tokenizer.add_tokens(TAGS)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.train_from_iterator(
            CORPUS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=[*SPECIAL, "<unk>"])
        )
        tokenizer.add_tokens(TAGS)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return tokenizer_of(request.param, str(tmp_path_factory.getbasetemp() / "tiny_tokenizer"))


def by_definition(token_ids: list[int], tokenizer, end: int) -> int:
    wanted = response_text(token_ids, tokenizer)[:end]
    return next(n for n in range(len(token_ids)) if response_text(token_ids[: n + 1], tokenizer).startswith(wanted))


def check(token_ids: list[int], tokenizer) -> int:
    """Compare all steps of a response with the definition; how many there were."""
    ends = parse_solution(response_text(token_ids, tokenizer)).step_end_chars
    actual = step_end_tokens(token_ids, tokenizer, ends)
    assert actual == [by_definition(token_ids, tokenizer, end) for end in ends]
    return len(ends)


STEP_TEXT = st.text(alphabet="abco x0é漢🎉\n▁<>/\\{}.", max_size=8)


@given(steps=st.lists(STEP_TEXT, max_size=4), joint=st.sampled_from(["", "\n", "é", " "]), cut=st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_solutions_in_any_script_cut_anywhere(tokenizer, steps, joint, cut):
    body = joint.join(f"<step>{text}</step>" for text in steps)
    token_ids = tokenizer(f"<think>{body}</think><answer>\\boxed{{5}}</answer>", add_special_tokens=False)["input_ids"]
    check([*token_ids, tokenizer.eos_token_id], tokenizer)
    check(token_ids[: max(len(token_ids) - cut, 0)], tokenizer)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_token_ids_with_special_and_unknown_ones(tokenizer, data):
    """What a model may sample: damaged characters, special tokens in the middle, ids beyond the vocabulary."""
    tags = [tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in ("<step>", "</step>", "</step><step>")]
    pieces = data.draw(
        st.lists(
            st.one_of(
                st.sampled_from(tags),
                st.lists(st.integers(0, len(tokenizer) + 3), min_size=1, max_size=3),
                st.just([tokenizer.eos_token_id]),
            ),
            max_size=12,
        )
    )
    check([token_id for piece in pieces for token_id in piece], tokenizer)


def test_every_kind_really_finds_steps(tokenizer):
    text = "<think><step>ab c</step><step>é 漢字</step></think><answer>\\boxed{5}</answer>"
    assert check(tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer) == 2


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Byte-level tokens by hand; "Ã" and "©" stand for the two bytes of é."""
    tokens = ["<step>", "</step>", "</step><step>", ">", "</step", ">Ã", "Ã", "©", "x", "<|end|>"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="x"))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def ends_of(names: str, tokenizer) -> list[int]:
    token_ids = tokenizer.convert_tokens_to_ids(names.split())
    text = response_text(token_ids, tokenizer)
    return step_end_tokens(token_ids, tokenizer, parse_solution(text).step_end_chars)


def test_hand_derived_positions(byte_tokenizer):
    # one token closes the first step and opens the second
    assert ends_of("<step> x </step><step> x </step> <|end|>", byte_tokenizer) == [2, 4]
    # the closing tag in two tokens: the second has its last character
    assert ends_of("<step> x </step > x", byte_tokenizer) == [3]
    # ">Ã" ends the step and begins é, which the next token completes: the step ends in it all the same
    assert ends_of("<step> x </step >Ã © x", byte_tokenizer) == [3]
    # the same with é never completed
    assert ends_of("<step> x </step >Ã", byte_tokenizer) == [3]
    # é inside the step; a special token between its bytes shows nowhere in the text
    assert ends_of("<step> Ã <|end|> © </step>", byte_tokenizer) == [4]
    # text that ends inside a step: the step is none
    assert ends_of("<step> x </step> <step> x", byte_tokenizer) == [2]


def test_no_steps_and_ends_past_the_text(byte_tokenizer):
    assert step_end_tokens([], byte_tokenizer, []) == []
    with pytest.raises(ValueError, match="cannot end at character 9"):
        step_end_tokens([0], byte_tokenizer, [9])


def test_long_responses_are_aligned_in_one_pass(byte_tokenizer):
    """50,000 tokens: decoding a prefix for each would take minutes."""
    token_ids = byte_tokenizer.convert_tokens_to_ids(["<step>", "x", "Ã", "©", "</step>"]) * 10_000
    ends = parse_solution(response_text(token_ids, byte_tokenizer)).step_end_chars
    assert step_end_tokens(token_ids, byte_tokenizer, ends) == list(range(4, 50_000, 5))
