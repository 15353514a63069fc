"""What a configuration, or a sweep, resolves to: a hash that two trees can be compared by."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tango_hpc.base.config import Config


def fingerprint(*configs: Config) -> str:
    """A hash of resolved configurations in any order; paths as seen from the working directory, without `run.dir`."""
    texts = []
    for config in configs:
        tree = config.model_dump(mode="json")
        home = tree["run"].pop("dir")
        texts.append(json.dumps(tree, sort_keys=True).replace(home, "RUN").replace(f"{Path.cwd()}/", ""))
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:16]
