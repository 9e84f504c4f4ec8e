"""Checks that training and serving compute one and the same thing: positions, rope, decoding."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trainer.check.findings import FaultFoundError
from trainer.check.subject import Scene, Subject, loud, make_batch, targets_of
from trainer.data.packing import place_features
from trainer.loss import block_hidden
from trainer.model.draft import DraftModel
from trainer.model.layers import Rotary
from trainer.model.target import Target

PARITY = 1e-5  # largest difference in fp32; measured on others' pairs: 1.2e-7 to 2.4e-7
_SHIFT = 1e-4
_NUM_BLOCKS = 6


def forward_equals_decode(subject: Subject) -> str:
    """Each block of a packed training row equals the same block drafted with the decode cache."""
    errors = [_compare(subject, subject.miniature, subject.small_draft())]
    told = f"{_NUM_BLOCKS} blocks of {subject.config.draft.variant} within {errors[0]:.1g}"
    if not subject.fast:
        # Further layers of the same kinds would prove no more, and their rounding adds up.
        kinds = subject.small_config.draft.layer_types or ()
        shape = replace(subject.draft_config, num_draft_layers=len(kinds), layer_types=kinds)
        real = loud(DraftModel(replace(shape, dtype="float32")))
        errors.append(_compare(subject, subject.target, real))
        told += f"; the run's own widths on the target's own taps within {errors[1]:.1g}"
    if not max(errors) <= PARITY:
        raise FaultFoundError(
            f"training forward and decode loop differ by {max(errors):.2g} in fp32,"
            f" at most {PARITY:g} is rounding"
        )
    return told


@torch.no_grad()
def _compare(subject: Subject, target: Target, draft: DraftModel) -> float:
    """Return the largest difference between the two ways over some blocks of packed documents."""
    config, samples = subject.small_config, subject.short_samples
    lengths = [len(sample.input_ids) for sample in samples]
    data = replace(
        config.data,
        max_length=max(lengths),
        token_budget=sum(lengths) + 3,
        max_batch_size=len(lengths),
        packing=True,
        max_anchors=_NUM_BLOCKS,
    )
    config = replace(config, data=data)
    batch = make_batch(samples, config)
    features = [f.float().cpu() for f in target.document_features(batch.document_tokens())]
    head = target.head.to("cpu", draft.fc.weight.dtype)
    embedding = head.embedding
    targets = targets_of(batch, config)
    trained = block_hidden(draft, embedding, batch, targets, place_features(features, batch))
    worst = 0.0
    for block in batch.anchor_keep[0].nonzero().flatten().tolist():
        anchor = int(batch.anchor_positions[0, block])
        document = int(batch.document_ids[0, anchor])
        length = anchor - batch.documents[document].start
        ids = targets.block_ids[0, block][None]
        served = decode_block(draft, features[document], F.embedding(ids, embedding), length)
        worst = max(worst, float((trained[0, block] - served[0]).abs().max()))
        pair = (trained[0, block][None], served)
        chosen = [draft.choose(head, hidden, ids[:, 0]) for hidden in pair]
        if worst <= PARITY and not torch.equal(*chosen):
            raise FaultFoundError(f"equal states of the block at {anchor} draft unequal tokens")
    return worst


def decode_block(draft: DraftModel, features: Tensor, block: Tensor, anchor: int) -> Tensor:
    """Draft a block as decoding does: the context comes in two pieces, then the block.

    Shapes: features [S, n * D], block [1, B, D] -> [1, B, D].
    """
    cache = draft.new_cache()
    cut = anchor // 2
    for part in (features[:cut], features[cut:anchor]):
        if len(part):
            draft.append(cache, part[None])
    return draft.draft_block(cache, block, anchor)


def rope(subject: Subject) -> str:
    """The draft turns by the target's theta, over the whole head, in fp32 angles."""
    shape, theta = subject.draft_config, written_theta(subject)
    if not math.isclose(shape.rope_theta, theta, rel_tol=1e-9):
        raise FaultFoundError(
            f"the draft's rope_theta is {shape.rope_theta:g}, config.json of the target says"
            f" {theta:g}"
        )
    positions = torch.tensor([[0, 1, 7, 1000, 30011]])
    found = Rotary.at(positions, shape, torch.float32)
    half = shape.head_dim // 2
    for row, position in enumerate(positions[0].tolist()):
        for i in range(half):
            angle = position / theta ** (2 * i / shape.head_dim)
            for place in (i, i + half):
                pair = float(found.cos[0, row, 0, place]), float(found.sin[0, row, 0, place])
                if math.dist(pair, (math.cos(angle), math.sin(angle))) > 0.02:
                    raise FaultFoundError(
                        f"position {position} turns pair {i} by another angle than"
                        f" {position} / theta ** (2 * {i} / {shape.head_dim})"
                    )
    return f"theta {theta:g} as in the target's config.json, {shape.head_dim} of a head turned"


def written_theta(subject: Subject) -> float:
    """Return theta as config.json writes it: in rope_parameters, for each kind, or by itself."""
    written = subject.written
    held = written.get("rope_parameters") or {}
    held = held.get("full_attention", held)
    theta = held.get("rope_theta", written.get("rope_theta"))
    if theta is None:  # not written: the class's default is what the target itself runs with
        held = getattr(subject.known.get_text_config(), "rope_parameters", None) or {}
        theta = held.get("full_attention", held).get("rope_theta")
    if theta is None:
        raise FaultFoundError(
            "config.json of the target names no rope_theta",
            where=f"{subject.config.target.path}/config.json",
            fix="this kind of target has no rotary positions and is not supported",
        )
    return float(theta)


def positions(subject: Subject) -> str:
    """Positions count from 0 in each document, a block's go on from its anchor, and only differ."""
    scene = subject.scene
    for document in scene.batch.documents:
        part = slice(document.start, document.start + document.length)
        found = scene.batch.position_ids[document.row, part].tolist()
        if found != list(range(document.length)):
            raise FaultFoundError(
                f"document {document.sample_id} has positions {found[0]}..{found[-1]}, expected"
                f" 0..{document.length - 1}"
            )
    size = subject.config.draft.block_size
    for block in range(int(scene.batch.anchor_keep[0].sum())):
        anchor = int(scene.batch.anchor_positions[0, block])
        first = int(scene.batch.position_ids[0, anchor])
        found = scene.targets.position_ids[0, block].tolist()
        if found != list(range(first, first + size)):
            raise FaultFoundError(
                f"the block at position {first} has positions {found}, expected {first} and on"
            )
    error = _shifted(subject, scene)
    if not error <= _SHIFT:
        raise FaultFoundError(
            f"all positions 100 further on change the output by {error:.2g}: a part of the draft"
            " does not turn with the others"
        )
    return f"restart in {len(scene.batch.documents)} documents; block slot k stands at a + k"


@torch.no_grad()
def _shifted(subject: Subject, scene: Scene) -> float:
    """Return what moving every position by the same distance changes: nothing, for rotary ones."""
    batch, targets = scene.batch, scene.targets
    later = replace(targets, position_ids=targets.position_ids + 100)
    draft = subject.draft
    here = block_hidden(draft, scene.embedding, batch, targets, scene.hidden)
    moved_batch = replace(batch, position_ids=batch.position_ids + 100)
    there = block_hidden(draft, scene.embedding, moved_batch, later, scene.hidden)
    return float((here - there)[batch.anchor_keep].abs().max())
