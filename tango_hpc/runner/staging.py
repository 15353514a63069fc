"""Model folders copied to node-local scratch, where reading them does not load the shared file system.

The supervisor runs this module once per node before the ranks start; the ranks then read the copies. The folder is
named by TANGO_STAGE_WEIGHTS_TO (in a profile: stage_weights_to).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.config.load import read_tree
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory

VARIABLE = "TANGO_STAGE_WEIGHTS_TO"


def stage_weights(config: Config, folder: Path) -> list[Path]:
    """Copy every model folder that the run reads to `folder` on this node; return the copies."""
    copies = []
    for source in sorted({path for _, path in _model_paths(config.model_dump())}):
        copy = staged_path(source, folder)
        copies.append(copy)
        if copy.is_dir():
            continue
        begun = f".{copy.name}.{socket.gethostname()}"
        for left in folder.glob(f"{begun}.*"):
            if not Path("/proc", left.name.rpartition(".")[2]).exists():  # ended while it copied
                shutil.rmtree(left, ignore_errors=True)
        needed = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise UserError(
                f"{folder} on {socket.gethostname()} has {free / 2**30:.1f} GB free, {source} takes "
                f"{needed / 2**30:.1f} GB; leave out stage_weights_to, or name a larger folder"
            )
        partial = copy.with_name(f"{begun}.{os.getpid()}")
        shutil.copytree(source, partial, dirs_exist_ok=True)
        try:
            partial.rename(copy)
        except OSError:  # another job on this node was quicker
            shutil.rmtree(partial)
    return copies


def staged_overrides(config_file: Path, env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the overrides that put this node's copies in the place of a config's model folders."""
    if not env.get(VARIABLE):
        return []
    found = ((key, staged_path(path, Path(env[VARIABLE]))) for key, path in _model_paths(read_tree(config_file)))
    return [f"{key}.path={json.dumps(str(copy))}" for key, copy in found if copy.is_dir()]


def staged_path(source: Path, folder: Path) -> Path:
    """Return where the copy of a model folder lies; another place when the original changes."""
    weights = max((file.stat().st_mtime_ns for file in source.glob("*.safetensors")), default=0)
    mark = hashlib.sha256(f"{source.absolute()}:{weights}".encode()).hexdigest()[:12]
    return folder / f"{source.name}-{mark}"


def _model_paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the `model` and `init` sections of a config's tree whose folder exists, by their keys, each with that
    folder.
    """
    for key, value in tree.items():
        if not isinstance(value, dict):
            continue
        if key in ("model", "init") and Path(value["path"]).is_dir():
            yield f"{prefix}{key}", Path(value["path"])
        yield from _model_paths(value, f"{prefix}{key}.")


def main() -> int:
    """Run `python -m tango_hpc.runner.staging RUN_DIR`, once per node."""
    try:
        stage_weights(load_config(RunDirectory.open(sys.argv[1]).config), Path(os.environ[VARIABLE]))
    except UserError as error:
        print(f"tango: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
