"""A file of advantages that draws at random: all processes get what the first one drew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.helpers.ranks import run_ranks

MINE = """
import numpy as np


def advantages(batch, settings, state):
    drawn = np.random.default_rng().normal(size=len(batch.lengths))
    if state == 1:
        raise ValueError("once is enough")
    return [None if i == 1 else np.full(n, drawn[i]) for i, n in enumerate(batch.lengths)], 1
"""


def on_each_rank(folder: Path) -> Any:
    from torch.distributed import FileStore, PrefixStore

    from tango_hpc.base.config.hooks import GeneratorAdvantagesConfig
    from tango_hpc.base.errors import UserError
    from tango_hpc.method.hooks import load_hook
    from tango_hpc.models.parallel.exchange import Exchange, PeerFailedError
    from tango_hpc.models.parallel.ranks import init_distributed, shutdown_distributed
    from tango_hpc.stages.sharing import OnceForAll
    from tests.helpers.advantages import solutions

    shutdown_distributed()
    store = FileStore(str(folder / "store"), -1)
    init_distributed(60, PrefixStore("generator", store))
    exchange = Exchange.join(store, ("generator",), "generator", 60)
    hook = OnceForAll.of(load_hook(GeneratorAdvantagesConfig(name=str(folder / "mine.py"))), exchange)
    batch = solutions(["q"] * 3, [True] * 3, [[]] * 3, [[]] * 3, [2, 3, 4], 0.0)
    found, state = hook(batch, None)
    try:
        hook(batch, state)
        error = ""
    except (UserError, PeerFailedError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    return int(os.environ["RANK"]), [None if one is None else one.tolist() for one in found], state, error


def test_the_first_process_calls_it_for_all(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (_, found, state, error), (_, other, other_state, told) = run_ranks(on_each_rank, 2, tmp_path)
    assert found == other and state == other_state == 1
    assert found[1] is None and len(set(found[0])) == 1 and [len(found[0]), len(found[2])] == [2, 4]
    assert error.startswith("UserError") and "mine.py, line 8, in advantages: ValueError: once is enough" in error
    assert told.startswith("PeerFailedError: another process failed: UserError")
