"""The README and docs/ say what is there: files, links, columns, keys, commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tango_hpc.base.run.dumps import ROLLOUT_SCHEMA
from tango_hpc.base.run.metrics import REQUIRED_KEYS
from tango_hpc.commands.cli import app
from tango_hpc.commands.profiles import Profile

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
COMMAND = re.compile(r"\btango ([a-z]+)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    broken = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_code_exist_and_so_do_their_configs(page: Path) -> None:
    text = page.read_text()
    code = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    for snippet in code:
        assert set(COMMAND.findall(snippet)) <= known | {"hpc"}, snippet
        for word in shlex.split(snippet.replace("'", ""), comments=True):
            if re.fullmatch(r"(configs|slurm|tools)/[\w./-]+\.(yaml|sh|sbatch|py)", word):
                assert (ROOT / word).is_file(), f"{word} in {snippet!r}"


def test_the_ten_failures_quote_messages_and_settings_that_exist() -> None:
    page = (ROOT / "docs/on_your_cluster.md").read_text()
    section = page.partition("## The ten most likely failures")[2].partition("\n## ")[0]
    failures = re.findall(r"^\d+\. \*\*(.+?)\*\*(.*?)(?=^\d+\. |\Z)", section, re.DOTALL | re.MULTILINE)
    assert len(failures) == 10
    sources = "\n".join(path.read_text() for path in ROOT.glob("tango_hpc/**/*.py"))
    sources = re.sub(r'"\n\s*f?"', "", sources)  # strings that go on in the next line
    of_slurm = {"invalid account or partition", "Out Of Memory"}
    for title, _ in failures:
        for quoted in set(re.findall(r'"([^"]+)"', title)) - of_slurm:
            for part in filter(None, map(str.strip, quoted.split("…"))):
                assert part in sources, quoted
    sections = "\n".join(
        (ROOT / f"tango_hpc/base/config/{name}.py").read_text() for name in ("schema", "roles", "tasks")
    )
    known = set(re.findall(r"^    (\w+): ", sections, re.MULTILINE))
    for setting in re.findall(r"`((?:launch|rollout|parallel|checkpoint|run)\.\w+)`", page):
        assert setting.partition(".")[2] in known, setting
    for setting in re.findall(r"`(\w+): [^`]+`", page):
        assert setting in known | set(Profile.model_fields) | {"tango"}, setting


def test_what_a_resume_promises_bit_for_bit_it_promises_for_cpus() -> None:
    """On a GPU the backward pass of attention adds up in any order."""
    files = [*PAGES, *ROOT.glob("tango_hpc/**/*.py"), *ROOT.glob("slurm/**/*.*"), *ROOT.glob("configs/**/*.yaml")]
    promises = []
    for file in files:
        text = " ".join(re.sub(r"^\s*(#+|-) ", "", line).strip() for line in file.read_text().splitlines())
        for sentence in re.split(r"(?<=[.;:]) ", text):
            if "bit for bit" in sentence.lower() and re.search(
                r"\b(continues?|go(es)? on|interrupted|resum)", sentence
            ):
                assert "on CPUs" in sentence or "On CPUs" in sentence, f"{file}: {sentence}"
                promises.append(file.name)
    assert {"README.md", "on_your_cluster.md", "tango.py"} <= set(promises)


def test_every_command_has_help_with_an_example() -> None:
    runner = CliRunner()
    for command in app.registered_commands:
        name = command.name or (command.callback.__name__ if command.callback else "")
        result = runner.invoke(app, [name, "--help"])
        assert result.exit_code == 0 and "Example" in result.output, name


def test_the_page_on_files_names_every_metric_and_column() -> None:
    text = (ROOT / "docs/run_directory.md").read_text()
    named = set(re.findall(r"`([^`]+)`", text))
    assert set(REQUIRED_KEYS) <= named
    assert set(ROLLOUT_SCHEMA.names) <= named
