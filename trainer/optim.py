"""The optimiser of one draft replica: fp32 masters, AdamW or Muon, schedule, clip, guard, average.

Gradients are summed in one flat fp32 tensor (the one that ``sync`` adds up), so bf16 gradients of
several micro-batches lose nothing. The order of a step: accumulate, exchange, ``apply``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.contract.config import OptimConfig
from trainer.errors import CheckpointError, NonFiniteError

# Muon's rate is about ten times AdamW's (vllm-project/speculators RFC 979).
_ADAMW_PER_MUON_LR = 0.1
_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then cosine from 1 to ``min_frac`` over ``num_steps``."""

    num_steps: int
    num_warmup_steps: int
    min_frac: float

    @classmethod
    def from_config(cls, config: OptimConfig, num_steps: int) -> "Schedule":
        """Make the schedule of a run of ``num_steps`` optimiser steps."""
        return cls(num_steps, round(config.warmup_frac * num_steps), config.min_lr_frac)

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate for the 0-based ``step``."""
        if step < self.num_warmup_steps:
            return (step + 1) / self.num_warmup_steps
        length = max(1, self.num_steps - self.num_warmup_steps)
        progress = min(1.0, (step - self.num_warmup_steps) / length)
        return self.min_frac + (1 - self.min_frac) * 0.5 * (1 + math.cos(math.pi * progress))

    def describe(self, step: int) -> str:
        """Say in words where the schedule stands before the 0-based ``step``."""
        rises = f"{self.num_warmup_steps} steps of warm-up, cosine to {self.min_frac:g}"
        return f"schedule: {rises}; step {step} of {self.num_steps} takes {self.factor(step):.4f}"


@dataclass(frozen=True)
class Applied:
    """What one ``apply`` did: gradient norm before clipping and the learning rate."""

    grad_norm: float
    lr: float


class WeightAverage:
    """An fp32 exponential moving average of weights in one flat tensor. Shapes: flat [P].

    The decay rises to its value, min(decay, (1 + step) / (10 + step)), so that the average of a
    short run is not that of its random start. Source: num_updates of TensorFlow's
    ExponentialMovingAverage.
    """

    def __init__(self, flat: Tensor, decay: float) -> None:
        self.flat, self._decay = flat.clone(), decay

    def follow(self, flat: Tensor, step: int) -> None:
        """Take in the weights after the 0-based optimiser step ``step``."""
        self.flat.lerp_(flat, 1 - min(self._decay, (1 + step) / (10 + step)))


class DraftOptimizer:
    """Owns the fp32 masters of a model's trainable parameters and steps them.

    An fp32 model's parameters become views of the masters; a bf16 model's are written back after
    each step. keep_average: False leaves out the average that optim.ema_decay asks for; one
    replica is enough to hold it.
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
        total = sum(p.numel() for p in self._params)
        self._fused = device.type == "cuda" and config.name == "adamw"
        self._direct = False
        self.flat_grad = torch.zeros(total, dtype=torch.float32, device=device)
        self._flat = torch.empty(total, dtype=torch.float32, device=device)
        self._masters = [nn.Parameter(view) for view in self._views(self._flat)]
        self._write_back: list[tuple[Tensor, Tensor]] = []
        for param, master in zip(self._params, self._masters, strict=True):
            master.data.copy_(param.data)
            if param.dtype == torch.float32:
                param.data = master.data
            else:
                self._write_back.append((param.data, master.data))
        self._sums = list(self._views(self.flat_grad))
        for master, grad in zip(self._masters, self._sums, strict=True):
            master.grad = grad
        self._average: WeightAverage | None = None
        if keep_average and config.ema_decay is not None:
            self._average = WeightAverage(self._flat, config.ema_decay)
        self._optimizers = self._build()
        self._base_lrs = [[g["lr"] for g in o.param_groups] for o in self._optimizers]

    def take_gradients_directly(self) -> None:
        """Step with the gradients where backward leaves them, instead of their fp32 sum.

        For steps of one micro-batch of one replica: AdamW on a GPU then reads them once, and
        ``flat_grad`` is empty. Elsewhere nothing changes.
        """
        if self._fused:
            self._direct = True
            self.flat_grad, self._sums = self.flat_grad.new_empty(0), []
            for master in self._masters:
                master.grad = None

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the parameters' gradients to the flat fp32 sum and clear them."""
        if self._direct:
            return
        for param, grad in zip(self._params, self._sums, strict=True):
            if param.grad is not None:
                grad.add_(param.grad)
                param.grad = None

    def clear(self) -> None:
        """Forget the gradients summed so far."""
        self.flat_grad.zero_()
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def apply(self, step: int, loss_sum: float, weight_sum: float) -> Applied:
        """Take optimiser step ``step`` with the summed gradient divided by ``weight_sum``.

        A step in which no position had weight changes nothing but still counts.
        Raises: NonFiniteError before any weight has changed.
        """
        factor = self._schedule.factor(step)
        lr = self._base_lrs[0][0] * factor
        if weight_sum == 0:
            self.clear()
            return Applied(0.0, lr)
        if not self._fused:
            self.flat_grad /= weight_sum
        norm = self._norm(2.0) / (weight_sum if self._fused else 1.0)
        if not (math.isfinite(norm) and math.isfinite(loss_sum)):
            raise NonFiniteError(
                f"step {step + 1}: loss sum {loss_sum}, gradient norm {norm} ({self.blame()});"
                " the weights were not changed"
            )
        clip = min(1.0, self._config.clip_norm / (norm + 1e-6))
        for optimizer, lrs in zip(self._optimizers, self._base_lrs, strict=True):
            for group, base in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = base * factor
        if self._fused:
            self._step_fused(clip / weight_sum)
        else:
            self.flat_grad *= clip
            for optimizer in self._optimizers:
                optimizer.step()
            for target, source in self._write_back:
                target.copy_(source)
        if self._average is not None:
            self._average.follow(self._flat, step)
        self.clear()
        return Applied(norm, lr)

    def _step_fused(self, grad_scale: float) -> None:
        """Step every parameter in one pass; torch's AdamW only holds the state."""
        from trainer.fused_adamw import Moments, Rates, adamw_step  # noqa: PLC0415 - needs Triton

        (adamw,) = self._optimizers
        for master in self._masters:
            if not adamw.state[master]:
                zero = torch.zeros((), dtype=torch.float32, device=master.device)
                first, second = torch.zeros_like(master), torch.zeros_like(master)
                adamw.state[master] = dict(zip(_STATE_KEYS, (zero, first, second), strict=False))
        torch._foreach_add_([adamw.state[master]["step"] for master in self._masters], 1.0)
        at = {id(m): place for place, m in enumerate(self._masters)}
        grads = self._gradients()
        for group in adamw.param_groups:
            numbers = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
            rates = Rates(*numbers, grad_scale)
            for master in group["params"]:
                place, held = at[id(master)], adamw.state[master]
                moments = Moments(held["step"], held["exp_avg"], held["exp_avg_sq"])
                weight = self._params[place].data
                adamw_step(grads[place], master.data, moments, weight, rates)

    def _gradients(self) -> list[Tensor]:
        """Return the gradients summed so far, in the order of the parameters."""
        if not self._direct:
            return self._sums
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]

    def _norm(self, order: float) -> float:
        """Return the norm of all gradients together. Waits for the device."""
        if not self._direct:
            return float(torch.linalg.vector_norm(self.flat_grad, ord=order))
        norms = torch._foreach_norm(self._gradients(), order, dtype=torch.float32)
        return float(torch.linalg.vector_norm(torch.stack(norms), ord=order))

    def masters(self) -> dict[str, Tensor]:
        """Return the fp32 master weights by parameter name (not copies)."""
        return {n: m.data for n, m in zip(self._names, self._masters, strict=True)}

    def average(self) -> dict[str, Tensor]:
        """Return the fp32 average by parameter name (not copies); empty when none is kept."""
        if self._average is None:
            return {}
        return dict(zip(self._names, self._views(self._average.flat), strict=True))

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
        masters: dict[str, Tensor],
        state: dict[str, Tensor],
        average: dict[str, Tensor] | None = None,
    ) -> None:
        """Take over masters, optimiser tensors and average of a checkpoint.

        An average that is wanted and not there begins at the masters. Raises: CheckpointError for
        names or shapes of another model or optimiser.
        """
        _check_same("master weights", self.masters(), masters)
        for name, master in self.masters().items():
            master.copy_(masters[name])
        for target, source in self._write_back:
            target.copy_(source)
        if self._average is not None:
            begun = average or masters
            _check_same("average", self.masters(), begun)
            for name, view in self.average().items():
                view.copy_(begun[name])
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    optimizer.state[param] = {}
        for full_name, tensor in state.items():
            name, _, key = full_name.rpartition("/")
            if name not in self._names or key not in _STATE_KEYS:
                raise CheckpointError(f"optimiser state of an unknown parameter: {full_name}")
            master = self._masters[self._names.index(name)]
            owner = self._owner(master)
            on_host = key == "step" and not owner.defaults.get("fused", False)
            owner.state[master][key] = tensor.to("cpu" if on_host else master.device, copy=True)

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

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        start = 0
        for param in self._params:
            yield flat[start : start + param.numel()].view(param.shape)
            start += param.numel()

    def _build(self) -> list[torch.optim.Optimizer]:
        """Make the optimisers; the first group's learning rate is the one that is reported."""
        config, named = self._config, list(zip(self._names, self._masters, strict=True))
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
        for name, master in zip(self._names, self._masters, strict=True):
            yield name, self._owner(master).state.get(master, {})

    def _owner(self, master: Tensor) -> torch.optim.Optimizer:
        return next(
            o
            for o in self._optimizers
            if any(p is master for g in o.param_groups for p in g["params"])
        )

    def has_finite_weights(self) -> bool:
        """Say whether every master weight is finite. Waits for the device."""
        return bool(torch.linalg.vector_norm(self._flat, ord=math.inf).isfinite())

    def is_finite(self) -> bool:
        """Say whether every gradient summed so far is finite. Waits for the device."""
        # The greatest absolute value passes NaN on and needs no second tensor of this size.
        return math.isfinite(self._norm(math.inf))

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients summed so far by parameter name (not copies)."""
        return dict(zip(self._names, self._gradients(), strict=True))

    def blame(self) -> str:
        """Say in words which gradients are not finite."""
        bad = [n for n, grad in self.gradients().items() if not bool(torch.isfinite(grad).all())]
        if not bad:
            return "every gradient is finite by itself"
        return f"gradient not finite in {len(bad)} of {len(self._names)} tensors, first {bad[0]}"


def _is_layer_matrix(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and name.startswith("layers.")


def _check_same(what: str, own: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    missing, extra = sorted(own.keys() - other.keys()), sorted(other.keys() - own.keys())
    if missing or extra:
        raise CheckpointError(f"{what}: missing {missing[:3]}, not of this model {extra[:3]}")
    for name, tensor in own.items():
        if tensor.shape != other[name].shape:
            raise CheckpointError(
                f"{what}: {name} has shape {tuple(other[name].shape)},"
                f" this model's has {tuple(tensor.shape)}"
            )
