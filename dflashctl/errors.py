"""Every error dflashctl shows, as one tree; each class fixes the exit code.

DflashctlError            1   the remote command or run failed
  UsageError              2   the command line
    ConfigurationError    2   hosts.yaml or train.yaml, with file:line:column
  RefusedError            3   a safety rule: GPU busy, tag exists, release missing
  UnreachableError        4   no connection, or no answer in time
    ContainerDownError    4   pct says the container does not run
  TrustError              5   host key or authentication
  PartialError            6   some hosts failed
  MismatchError           7   digest, driver or inventory differ
  StateUnknownError       8   the end mark is missing: nobody knows whether it ran
  LabError                1   the look-alike site could not be started or changed
Interrupted by Ctrl-C: 130.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of dflashctl."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNREACHABLE = 4
    TRUST = 5
    PARTIAL = 6
    MISMATCH = 7
    UNKNOWN = 8
    INTERRUPTED = 130


class DflashctlError(Exception):
    """What failed, where, what was found, and the next command to type.

    ``code`` is the short machine name (``gpu-busy``), ``place`` the host or host/vmid or file.
    """

    exit_code = ExitCode.FAILED
    code = "failed"

    def __init__(
        self, message: str, *, hint: str = "", place: str = "", code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.place = place
        self.code = code or type(self).code

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        return f"error[{self.code}]: {where}{self.message}"


class UsageError(DflashctlError):
    """The command line cannot be carried out as typed."""

    exit_code = ExitCode.USAGE
    code = "usage"


class ConfigurationError(UsageError):
    """hosts.yaml or train.yaml is wrong; ``place`` holds file:line:column."""

    code = "config"


class RefusedError(DflashctlError):
    """A safety rule forbids the action; nothing was changed."""

    exit_code = ExitCode.REFUSED
    code = "refused"


class UnreachableError(DflashctlError):
    """No connection, or no answer within the deadline."""

    exit_code = ExitCode.UNREACHABLE
    code = "unreachable"


class ContainerDownError(UnreachableError):
    """pct answered that the container does not run or does not exist."""

    code = "container-down"


class TrustError(DflashctlError):
    """The host key is unknown or changed, or authentication failed."""

    exit_code = ExitCode.TRUST
    code = "trust"


class PartialError(DflashctlError):
    """Some hosts failed and others did not."""

    exit_code = ExitCode.PARTIAL
    code = "partial"


class MismatchError(DflashctlError):
    """What is there is not what was sent or declared."""

    exit_code = ExitCode.MISMATCH
    code = "mismatch"


class StateUnknownError(DflashctlError):
    """The remote side gave no end mark: it may or may not have run."""

    exit_code = ExitCode.UNKNOWN
    code = "state-unknown"


class LabError(DflashctlError):
    """The look-alike site could not be started, changed or stopped."""

    code = "lab"
