"""One arm of `python -m tools.bench grpo`, in the environment of tools/bench_trl.sh: GRPO steps of TRL's GRPOTrainer on
a CPU.

`python tools/bench_trl.py SETTINGS.json` with model, prompts, steps, group_size, max_tokens, learning_rate, threads and
micro_batch; prints a line of JSON for every step: seconds, tokens (of completions).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Train and time."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    import torch

    torch.set_num_threads(settings["threads"])
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.chat_template = None
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    tokens = [0]

    def reward(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        tokens[0] += sum(len(ids) for ids in completion_ids)
        return [float(hash(text) % 7) for text in completions]

    class Watch(TrainerCallback):
        """Prints the seconds of every step."""

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.start, tokens[0] = time.perf_counter(), 0

        def on_step_end(self, *_: object, **__: object) -> None:
            row = {"seconds": time.perf_counter() - self.start, "tokens": tokens[0]}
            print(json.dumps(row), flush=True)

    prompts = settings["prompts"]
    rollouts = settings["group_size"] * settings["questions"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        use_cpu=True,
        bf16=False,
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=rollouts // settings["micro_batch"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_tokens"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
