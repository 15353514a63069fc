"""Mistral 7B and Mistral Nemo: Llama's layers, in early ones with a window."""

from tango_hpc.base.families.family import Family

FAMILY = Family(
    "mistral",
    members=("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"),
    windows="all",
)
