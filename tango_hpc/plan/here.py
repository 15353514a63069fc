"""The machine that a plan is for: as named, as found here or in a partition, or as measured."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.plan.cards import CARDS, GPU_DEFAULT, Card, Machine, card_named, card_of_driver, machine_of
from tango_hpc.plan.rates import cpu_machine

_GPUS = re.compile(r"(?:(\d+)x)?([\w-]+)")
_GRES = re.compile(r"gpu:([\w.-]+):(\d+)")


def find_machine(config: Config, gpu: str | None, gpu_gb: float | None) -> Machine | None:
    """Return one rank's machine; None where its seconds are not known: a CPU that was not measured, or a GPU of which
    only the memory is given. Raises UserError for a card that is not in the table.
    """
    if config.launch.device == "cpu" or (gpu is None and gpu_gb is None):
        here = machine_here(config)
        return here if here is not None or config.launch.device == "cpu" else machine_of(CARDS[GPU_DEFAULT])
    if gpu is None:
        return None
    machine = machine_of(card_named(gpu))
    return machine if gpu_gb is None else replace(machine, memory_gib=gpu_gb)


def machine_here(config: Config) -> Machine | None:
    """Return one rank's machine where this process runs; None where its seconds are not known: a CPU that was not
    measured, or a GPU that is not in the table.
    """
    if config.launch.device == "cpu":
        return cpu_machine(config)
    found = cards_here()
    return None if found is None else machine_of(found[1])


def parse_gpus(text: str) -> tuple[int, Card]:
    """Return the number and the card of `4xA100-80`, or `H100`. Raises UserError for what is neither."""
    match = _GPUS.fullmatch(text)
    if match is None or match.group(1) == "0":
        raise UserError(f"--gpus {text!r} is not of the form 4xA100-80")
    return int(match.group(1) or 1), card_named(match.group(2))


def cards_here() -> tuple[int, Card] | None:
    """Return how many GPUs this machine has, and the card; None without one that is in the table."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    name, _, memory = (lines or [""])[0].partition(",")
    if done.returncode != 0 or not memory.strip():
        return None
    card = card_of_driver(name, float(memory))
    return None if card is None else (len(lines), card)


def cards_of_partition(partition: str | None, gpu_type: str | None) -> tuple[int, Card] | None:
    """Return the GPUs of a node of a partition, by its generic resources in Slurm; None where they say no known card.

    A type such as `a100` tells no memory: the smallest card of that name is taken.
    """
    if shutil.which("sinfo") is None:
        return None
    where = ["--partition", partition] if partition else []
    done = subprocess.run(["sinfo", "--noheader", "--format=%G", *where], capture_output=True, text=True, check=False)
    for kind, count in _GRES.findall(done.stdout):
        fitting = [card for card in CARDS.values() if card.word.lower() in kind.lower().replace("_", "-").split("-")]
        if fitting and gpu_type in (None, kind):
            return int(count), min(fitting, key=lambda card: card.memory_gib)
    return None
