"""Errors of the contract: a file or a value that does not say what the contract asks for."""


class ContractError(ValueError):
    """Base of all contract errors; the text names the thing and what was expected."""


class ConfigError(ContractError):
    """A training configuration value is missing, unknown or out of range."""


class ManifestError(ContractError):
    """A manifest lacks a fact, or was written by a newer major version."""


class EventError(ContractError):
    """A line of metrics.jsonl is not an event of a version that this reader knows."""


class TagError(ContractError):
    """A run tag that a directory, tmux or a shell could misread."""


class CompletionError(ContractError):
    """A checkpoint directory is not complete, or differs from its COMPLETE.json."""


class ArtifactsError(ContractError):
    """A file of compile caches is damaged, or was made on hosts of another kind."""


class EvaluationsError(ContractError):
    """evaluations.json of a run is damaged, or was written by a newer major version."""
