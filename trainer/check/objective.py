"""Checks of what is learnt: labels, weights, the loss and its gradient, against plain formulas."""

import math
from contextlib import closing
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer import assembly
from trainer.check.findings import FaultFoundError
from trainer.check.subject import Scene, Subject
from trainer.compile_gate import CompileGate
from trainer.learning_rate import Schedule
from trainer.loss import LossSums, block_hidden, draft_loss
from trainer.model.attention import SdpaAttention
from trainer.workers.drafter import Replica, forward_backward
from trainer.workers.target import Prepared

_CLOSE = 1e-4
_SCHEDULE_STEPS = 10


def slots(subject: Subject) -> str:
    """The anchor stands in slot 0, masks behind it, and slot k is asked for its own token a + k."""
    scene = subject.scene
    size, mask_token_id = subject.config.draft.block_size, subject.config.draft.mask_token_id
    ids = scene.batch.input_ids[0].tolist()
    count = int(scene.batch.anchor_keep[0].sum())
    for block in range(count):
        anchor = int(scene.batch.anchor_positions[0, block])
        read = scene.targets.block_ids[0, block].tolist()
        if read != [ids[anchor], *[mask_token_id] * (size - 1)]:
            raise FaultFoundError(
                f"the block at {anchor} reads {read[:4]}..., expected its token {ids[anchor]} and"
                f" then the mask token {mask_token_id}"
            )
        for slot in range(1, size):
            weight = float(scene.targets.weights[0, block, slot])
            label = int(scene.targets.labels[0, block, slot])
            if weight > 0 and label != ids[anchor + slot]:
                raise FaultFoundError(
                    f"slot {slot} of the block at {anchor} is asked for the token {label}, expected"
                    f" {ids[anchor + slot]}, the one at its own position {anchor + slot}"
                )
    return f"{count} blocks: slot 0 is the anchor, slot k predicts position a + k"


def weights(subject: Subject) -> str:
    """Weights are keep x in the row x same document x loss mask x decay, and 0 for the anchor."""
    scene = subject.scene
    gamma, num_weighed = subject.config.position_decay, 0
    for block in range(scene.batch.anchor_keep.shape[1]):
        for slot in range(subject.config.draft.block_size):
            wanted = _weight(scene, block, slot, gamma)
            found = float(scene.targets.weights[0, block, slot])
            num_weighed += wanted > 0
            if not math.isclose(found, wanted, rel_tol=1e-5, abs_tol=1e-9):
                raise FaultFoundError(
                    f"slot {slot} of block {block} weighs {found:.6f}, expected {wanted:.6f}"
                )
    decay = f"exp(-(k - 1) / {gamma:g})" if math.isfinite(gamma) else "1 (dpace weighs later)"
    return f"{num_weighed} weighed slots, each {decay} within its document's answer"


def _weight(scene: Scene, block: int, slot: int, gamma: float) -> float:
    batch = scene.batch
    anchor = int(batch.anchor_positions[0, block])
    place = anchor + slot
    if slot == 0 or not bool(batch.anchor_keep[0, block]) or place >= batch.input_ids.shape[1]:
        return 0.0
    same = batch.document_ids[0, place] == batch.document_ids[0, anchor]
    if not bool(same) or not bool(batch.loss_mask[0, place]):
        return 0.0
    return math.exp(-(slot - 1) / gamma) if math.isfinite(gamma) else 1.0


def anchors(subject: Subject) -> str:
    """Blocks start on trained tokens whose successor is trained too, ascending and never twice."""
    batch = subject.scene.batch
    found = batch.anchor_positions[0][batch.anchor_keep[0]].tolist()
    mask, owner = batch.loss_mask[0].tolist(), batch.document_ids[0].tolist()
    valid = [
        i
        for i in range(len(mask) - 1)
        if mask[i] and mask[i + 1] and owner[i] == owner[i + 1] and owner[i] >= 0
    ]
    if found != valid:
        wrong = sorted(set(found) ^ set(valid)) or found
        raise FaultFoundError(
            f"with room for all, anchors and valid positions differ at {wrong[:5]}"
        )
    return f"all {len(found)} valid positions are drawn when there is room, in order"


def loss_value(subject: Subject) -> str:
    """The loss is that of the target's head on the draft's states, divided by the weights' sum."""
    scene = subject.sparse_scene
    replica = _replica(subject)
    sums = _train(subject, replica)
    grads = replica.optimizer.flat_grad.clone()
    once = replica.optimizer.apply(0, float(sums.loss_sum), float(sums.weight_sum))
    told = "two equal micro-batches give the gradient of one"
    if subject.config.draft.variant == "dflash" and subject.config.loss.name == "decay":
        fresh = _replica(subject)
        value, grad = _plain_loss(fresh, scene)
        if not math.isclose(sums.loss, value, rel_tol=_CLOSE):
            raise FaultFoundError(f"the loss is {sums.loss:.6f}, cross-entropy gives {value:.6f}")
        _same_gradient(grads / float(sums.weight_sum), grad)
        if not math.isclose(once.grad_norm, float(grad.norm()), rel_tol=_CLOSE):
            raise FaultFoundError(
                f"the step's gradient norm is {once.grad_norm:.6g}, that of the weighted mean is"
                f" {float(grad.norm()):.6g}: the sum is not divided by the sum of weights"
            )
        _took_mean_gradient(subject, replica, grad)
        told = f"loss {value:.4f} and its gradient equal weighted cross-entropy; {told}"
    twice = _replica(subject)
    parts = [_train(subject, twice) for _ in range(2)]
    applied = twice.optimizer.apply(
        0, sum(float(p.loss_sum) for p in parts), sum(float(p.weight_sum) for p in parts)
    )
    if not math.isclose(applied.grad_norm, once.grad_norm, rel_tol=_CLOSE):
        raise FaultFoundError(
            f"two equal micro-batches give a gradient of norm {applied.grad_norm:.6g}, one gives"
            f" {once.grad_norm:.6g}: the loss is not divided by the sum of weights"
        )
    return told


