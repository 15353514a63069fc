"""The engine in process: its log-probabilities, its reproducibility, and requests spread over rollout groups."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tango_hpc.base.types import Generation, GenerationRequest, SamplingSettings
from tango_hpc.models.engine.spread import spread_requests
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import make_tiny_hf
from tests.helpers.vllm_engines import make_engine

SAMPLED = SamplingSettings(temperature=0.7, top_p=1.0, max_tokens=24, stop_token_ids=(3, 5))
BLOCK = 32  # tokens of which vLLM shares a prompt's on a CPU
LETTERS = "abcdefghijk"
STOPPED = replace(SAMPLED, stop_strings=("ab", "bca"))
GREEDY = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=16)


def requests() -> list[GenerationRequest]:
    """Four prompts of different lengths, three samples each, and a request that repeats the first one."""
    prompts = [[(7 * i + 3 * j) % 100 + 6 for j in range(3 + 5 * i)] for i in range(4)]
    asked = [GenerationRequest(prompt, 100 * i + k) for i, prompt in enumerate(prompts) for k in range(3)]
    return [*asked, asked[0]]


def generate_on_ranks(model_dir: str, tensor: int) -> dict[str, list[Generation]]:
    """What an engine generates at one sampling setting, again, and greedily."""
    engine = make_engine(Path(model_dir), tensor, load_weights=True)
    return {
        "sampled": engine.generate(requests(), SAMPLED),
        "greedy": engine.generate(requests(), GREEDY),
        "again": engine.generate(requests(), SAMPLED),
        "reordered": engine.generate(requests()[::-1], SAMPLED)[::-1],
        "stopped": engine.generate(requests(), STOPPED),
        "one request": engine.generate(requests()[:1], SAMPLED),
        "shared": engine.generate(shared_prompts(), SAMPLED),
    }


def shared_prompts() -> list[GenerationRequest]:
    """Three prompts of two blocks and a bit, three samples each."""
    prompts = [[(11 * i + 3 * j) % 100 + 6 for j in range(2 * BLOCK + 6)] for i in range(3)]
    return [GenerationRequest(prompt, 100 * i + k) for i, prompt in enumerate(prompts) for k in range(3)]


def cached_on_rank(model_dir: str) -> dict[str, int]:
    """How many tokens of prompts were not computed again, by what was asked."""
    engine = make_engine(Path(model_dir), 1, load_weights=True)
    found = {}
    for name, asked in {"shared": shared_prompts(), "again": shared_prompts(), "short": requests()}.items():
        engine.generate(asked, SAMPLED)
        found[name] = engine.num_cached_tokens
    return found


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32: the CPU attention kernel knows no smaller ones. The tokenizer writes each token as two letters."""
    model = make_tiny_hf(tmp_path_factory.mktemp("engine") / "model", "qwen2", hidden_size=128)
    tokenizer = Tokenizer(models.WordLevel({said(token): token for token in range(107)}, unk_token=said(0)))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    return model


