"""Checkpoints become Hugging Face folders and folders become ones that training reads, tensor by tensor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tango_hpc.base.config import config_to_yaml, load_config
from tango_hpc.base.config.roles import OptimizerConfig
from tango_hpc.base.config.schema import CheckpointConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.models.trainer.checkpoints import Checkpoints
from tango_hpc.stages.convert import export_run, import_model
from tests.helpers.attempts import flip
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.small_tokenizer import write_tokenizer
from tests.helpers.tiny import make_tiny_hf

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
FAMILIES = ("qwen2", "qwen3", "llama")


def on_two_ranks(folder: str) -> None:
    """A checkpoint of two tensor-parallel ranks with halved weights; exports of each family by two stages."""
    policy = policy_of(f"{folder}/qwen2", tensor=2, optimizer=OptimizerConfig(), with_reference=True, total_steps=1)
    with torch.no_grad():
        for shard in policy.named_shards().values():
            shard.mul_(0.5)
    checkpoints = Checkpoints(
        RunDirectory(f"{folder}/run"), "train", CheckpointConfig(), Exchange(["generator"], "generator")
    )
    checkpoints.save(7, "", {"generator": policy}, {"step": 7})
    for family in FAMILIES:
        imported = policy_of(f"{folder}/{family}_imported", pipeline=2)
        imported.export_hf(Path(folder) / f"{family}_exported")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of three families, what import and export made of them, and a run with one checkpoint."""
    folder = tmp_path_factory.mktemp("convert")
    for family in FAMILIES:
        make_tiny_hf(folder / family, family=family, hidden_size=128)
        write_tokenizer(folder / family)
        (folder / family / "chat_template.jinja").write_text("{{ messages }}")
        generation = {"eos_token_id": [3, 4], "temperature": 0.7, "repetition_penalty": 1.1, "max_new_tokens": 9}
        (folder / family / "generation_config.json").write_text(json.dumps(generation))
        assert import_model(str(folder / family), folder / f"{family}_imported", "float32").startswith(family)
    run_ranks(on_two_ranks, 2, str(folder), timeout=200)
    model = folder / "qwen2"
    config = load_config(
        QUICKSTART,
        [f"run.dir={folder}/run", f"generator.model.path={model}", f"verifier.model.path={model}", "sft={}"],
    )
    (folder / "run/config.yaml").write_text(config_to_yaml(config))
    return folder


@pytest.fixture
def run(folder: Path) -> Path:
    return folder / "run"


def test_export_writes_a_checkpoint_of_any_layout_as_a_folder(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    command = [sys.executable, "-P", "-m", "tango_hpc.commands.cli", "export", str(run), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the generator after 7 steps" in done.stdout
    before = load_file(run.parent / "qwen2/model.safetensors")
    after = load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name] * 0.5, after[name]) for name in before)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [3, 4]}
    logits = AutoModelForCausalLM.from_pretrained(out)(torch.tensor([[1, 2, 3]])).logits
    assert logits.isfinite().all()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("chosen", ["auto", "none", "mine.jinja"])
def test_an_exported_folder_has_the_chat_template_that_the_role_was_trained_with(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the export sets it
    (tmp_path / "mine.jinja").write_text("mine: {{ messages }}")
    shutil.copytree(run, tmp_path / "run")
    words = chosen if chosen in ("auto", "none") else tmp_path / chosen
    model = tmp_path / "model"
    shutil.copytree(run.parent / "qwen2", model)
    (model / "tokenizer_config.json").write_text('{"eos_token": "é", "chat_template": "old"}')
    config = load_config(
        tmp_path / "run/config.yaml", [f"generator.chat_template={words}", f"generator.model.path={model}"]
    )
    (tmp_path / "run/config.yaml").write_text(config_to_yaml(config))
    export_run(tmp_path / "run", "generator", tmp_path / "out")
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    template = tmp_path / "out/chat_template.jinja"
    assert settings == {"eos_token": "é"} | ({"chat_template": "old"} if chosen == "auto" else {})
    expected = {"auto": "{{ messages }}", "none": None, "mine.jinja": "mine: {{ messages }}"}[chosen]
    assert (template.read_text() if template.is_file() else None) == expected


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"role": "judge"}, "choose generator or verifier"),
        ({"role": "verifier"}, "was not trained; its weights are those of"),
        ({"step": 8}, "no checkpoint of step 8; it has 7"),
    ],
)
def test_export_names_what_is_not_there(run: Path, tmp_path: Path, arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        export_run(run, arguments.get("role", "generator"), tmp_path / "out", arguments.get("step"))


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    flip(tmp_path / "run/checkpoints/train/step_000007/generator/__1_weights.distcp")
    with pytest.raises(
        UserError, match=r"step_000007 is damaged: generator/__1_weights.distcp is not what was written"
    ):
        export_run(tmp_path / "run", "generator", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_never_writes_into_a_folder_that_is_in_use(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="not empty"):
        export_run(run, "generator", tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_after_import_gives_identical_tensors(family: str, folder: Path) -> None:
    original, exported = (load_file(folder / name / "model.safetensors") for name in (family, f"{family}_exported"))
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)
    assert (folder / f"{family}_exported/chat_template.jinja").is_file()


def test_import_reads_old_pickled_weights_and_converts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny_hf(model)
    write_tokenizer(model)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(tensors, model / "pytorch_model.bin")
    import_model(str(model), tmp_path / "imported", "bfloat16")
    imported = load_file(tmp_path / "imported/model.safetensors")
    assert all(torch.equal(imported[name], tensors[name].bfloat16()) for name in imported)
    assert not (tmp_path / "imported/pytorch_model.bin").exists()


def test_import_names_what_does_not_fit_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny_hf(model)
    write_tokenizer(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(UserError, match=r"gate_proj.weight is \[96, 64\], should be \[128, 64\]"):
        import_model(str(model), tmp_path / "imported")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    with pytest.raises(UserError, match="no folder at ./nowhere"):
        import_model("./nowhere", tmp_path / "imported")
