"""RL Tango (arXiv 2505.15034) on Slurm clusters: a generator and a verifier trained together."""

from __future__ import annotations

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`from tango_hpc import submit`, without the cost of it for those who do not."""
    if name == "submit":
        from tango_hpc.commands.submit import submit

        return submit
    raise AttributeError(f"module 'tango_hpc' has no attribute {name!r}")
