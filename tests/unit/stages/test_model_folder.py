"""What keeps a model from being used is said once, in one message, by everything that meets its folder."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tango_hpc.base.config.load import config_to_yaml, validate_tree
from tango_hpc.base.errors import UserError
from tango_hpc.commands.doctor import examine
from tango_hpc.commands.plan_report import make_plan
from tango_hpc.questions.data.tables import write_rows
from tango_hpc.runner.enter import prepare_run
from tango_hpc.stages.convert import import_model
from tango_hpc.stages.model_folder import check_model
from tango_hpc.stages.stage import TRAIN
from tests.helpers.tiny import make_tiny_hf

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(
    folder: Path, *, template: str | None = CHATML, extra: tuple[str, ...] = (), rows_short: int = 0, **config: Any
) -> Path:
    """A tiny model with a byte-level tokenizer, whose last `rows_short` tokens have no rows; `config` overrides."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["one two three"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    tokenizer.add_tokens(list(extra))
    rows = len(tokenizer) - rows_short
    make_tiny_hf(folder, vocab_size=rows, num_attention_heads=2, max_position_embeddings=4096)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    tokenizer.save_pretrained(folder)
    return folder


def without_end(folder: Path) -> None:
    """Nothing in the folder names an end of sequence, and the tokenizer has none of the well-known ones."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    tokenizer = (folder / "tokenizer.json").read_text()
    for name in ("endoftext", "im_end"):
        tokenizer = tokenizer.replace(f"<|{name}|>", f"<|{name}_1|>")
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text("{}")


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "dynamic": ({"rope_scaling": DYNAMIC}, "rope type 'dynamic' (supported are default, linear, llama3, yarn)"),
    "dynamic, newer config": ({"rope_parameters": DYNAMIC | {"rope_theta": 1e4}}, "rope type 'dynamic'"),
    "yarn without a length": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "without a number for original_max",
    ),
    "dynamic, older config": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope type 'longrope'"),
    "by kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}},
        "rope_parameters that differ by kind of layer (full_attention, sliding_attention)",
    ),
    "linear without its factor": ({"rope_scaling": {"rope_type": "linear"}}, "'linear' without a number for factor"),
    "part of the dimensions": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "no mapping": ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
    "tokens beyond the rows": ({"rows_short": 2}, "rows: 2 tokens, such as"),
    "an added token beyond the rows": ({"rows_short": 1, "extra": ("<new>",)}, "1 tokens, such as '<new>', have no"),
    "two mistakes": (
        {"rope_scaling": DYNAMIC, "rows_short": 2, "mlp_bias": True},
        "mlp_bias=true, rope type 'dynamic'",
    ),
}


def config_of(folder: Path, **generator: Any) -> Any:
    rows = [{"id": "1", "question": "1+1?", "answer": "2", "source": "math"}]
    for name in ("train", "eval"):
        write_rows(folder.parent / f"{name}.parquet", rows)
    tree = {
        "run": {"dir": str(folder.parent / "run")},
        "task": {"name": "math"},
        "data": {"train": str(folder.parent / "train.parquet"), "eval": str(folder.parent / "eval.parquet")},
        "generator": {"model": {"path": str(folder)}, "rollout": {"kv_cache_gb": 0.1}} | generator,
        "verifier": None,
        "algorithm": {"alpha_start": 0.0},
        "train": {"verifier_warmup_steps": 0, "verifier_steps_per_cycle": 0},
        "launch": {"device": "cpu", "dtype": "float32"},
    }
    return validate_tree(tree, "config")


def refusals(folder: Path, out: Path) -> list[str]:
    """What import, plan, doctor and the start of a stage say of a model."""

    def told(action: Any) -> str:
        try:
            action()
        except UserError as error:
            return str(error)
        return ""

    def seen_by_doctor() -> str:
        file = folder.parent / "config.yaml"
        file.write_text(config_to_yaml(config_of(folder)))
        console = Console(record=True, width=1000, file=io.StringIO())
        assert examine(file, [], None, "train", console) == 1
        return console.export_text()

    return [
        told(lambda: import_model(str(folder), out)),
        told(lambda: make_plan(config_of(folder), gpu_gb=80, node_gb=None)),
        told(seen_by_doctor) or seen_by_doctor(),
        told(lambda: prepare_run([TRAIN], config_of(folder), resume=False)),
        told(lambda: check_model(folder)),
    ]


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_cannot_be_used_is_refused_wherever_it_is_met(tmp_path: Path, name: str) -> None:
    changes, message = BROKEN[name]
    folder = make_model(tmp_path / "model", **changes)
    for refusal in refusals(folder, tmp_path / "out"):
        assert message in refusal
    assert not (tmp_path / "out").exists()


def test_a_sound_model_is_taken_everywhere(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", rope_scaling={"rope_type": "linear", "factor": 2.0})
    check_model(folder, "", "generator", config_of(folder))
    assert "is in" in import_model(str(folder), tmp_path / "out")
    make_plan(config_of(folder), gpu_gb=80, node_gb=None)
    prepare_run([TRAIN], config_of(folder), resume=False)


def test_a_model_that_names_no_end_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    without_end(folder)
    with pytest.raises(UserError, match="no token ends its responses: set eos_token in tokenizer_config.json"):
        check_model(folder)


TEMPLATES = {
    "drops the system message": (CHATML.replace("<|im_start|>{{", "{% if m.role == 'user' %}<|im_start|>{{").replace(
        "{% endfor %}", "{% endif %}{% endfor %}"), "drops the system message of the generator's prompt"),
    "wants content parts": (
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endfor %}", "drops the system message and the question of the generator's prompt"),
    "is empty": ("{% if false %}x{% endif %}", "drops the system message and the question"),
    "takes the last message alone": ("{{ messages[-1].content }}", "drops the system message"),
    "refuses the system role": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
        "cannot put this prompt: System role not supported"),
    "is no template": ("{% for m in messages %}", "cannot put this prompt"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_must_put_all_of_the_prompt(tmp_path: Path, name: str) -> None:
    template, message = TEMPLATES[name]
    folder = make_model(tmp_path / "model", template=template)
    with pytest.raises(UserError, match=re.escape(message)):
        prepare_run([TRAIN], config_of(folder), resume=False)
    assert message in import_model(str(folder), tmp_path / "out")  # a note: a config may name another template
    prepare_run([TRAIN], config_of(folder, chat_template="none"), resume=False)


def test_links_of_a_broken_hub_cache(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    check_model(folder)
    blob.unlink()
    with pytest.raises(UserError, match=r"model.safetensors in the model folder .*: links to files that are gone"):
        check_model(folder)


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="its tokenizer cannot be read"):
        check_model(folder)
