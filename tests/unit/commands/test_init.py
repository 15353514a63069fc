"""`tango init`: a file that fits and says why, on ten machines; two that nothing fits or nobody knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tango_hpc.base.config import load_config
from tango_hpc.base.errors import UserError
from tango_hpc.commands import init_models
from tango_hpc.commands.cli import app
from tango_hpc.commands.init_models import find_model
from tango_hpc.commands.plan_report import make_plan
from tango_hpc.plan.cards import CARDS
from tango_hpc.plan.here import cards_here, cards_of_partition, parse_gpus
from tango_hpc.plan.seconds import plan_time

SEVEN = "--generator Qwen2.5-7B-Instruct --verifier Qwen2.5-7B-Instruct"
SMALL = "--generator Qwen2.5-1.5B-Instruct --verifier Qwen2.5-1.5B-Instruct"
# Whether adapters are taken: where all weights do not fit.
FITTING = {
    "--generator Qwen3-4B --verifier Qwen3-4B --gpus 4xA100-80": False,
    f"{SEVEN} --gpus 1xH100": True,
    f"{SEVEN} --gpus 2xA6000": True,
    f"{SEVEN} --gpus 4xA100-40": True,
    f"{SEVEN} --gpus 8xH100": False,
    f"{SEVEN} --gpus 4xGH200 --nodes 4": False,
    f"{SMALL} --gpus RTX4090": True,
    "--generator Qwen2.5-1.5B-Instruct --verifier same --gpus cpu --node-gb 20": True,
    "--generator Qwen2.5-14B-Instruct --verifier Qwen2.5-7B-Instruct --gpus 8xH100": False,
    "--generator Qwen2.5-32B-Instruct --verifier same --gpus 8xH100 --nodes 2": False,
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tango_hpc.commands.init.memory_of_this_machine", lambda: 20.0)


def init(options: str, file: str = "run.yaml") -> str:
    """What the command prints. Raises the error that it ends with."""
    told = CliRunner().invoke(app, ["init", file, *options.split()])
    if told.exception is not None and not isinstance(told.exception, SystemExit):
        raise told.exception
    return told.output


@pytest.mark.parametrize("options", FITTING)
def test_the_file_fits_by_the_plan_and_the_table_is_its(options: str) -> None:
    told = init(options)
    config = load_config(Path("run.yaml"))
    text = Path("run.yaml").read_text()
    gpus = re.search(r"--gpus (\S+)", options).group(1)  # type: ignore[union-attr]
    card = None if gpus == "cpu" else parse_gpus(gpus)[1]
    plan = make_plan(config, gpu_gb=card.memory_gib if card else 0, node_gb=None if card else 20.0)
    assert plan["problems"] == []
    peak = plan["memory"]["gpu" if card else "node"]["peak_bytes"] / 2**30
    assert f" {peak:.1f} " in told
    adapters = [role.adapter is not None for role in config.models.values()]
    assert adapters == [FITTING[options]] * len(adapters)
    assert ("do not fit" in text) == FITTING[options]
    # Each line that is not a path or a name of a section has its reason.
    bare = [line for line in text.splitlines() if ": " in line and "#" not in line]
    assert len(bare) <= 14, bare
    assert "tango plan run.yaml" in text and "tango import Qwen/" in text


def test_what_is_written_is_what_differs_from_the_defaults() -> None:
    init(f"{SEVEN} --gpus 8xH100")
    tree = yaml.safe_load(Path("run.yaml").read_text())
    whole = load_config(Path("run.yaml"))
    for role in ("generator", "verifier"):
        fields = type(whole.models[role]).model_fields
        for key, value in tree[role].items():
            assert fields[key].is_required() or value != fields[key].get_default(call_default_factory=True), key


def test_nothing_that_fits_is_faster() -> None:
    """Other cuts by hand, on four GPUs."""
    init("--generator Qwen3-4B --verifier none --gpus 4xA100-80")
    from tango_hpc.plan.cards import machine_of
    from tango_hpc.plan.lengths import assumed_load

    def seconds(*overrides: str) -> float:
        config = load_config(Path("run.yaml"), overrides)
        assert make_plan(config, gpu_gb=80, node_gb=None)["fits"]
        return plan_time(config, machine_of(CARDS["A100-80"]), assumed_load(config)).step_seconds("generator")

    best = seconds()
    for tensor, again, tokens, engine in ((2, "none", 8192, 1), (4, "none", 16384, 4), (1, "full", 16384, 2)):
        cut = [
            f"generator.parallel={{tensor: {tensor}, sequence: {str(tensor > 1).lower()}}}",
            f"generator.recompute={again}",
        ]
        other = seconds(*cut, f"generator.micro_batch_tokens={tokens}", f"generator.rollout.tensor={engine}")
        assert other > best / 1.06


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--generator Llama-3.1-70B-Instruct --verifier same --gpus 1xRTX4090",
            "What would fit:\n  - a smaller model: ",
        ),
        (
            "--generator Qwen2.5-32B-Instruct --verifier same --gpus 1xA100-40",
            "- more GPUs: --gpus 4xA100-40 --nodes 1",
        ),
        ("--generator Qwen3-4B --verifier same --gpus 4xP100", "no card named 'P100' is known; did you mean H100"),
        ("--generator Qwen3-4B --verifier same --gpus four", "no card named 'four'"),
        ("--generator Qwen9-4B --verifier same --gpus H100", "no sizes of the model 'Qwen9-4B' are known"),
        ("--generator Qwen3-4B --verifier Qwen9 --gpus H100", "no sizes of the model 'Qwen9' are known"),
        ("--generator Qwen3-4B --gpus H100", "give --generator MODEL and --verifier MODEL"),
        ("--generator Qwen3-4B --verifier none", "no known GPU was found here; say which there are: --gpus 4xA100-80"),
        ("--generator Qwen3-4B --verifier none --gpus H100 train.steps=3", "train.steps: unknown key"),
        (
            "--generator Qwen3-4B --verifier none --gpus H100 other.yaml",
            "'other.yaml' is not of the form key.path=value",
        ),
        ("--generator Qwen3-4B --verifier same --gpus H100 generator.max_response_tokens=x", "max_response_tokens"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(options: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        init(options)
    assert not Path("run.yaml").exists()


def test_a_file_that_is_there_stays() -> None:
    Path("run.yaml").write_text("mine")
    with pytest.raises(UserError, match="run.yaml is there already"):
        init(f"{SMALL} --gpus H100")
    assert Path("run.yaml").read_text() == "mine"


def test_settings_are_taken_over_and_the_search_respects_them() -> None:
    init(
        "--generator Qwen3-4B --verifier same --gpus H100 train.questions_per_step=32 generator.max_response_tokens=6000"
    )
    config = load_config(Path("run.yaml"))
    assert config.train.questions_per_step == 32 and config.generator.max_response_tokens == 6000
    assert config.generator.micro_batch_tokens >= 7024
    assert config.verifier is not None and config.verifier.max_prompt_tokens == 1024 + 6000 + 384


def test_numbers_are_read_as_in_any_config() -> None:
    """PyYAML's own reader takes 2e-6 for a text."""
    init("--generator Qwen3-4B --verifier same --gpus H100 generator.optimizer.learning_rate=2e-6")
    assert load_config(Path("run.yaml")).generator.optimizer.learning_rate == 2e-6
    assert "2.0e-06  # as asked for" in Path("run.yaml").read_text()


