"""RL Tango (arXiv 2505.15034) on Slurm clusters: a generator and a verifier trained together."""

from __future__ import annotations

__version__ = "0.1.0"
