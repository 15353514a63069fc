"""The errors that end a command, each with the exit code that scripts and the supervisor read."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave; its text is the whole message and names the way out. Exit code 2."""

    exit_code = 2


class CheckFailed(UserError):
    """A running job found its input or its own invariants broken; trying again cannot help. Exit code 78."""

    exit_code = 78


class NodeFailed(UserError):
    """A machine of the job, or what it is connected to, keeps a run from starting; on another try it may be well. Exit
    code 75.
    """

    exit_code = 75


class StoppedEarly(Exception):
    """The run stopped on request, has saved, and can be resumed. Exit code 85."""

    exit_code = 85
