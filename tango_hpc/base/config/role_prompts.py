"""The prompt that a config gives a role."""

from __future__ import annotations

from typing import Any

from tango_hpc.base.config.schema import Config
from tango_hpc.base.prompts import Prompt, read_prompt


def role_prompt(config: Config, role: str, tokenizer: Any = None) -> Prompt:
    """Return the prompt of `role`: its own file, or the shipped one for the form of the solutions.

    Raises UserError as `read_prompt` does.
    """
    settings = config.roles[role]
    return read_prompt(role, settings.prompt, settings.chat_template_arguments, tokenizer, config.protocol.solution)
