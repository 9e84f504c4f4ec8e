"""Every error the trainer raises by name; a run that fails says which, on which thread."""


class TrainerError(RuntimeError):
    """Base of all trainer errors; the text names the thing, what was found and the next step."""


class TargetError(TrainerError):
    """The target's directory is missing, incomplete or of a kind that cannot be tapped."""


class DataError(TrainerError):
    """The data set is missing, empty or unusable."""


class ServerError(TrainerError):
    """A server that writes answers is gone, or refuses what every question has in common."""


class StorageError(TrainerError):
    """A file cannot be written: the disk is full, or the place is read-only."""


class CompileGateError(TrainerError):
    """A compile after seal, a silent fall to eager, or a compile that never ends."""


class NonFiniteError(TrainerError):
    """A loss or a gradient is not finite; the step was not applied."""


class CheckpointError(TrainerError):
    """A checkpoint is incomplete, damaged or belongs to another configuration."""


class WorkerError(TrainerError):
    """A worker thread failed; the text names the thread and carries its error."""


class ChannelClosedError(TrainerError):
    """The hidden-state channel was closed while someone waited on it."""