def test_models_are_found_where_people_have_them(tmp_path: Path) -> None:
    own = tmp_path / "own/model"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    cached = tmp_path / "home/.cache/huggingface/hub/models--Qwen--Qwen3-4B/snapshots/abc"
    assert find_model("own/model") == Path("own/model")
    assert find_model("Qwen/Qwen3-4B") == Path("models/Qwen3-4B")
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    assert find_model("Qwen/Qwen3-4B") == cached
    assert init_models.hub_name("Llama-3.1-8B-Instruct") == "meta-llama/Llama-3.1-8B-Instruct"


def test_the_gpus_of_a_machine_and_of_a_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {
        "nvidia-smi": 'printf "NVIDIA H100 80GB HBM3, 81559\\nNVIDIA H100 80GB HBM3, 81559\\n"',
        "sinfo": 'case "$*" in *big*) echo "gpu:gh200:4(S:0-3)";; *) printf "(null)\\ngpu:a100:4,gpu:v100:2\\n";; esac',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert cards_here() == (2, CARDS["H100"])
    assert cards_of_partition("big", None) == (4, CARDS["GH200"])
    assert cards_of_partition(None, "a100") == (4, CARDS["A100-40"])  # the smaller one: a name tells no memory
    assert cards_of_partition(None, "v100") is None
    init("--generator Qwen3-4B --verifier same")
    assert load_config(Path("run.yaml")).launch.tasks_per_node == 2


def test_a_task_file_to_fill_in_is_a_task(tmp_path: Path) -> None:
    init("--task", file="mine.py")
    namespace: dict = {}
    exec((tmp_path / "mine.py").read_text(), namespace)
    task = namespace["MyTask"]()
    assert task.grade({"answer": "4"}, " 4 ") and task.label_steps({}, ["a"]) is None
    for file, message in (
        ("mine.py", "is there already"),
        ("mine.yaml", "name a file that ends in .py"),
        ("no/mine.py", "there is no folder no; make it first"),
    ):
        with pytest.raises(UserError, match=message):
            init("--task", file=file)
