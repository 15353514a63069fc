"""A config on a base: what merges, what replaces, and where a mistake stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tango_hpc.base.config import Config, config_to_yaml, load_config
from tango_hpc.base.config.load import apply_override, read_run_dir, read_tree
from tango_hpc.base.errors import UserError
from tango_hpc.commands.sweep import load_sweep

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
# With a run directory of its own: what lies in ./runs/quickstart must not count.
OWN_RUN = "/nowhere/run"
OWN_QUICKSTART = QUICKSTART.read_text().replace("dir: runs/quickstart", f"dir: {OWN_RUN}")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The quick start, in a folder beside that of the files that name it."""
    file = tmp_path / "shared/base.yaml"
    file.parent.mkdir()
    file.write_text(OWN_QUICKSTART)
    return file


def write(base: Path, text: str, *, names: str = "../shared/base.yaml") -> Path:
    """A config with these lines on the base."""
    file = base.parents[1] / "mine/config.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"base: {names}\n{text}\n")
    return file


def refusal(file: Path, *overrides: str) -> str:
    """The message that the config is refused with."""
    with pytest.raises(UserError) as caught:
        load_config(file, overrides)
    return str(caught.value)


def like_quickstart(*overrides: str) -> Config:
    return load_config(QUICKSTART, [f"run.dir={OWN_RUN}", *overrides])


def test_a_file_of_its_base_alone_is_the_base(base: Path) -> None:
    assert load_config(write(base, "")) == like_quickstart()
    assert load_config(write(base, "", names=str(base))) == like_quickstart()  # an absolute path


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("train: {generator_steps: 7}", ["train.generator_steps=7"]),
        ("sft: {generator: {init: {build: {num_layers: 2}}}}", ["sft.generator.init.build.num_layers=2"]),
        ("reshard: {verify: always}", ["reshard.verify=always"]),  # no such section in the base
        ("task: {last_letter: {eval_words: [2, 3]}}", ["task.last_letter.eval_words=[2, 3]"]),
        ("eval: {benchmarks: [task]}", ["eval.benchmarks=[task]"]),
        (
            "sft: {verifier: null}\nverifier: null\ntrain: {verifier_warmup_steps: 0, verifier_steps_per_cycle: 0}",
            ["sft.verifier=null", "verifier=null", "train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0"],
        ),
    ],
    ids=["value", "deep", "new section", "list", "list where none is", "null"],
)
def test_mappings_merge_and_everything_else_replaces(base: Path, text: str, same_as: list[str]) -> None:
    assert load_config(write(base, text)) == like_quickstart(*same_as) != like_quickstart()


def test_a_section_replaces_a_null_of_the_base(base: Path) -> None:
    base.write_text(base.read_text() + "teacher: null\n")
    config = load_config(write(base, "teacher: {questions: q.parquet, output: out}"))
    assert config.teacher is not None and config.teacher.questions == Path("q.parquet").absolute()


def test_references_and_overrides_see_the_merged_settings(base: Path) -> None:
    file = write(base, "run: {dir: /tmp/mine}\nalgorithm: {kl_coef: 0.2}")
    assert load_config(file) == like_quickstart("run.dir=/tmp/mine", "algorithm.kl_coef=0.2")
    assert str(load_config(file).data.train) == "/tmp/mine/data/train.parquet"
    assert load_config(file, ["run.dir=/tmp/x"]) == like_quickstart("run.dir=/tmp/x", "algorithm.kl_coef=0.2")
    assert read_run_dir(file) == Path("/tmp/mine") and read_run_dir(file, ["run.dir=/tmp/x"]) == Path("/tmp/x")


def test_what_is_written_to_a_run_directory_has_no_base(base: Path, tmp_path: Path) -> None:
    config = load_config(write(base, "seed: 3"))
    written = tmp_path / "config.yaml"
    written.write_text(config_to_yaml(config))
    assert "base" not in read_tree(written) and load_config(written) == config


def test_all_mistakes_of_both_files_at_once_and_where_they_stand(base: Path) -> None:
    text = base.read_text().replace("kl_coef:", "kl_coeff:")
    base.write_text(text.replace("family: qwen2", "family: qwen9"))
    file = write(base, "train: {generator_step: 3}\nverifier: {rollout: {tensor: 0}}")
    lines = refusal(file, "launch.nodes=0").splitlines()
    assert lines[0] == f"{file} has 5 mistakes:"
    in_base = f" (set in {file.parent / '../shared/base.yaml'})"
    wrong = dict(line.removeprefix("  - ").split(": ", 1) for line in lines[1:])
    assert {key for key, message in wrong.items() if message.endswith(in_base)} == {
        "algorithm.kl_coeff",
        "sft.generator.init.build.family",
    }
    assert set(wrong) - {"algorithm.kl_coeff", "sft.generator.init.build.family"} == {
        "train.generator_step",
        "verifier.rollout.tensor",
        "launch.nodes",
    }


def test_a_broken_reference_of_the_base_and_a_bad_combination_say_where(base: Path) -> None:
    base.write_text(base.read_text().replace("data: ${run.dir}/data/sft_gen", "data: ${run.folder}/data/sft_gen"))
    message = refusal(write(base, ""))
    assert "sft.generator.data: ${run.folder} names no key that is set in this config (set in " in message
    base.write_text(OWN_QUICKSTART)
    message = refusal(write(base, "verifier: null\nsft: {verifier: null}"))
    assert "train.verifier_steps_per_cycle: must be 0 without a verifier (set in " in message
    message = refusal(write(base, "algorithm: {alpha_end: 0.5}"))
    assert message.endswith("algorithm.alpha_end: 0.5 is above alpha_start 0.1")


