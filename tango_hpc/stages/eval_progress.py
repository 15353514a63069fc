"""The progress of `tango eval` on a set, turn by turn: a stopped evaluation goes on with the next turn.

A turn is one response of a role to each question, or to each solution of one of the generator's turns.
RUN/eval/LABEL/NAME.turns/TURN.parquet has a response a row: its token ids and why it ended; the file's metadata say
what it was asked with. The folder goes when the set is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tango_hpc.base.errors import UserError
from tango_hpc.base.types import Generation
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.questions.data.tables import read_made_with, write_rows

_SCHEMA = pa.schema([("token_ids", pa.list_(pa.int32())), ("finish_reason", pa.string())])


class EvalProgress:
    """The turns of one set; the same object in every process.

    `made_with`: what decides the responses, as JSON; those that were asked with something else are asked again. `begin`
    is called with a turn's name before its responses are generated, and may end the stage. `tell` says something in the
    log.
    """

    def __init__(
        self,
        folder: Path,
        made_with: dict[str, Any],
        exchange: Exchange,
        *,
        begin: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self._folder, self._exchange, self._begin, self._tell = folder, exchange, begin, tell
        self._made_with = json.loads(json.dumps(made_with))  # as it is read again

    def once(self, turn: str, generate: Callable[[], list[Generation]], about: Sequence[str] = ()) -> list[Generation]:
        """Return the responses of a turn that an interrupted attempt wrote down, or generate and write them.
        Collective.

        `about`: texts that are asked about, beside the questions; responses about others are asked for again.
        """
        made_with = self._made_with | {"about": hashlib.sha256(json.dumps(about).encode()).hexdigest()}
        file = self._folder / f"{turn.replace(',', '').replace(' ', '_')}.parquet"
        kept = self._exchange.all_gather(self._read(file, made_with) if self._exchange.is_first else None)[0]
        if kept is not None:
            return [Generation(token_ids, [], reason) for token_ids, reason in kept]
        self._begin(turn)
        generations = generate()
        if self._exchange.is_first:
            self._write(file, generations, made_with)
        return generations

    def drop(self) -> None:
        """Forget them; one process calls it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, file: Path, made_with: dict[str, Any]) -> list[tuple[list[int], str]] | None:
        if not file.is_file():
            return None
        try:
            if read_made_with(file) == made_with:
                table = pq.read_table(file)
                return list(zip(table["token_ids"].to_pylist(), table["finish_reason"].to_pylist(), strict=True))
            self._tell(f"{file} was asked for otherwise, and is asked for again")
        except (UserError, OSError, pa.ArrowInvalid) as error:
            self._tell(f"{file} is damaged and asked for again: {error}")
        return None

    def _write(self, file: Path, generations: list[Generation], made_with: dict[str, Any]) -> None:
        rows = [{"token_ids": made.token_ids, "finish_reason": made.finish_reason} for made in generations]
        write_rows(file, rows, made_with=made_with, schema=_SCHEMA)
