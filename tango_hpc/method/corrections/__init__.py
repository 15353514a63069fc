"""Weights for the ratio of trainer to engine, a file each: `algorithm.correction.name` names one."""
