"""RL Tango (arXiv 2505.15034) on Slurm clusters: a generator and a verifier trained together."""

from __future__ import annotations

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import `submit` when it is first asked for: the import is slow."""
    if name == "submit":
        from tango_hpc.commands.submit import submit

        return submit
    raise AttributeError(f"module 'tango_hpc' has no attribute {name!r}")
