"""Checks of what a block may see: by changing one thing and looking at which outputs move.

What must not be seen must not change the output by one bit; what must be seen has to change it.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.check.findings import FaultFoundError, NotApplicableError
from trainer.check.subject import Scene, Subject
from trainer.loss import block_hidden
from trainer.model.attention import FlexAttention, Mask
from trainer.model.draft import DraftModel
from trainer.model.masks import SLIDING, TILE, BlockLayout
from trainer.model.spans import KEY_GRADIENT, span_tensors

_BACKENDS_AGREE = 1e-4


@torch.no_grad()
def run_blocks(draft: DraftModel, scene: Scene, hidden: Tensor | None = None) -> Tensor:
    """Run every block of the scene as the loss does. Shapes: -> [N, B, D] of the kept blocks."""
    states = scene.hidden if hidden is None else hidden
    out = block_hidden(draft, scene.embedding, scene.batch, scene.targets, states)
    return out[0][scene.batch.anchor_keep[0]]


@torch.no_grad()
def run_embeddings(draft: DraftModel, scene: Scene, embeddings: Tensor) -> Tensor:
    """Run the blocks on other inputs than their tokens'. Shapes: [1, N, B, D] -> [N, B, D]."""
    batch, targets = scene.batch, scene.targets
    out: Tensor = draft(
        embeddings.flatten(1, 2),
        scene.hidden,
        batch.position_ids,
        targets.position_ids.flatten(1),
        masks_of(draft, scene),
    )
    return out.view(embeddings.shape)[0][batch.anchor_keep[0]]


def masks_of(draft: DraftModel, scene: Scene) -> dict[str, Mask]:
    """Return the masks of the scene's blocks, as the loss makes them."""
    return draft.attention.masks(_layout(scene), draft.config.rules)


def _layout(scene: Scene) -> BlockLayout:
    batch = scene.batch
    return BlockLayout.of(batch.anchor_positions, batch.anchor_keep, batch.document_ids)


def _all_see(mask: Mask) -> bool:
    """Say whether every slot sees at least one key; masks on the CPU are dense."""
    return isinstance(mask, Tensor) and bool(mask.any(-1).all())


def kept_anchors(scene: Scene) -> Tensor:
    """Return the row positions of the kept anchors, ascending. Shapes: [N]."""
    return scene.batch.anchor_positions[0][scene.batch.anchor_keep[0]]


def moved(before: Tensor, after: Tensor) -> Tensor:
    """Say which blocks differ by at least one bit. Shapes: [N, B, D] twice -> [N]."""
    return (before != after).flatten(1).any(1)