def said(token: int) -> str:
    """What the test's tokenizer makes of a token."""
    return LETTERS[token // len(LETTERS)] + LETTERS[token % len(LETTERS)]


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> dict[str, list[Generation]]:
    return run_ranks(generate_on_ranks, 1, str(model_dir), 1)[0]


def test_logprobs_are_those_of_transformers(model_dir: Path, alone: dict[str, list[Generation]]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    asked = {"sampled": (requests(), 0.7), "greedy": (requests(), 1.0), "shared": (shared_prompts(), 0.7)}
    for kind, (prompts, temperature) in asked.items():
        gaps = []
        for request, generation in zip(prompts, alone[kind], strict=True):
            tokens = torch.tensor([request.prompt_ids + generation.token_ids])
            with torch.no_grad():
                logprobs = (model(tokens).logits[0] / temperature).log_softmax(-1)
            first = len(request.prompt_ids)
            expected = [logprobs[first - 1 + i, token].item() for i, token in enumerate(generation.token_ids)]
            gaps += [abs(a - b) for a, b in zip(expected, generation.logprobs, strict=True)]
            if kind == "greedy":
                assert generation.token_ids == logprobs[first - 1 : -1].argmax(-1).tolist()
        assert sum(gaps) / len(gaps) < 1e-5


def test_responses_end_at_a_stop_token_or_at_the_limit(alone: dict[str, list[Generation]]) -> None:
    reasons = set()
    for generation in alone["sampled"]:
        stops = [token in SAMPLED.stop_token_ids for token in generation.token_ids]
        assert not any(stops[:-1])
        assert generation.finish_reason == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(stops) == SAMPLED.max_tokens
        reasons.add(generation.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_response_ends_with_the_token_that_completes_a_stop_string(alone: dict[str, list[Generation]]) -> None:
    """What is trained on is what was generated: the very tokens of a response without stop strings, up to there."""
    within, across = 0, 0
    for free, stopped in zip(alone["sampled"], alone["stopped"], strict=True):
        count = len(stopped.token_ids)
        assert (stopped.token_ids, stopped.logprobs) == (free.token_ids[:count], free.logprobs[:count])
        text = "".join(map(said, free.token_ids))
        ends = [text.index(stop) + len(stop) for stop in STOPPED.stop_strings if stop in text]
        if not ends:
            assert count == len(free.token_ids) and stopped.finish_reason == free.finish_reason
            continue
        assert count == -(-min(ends) // 2) and stopped.finish_reason == "stop"
        within += min(ends) % 2  # the token goes on after the string
        across += count < len(free.token_ids)
    assert within and across


def test_a_request_decides_its_own_tokens(alone: dict[str, list[Generation]]) -> None:
    tokens = [generation.token_ids for generation in alone["sampled"]]
    assert tokens[0] == tokens[-1]  # the same prompt and seed
    assert tokens[0] != tokens[1]  # the same prompt, another seed
    assert alone["again"] == alone["sampled"]
    assert [g.token_ids for g in alone["reordered"]] == tokens
    assert [g.token_ids for g in alone["one request"]] == tokens[:1]


def test_the_samples_of_a_question_share_its_prompt(model_dir: Path) -> None:
    """And nothing is kept from one call to the next, between which weights may have changed."""
    assert run_ranks(cached_on_rank, 1, str(model_dir)) == [
        {"shared": 3 * 2 * 2 * BLOCK, "again": 3 * 2 * 2 * BLOCK, "short": 0}
    ]


def counted_on_ranks(model_dir: str, tensor: int) -> list[tuple[int, int]]:
    """What an engine tells while it generates."""
    engine = make_engine(Path(model_dir), tensor, load_weights=True)
    told: list[tuple[int, int]] = []
    assert engine.generate(requests(), SAMPLED, lambda done, total: told.append((done, total))) == engine.generate(
        requests(), SAMPLED
    )
    return told


@pytest.mark.parametrize(("num_ranks", "tensor", "shares"), [(1, 1, [13]), (2, 1, [7, 6]), (2, 2, [13, 13])])
def test_responses_are_counted_as_they_come(
    model_dir: Path,
    num_ranks: int,
    tensor: int,
    shares: list[int],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank counts its share, and no progress bar is drawn."""
    monkeypatch.setenv("TQDM_DISABLE", "1")  # with which vLLM's own bar would divide by a time of zero
    told = run_ranks(counted_on_ranks, num_ranks, str(model_dir), tensor)
    assert sorted(told, reverse=True) == [[(done, share) for done in range(1, share + 1)] for share in shares]
    assert "Processed prompts" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_agree_with_one_process(model_dir: Path, alone: dict[str, list[Generation]], tensor: int) -> None:
    """Data parallel (TP=1) and tensor parallel (TP=2), in fresh processes; also fewer requests than groups."""
    first, second = run_ranks(generate_on_ranks, 2, str(model_dir), tensor)
    assert first == second
    for kind, generations in first.items():
        assert [g.token_ids for g in generations] == [g.token_ids for g in alone[kind]]
        for a, b in zip(generations, alone[kind], strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def two_jobs_at_once(model_dir: str, folder: str) -> list[Generation]:
    """Waits for the other job's engine, so that both hold shared memory at the same time."""
    import time

    engine = make_engine(Path(model_dir), 2, load_weights=True)
    Path(folder, f"ready-{dist.get_rank()}-{os.getpid()}").touch()
    while len(list(Path(folder).glob("ready-*"))) < 4:
        time.sleep(0.01)
    return engine.generate(requests(), SAMPLED)


def test_two_jobs_on_one_host_do_not_meet(model_dir: Path, alone: dict[str, list[Generation]], tmp_path: Path) -> None:
    """vLLM's own name for the shared memory of tensor parallelism is one for all jobs of an external launcher."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_ranks, two_jobs_at_once, 2, str(model_dir), str(tmp_path)) for _ in range(2)]
        for job in jobs:
            for generations in job.result():
                assert [g.token_ids for g in generations] == [g.token_ids for g in alone["sampled"]]


def test_requests_are_spread_evenly_and_prompts_stay_together() -> None:
    asked = [GenerationRequest([i] * 10, seed) for i in range(8) for seed in range(5)]
    groups = spread_requests(asked, 4, max_tokens=100)
    assert sorted(index for group in groups for index in group) == list(range(40))
    assert [len(group) for group in groups] == [10] * 4
    for group in groups:
        assert len({tuple(asked[index].prompt_ids) for index in group}) == 2


def test_one_prompt_for_all_is_split() -> None:
    groups = spread_requests([GenerationRequest([1, 2], seed) for seed in range(10)], 4, max_tokens=100)
    assert sorted(map(len, groups)) == [1, 3, 3, 3]
