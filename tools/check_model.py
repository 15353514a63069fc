#!/usr/bin/env python3
"""Does this package compute what transformers computes, for a model that you bring? On the CPU, in a minute or a few.

    python tools/check_model.py models/Qwen2.5-0.5B --tensor 1 2 --text "Two plus two is four." [--vllm]

Compares, in fp32, the logits of every token of a packed batch at each tensor-parallel size, checks that export after
import gives identical tensors, and with --vllm that the engine reads the exported folder and gives the same
log-probabilities. Exits 1 if logits differ by more than --tolerance or a tensor differs at all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

TEXTS = [
    "Natalia sold 48 clips in April and half as many in May. How many is that altogether?",
    r"Let $x^2 - 5x + 6 = 0$. Then \boxed{x = 2, 3}.",
    "<think><step>48 / 2 = 24</step></think><answer>\\boxed{72}</answer>",
]


def main() -> int:
    """Parent process: the reference, then one launch for each tensor size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tensor", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--text", action="append", help="Text to compare on (repeatable).")
    parser.add_argument("--tolerance", type=float, default=2e-3)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # set for the ranks
    arguments = parser.parse_args()
    if arguments.work is not None:
        as_rank(arguments.model, arguments.work, arguments.vllm)
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        reference(arguments.model, arguments.text or TEXTS, work)
        failed = False
        for tensor in arguments.tensor:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={tensor}",
                __file__,
                str(arguments.model),
                "--work",
                str(work),
                *(["--vllm"] * (arguments.vllm and tensor == 1)),
            ]
            subprocess.run(command, check=True)
            found = json.loads((work / "found.json").read_text())
            print(
                f"tensor {tensor}: logits differ by at most {found['logits']:.2e} (their range is {found['range']:.1f})"
            )
            failed |= found["logits"] > arguments.tolerance
            if "export" in found:
                print(f"tensor {tensor}: export after import: {found['export']}")
                failed |= not found["export"].startswith("all")
            if "vllm" in found:
                print(f"vLLM on the exported folder: log-probabilities differ by at most {found['vllm']:.2e}")
                failed |= found["vllm"] > arguments.tolerance
    return int(failed)


def reference(model: Path, texts: list[str], work: Path) -> None:
    """Token ids and transformers' logits in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    from tango_hpc.questions.protocol.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    ids.sort(key=len, reverse=True)  # as a micro-batch has them
    with torch.no_grad():
        logits = [network(torch.tensor([sequence])).logits[0].numpy() for sequence in ids]
    (work / "ids.json").write_text(json.dumps(ids))
    np.save(work / "logits.npy", np.concatenate(logits))


def as_rank(model: Path, work: Path, with_vllm: bool) -> None:
    """One rank of the package's own model, packed; rank 0 compares and writes what it found."""
    import torch
    import torch.distributed as dist

    from tango_hpc.base.config.roles import ModelConfig, ParallelConfig, RoleConfig
    from tango_hpc.models.parallel.megatron_cpu import megatron_on_cpu
    from tango_hpc.models.parallel.ranks import init_distributed, shutdown_distributed
    from tango_hpc.models.trainer.attention import PackedSequences
    from tango_hpc.models.trainer.policy import Policy

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    info = init_distributed()
    found: dict[str, object] = {}

    def load(dtype: str) -> Policy:
        settings = RoleConfig(
            model=ModelConfig(path=model),
            parallel=ParallelConfig(tensor=info.world_size),
            micro_batch_tokens=4096,
        )
        return Policy(settings, dtype)

    ids = json.loads((work / "ids.json").read_text())
    policy = load("float32")
    packed = PackedSequences.of_lengths(
        [len(sequence) for sequence in ids], policy.rotaries, torch.float32, info.device
    )
    tokens = torch.tensor([[token for sequence in ids for token in sequence]])
    with torch.no_grad(), megatron_on_cpu():
        hidden = policy.model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=packed)
        mine = (hidden[:, 0] @ policy.model.output_weight().t()).contiguous()
    parts = [torch.empty_like(mine) for _ in range(info.world_size)]
    dist.all_gather(parts, mine)
    if info.rank == 0:
        expected = np.load(work / "logits.npy")
        logits = torch.cat(parts, dim=1).numpy()[:, : expected.shape[1]]
        found = {"logits": float(np.abs(logits - expected).max()), "range": float(np.ptp(expected))}
    del policy, parts, mine, hidden
    stored = stored_dtype(model)
    exported = work / f"exported_{info.world_size}"
    load(stored).export_hf(exported)
    if info.rank == 0:
        found["export"] = compare_folders(model, exported)
    if with_vllm:
        found["vllm"] = through_vllm(exported, ids, np.load(work / "logits.npy"))
    if info.rank == 0:
        (work / "found.json").write_text(json.dumps(found))
    dist.barrier()
    shutdown_distributed()


def stored_dtype(model: Path) -> str:
    """The type that the weights are stored in."""
    from safetensors import safe_open

    with safe_open(next(iter(sorted(model.glob("*.safetensors")))), framework="pt") as handle:
        name = str(handle.get_tensor(next(iter(handle.keys()))).dtype).removeprefix("torch.")
    return name if name in ("float32", "bfloat16") else "float32"


def compare_folders(before: Path, after: Path) -> str:
    """Whether two folders hold the same tensors, bit for bit."""
    import torch
    from safetensors import safe_open

    def tensors(folder: Path) -> dict[str, Path]:
        names = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as handle:
                names.update(dict.fromkeys(handle.keys(), file))
        return names

    first, second = tensors(before), tensors(after)
    different = sorted(first.keys() ^ second.keys())
    for name in first.keys() & second.keys():
        with safe_open(first[name], framework="pt") as old, safe_open(second[name], framework="pt") as new:
            if not torch.equal(old.get_tensor(name), new.get_tensor(name)):
                different.append(name)
    return (
        f"all {len(first)} tensors identical"
        if not different
        else f"{len(different)} differ: {', '.join(different[:3])}"
    )


def through_vllm(folder: Path, ids: list[list[int]], logits: np.ndarray) -> float:
    """Largest difference of the greedy continuation's log-probability, engine against transformers."""
    from tango_hpc.base.types import GenerationRequest, SamplingSettings
    from tango_hpc.models.engine.engine import RolloutEngine

    longest = max(map(len, ids))
    engine = RolloutEngine(
        folder, tensor=1, dtype="float32", max_model_len=longest + 8, max_num_seqs=8, max_batched_tokens=4096,
        device="cpu", load_weights=True, kv_cache_bytes=int(0.2 * 2**30),
    )  # fmt: skip
    generations = engine.generate([GenerationRequest(sequence, 0) for sequence in ids], SamplingSettings(0.0, 1.0, 1))
    engine.close()
    worst, end = 0.0, 0
    for sequence, generation in zip(ids, generations, strict=True):
        end += len(sequence)
        row = logits[end - 1].astype(np.float64)
        logprobs = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        worst = max(worst, abs(float(logprobs[generation.token_ids[0]]) - generation.logprobs[0]))
    return worst


if __name__ == "__main__":
    sys.exit(main())
