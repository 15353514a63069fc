"""Rollouts with vLLM. This package is the only one that imports vLLM."""
