"""Measuring the product against what else could be used, on this machine, in one run."""
