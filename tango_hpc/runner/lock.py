"""RUN/control/lock names the one process, on any node, that may write into the run.

A process id alone is not enough: it changes its meaning after a reboot, in another container, and when the system
reuses it. So the lock names host, boot, process-id namespace, process id and start time of its holder, and a process is
the holder only where all five fit. For a holder on another node or in another container, Slurm is asked for its job;
without Slurm, a holder counts as alive while it touches its lock every few seconds.

A process takes the lock by one `link`, which succeeds for one process only. It takes a dead holder's lock in two steps:
it links `lock.after-ID`, where ID is the dead holder's, which makes it the only successor; then it renames its own lock
over the old one. A successor that dies between the two steps is a dead holder like any other.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tango_hpc.base.errors import CheckFailed, UserError
from tango_hpc.base.files import read_json, read_replaced, warn_once, write_atomically
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.runner import slurm
from tango_hpc.runner.polling import poll

TOUCH_SECONDS = 10.0
# A holder on another node is dead when it has not touched its lock for this long.
STALE_SECONDS = 120.0
# The same for a holder whose job may go on without it, as it may copy models or wait for Slurm between two touches.
ABANDONED_SECONDS = 1800.0
# How long a lock is watched whose holder should be on this machine and is not visible: a live one touches it.
WATCH_SECONDS = 15.0
POLL_SECONDS = 0.5
# How long, and how often, a batch job asks Slurm about the holder's job while Slurm does not answer.
PATIENCE_SECONDS = 1800.0
RETRY_SECONDS = 15.0
# Ids of jobs and of locks, which become parts of file names.
NAME = re.compile(r"[\w.+-]{1,64}", re.ASCII)
# Errors of pidfd_open on kernels before 5.3 and in containers that forbid the call.
NO_PIDFD = (errno.EPERM, errno.ENOSYS)
# Errors of file systems without hard links.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Process:
    """The identity of a process, which no other process ever has. Unknown values are "" or 0."""

    host: str = ""
    boot: str = ""
    namespace: str = ""  # of process ids; every container has its own
    pid: int = 0
    start: int = 0  # in clock ticks since the boot

    @classmethod
    def this(cls) -> Process:
        """Return this process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _boot(), _namespace(), pid, _start_of(pid) or 0)

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process of this machine that has `pid` now."""
        start = _start_of(pid)
        return None if start is None else cls(socket.gethostname(), _boot(), _namespace(), pid, start)

    @classmethod
    def noted(cls, values: object) -> Process:
        """Return the process that a file describes; values of a wrong type count as unknown."""
        return cls(**_fitting(cls, values if isinstance(values, dict) else {}))

    @property
    def is_visible(self) -> bool:
        """Return whether its process id means the same here: the boot and the namespace are ours."""
        return bool(self.boot) and (self.boot, self.namespace) == (_boot(), _namespace())

    @property
    def is_alive(self) -> bool:
        """Return whether the process certainly runs; False also where it is not visible from here."""
        return self.is_visible and self.start > 0 and _start_of(self.pid) == self.start

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to this process and to no other; return False where it does not run here.

        Without pidfd (Python, kernel or container), the process could end between the check and the signal.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except (OSError, AttributeError, OverflowError) as error:
            if getattr(error, "errno", errno.ENOSYS) in NO_PIDFD and self.is_alive:
                os.kill(self.pid, number)
                return True
            return False
        try:
            if not self.is_alive:
                return False
            signal.pidfd_send_signal(descriptor, number)  # to the process that had this id when it was looked at
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Holder(Process):
    """The holder of a lock, as the lock's file names it. `id` is new with every lock."""

    job: str | None = None  # Slurm's job id
    own_job: bool = True  # the job ends with its holder
    id: str = ""

    @classmethod
    def new(cls) -> Holder:
        """Return this process as the holder of a new lock."""
        own = slurm.is_batch_process()
        return cls(**asdict(Process.this()), job=slurm.job_id(), own_job=own, id=uuid.uuid4().hex)

    @classmethod
    def read(cls, file: Path) -> Holder | None:
        """Return the holder of the lock `file`; None where there is no file.

        A damaged lock has a holder without a name: it is never taken for free.
        """
        try:
            content = read_replaced(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        values = read_json(file) if content.strip() else {}
        known = _fitting(cls, values)
        job = values.get("job")
        known["job"] = job if isinstance(job, str) and NAME.fullmatch(job) else None
        if not NAME.fullmatch(known.get("id", "")):
            known.pop("id", None)
        return cls(**({"id": f"{zlib.crc32(content):08x}"} | known))

    def __str__(self) -> str:
        who = f"Slurm job {self.job}" if self.job else f"process {self.pid}" if self.pid else "somebody"
        return f"{who} on {self.host}" if self.host else who


def _fitting(cls: type[Process], values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `values` whose types are those of their fields."""
    names = [field.name for field in fields(cls) if type(values.get(field.name)) is type(field.default)]
    return {name: values.get(name) for name in names}


def holder_of(directory: RunDirectory) -> Holder | None:
    """Return the process that the run's lock names, alive or dead; None where there is no lock."""
    return Holder.read(directory.lock_file)


def is_held(directory: RunDirectory) -> bool:
    """Return whether the run's supervisor is alive; on another machine, by the age of its last touch."""
    holder = holder_of(directory)
    if holder is None or holder.is_visible:
        return holder is not None and holder.is_alive
    if holder.boot and holder.boot != _boot() and holder.host == socket.gethostname():
        return False  # this machine was started anew
    try:
        return _seconds_since_touch(directory.lock_file) <= STALE_SECONDS
    except OSError:  # another user's run, in which we may not write
        with suppress(FileNotFoundError):
            return time.time() - directory.lock_file.stat().st_mtime <= STALE_SECONDS
    return False


def signal_holder(directory: RunDirectory, number: signal.Signals) -> int | None:
    """Send a signal to the run's supervisor and return its process id; None where it is not on this machine."""
    holder = holder_of(directory)
    return holder.pid if holder is not None and holder.send(number) else None


def check_lock(directory: RunDirectory) -> None:
    """Raise UserError where a live process holds the run."""
    for file in _chain(directory):
        holder = Holder.read(file)
        if holder is not None:
            _refuse_if_alive(directory, holder, file)


# The locks that this process holds, by path: it cannot take one twice.
_held: dict[str, Holder] = {}


class RunLock:
    """Holds the run's lock; a context manager. The holder calls `touch` at least every minute.

    After exec, the new program has the process identity of the old one and keeps its lock.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._file = directory.lock_file
        self._holder = Holder.new()
        self._touched = 0.0

    def __enter__(self) -> RunLock:
        present = Holder.read(self._file)
        key = str(self._file)
        if present is not None and key not in _held and present.is_alive and present.pid == os.getpid():
            self._holder = present
        else:
            self._take()
        _held[key] = self._holder
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock, if this process still holds it."""
        if _held.get(str(self._file)) == self._holder:
            del _held[str(self._file)]
            if Holder.read(self._file) == self._holder:
                with suppress(OSError):  # on a disk that has become read-only: the holder is known to be gone
                    self._file.unlink(missing_ok=True)

    def touch(self) -> None:
        """Show that the holder is alive. Raises CheckFailed where another process has taken the run over."""
        if time.monotonic() - self._touched < TOUCH_SECONDS:
            return
        self._touched = time.monotonic()
        present = Holder.read(self._file)
        if present is not None and present.id != self._holder.id and present.host:
            raise CheckFailed(
                f"{present} has taken over {self._directory.path}, which had no sign of life of this process for too"
                " long"
            )
        try:
            if present != self._holder:  # the file was deleted or damaged
                write_atomically(self._file, json.dumps(asdict(self._holder)), durable=False)
            else:
                os.utime(self._file)
        except OSError as error:  # a full disk must not end a run that may still be able to train
            warn_once(f"the lock of the run cannot be renewed: {error}")

    def _take(self) -> None:
        """Take the lock. Raises UserError where its holder is alive."""
        claim = self._file.with_name(f"lock.claim-{self._holder.id}")
        write_atomically(claim, json.dumps(asdict(self._holder)), durable=False)
        try:
            while not self._try(claim):
                pass
        finally:
            claim.unlink(missing_ok=True)

    def _try(self, claim: Path) -> bool:
        """Try once to take the lock; return False where the lock changed meanwhile."""
        if _link(claim, self._file):
            return True
        chain = list(_chain(self._directory))
        first, last = (Holder.read(file) for file in (self._file, (chain or [self._file])[-1]))
        if first is None or last is None:
            return False
        _refuse_if_alive(self._directory, last, chain[-1])
        successor = self._file.with_name(f"lock.after-{last.id}")
        if not _link(claim, successor):
            return False
        if Holder.read(self._file) != first:  # another successor has finished: this claim is void
            successor.unlink(missing_ok=True)
            return False
        os.replace(claim, self._file)
        for file in (*chain[1:], successor):
            file.unlink(missing_ok=True)
        return True


def take_lock(directory: RunDirectory, say: Callable[[str], None] = print) -> RunLock:
    """Take the run's lock and return it. A batch job waits while Slurm does not say whether the holder's job runs."""

    def tell(error: Exception) -> None:
        say(f"{error}. Whether another job runs in {directory.path} is not known; asked until it is.")

    patience = PATIENCE_SECONDS if slurm.is_batch_process() else 0.0
    return slurm.patiently(RunLock(directory).__enter__, patience, every=RETRY_SECONDS, tell=tell)


def _chain(directory: RunDirectory) -> Iterator[Path]:
    """Yield the lock, then the claims of successors that died before they renamed theirs, in order."""
    file = directory.lock_file
    while (holder := Holder.read(file)) is not None:
        yield file
        file = directory.lock_file.with_name(f"lock.after-{holder.id}")


def _link(claim: Path, target: Path) -> bool:
    """Link `claim` to `target`; return False where `target` exists."""
    try:
        os.link(claim, target)
    except FileExistsError:
        with suppress(FileNotFoundError):
            return os.path.samefile(claim, target)  # NFS: it was done, and the answer got lost
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with suppress(FileExistsError), target.open("xb") as file:
            file.write(claim.read_bytes())
            return True
        return False
    return True


def _refuse_if_alive(directory: RunDirectory, holder: Holder, file: Path) -> None:
    seconds = _seconds_since_touch(file)
    if not _may_be_alive(holder, file, seconds):
        return
    again = ""
    if not holder.is_alive and not (holder.job and holder.own_job and slurm.is_available()):
        dead_after = ABANDONED_SECONDS if holder.job and slurm.is_available() else STALE_SECONDS
        wait = max(dead_after - seconds, 1)
        again = f" (its last sign of life is {seconds:.0f} s old: if it is gone, try again in {wait:.0f} s)"
    raise UserError(
        f"{holder} is running in {directory.path}{again}; end it with `tango stop` or `tango cancel`, "
        "or give another run.dir"
    )


def _may_be_alive(holder: Holder, file: Path, seconds: float) -> bool:
    if holder.is_visible:
        return holder.is_alive
    if holder.job is not None and holder.job == slurm.job_id():
        if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
            return seconds <= STALE_SECONDS  # on another node of this allocation
        return seconds <= STALE_SECONDS and _is_touched(holder, file)  # this job, before it was requeued
    if holder.job is not None and slurm.is_available():
        found = slurm.show_job(holder.job)
        if found is None or not slurm.is_alive(found.state) or found.state in slurm.WAITING_STATES:
            return False
        # Somebody's allocation goes on without what was typed into it.
        return holder.own_job or found.state == "SUSPENDED" or seconds <= ABANDONED_SECONDS
    if seconds > STALE_SECONDS:
        return False
    if holder.host in ("", socket.gethostname()):  # before a reboot, in another container, or the lock is damaged
        return _is_touched(holder, file)
    return True


def _is_touched(holder: Holder, file: Path) -> bool:
    """Return whether the lock is touched within WATCH_SECONDS."""
    warn_once(f"{file} was left by {holder}, which is not visible from here: watching it for {WATCH_SECONDS:.0f} s")
    with suppress(FileNotFoundError):
        before = file.stat().st_mtime_ns
        return poll(lambda: file.stat().st_mtime_ns != before, WATCH_SECONDS, every=POLL_SECONDS)
    return False


def _seconds_since_touch(lock: Path) -> float:
    """Return the age of the last touch, by the file server's clock: a new file in the same folder shows it."""
    probe = lock.with_name(f"clock-{uuid.uuid4().hex}")
    probe.touch()
    try:
        return probe.stat().st_mtime - lock.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def _boot() -> str:
    """Return the id of the machine's boot; "" where the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _start_of(pid: int) -> int | None:
    """Return when the process with `pid` started, in clock ticks since the boot; None for no process or a zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] == "Z" else int(words[19])
