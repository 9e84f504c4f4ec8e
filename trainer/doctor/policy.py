"""Did the target write these answers? Its own opinion of them, token by token.

Two figures over trained tokens. Agreement: the share that equals the target's greedy choice; 1 but
for rounding when the answers were decoded greedily. Surprise: how much less likely than its own
choices the target finds them, mean of -log p minus mean of the entropy, in nats; 0 on average when
it drew them itself at temperature 1, below 0 at lower ones, above 0 for foreign answers only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.data.dataset import Sample
from trainer.doctor.findings import Finding, warning
from trainer.model.target import Target

# Agreement and surprise measured with SmolLM2-135M-Instruct, 32 chats each: its own answers, greedy
# 98 % and -1.01, drawn at temperature 0.7 69 % and -0.76, at 1.0 49 % and +0.04 (error 0.06);
# foreign ones 24 % and +1.22.
FOREIGN_SURPRISE = 0.1
LEAST_AGREEMENT = 0.3
_TOKENS_OF_A_SAMPLE = 512  # logits of more rows would be gigabytes with a large vocabulary


@dataclass(frozen=True)
class PolicyFacts:
    """Means over ``num_tokens`` trained tokens.

    surprise_error: its standard error over the samples, None for a single one.
    """

    num_samples: int
    num_tokens: int
    agreement: float
    mean_log_prob: float
    mean_entropy: float
    surprise_error: float | None

    @property
    def surprise(self) -> float:
        """Mean of -log p minus mean of the entropy, in nats."""
        return -self.mean_log_prob - self.mean_entropy


def chosen_samples(total: int, count: int, seed: int) -> list[int]:
    """Return ``count`` random sample positions, ascending."""
    return sorted(np.random.default_rng(seed).permutation(total)[:count].tolist())


def on_policy(target: Target, samples: Sequence[Sample], seed: int) -> PolicyFacts:
    """Score trained tokens of the samples with the real target, at most 512 of each.

    Raises: ValueError where no sample has a trained token.
    """
    rng = np.random.default_rng(seed)
    scored: list[Tensor] = []
    for sample in samples:
        trained = np.flatnonzero(sample.loss_mask[1:]) + 1  # the first token has no prediction
        trained = np.sort(rng.permutation(trained)[:_TOKENS_OF_A_SAMPLE])
        if len(trained):
            scored.append(_scores(target, torch.from_numpy(sample.input_ids), trained))
    if not scored:
        raise ValueError("no sample has a trained token")
    tokens = torch.cat(scored)  # [tokens, 3]
    surprises = torch.stack([(-part[:, 1] - part[:, 2]).mean() for part in scored])
    error = float(surprises.std() / len(scored) ** 0.5) if len(scored) > 1 else None
    hit, log_prob, entropy = tokens.mean(0).tolist()
    return PolicyFacts(len(scored), len(tokens), hit, log_prob, entropy, error)


@torch.no_grad()
def _scores(target: Target, ids: Tensor, places: npt.NDArray[np.int64]) -> Tensor:
    """Return (is the greedy choice, log p, entropy) of the tokens at ``places``.

    Shapes: ids [S], places [T] -> [T, 3] fp64 on the CPU. The token at j is predicted at j - 1.
    """
    at = torch.from_numpy(places).to(target.device)
    ids = ids.long().to(target.device)
    logits = target.model(input_ids=ids[None], use_cache=False, logits_to_keep=at - 1).logits[0]
    log_probs = torch.log_softmax(logits.float(), -1)
    label = ids[at]
    columns = (
        logits.argmax(-1) == label,
        log_probs.gather(1, label[:, None]).squeeze(1),
        -(log_probs.exp() * log_probs).sum(-1),
    )
    return torch.stack([column.double() for column in columns], 1).cpu()


def policy_findings(facts: PolicyFacts, path: str) -> list[Finding]:
    """Warn when the target would hardly have written this."""
    foreign = facts.surprise > max(FOREIGN_SURPRISE, 2 * (facts.surprise_error or 0.0))
    if not foreign and facts.agreement >= LEAST_AGREEMENT:
        return []
    text = (
        f"the target would not have written these answers: {facts.agreement:.0%} of the tokens are"
        f" its greedy choice, and they surprise it by {facts.surprise:+.2f} nats more than its own"
        " would (its own: about 0 or less)"
    )
    fix = "have them written anew: python -m trainer regenerate"
    return [warning("on-policy", text, path, fix)]
