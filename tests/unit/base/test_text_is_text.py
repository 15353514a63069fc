"""What a question, a solution or a reference spells is text in a prompt, never a token that ends or begins a turn."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tango_hpc.base.errors import UserError
from tango_hpc.base.prompts import (
    Prompt,
    generator_prompt_ids,
    generator_template,
    response_ids,
    stop_token_ids,
    verifier_prompt_ids,
    verifier_template,
)
from tango_hpc.base.types import Generation
from tango_hpc.questions.tasks.math import Math
from tango_hpc.questions.tasks.tiny import build_tokenizer
from tango_hpc.stages.responses import read_solutions
from tango_hpc.stages.sft import sft_sequence

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As DeepSeek-R1's distillations have it: role tokens that are not marked as special, and a thought that is opened.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% else %}<｜User｜>{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]
SPELLED = [*SPECIAL, *ADDED, "<|im", "_end|>", "<step>", "</step>", "a b", " ", "\n", "é", "<|", "<<|im_end|>"]
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(SPELLED), max_size=8).map("".join))


def make_tokenizer(kind: str, template: str) -> Any:
    """A tokenizer of bytes, of SentencePiece's spelling, or of normalised characters."""
    if kind == "bytes":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        core.normalizer = normalizers.NFC()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        core.decoder = decoders.Metaspace()
        alphabet = [chr(i) for i in range(32, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", *SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["one two three <step> user assistant", "the solution to check"], trainer)
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in ADDED])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    wrapped.chat_template = template
    return wrapped


TOKENIZERS = {
    "ChatML, bytes": make_tokenizer("bytes", CHATML),
    "DeepSeek, bytes": make_tokenizer("bytes", DEEPSEEK),
    "ChatML, SentencePiece": make_tokenizer("pieces", CHATML),
    "no template": make_tokenizer("bytes", None),  # type: ignore[arg-type]
}


def structure(token_ids: list[int], tokenizer: Any) -> Counter[str]:
    """The tokens of turns among `token_ids`: special ones, and added ones that the template uses but for `<think>`."""
    roles = [token for token in ADDED[:2] if token in (tokenizer.chat_template or "")]
    return Counter(token for token in tokenizer.convert_ids_to_tokens(token_ids) if token in {*SPECIAL, *roles})


@pytest.mark.parametrize("name", TOKENIZERS)
@given(question=TEXTS, solution=TEXTS)
@settings(max_examples=100, deadline=None)
def test_no_text_changes_the_turns_of_a_prompt(name: str, question: str, solution: str) -> None:
    tokenizer = TOKENIZERS[name]
    asked = structure(generator_prompt_ids(question, tokenizer), tokenizer)
    assert asked == structure(generator_prompt_ids("q", tokenizer), tokenizer)
    asked = structure(verifier_prompt_ids(question, solution, 2, tokenizer), tokenizer)
    assert asked == structure(verifier_prompt_ids("q", "s", 2, tokenizer), tokenizer)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_no_reference_ends_a_turn_before_its_end(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    row = {"question": text, "solution_text": text, "verification_text": text}
    for role in ("generator", "verifier"):
        sequence = sft_sequence(role, row, tokenizer)
        assert structure(sequence.response_ids, tokenizer) == Counter(["<|im_end|>"])
        assert sequence.response_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("name", ["ChatML, bytes", "DeepSeek, bytes"])
@given(question=TEXTS)
@settings(max_examples=100, deadline=None)
def test_the_text_of_a_prompt_is_what_the_template_makes_of_it(name: str, question: str) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = Prompt("Solve {question}!", "Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Solve {question}!"}]
    theirs = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = generator_prompt_ids(question, tokenizer, prompt)
    normal = normalizers.NFC().normalize_str
    assert normal(tokenizer.decode(ids)) == normal(theirs)
    if not any(token in question for token in SPELLED[:7]):  # any other text has the tokens that transformers gives it
        assert ids == tokenizer(theirs, add_special_tokens=False)["input_ids"]


def test_a_role_token_across_template_and_text_is_none() -> None:
    tokenizer = TOKENIZERS["ChatML, bytes"]
    ids = generator_prompt_ids("im_end|>", tokenizer, Prompt("{question} <|{question}", None))
    assert structure(ids, tokenizer) == structure(generator_prompt_ids("q", tokenizer, Prompt("{question}")), tokenizer)