def _other(values: Tensor, seed: int) -> Tensor:
    """Return random values of the same shape and size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(values.shape, generator=generator).to(values)


def strict_context(subject: Subject) -> str:
    """A block sees hidden states before its anchor, never the anchor's own or a later one."""
    scene, draft = subject.scene, subject.draft
    before, anchors = run_blocks(draft, scene), kept_anchors(scene)
    documents = scene.batch.document_ids[0]
    chosen = [int(anchors[i]) for i in (0, len(anchors) // 2, len(anchors) - 1)]
    for anchor in chosen:
        hidden = scene.hidden.clone()
        hidden[0, anchor:] = _other(hidden[0, anchor:], anchor)
        changed = moved(before, run_blocks(draft, scene, hidden))
        seen = anchors[changed & (anchors <= anchor)].tolist()
        if seen:
            raise FaultFoundError(
                f"other hidden states from {anchor} on change the block that starts at {seen[0]}:"
                " it sees its own anchor or later, where the answer stands"
            )
        hidden = scene.hidden.clone()
        hidden[0, anchor - 1] = _other(hidden[0, anchor - 1], anchor)
        changed = moved(before, run_blocks(draft, scene, hidden))
        own = anchors == anchor
        if documents[anchor - 1] == documents[anchor] and not bool(changed[own].all()):
            raise FaultFoundError(
                f"the hidden state at {anchor - 1} does not reach the block that starts at {anchor}"
            )
    return f"anchors {', '.join(map(str, chosen))}: j < a is seen, j >= a never (bitwise)"


def document_isolation(subject: Subject) -> str:
    """Nothing of one document reaches a block of another in the same packed row."""
    scene, draft = subject.scene, subject.draft
    before, anchors = run_blocks(draft, scene), kept_anchors(scene)
    owner = scene.batch.document_ids[0][anchors]
    for number, document in enumerate(scene.batch.documents):
        part = slice(document.start, document.start + document.length)
        hidden, ids = scene.hidden.clone(), scene.batch.input_ids.clone()
        hidden[0, part] = _other(hidden[0, part], document.start + 1)
        ids[0, part] = ids[0, part].roll(1)
        changed = moved(before, run_blocks(draft, _with_ids(scene, ids), hidden))
        foreign = anchors[changed & (owner != number)].tolist()
        if foreign:
            raise FaultFoundError(
                f"another text in document {number} changes the block at {foreign[0]},"
                " which belongs to another document"
            )
        if not bool(changed[owner == number].all()):
            raise FaultFoundError(f"a block of document {number} does not see its own text")
    padding = scene.hidden.clone()
    outside = scene.batch.document_ids[0] < 0
    padding[0, outside] = _other(padding[0, outside], 1)
    if bool(moved(before, run_blocks(draft, scene, padding)).any()):
        raise FaultFoundError("the hidden states of padding change a block")
    return f"{len(scene.batch.documents)} documents in a row and its padding: none reaches another"


def _with_ids(scene: Scene, ids: Tensor) -> Scene:
    """Return the scene with other tokens in its blocks; the anchors stay."""
    blocks = scene.targets.block_ids.clone()
    anchors = scene.batch.anchor_positions
    blocks[..., 0] = ids.gather(1, anchors)
    return replace(scene, targets=replace(scene.targets, block_ids=blocks))


def block_isolation(subject: Subject) -> str:
    """A block sees no other block, however close their anchors stand."""
    scene, draft = subject.scene, subject.draft
    before, anchors = run_blocks(draft, scene), kept_anchors(scene)
    size, keep = draft.config.block_size, scene.batch.anchor_keep[0]
    for place in (0, len(anchors) // 3, len(anchors) // 2, len(anchors) - 1):
        column = int(keep.nonzero()[place])
        embeddings = _embeddings(scene)
        embeddings[0, column] = _other(embeddings[0, column], place)
        changed = moved(before, run_embeddings(draft, scene, embeddings))
        changed[place] = ~changed[place]  # its own block has to move
        if bool(changed.any()):
            seen = int(anchors[changed][0])
            if seen == int(anchors[place]):
                raise FaultFoundError(f"the block at {seen} does not see its own inputs")
            raise FaultFoundError(
                f"other inputs of the block at {int(anchors[place])} change the block at {seen}"
            )
    close = int((anchors.diff() < size).sum())
    return f"{len(anchors)} blocks, {close} of them overlapping the next: none sees another"


def _embeddings(scene: Scene) -> Tensor:
    """Return what the blocks read. Shapes: [1, N, B, D]."""
    return torch.nn.functional.embedding(scene.targets.block_ids, scene.embedding).clone()


def padded_blocks(subject: Subject) -> str:
    """A padded block gives numbers, not NaN, and adds nothing to the loss."""
    scene, draft = subject.scene, subject.draft
    keep = scene.batch.anchor_keep[0]
    with torch.no_grad():
        out = block_hidden(draft, scene.embedding, scene.batch, scene.targets, scene.hidden)[0]
    blind = [kind for kind, mask in masks_of(draft, scene).items() if not _all_see(mask)]
    if blind or not bool(torch.isfinite(out).all()):
        raise FaultFoundError(
            f"a slot sees no key at all ({', '.join(blind)}): some backends make NaN of it"
        )
    if float(scene.targets.weights[0][~keep].abs().sum()) != 0:
        raise FaultFoundError("a padded block weighs something in the loss")
    return f"{int((~keep).sum())} padded blocks are finite and weigh nothing"


def causal_flag(subject: Subject) -> str:
    """Inside a block the slots see each other as the configuration says, in each kind of layer."""
    told = []
    for kind in dict.fromkeys(subject.draft_config.layer_types):
        causal = expects_causal(subject, kind)
        reach = _reach(subject, kind)
        size = len(reach)
        wanted = [[(i >= k) if causal else True for i in range(size)] for k in range(size)]
        for k, i in ((k, i) for k in range(size) for i in range(size)):
            if reach[k][i] != wanted[k][i]:
                does, must = ("sees", "must not") if reach[k][i] else ("does not see", "must")
                raise FaultFoundError(
                    f"{kind}: slot {i} {does} slot {k} of its block and {must} (causal {causal})"
                )
        told.append(f"{kind} {'causal' if causal else 'bidirectional'}")
    return f"inside a block: {', '.join(told)}"


def expects_causal(subject: Subject, kind: str) -> bool:
    """Say what the configuration means: engines run sliding layers causally unless told not to."""
    draft = subject.config.draft
    return draft.causal or (kind == SLIDING and not draft.sliding_window_non_causal)


def _reach(subject: Subject, kind: str) -> list[list[bool]]:
    """Return whether other inputs in slot k move slot i, as reach[k][i], in one layer."""
    scene = subject.scene
    draft = subject.small_draft(num_draft_layers=1, layer_types=(kind,))
    base = _embeddings(scene)
    before = run_embeddings(draft, scene, base)
    place, size = len(before) // 2, draft.config.block_size
    column = int(scene.batch.anchor_keep[0].nonzero()[place])
    reach = []
    for slot in range(size):
        embeddings = base.clone()
        embeddings[0, column, slot] = _other(embeddings[0, column, slot], slot)
        after = run_embeddings(draft, scene, embeddings)
        reach.append((before[place] != after[place]).any(-1).tolist())
    return reach


def window_edge(subject: Subject) -> str:
    """A sliding layer sees its own position and W - 1 keys before it, counted from each slot."""
    shape = subject.draft_config
    if SLIDING not in shape.layer_types:
        raise NotApplicableError("no sliding layer")
    real = shape.rules[SLIDING].window
    if real != subject.config.draft.sliding_window:
        raise FaultFoundError(
            f"sliding layers see {real} keys, the configuration says"
            f" {subject.config.draft.sliding_window}"
        )
    draft = subject.small_draft(num_draft_layers=1, layer_types=(SLIDING,))
    window = draft.config.sliding_window or 0
    scene, anchors = subject.scene, kept_anchors(subject.scene)
    before = run_blocks(draft, scene)
    # Of the document that was made long enough to have keys beyond the window.
    start = next(d.start for d in scene.batch.documents if d.sample_id == 0)
    anchor = start + window + 3
    block = int((anchors == anchor).nonzero()[0])
    for slot in _slots_by_themselves(subject):
        for key in (anchor + slot - window, anchor + slot - window + 1):
            hidden = scene.hidden.clone()
            hidden[0, key] = _other(hidden[0, key], key)
            after = run_blocks(draft, scene, hidden)
            found = bool((before[block, slot] != after[block, slot]).any())
            inside = anchor + slot - key < window
            if found != inside:
                does, must = ("sees", "must not") if found else ("does not see", "must")
                raise FaultFoundError(
                    f"window {window}: slot {slot} of the block at {anchor} {does} the key at {key}"
                    f" (distance {anchor + slot - key}) and {must}"
                )
    return f"window {real}: distance W - 1 is seen, W is not (tried with W {window})"


def _slots_by_themselves(subject: Subject) -> Iterable[int]:
    """Return slots fed by their own attention alone: dflash2 mixes a slot with the one before."""
    size = subject.config.draft.block_size
    return (0,) if subject.config.draft.variant == "dflash2" else (0, 1, size - 1)


def mask_table(subject: Subject) -> str:
    """Every query and key of some blocks, against the rule written out in plain loops."""
    scene, draft = subject.scene, subject.draft
    batch = scene.batch
    masks = masks_of(draft, scene)
    size, length = draft.config.block_size, batch.input_ids.shape[1]
    count = batch.anchor_positions.shape[1]
    blocks = sorted({0, 1, count // 4, count // 3, count // 2, count - 1})
    num_pairs = 0
    for kind, mask in masks.items():
        assert isinstance(mask, Tensor)  # noqa: S101 - dense on the CPU
        sees = _rule(subject, kind, scene)
        for block in blocks:
            for slot in range(size):
                row = mask[0, 0, block * size + slot].tolist()
                wanted = [sees(block, slot, key) for key in range(length + count * size)]
                num_pairs += len(row)
                if row != wanted:
                    key = next(k for k in range(len(row)) if row[k] != wanted[k])
                    what = f"context key {key}" if key < length else f"block key {key - length}"
                    raise FaultFoundError(
                        f"{kind}: slot {slot} of block {block} {'sees' if row[key] else 'misses'}"
                        f" {what}"
                    )
    return f"{num_pairs} pairs of slots and keys are as the rule says ({', '.join(masks)})"


def _rule(subject: Subject, kind: str, scene: Scene) -> Callable[[int, int, int], bool]:
    """Return the rule of dflash_method section 1.4 in plain Python: (block, slot, key) -> seen."""
    batch, size = scene.batch, subject.config.draft.block_size
    length = batch.input_ids.shape[1]
    anchors, documents = batch.anchor_positions[0].tolist(), batch.document_ids[0].tolist()
    window = subject.small_config.draft.sliding_window if kind == SLIDING else None
    causal = expects_causal(subject, kind)

    def sees(block: int, slot: int, key: int) -> bool:
        anchor = anchors[block]
        if key >= length:
            other, place = divmod(key - length, size)
            return other == block and (not causal or place <= slot)
        if key >= anchor or documents[key] != documents[anchor]:
            return False
        return window is None or anchor + slot - key < window

    return sees


def backends_agree(subject: Subject) -> str:
    """The spans and tiles that GPUs train with are the dense mask; flex gives what dense gives."""
    scene, draft = subject.wide_scene, subject.small_draft()
    dense, dense_masks = run_blocks(draft, scene), masks_of(draft, scene)
    for kind, rule in draft.config.rules.items():
        _compare_spans(kind, span_tensors(_layout(scene), rule), dense_masks[kind])
    draft.attention = FlexAttention(None)
    for kind, tiles in masks_of(draft, scene).items():
        _compare_tiles(kind, tiles, dense_masks[kind])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile")
        sparse = run_blocks(draft, scene)
    error = float((dense - sparse).abs().max())
    if not error <= _BACKENDS_AGREE:
        raise FaultFoundError(f"flex and dense attention differ by {error:.2g} in fp32")
    return f"flex and dense attention agree within {error:.1g}, and tile by tile; so do the spans"


def _compare_spans(kind: str, spans: tuple[Tensor, Tensor, Tensor], dense: Mask) -> None:
    """The spans are the dense mask's context, and the reach of a tile of keys leaves none out."""
    assert isinstance(dense, Tensor)  # noqa: S101 - made by SdpaAttention
    low, high, reach = (part[0] for part in spans)
    length, seen = len(reach) * KEY_GRADIENT.keys, dense[0, 0]
    context = seen[:, : seen.shape[1] - len(low)]
    keys = torch.arange(context.shape[1], device=low.device)
    wrong = context != ((keys >= low[:, None]) & (keys < high[:, None]))
    looked_at, whole = torch.zeros(2, len(low), length, dtype=torch.bool).unbind()
    for tile, edges in enumerate(reach.tolist()):
        first, first_whole, end_whole, end = (edge * KEY_GRADIENT.queries for edge in edges)
        columns = slice(tile * KEY_GRADIENT.keys, (tile + 1) * KEY_GRADIENT.keys)
        looked_at[first:end, columns] = True
        whole[first_whole:end_whole, columns] = True
    covered = slice(context.shape[1])
    for pairs, what in (
        (wrong, "is seen by the one and hidden by the other of span and mask"),
        (context & ~looked_at[:, covered], "is out of the reach of its keys"),
        (whole[:, covered] & ~context, "is hidden, but in a tile that counts as whole"),
    ):
        if bool(pairs.any()):
            query, key = pairs.nonzero()[0].tolist()
            raise FaultFoundError(f"{kind}: the pair of query {query} and key {key} {what}")


def _compare_tiles(kind: str, tiles: Mask, dense: Mask) -> None:
    """Every visible pair lies in a tile that a kernel looks at, and full tiles hold no other."""
    assert isinstance(tiles, BlockMask)  # noqa: S101 - made by FlexAttention
    assert isinstance(dense, Tensor)  # noqa: S101 - made by SdpaAttention
    looked_at, full = torch.zeros_like(dense[0, 0]), torch.zeros_like(dense[0, 0])
    kinds = (
        (tiles.kv_num_blocks, tiles.kv_indices, (looked_at,)),
        (tiles.full_kv_num_blocks, tiles.full_kv_indices, (looked_at, full)),
    )
    for counts, indices, marked in kinds:
        if counts is None or indices is None:
            continue
        for row, count in enumerate(counts[0, 0].tolist()):
            for column in indices[0, 0, row, :count].tolist():
                for mark in marked:
                    mark[_tile(row), _tile(column)] = True
    missed, wrong = dense[0, 0] & ~looked_at, full & ~dense[0, 0]
    for pairs, what in ((missed, "is in no tile"), (wrong, "is hidden, but in a full tile")):
        if bool(pairs.any()):
            query, key = pairs.nonzero()[0].tolist()
            raise FaultFoundError(f"{kind}: the pair of query {query} and key {key} {what}")


def _tile(number: int) -> slice:
    return slice(number * TILE, (number + 1) * TILE)
