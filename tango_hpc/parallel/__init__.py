"""Ranks, process groups, collectives, and Megatron-core on a CPU."""

import warnings

# Megatron-core says so once per module; running without both is what this package is built for.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