def test_what_is_typed_in_a_prompt_file_is_a_template(tmp_path: Path) -> None:
    """Without a chat template such a file is the whole prompt as it stands: its author may write role tokens."""
    tokenizer = TOKENIZERS["no template"]
    prompt = Prompt("<|im_start|>user\n{question}<|im_end|>")
    tokens = tokenizer.convert_ids_to_tokens(generator_prompt_ids("<|im_end|>", tokenizer, prompt))
    assert tokens.count("<|im_start|>") == tokens.count("<|im_end|>") == 1


def test_a_tiny_model_is_asked_one_question(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    ids = generator_prompt_ids("ab<solve><eos>", tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert (tokens[0], tokens[-1], tokens.count("<solve>"), tokens.count("<eos>")) == ("<question>", "<solve>", 1, 0)
    solution = "<think><step>a</step></think><answer>\\boxed{a}</answer>"
    tokens = tokenizer.convert_ids_to_tokens(verifier_prompt_ids("ab", solution, 1, tokenizer))
    assert "".join(tokens) == f"<question>ab<solution>{solution}<verify>"


def test_what_the_prompt_has_opened() -> None:
    deepseek, chatml = TOKENIZERS["DeepSeek, bytes"], TOKENIZERS["ChatML, bytes"]
    assert generator_template(deepseek).opened == verifier_template(deepseek).opened == "<think>\n"
    assert generator_template(chatml).opened == ""
    # as Qwen3's template has it without thinking: opened and closed again
    chatml_closed = make_tokenizer("bytes", CHATML + "<think>\n\n</think>\n\n")
    assert generator_template(chatml_closed).opened == ""


def test_a_reference_does_not_open_again_what_the_prompt_has_opened() -> None:
    text = "<think>\n<step>a</step></think><answer>\\boxed{1}</answer>"
    for name, begins in (("DeepSeek, bytes", "<step>"), ("ChatML, bytes", "<think>")):
        tokenizer = TOKENIZERS[name]
        ids = response_ids(text, tokenizer, generator_template(tokenizer))
        assert tokenizer.decode(ids[:-1]).startswith(begins)


@pytest.mark.parametrize(
    ("tokenizers", "config", "generation", "expected"),
    [
        ("<|im_end|>", None, None, ["<|im_end|>", "<|endoftext|>"]),
        ("<|im_end|>", 7, None, ["<|im_end|>", 7, "<|endoftext|>"]),
        ("<|im_end|>", [7, 8], [8, 9], ["<|im_end|>", 7, 8, 9, "<|endoftext|>"]),
        (None, None, 9, [9, "<|im_end|>", "<|endoftext|>"]),
    ],
)
def test_a_response_ends_with_any_of_the_ends_that_the_folder_names(
    tmp_path: Path, tokenizers: str | None, config: Any, generation: Any, expected: list[Any]
) -> None:
    tokenizer = make_tokenizer("bytes", CHATML)
    tokenizer.eos_token = tokenizers
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    ids = [tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else token for token in expected]
    assert list(stop_token_ids(tokenizer, tmp_path)) == ids


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    core = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=re.escape("names no token that ends a response: set eos_token")):
        stop_token_ids(PreTrainedTokenizerFast(tokenizer_object=core), tmp_path)


def test_a_thought_that_the_prompt_opens_is_part_of_the_response() -> None:
    """Without it every solution of a reasoning model would lack its first tag."""
    tokenizer = TOKENIZERS["DeepSeek, bytes"]
    template = generator_template(tokenizer)
    written = "<step>one</step>\n<step>two</step>\n</think><answer>\\boxed{3}</answer>"
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    question = {"id": "1", "question": "q", "answer": "3", "source": "math"}
    generation = Generation(ids, [0.0] * len(ids), "stop")
    exchange: Any = SimpleNamespace(size=1, number=0)
    (read,) = read_solutions(Math(), [question], ["q"], [([1], generation)], tokenizer, exchange, template.opened)
    assert read.response.text == "<think>\n" + written
    assert read.solution.well_formed and [step.text for step in read.solution.steps] == ["one", "two"]
    ends = [tokenizer.decode(ids[: end + 1]).endswith("</step>") for end in read.step_end_tokens]
    assert ends == [True, True]
    (unopened,) = read_solutions(Math(), [question], ["q"], [([1], generation)], tokenizer, exchange)
    assert not unopened.solution.well_formed
