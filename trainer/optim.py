"""The optimiser of one draft replica: fp32 masters, AdamW or Muon, clip, guard, average.

Gradients of several micro-batches are summed in one flat fp32 tensor, so that bf16 ones lose
nothing; it is also what ``sync`` adds up. The order of a step: accumulate, exchange, ``launch``,
and when the host wants to know, ``settle``. Whether a step is taken is decided on the device,
before the host knows: a gradient or loss that is not finite changes nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.contract.config import OptimConfig
from trainer.device import HostCopy
from trainer.errors import CheckpointError, NonFiniteError
from trainer.learning_rate import Schedule
from trainer.masters import Layout, NamedMasters, SplitMasters, WeightAverage, WholeMasters

if TYPE_CHECKING:
    from trainer.fused_adamw import FusedAdamw, Held

# Muon's rate is about ten times AdamW's (vllm-project/speculators RFC 979).
_ADAMW_PER_MUON_LR = 0.1
_ALIGNMENT = 64  # numbers; as fused_adamw wants it
_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True)
class Applied:
    """What one ``apply`` did: gradient norm before clipping and the learning rate."""

    grad_norm: float
    lr: float


class DraftOptimizer:
    """Owns the fp32 masters of a model's trainable parameters and steps them.

    An fp32 model's parameters become views of the masters; a bf16 model's are rounded from them
    after each step, or are their upper halves (see ``trainer.masters``): with AdamW on a GPU. Other
    weights are given by ``load`` alone; ``launch`` refuses to go on from what was written
    otherwise. keep_average: False leaves out the average that optim.ema_decay asks for; one replica
    is enough to hold it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        schedule: Schedule,
        *,
        keep_average: bool = True,
    ) -> None:
        self._config, self._schedule = config, schedule
        self._names = [n for n, p in model.named_parameters() if p.requires_grad]
        self._params = [p for p in model.parameters() if p.requires_grad]
        device = self._params[0].device
        self._fused = device.type == "cuda" and config.name == "adamw"
        self._layout = Layout.of(self._params, _ALIGNMENT if self._fused else 1)
        self.starts = self._layout.starts
        self._direct = False  # the step reads gradients where backward leaves them
        self._fresh = True  # the sums begin with the next gradients, whatever they hold
        self._norm: Tensor | None = None  # of the sums, once it is known
        self._taken: set[int] = set()  # places that ``take_in`` has had of this micro-batch
        self.flat_grad = torch.zeros(self._layout.total, dtype=torch.float32, device=device)
        self._masters = self._make_masters()
        self._sums = self._layout.views(self.flat_grad)
        if not self._fused:
            for master, grad in zip(self._masters.handles, self._sums, strict=True):
                master.grad = grad
        self._average: WeightAverage | None = None
        if keep_average and config.ema_decay is not None:
            self._average = WeightAverage(torch.zeros_like(self.flat_grad), config.ema_decay)
            self._begin_average(self.masters())
        self._optimizers = self._build()
        self._adamw = self._fused_adamw() if self._fused else None
        self._held: Held | None = None
        self._base_lrs = [[g["lr"] for g in o.param_groups] for o in self._optimizers]

    @property
    def params(self) -> Sequence[Tensor]:
        """The trainable parameters; ``starts`` says where each begins in ``flat_grad``."""
        return self._params

    def arrange_gradients(self, num_replicas: int, num_micro_batches: int) -> None:
        """Let gradients lie where a step of so many of them costs least.

        One micro-batch of one replica: AdamW on a GPU reads them where backward leaves them. One
        of each of several replicas: their sum is made in fp32 and has the type of the parameters,
        as the gradient of one larger batch would. Else, and off a GPU, sums are fp32.
        """
        dtypes = {param.dtype for param in self._params}
        if num_micro_batches > 1:
            return
        if num_replicas == 1:
            self.take_gradients_directly()
        elif self._fused and len(dtypes) == 1:
            self.flat_grad = self.flat_grad.to(dtypes.pop())
            self._sums = self._layout.views(self.flat_grad)

    def take_gradients_directly(self) -> None:
        """Step with the gradients where backward leaves them, instead of their fp32 sum.

        For steps of one micro-batch of one replica: AdamW on a GPU then reads them once, and
        ``flat_grad`` is empty. Elsewhere nothing changes.
        """
        if self._fused:
            self._direct = True
            self.flat_grad, self._sums = self.flat_grad.new_empty(0), []

    @torch.no_grad()
    def take_in(self, places: Sequence[int]) -> None:
        """Add the gradients of some parameters to the flat sum before ``accumulate`` does.

        Where there is none, zeros. Each place once a micro-batch. The current stream may be
        another than backward's, when it is behind it. Raises: RuntimeError for a place taken twice.
        """
        if not self._taken.isdisjoint(places):
            raise RuntimeError("gradients were taken in, and then backward ran again")
        self._taken.update(places)
        found = [(self._sums[place], self._params[place]) for place in places]
        with_grad = [(total, p.grad) for total, p in found if p.grad is not None]
        if self._fresh:
            for total, param in found:
                if param.grad is None:
                    total.zero_()
        if with_grad:
            totals, grads = (list(side) for side in zip(*with_grad, strict=True))
            if self._fresh:
                torch._foreach_copy_(totals, grads)
            else:
                torch._foreach_add_(totals, grads)
            for grad in grads:
                if grad.is_cuda:  # its memory is free for backward's stream after this only
                    grad.record_stream(torch.cuda.current_stream(grad.device))
        for _total, param in found:
            param.grad = None

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the parameters' gradients to the flat sum and clear them; nothing waits."""
        self._norm = None
        if self._direct:
            return
        rest = [place for place in range(len(self._params)) if place not in self._taken]
        if self._adamw is not None and not self._taken and self.flat_grad.dtype == torch.float32:
            grads = [param.grad for param in self._params]
            self._norm = self._adamw.add_up(grads, self.flat_grad, fresh=self._fresh)
            self._drop_gradients()
        else:
            self.take_in(rest)
        self._fresh = False
        self._taken.clear()

    def clear(self) -> None:
        """Forget the gradients summed so far."""
        self.flat_grad.zero_()
        self._fresh, self._norm = True, None
        self._taken.clear()
        self._drop_gradients()

    @torch.no_grad()
    def grad_norm(self, *, again: bool = False) -> Tensor:
        """Return the 2-norm of all gradients together, [] fp32; nothing waits.

        It is finite if and only if the sum of their squares is. ``again``: the gradients have
        changed since ``accumulate``.
        """
        if self._norm is None or again:
            if self._adamw is not None:
                self._norm = self._adamw.norm(self._gradients())
            else:
                self._norm = torch.linalg.vector_norm(self.flat_grad)
        return self._norm

    def rehearse(self) -> None:
        """Launch all that a step launches, so that it is compiled; no weight changes.

        The gradients summed so far are forgotten.
        """
        nothing = torch.full((2,), math.nan, dtype=torch.float64, device=self.flat_grad.device)
        self.launch(0, nothing, self.grad_norm(again=True))
        self.clear()

    def apply(self, step: int, loss_sum: float | Tensor, weight_sum: float | Tensor) -> Applied:
        """Take optimiser step ``step`` and wait for its end: ``launch`` and ``settle``.

        Raises: NonFiniteError before any weight has changed.
        """
        device = self.flat_grad.device
        sums = [
            torch.as_tensor(value, dtype=torch.float64, device=device)
            for value in (loss_sum, weight_sum)
        ]
        told = self.launch(step, torch.stack(sums), self.grad_norm())
        return self.settle(step, told.wait())

    @torch.no_grad()
    def launch(self, step: int, sums: Tensor, norm: Tensor) -> HostCopy:
        """Take optimiser step ``step`` with the summed gradient divided by the weight sum.

        Nothing waits on a GPU with AdamW. A loss sum or norm that is not finite changes nothing,
        the count of steps included; neither does a step in which no position had weight.
        The host's copy is on its way before the step is, so that the host goes on meanwhile.
        Shapes: sums [K] fp64, the loss sum, the weight sum and whatever else the host wants to
        read, norm [] that of the summed gradient -> [K + 1], for ``settle``.
        Raises: RuntimeError when somebody else has written weights.
        """
        self._require_own_weights()
        total = norm.double()
        told = HostCopy(torch.cat((sums, total[None])))
        factor = self._schedule.factor(step)
        for optimizer, lrs in zip(self._optimizers, self._base_lrs, strict=True):
            for group, base in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = base * factor
        if self._adamw is not None:
            self._step_fused(self._adamw, step, sums, total)
        else:
            self._step_unfused(step, sums, total)
        return told

    def settle(self, step: int, values: Sequence[float]) -> Applied:
        """Say what ``launch`` did, from the host's copy of what it returned; forget the gradients.

        Raises: NonFiniteError when the step was not taken because a number was not finite.
        """
        loss_sum, weight_sum, norm = values[0], values[1], values[-1]
        if not (math.isfinite(norm) and math.isfinite(loss_sum)):
            raise NonFiniteError(
                f"step {step + 1}: loss sum {loss_sum}, gradient norm {norm} ({self.blame()});"
                " the weights were not changed"
            )
        if self._adamw is None:
            self.flat_grad.zero_()
        self._fresh, self._norm = True, None
        self._taken.clear()
        self._drop_gradients()
        lr = self._base_lrs[0][0] * self._schedule.factor(step)
        return Applied(norm / weight_sum if weight_sum else 0.0, lr)

    def _step_unfused(self, step: int, sums: Tensor, norm: Tensor) -> None:
        loss_sum, weight_sum = sums[0], sums[1]
        good = loss_sum.isfinite() & norm.isfinite() & (weight_sum != 0)
        clip = self._config.clip_norm / (norm / weight_sum + 1e-6)
        scale = torch.where(good, clip.clamp(max=1.0) / weight_sum, math.nan).float()
        if not math.isfinite(scale):
            return
        self.flat_grad *= scale
        for optimizer in self._optimizers:
            optimizer.step()
        if isinstance(self._masters, WholeMasters):  # split ones are written by the kernels alone
            self._masters.write_back()
        if self._average is not None:
            self._average.follow(self._masters.flat, step)

    def _step_fused(self, adamw: "FusedAdamw", step: int, sums: Tensor, norm: Tensor) -> None:
        from trainer.fused_adamw import Rates  # noqa: PLC0415 - needs Triton

        group, held = self._optimizers[0].param_groups[0], self._hold()
        share = 0.0 if self._average is None else self._average.share(step)
        rates = Rates(group["lr"], group["betas"], group["eps"], share)
        scale = adamw.decide(sums, norm, self._config.clip_norm, held)
        adamw.step(self._gradients(), held, rates, scale)

    def _require_own_weights(self) -> None:
        if written := self._masters.rewritten():
            raise RuntimeError(
                f"{len(written)} weights were written after the optimiser was built, first"
                f" {self._names[written[0]]}: it does not know their masters; write them before, or"
                " give them to load()"
            )

    def _fused_adamw(self) -> "FusedAdamw":
        """Return the kernels over the parameters; torch's AdamW only holds groups and state."""
        from trainer.fused_adamw import FusedAdamw  # noqa: PLC0415 - needs Triton

        groups = self._optimizers[0].param_groups
        decays = {id(m): group["weight_decay"] for group in groups for m in group["params"]}
        return FusedAdamw(self._params, self.starts, [decays[id(m)] for m in self._masters.handles])

    def _hold(self) -> "Held":
        """Return what the fused AdamW works on; its moments are made when first needed."""
        from trainer.fused_adamw import Held  # noqa: PLC0415 - needs Triton

        if self._held is None:
            average = None if self._average is None else self._average.flat
            made = self._held = Held.begun(self._masters.flat, average)
            firsts, seconds = map(self._layout.views, (made.exp_avg, made.exp_avg_sq))
            for master, first, second in zip(self._masters.handles, firsts, seconds, strict=True):
                held = (made.step, first, second)
                state = dict(zip(_STATE_KEYS, held, strict=False))
                self._optimizers[0].state[master] = state
        return self._held

    def _gradients(self) -> list[Tensor | None]:
        """Return the gradients summed so far, in the order of the parameters; None is zeros."""
        return [param.grad for param in self._params] if self._direct else list(self._sums)

    def _drop_gradients(self) -> None:
        for param in self._params:
            param.grad = None

    def masters(self) -> Mapping[str, Tensor]:
        """Return the fp32 master weights by parameter name, each made when it is asked for.

        With bf16 weights and AdamW on a GPU they are copies, else not. To write: ``load``.
        """
        return NamedMasters(self._names, self._masters)

    def average(self) -> dict[str, Tensor]:
        """Return the fp32 average by parameter name (not copies); empty when none is kept."""
        if self._average is None:
            return {}
        return dict(zip(self._names, self._layout.views(self._average.flat), strict=True))

    def state(self) -> dict[str, Tensor]:
        """Return the optimisers' tensors as ``NAME/exp_avg`` and the like (not copies)."""
        found: dict[str, Tensor] = {}
        for name, entry in self._entries():
            for key in _STATE_KEYS:
                if key in entry:
                    found[f"{name}/{key}"] = entry[key]
        return found

    @torch.no_grad()
    def load(
        self,
        masters: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        average: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take over masters, optimiser tensors and average of a checkpoint.

        An average that is wanted and not there begins at the masters. Raises: CheckpointError for
        names or shapes of another model or optimiser.
        """
        self._check_same("master weights", masters)
        for place, name in enumerate(self._names):
            self._masters.set(place, masters[name])
        if self._average is not None:
            self._begin_average(average or masters)
        self._held = None
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    optimizer.state[param] = {}
        if state and self._fused:
            self._hold()
        for full_name, tensor in state.items():
            place, key = self._place_of_state(full_name, tensor.shape)
            master = self._masters.handles[place]
            owner = self._owner(master)
            if self._fused:  # its tensors are views of flat ones
                owner.state[master][key].copy_(tensor)
                continue
            on_host = key == "step" and not owner.defaults.get("fused", False)
            owner.state[master][key] = tensor.to("cpu" if on_host else master.device, copy=True)

    def _place_of_state(self, full_name: str, shape: torch.Size) -> tuple[int, str]:
        """Return the place and key of an optimiser's tensor. Raises: CheckpointError."""
        name, _, key = full_name.rpartition("/")
        if name not in self._names or key not in _STATE_KEYS:
            raise CheckpointError(f"optimiser state of an unknown parameter: {full_name}")
        place = self._names.index(name)
        own = torch.Size() if key == "step" else self._layout.shapes[place]
        if shape != own:
            raise CheckpointError(
                f"optimiser state: {full_name} has shape {tuple(shape)}, this model's has"
                f" {tuple(own)}"
            )
        return place, key

    def describe(self) -> list[str]:
        """Return one line a parameter group: optimiser, tensors, numbers, learning rate."""
        lines = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                count = sum(p.numel() for p in group["params"])
                lines.append(
                    f"{type(optimizer).__name__}: {len(group['params'])} tensors, {count:,}"
                    f" numbers, lr {group['lr']:g}, weight decay {group['weight_decay']:g}"
                )
        return lines

    def _make_masters(self) -> WholeMasters | SplitMasters:
        """Lay out the masters: split where the fused AdamW takes them so."""
        if self._fused and all(param.dtype == torch.bfloat16 for param in self._params):
            return SplitMasters(self._params, self._layout)
        return WholeMasters(self._params, self._layout)

    def _begin_average(self, weights: Mapping[str, Tensor]) -> None:
        self._check_same("average", weights)
        for name, view in self.average().items():
            view.copy_(weights[name])

    def _check_same(self, what: str, other: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError unless ``other`` has this model's names and shapes."""
        own = dict(zip(self._names, self._layout.shapes, strict=True))
        missing, extra = sorted(own.keys() - other.keys()), sorted(other.keys() - own.keys())
        if missing or extra:
            raise CheckpointError(f"{what}: missing {missing[:3]}, not of this model {extra[:3]}")
        for name, shape in own.items():
            if shape != other[name].shape:
                raise CheckpointError(
                    f"{what}: {name} has shape {tuple(other[name].shape)},"
                    f" this model's has {tuple(shape)}"
                )

    def _build(self) -> list[torch.optim.Optimizer]:
        """Make the optimisers; the first group's learning rate is the one that is reported."""
        config = self._config
        named = list(zip(self._names, self._masters.handles, strict=True))
        muon = [m for n, m in named if config.name == "muon" and _is_layer_matrix(n, m)]
        chosen = {id(m) for m in muon}
        rest = [m for _, m in named if id(m) not in chosen]
        fallback = config.lr * _ADAMW_PER_MUON_LR if muon else config.lr
        lr = fallback if config.adamw_lr is None or not muon else config.adamw_lr
        groups = [
            # Only matrices decay: norms and the kernels of convolutions rest at 1, not at 0.
            {"params": [m for m in rest if m.ndim == 2], "weight_decay": config.weight_decay},
            {"params": [m for m in rest if m.ndim != 2], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=lr, betas=config.betas, fused=True
        )
        if not muon:
            return [adamw]
        # match_rms_adamw: an update has the size that AdamW would give it at the same rate.
        return [
            torch.optim.Muon(
                muon,
                lr=config.lr,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            adamw,
        ]

    def _entries(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        for name, master in zip(self._names, self._masters.handles, strict=True):
            yield name, self._owner(master).state.get(master, {})

    def _owner(self, master: Tensor) -> torch.optim.Optimizer:
        return next(
            o
            for o in self._optimizers
            if any(p is master for g in o.param_groups for p in g["params"])
        )

    def has_finite_weights(self) -> bool:
        """Say whether every master weight is finite. Waits for the device."""
        return self._masters.are_finite()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients summed so far by parameter name (not copies)."""
        found = zip(self._names, self._params, self._gradients(), strict=True)
        return {name: torch.zeros_like(p) if g is None else g for name, p, g in found}

    def blame(self) -> str:
        """Say in words which gradients are not finite."""
        bad = [n for n, grad in self.gradients().items() if not bool(torch.isfinite(grad).all())]
        if not bad:
            return "every gradient is finite by itself"
        return f"gradient not finite in {len(bad)} of {len(self._names)} tensors, first {bad[0]}"


def _is_layer_matrix(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and name.startswith("layers.")
