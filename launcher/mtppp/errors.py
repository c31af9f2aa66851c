"""Every error a user can meet, and the exit status it ends with.

    MtpppError                 1  a step failed
    ├── ConfigurationError     2  cluster.yaml or the command line is invalid
    ├── Inconclusive           3  neither PASS nor FAIL could be established
    ├── Refused                4  the combination is known to be wrong, or not proven
    └── HostError              1  something failed on, or on the way to, one host
        ├── ConnectFailed
        ├── ForwardingProhibited
        ├── RemoteCommandFailed
        ├── HostTimeout
        └── Locked

Ctrl-C ends with 130, a reader of the output that is gone with 141. An error says what failed, where
and why; `hint` says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class MtpppError(Exception):
    """A failure with a message for a person.

    Attributes:
        message: what failed, and where.
        hint: what to do about it; "" when there is nothing useful to say.
        details: the few lines that matter (of a log, say), shown below the message.
    """

    exit_status = 1

    def __init__(self, message: str, *, hint: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = tuple(details)


class ConfigurationError(MtpppError):
    """cluster.yaml, a model's config.json or the command line is invalid."""

    exit_status = 2


class Inconclusive(MtpppError):
    """A check could decide neither way."""

    exit_status = 3


class Refused(MtpppError):
    """The combination is known to be wrong, or has not been proven."""

    exit_status = 4


class HostError(MtpppError):
    """Something failed on one host.

    Attributes:
        host: the name by which cluster.yaml calls the host.
    """

    def __init__(
        self, host: str, message: str, *, hint: str = "", details: Sequence[str] = ()
    ) -> None:
        super().__init__(f"{host}: {message}", hint=hint, details=details)
        self.host = host


class ConnectFailed(HostError):
    """The host could not be reached or would not let us in."""


class ForwardingProhibited(HostError):
    """The host's sshd does not carry connections to a port."""


class RemoteCommandFailed(HostError):
    """A command ran on the host and failed, or its answer made no sense."""


class HostTimeout(HostError):
    """The host did not answer in time."""


class Locked(HostError):
    """Somebody else is at work on the deployment there."""
