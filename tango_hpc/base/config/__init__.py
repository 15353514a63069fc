"""The configuration: `load_config` reads YAML and overrides, checks everything at once, and returns a `Config`."""

from __future__ import annotations

from tango_hpc.base.config.load import config_to_yaml, load_config
from tango_hpc.base.config.schema import Config

__all__ = ["Config", "config_to_yaml", "load_config"]
