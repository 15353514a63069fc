"""The machine that a plan is for: as named, as found here, or as measured."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

from tango_hpc.base.config import Config
from tango_hpc.plan.cards import CARDS, GPU_DEFAULT, Card, Machine, card_named, card_of_driver, machine_of
from tango_hpc.plan.rates import cpu_machine


def find_machine(config: Config, gpu: str | None, gpu_gb: float | None) -> Machine | None:
    """Return one rank's machine; None where its seconds are not known: a CPU that was not measured, or a GPU of which
    only the memory is given. Raises UserError for a card that is not in the table.
    """
    if config.launch.device == "cpu":
        return cpu_machine(config)
    if gpu is None and gpu_gb is not None:
        return None
    card = card_named(gpu) if gpu is not None else (card_here() or CARDS[GPU_DEFAULT])
    machine = machine_of(card)
    return machine if gpu_gb is None else replace(machine, memory_gib=gpu_gb)


def card_here() -> Card | None:
    """Return the first GPU of this machine, if it is in the table."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    name, _, memory = (done.stdout.splitlines() or [""])[0].partition(",")
    return card_of_driver(name, float(memory)) if done.returncode == 0 and memory.strip() else None
