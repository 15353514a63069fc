"""vLLM's CPU worker, made safe for several jobs on one host."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

GROUP_IDENT = "TANGO_ROLLOUT_IDENT"


class NamedCPUWorker(CPUWorker):
    """Names the shared-memory segments of tensor parallelism after this job and host.

    vLLM derives their name from the end of the init method, which is the same for every job that an external
    launcher starts: two jobs on one host would write into each other's segments, and a group that spans two hosts
    would wait for segments it cannot see. The default process group exists already, so the init method serves no
    other purpose here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["distributed_init_method"] = f"tango:{os.environ[GROUP_IDENT]}"
        super().__init__(*args, **kwargs)
