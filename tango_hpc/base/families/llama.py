"""Llama 2 to 3.3, and the many models that are built like them."""

from tango_hpc.base.families.family import Family

FAMILY = Family("llama", members=("meta-llama/Llama-3.1-8B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"))
