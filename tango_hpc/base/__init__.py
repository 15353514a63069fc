"""Errors, types, files, configurations and run directories: what everything else stands on."""