def test_what_is_given_nowhere_stands_nowhere(base: Path) -> None:
    base.write_text("seed: 1\ntask: {name: math}\n")
    message = refusal(write(base, "run: {dir: x}"))
    assert "generator: required, but not given" in message and "set in" not in message


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (
            "nothing.yaml",
            r"base: no config file at .*mine/nothing.yaml; the path is relative to the file that names it",
        ),
        ("3", r"base: must be the path of another config, seen from this file \(got 3\)"),
        ("null", r"base: must be the path .* \(got None\)"),
        ("[../shared/base.yaml]", r"base: must be the path .* \(got \['../shared/base.yaml'\]\)"),
        (".", r"cannot read the config .*mine: "),
        ("config.yaml", r"config.yaml is built on this file; let one of the two have no base"),
    ],
)
def test_a_base_that_cannot_be_is_refused(base: Path, named: str, expected: str) -> None:
    file = write(base, "", names=named)
    with pytest.raises(UserError, match=expected):
        load_config(file)
    with pytest.raises(UserError, match=expected):
        read_run_dir(file)


def test_a_base_has_a_base(base: Path, tmp_path: Path) -> None:
    middle = write(base, "seed: 1\ntrain: {generator_steps: 7, eval_every: 3}")
    top = tmp_path / "top.yaml"
    top.write_text("base: mine/config.yaml\ntrain: {eval_every: 4}\n")
    assert load_config(top) == like_quickstart("seed=1", "train.generator_steps=7", "train.eval_every=4")
    middle.write_text(middle.read_text().replace("generator_steps: 7", "generator_steps: x"))
    assert refusal(top).startswith(f"{top} has 1 mistake:") and refusal(top).endswith(
        f"(set in {top.parent / 'mine/config.yaml'})"
    )
    base.write_text("base: ../top.yaml\n" + base.read_text())
    assert "top.yaml is built on this file" in refusal(top)


def test_files_and_overrides_lie_over_each_other_in_their_order(base: Path, tmp_path: Path) -> None:
    first, second = write(base, "train: {generator_steps: 7, eval_every: 3}"), tmp_path / "second.yaml"
    second.write_text("train: {eval_every: 4}\n")
    both = ["train.generator_steps=7", "train.eval_every=4"]
    assert load_config(first, [str(second)]) == like_quickstart(*both)
    assert load_config(first, [str(second), "train.eval_every=5"]) == like_quickstart(*both, "train.eval_every=5")
    assert load_config(first, ["train.eval_every=5", str(second)]) == like_quickstart(*both)
    second.write_text("base: shared/base.yaml\ntrain: {eval_every: 4}\n")  # which is below already
    assert load_config(first, [str(second)]) == like_quickstart(*both)
    second.write_text("train: {eval_every: x}\n")
    message = refusal(first, str(second))
    assert message.startswith(f"{second} has 1 mistake:") and "train.eval_every" in message
    assert "no YAML file at nothing.yaml" in refusal(first, "nothing.yaml")
    assert "is not of the form key.path=value" in refusal(first, "train.yaml.eval_every")


def test_a_layer_alone_is_told_to_be_one() -> None:
    layer = QUICKSTART.parent / "methods/alone.yaml"
    assert refusal(layer) == f"{layer} is a layer, with neither task nor data: name it after a config, CONFIG {layer}"


def test_a_path_with_an_equals_sign_is_a_file(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cell_seed=0"
    folder.mkdir()
    (folder / "mine.yaml").write_text("seed: 5\n")
    assert load_config(base, [str(folder / "mine.yaml")]).seed == 5
    assert "words.yaml cannot be read" in refusal(base, "generator.prompt=words.yaml")


@pytest.mark.parametrize("text", ["seed: 1\nseed: 2", "train: {dump_every: 1, dump_every: 2}"])
def test_a_key_that_stands_twice_is_refused_in_both_files(base: Path, text: str) -> None:
    assert "mine/config.yaml is not valid YAML" in (message := refusal(write(base, text))) and "stands twice" in message
    base.write_text(text)
    assert "shared/base.yaml is not valid YAML" in (message := refusal(write(base, ""))) and "stands twice" in message


def test_a_base_is_named_in_a_file_only(base: Path) -> None:
    tree = read_tree(write(base, ""))
    with pytest.raises(UserError, match="override 'base=other.yaml': only a config file names its base"):
        apply_override(tree, "base=other.yaml")


def test_a_sweep_of_a_config_with_a_base(base: Path, tmp_path: Path) -> None:
    write(base, "train: {generator_steps: 7}")
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        f"config: mine/config.yaml\ndir: {tmp_path}/sweep\ngrid: {{algorithm.alpha_start: [0.1, 0.2]}}\nseeds: [0, 1]\n"
    )
    cells = load_sweep(sweep).cells
    assert [cell.config for cell in cells] == [
        like_quickstart(
            "train.generator_steps=7",
            f"algorithm.alpha_start={alpha}",
            f"seed={seed}",
            f"run.dir={cell.config.run.dir}",  # a folder of its own
        )
        for cell, (alpha, seed) in zip(cells, [(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)], strict=True)
    ]
    base.write_text(base.read_text().replace("kl_coef: 0.0", "kl_coef: -1"))
    with pytest.raises(UserError) as caught:
        load_sweep(sweep)
    assert str(caught.value).count("algorithm.kl_coef") == str(caught.value).count("shared/base.yaml)") == 4


def test_a_sweep_file_has_no_base(base: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(f"base: shared/base.yaml\nconfig: {QUICKSTART}\ndir: x\ngrid: {{seed: [0]}}\n")
    with pytest.raises(UserError, match="base: unknown key; valid names here: config"):
        load_sweep(sweep)
