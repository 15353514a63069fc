"""Memory above the start: of the GPU where there is one, else resident memory of this process, sampled."""

from __future__ import annotations

import os
import threading


class PeakMemory:
    """`with PeakMemory() as memory:` ...; then `memory.peak_bytes`."""

    def __enter__(self) -> PeakMemory:
        import torch

        self._gpu = torch.cuda.is_available()
        self.peak_bytes = 0
        if self._gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
            return self
        self._start = _resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._gpu:
            import torch

            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated() - self._start
            return
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, _resident_bytes() - self._start)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