def counted_hits(subject: Subject) -> str:
    """What training counts as a right guess is what decoding drafts, token after token."""
    scene, draft, head = subject.scene, subject.draft, subject.miniature.head
    batch, size = scene.batch, subject.config.draft.block_size
    apart = _apart(batch.anchor_positions[0], batch.anchor_keep[0], size)
    batch = replace(batch, anchor_keep=apart[None])
    with torch.no_grad():
        hidden = block_hidden(draft, head.embedding, batch, scene.targets, scene.hidden)[0][apart]
        drafted = draft.choose(head, hidden, scene.targets.block_ids[0, apart, 0])
    ids = batch.input_ids.clone()
    for anchor, tokens in zip(batch.anchor_positions[0][apart].tolist(), drafted, strict=True):
        room = min(size - 1, ids.shape[1] - anchor - 1)
        ids[0, anchor + 1 : anchor + 1 + room] = tokens[:room]
    batch = replace(batch, input_ids=ids)
    with torch.no_grad():
        sums = draft_loss(draft, head, batch, scene.hidden, scene.config)
    hits, counts = int(sums.hits.sum()), int(sums.counts.sum())
    if hits != counts:
        raise FaultFoundError(
            f"of {counts} tokens that decoding drafts, training counts {hits} as right"
        )
    return f"all {counts} tokens that decoding drafts in {len(drafted)} blocks count as right"


def _apart(anchors: Tensor, keep: Tensor, size: int) -> Tensor:
    """Choose blocks that do not overlap, so that each can be given its own tokens."""
    chosen, free_from = torch.zeros_like(keep), 0
    for column in keep.nonzero().flatten().tolist():
        if int(anchors[column]) >= free_from:
            chosen[column] = True
            free_from = int(anchors[column]) + size
    return chosen


def _replica(subject: Subject) -> Replica:
    config = subject.sparse_scene.config
    schedule = Schedule.from_config(config.optim, _SCHEDULE_STEPS)
    place = 0, torch.device("cpu")
    return assembly.build_replica(config, subject.miniature, place, SdpaAttention(), schedule, None)


def _train(subject: Subject, replica: Replica) -> LossSums:
    scene = subject.sparse_scene
    with closing(CompileGate(assembly.gate_settings(scene.config, 1))) as gate:
        return forward_backward(replica, gate, Prepared(scene.batch, scene.hidden), scene.config)


def _plain_loss(replica: Replica, scene: Scene) -> tuple[float, Tensor]:
    """Return the weighted mean of cross-entropy over whole logits, and its gradient, flat."""
    draft, head = replica.draft, replica.head
    hidden = block_hidden(draft, head.embedding, scene.batch, scene.targets, scene.hidden)
    logits = (hidden @ head.lm_head.t()).flatten(0, 2)
    each = F.cross_entropy(logits, scene.targets.labels.flatten(), reduction="none")
    weight = scene.targets.weights.flatten()
    loss = (each * weight).sum() / weight.sum()
    found = torch.autograd.grad(loss, [p for p in draft.parameters() if p.requires_grad])
    return float(loss.detach()), torch.cat([g.flatten() for g in found])


def _took_mean_gradient(subject: Subject, replica: Replica, grad: Tensor) -> None:
    """AdamW's first moments are those of the mean gradient, clipped."""
    state, optim = replica.optimizer.state(), subject.sparse_scene.config.optim
    clip = min(1.0, optim.clip_norm / float(grad.norm()))
    trained = [(n, p) for n, p in replica.draft.named_parameters() if p.requires_grad]
    pieces = zip(trained, torch.split(grad, [p.numel() for _, p in trained]), strict=True)
    for (name, _), piece in pieces:
        moment = state.get(f"{name}/exp_avg")
        if moment is None:
            continue
        wanted = (1 - optim.betas[0]) * clip * piece
        if not float((moment.flatten() - wanted).norm()) <= 0.01 * float(wanted.norm()) + 1e-12:
            raise FaultFoundError(
                f"AdamW took another gradient of {name} than the clipped mean: its first moment has"
                f" norm {float(moment.norm()):.3g}, expected {float(wanted.norm()):.3g}"
            )


def _same_gradient(found: Tensor, wanted: Tensor) -> None:
    error = float((found - wanted).norm() / wanted.norm())
    if not error <= _CLOSE:
        raise FaultFoundError(f"the gradient differs by {error:.2g} of its size from autograd's")
