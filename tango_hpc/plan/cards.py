"""Cards by their data sheets, and the shares that programs reach: the numbers behind the seconds of `tango plan`.

Bytes and operations a second, without sparsity; links one way. GPU memory is what `nvidia-smi` shows as the total.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from tango_hpc.base.errors import UserError

TERA, GIGA = 1e12, 1e9
GPU_DEFAULT = "A100-80"


@dataclass(frozen=True)
class Card:
    """A GPU, and how it is reached from the others of its node and from its host."""

    name: str
    word: str  # of the name that the driver gives it
    memory_gib: float
    operations: float  # bfloat16, dense
    bandwidth: float  # of its memory
    peer_link: float  # to the other GPUs of the node together
    host_link: float


# NVIDIA's data sheets of each product. Peer links: NVLink of SXM boards; PCIe of cards without it, as a bridge joins
# only pairs. A GH200's four GPUs of a node share 18 links of NVLink 4 three ways; host links: PCIe 4.0 and 5.0 x16,
# NVLink-C2C of GH200 and GB200.
CARDS = {
    card.name: card
    for card in (
        Card("A100-40", "A100", 40.0, 312 * TERA, 1555 * GIGA, 300 * GIGA, 32 * GIGA),
        Card("A100-80", "A100", 80.0, 312 * TERA, 2039 * GIGA, 300 * GIGA, 32 * GIGA),
        Card("H100", "H100", 79.6, 989.4 * TERA, 3350 * GIGA, 450 * GIGA, 64 * GIGA),
        Card("H20", "H20", 95.6, 148 * TERA, 4000 * GIGA, 450 * GIGA, 64 * GIGA),
        Card("H200", "H200", 140.4, 989.4 * TERA, 4800 * GIGA, 450 * GIGA, 64 * GIGA),
        Card("GH200", "GH200", 95.6, 989.4 * TERA, 4000 * GIGA, 450 * GIGA, 450 * GIGA),
        Card("GB200", "GB200", 184.0, 2500 * TERA, 8000 * GIGA, 900 * GIGA, 225 * GIGA),
        Card("L40S", "L40S", 45.0, 362 * TERA, 864 * GIGA, 32 * GIGA, 32 * GIGA),
        Card("A40", "A40", 45.0, 149.7 * TERA, 696 * GIGA, 32 * GIGA, 32 * GIGA),
        Card("A6000", "A6000", 48.0, 154.8 * TERA, 768 * GIGA, 32 * GIGA, 32 * GIGA),
        Card("RTX4090", "4090", 24.0, 165.2 * TERA, 1008 * GIGA, 32 * GIGA, 32 * GIGA),
    )
}


@dataclass(frozen=True)
class Rates:
    """The part of a machine that programs reach: shares of its peaks, and seconds whatever the size of the model.

    Those of GPUs are estimates from the sources named at `GPU_RATES`; those of a CPU are measured by
    `tango doctor --rates`.
    """

    training: float  # share of peak operations that the passes of a trainer reach
    prefill: float  # the same of an engine that reads prompts
    decoding: float  # the same of an engine that writes, where arithmetic bounds it
    reading: float  # share of memory bandwidth that an engine reads weights and cache with
    activations: float  # share of memory bandwidth that activations are written and read with
    links: float  # share of a link's data sheet
    decode_step: float  # seconds of an engine's step beside arithmetic and memory
    decode_sequence: float  # seconds that each sequence adds to such a step
    layer: float  # seconds of a layer of a micro-batch, forward and backward, beside arithmetic and memory
    collective: float  # seconds of a collective beside its bytes
    update: float  # seconds of an update beside its micro-batches: clipping, the optimizer's launches, statistics
    score: float  # seconds of a step outside models: prompts, grading, advantages, metrics
    score_response: float  # the same for each response
    start: float  # seconds from the start of a job to its first step


# training: Llama 3 reports 38 to 43% of the peak on H100s (arXiv 2407.21783, Table 4), Megatron-LM's README 41 to 47%;
#   a trainer of ours on one H100, its micro-batches full, reached 53%.
# prefill: half of the peak, as weights are read once for thousands of tokens. reading: model bandwidth utilization of
#   0.55 to 0.6 with several GPUs (Databricks, "LLM Inference Performance Engineering"). links: NCCL and pinned copies
#   reach 75 to 85% of a data sheet. decode_step, decode_sequence: of vLLM with CUDA graphs, its scheduler and sampler
#   run once a step for all sequences; an H100 took 7.3 ms for a step of 256 sequences of a model of 0.5B parameters.
# update, score, score_response: the quick start on an H100 (docs/measurements/quickstart_h100_expected.json).
# layer, collective, start: guesses.
GPU_RATES = Rates(
    training=0.4,
    prefill=0.5,
    decoding=0.5,
    reading=0.6,
    activations=0.8,
    links=0.8,
    decode_step=3e-3,
    decode_sequence=15e-6,
    layer=4e-4,
    collective=15e-6,
    update=0.03,
    score=0.04,
    score_response=3e-4,
    start=100.0,
)


@dataclass(frozen=True)
class Machine:
    """One rank's share of the machine that a run is on. `operations` are those of `launch.dtype`."""

    name: str
    memory_gib: float | None  # of its GPU
    operations: float
    bandwidth: float
    peer_link: float
    host_link: float
    network: float  # between nodes, for each rank
    disk: float  # for each node
    rates: Rates


# Where nothing else is known: a port of 200 Gb/s for each GPU (InfiniBand HDR, Slingshot 11), and a parallel file
# system's share of a node.
NETWORK, DISK = 25 * GIGA, 2 * GIGA


def machine_of(card: Card) -> Machine:
    """Return the machine of a rank that has this card."""
    links = {"peer_link": card.peer_link, "host_link": card.host_link, "network": NETWORK, "disk": DISK}
    return Machine(card.name, card.memory_gib, card.operations, card.bandwidth, rates=GPU_RATES, **links)


def card_named(name: str) -> Card:
    """Return the card that a user names, in any case. Raises UserError for one that is not in the table."""
    known = {key.lower(): card for key, card in CARDS.items()}
    if name.lower() in known:
        return known[name.lower()]
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(known[key].name for key in close)}? " if close else ""
    raise UserError(f"no card named {name!r} is known; {meant}Known are {', '.join(CARDS)}")


def card_of_driver(name: str, memory_mib: float) -> Card | None:
    """Return the card by what the driver calls it and how much memory it has; None for one that is not in the table."""
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    fitting = [card for card in CARDS.values() if card.word in words]
    return min(fitting, key=lambda card: abs(card.memory_gib - memory_mib / 1024), default=None)
