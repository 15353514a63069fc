"""Qwen2, Qwen2.5, and the distillations of DeepSeek-R1 on them: biases on queries, keys and values."""

from tango_hpc.base.families.family import Family

FAMILY = Family(
    "qwen2",
    members=("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Math-7B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    qkv_bias=True,
    refused=("use_sliding_window",),  # the bias is always there
)
