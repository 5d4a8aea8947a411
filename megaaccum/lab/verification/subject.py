"""The model, the loss and the data of a case, on a rank of its layout and in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megaaccum.config import Plan
from megaaccum.distributed.groups import Groups
from megaaccum.errors import ConfigError
from megaaccum.lab.verification.case import Case, UserModel
from megaaccum.lab.verification.param_groups import param_groups
from megaaccum.model import names
from megaaccum.model.torch_chunk import TorchChunk
from megaaccum.pretrain.model import gpt
from megaaccum.pretrain.model.gpt_forward import REPORTS, GptForwardStep
from megaaccum.upstream import emerging

_DROPOUTS = tuple(each for name, each in vars(torch.nn).items() if "Dropout" in name)


def vocab_size_of(case: Case) -> int:
    """The vocabulary of a configured GPT, before padding."""
    return int(case.keys.get("vocab_size") or 61)


def subject_of(case: Case) -> _Gpt | _UserSubject:
    """Model, loss and samples of a case: the configured GPT, or the user's model, both with the same methods."""
    return _Gpt(case) if case.user_model is None else _UserSubject(case, case.user_model)


def optimizer_of(named: list[tuple[str, torch.Tensor]], plan: Plan) -> Any:
    """The plan's optimizer over masters of parameters, in one process."""
    keys = plan.config.optimizer
    if keys.optimizer == "adam":
        return adamw(named, plan)
    if keys.optimizer == "lion":
        return emerging.lion(list(param_groups(named, plan)), lr=keys.lr, betas=(keys.lion_beta1, keys.lion_beta2))
    from megaaccum.lab.verification.whole_matrices import WholeMatrices

    return WholeMatrices(named, plan, adamw)


def adamw(named: list[tuple[str, torch.Tensor]], plan: Plan) -> torch.optim.Optimizer:
    """torch's AdamW over masters of parameters."""
    keys = plan.config.optimizer
    return torch.optim.AdamW(param_groups(named, plan), betas=(keys.adam_beta1, keys.adam_beta2), eps=keys.adam_eps)


def whole_batch(batches: list[Any]) -> Any | None:
    """All micro-batches as one if each is a tensor, or a dict of tensors with the same number of rows; else None."""
    if all(isinstance(each, torch.Tensor) and each.dim() for each in batches):
        return torch.cat(batches) if len({each.shape[1:] for each in batches}) == 1 else None
    if not all(isinstance(each, dict) and each.keys() == batches[0].keys() for each in batches):
        return None
    whole = {name: whole_batch([each[name] for each in batches]) for name in batches[0]}
    if not all(isinstance(each, torch.Tensor) for each in whole.values()):
        return None
    return whole if all(len({len(each) for each in batch.values()}) == 1 for batch in batches) else None


def gpt_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], *, means: bool) -> tuple[torch.Tensor, float]:
    """(sum of the losses of unmasked tokens, their number) of a GPT; means: (the mean over these tokens, 1)."""
    batch = {name: each.to(next(model.parameters()).device) for name, each in batch.items()}
    mask = batch["loss_mask"]
    losses = torch.cat([_losses(model, part) for part in _documents(model, batch)], dim=1).view(mask.shape)
    losses = losses if losses.dtype is torch.float64 else losses.float()
    total, tokens = (losses * mask.to(losses.dtype)).sum(), float(mask.sum())
    return (total / max(tokens, 1.0), 1.0) if means else (total, tokens)


def _losses(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    starts = batch["document_starts"].cpu() if "document_starts" in batch else None
    keys = {name: batch.get(name) for name in ("labels", "loss_mask", "padding_mask")}
    losses: torch.Tensor = model(batch["tokens"], batch["position_ids"], starts, **keys)
    return losses.view(1, -1)


def _documents(model: Any, batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the documents of a batch, each alone, without boundaries. The batch itself with experts, whose balancing
    losses count the tokens of a micro-batch, with prediction layers, which predict past the end of a document, and in
    float64 with rotary positions, whose FP32 angles are those of the row."""
    config = model.config
    rotates = config.multi_latent_attention or model.position_embedding_type in ("rope", "yarn")
    by_row = config.num_moe_experts or config.mtp_num_layers or (rotates and config.params_dtype is torch.float64)
    if "document_starts" not in batch or by_row:
        yield batch
        return
    starts = batch["document_starts"].cpu().view(-1)
    lengths = starts.nonzero().view(-1).diff(append=torch.tensor([len(starts)])).tolist()
    flat = {name: each.reshape(1, -1).split(lengths, dim=1) for name, each in batch.items() if each.dim() == 2}
    for number in range(len(lengths)):
        yield {name: parts[number] for name, parts in flat.items() if name != "document_starts"}


class _Gpt:
    """Megatron's GPT of a configuration, its cross entropy, and made-up tokens. Micro-batches are numbered over all
    ranks: number i of data-parallel rank r is i * dp + r."""

    reports = REPORTS

    def __init__(self, case: Case):
        self._case = case
        self.vocab_size = vocab_size_of(case)

    def chunks(self, plan: Plan, groups: Groups) -> list[torch.nn.Module]:
        """Build this rank's chunks of a layout."""
        return list(gpt.build_chunks(plan, groups, vocab_size=self.vocab_size))

    def forward_step(self, plan: Plan, groups: Groups) -> Any:
        """The forward step function that the engine is given."""
        return WithOverflow(GptForwardStep(groups, plan.batch.loss_norm))

    def loss(self, plan: Plan, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        """(sum of the losses of `batch`, its weight) in one process."""
        return gpt_loss(model, batch, means=plan.batch.loss_norm != "token")

    def optimizer(self, named: list[tuple[str, torch.Tensor]], plan: Plan) -> torch.optim.Optimizer:
        """Make an optimizer over masters of the parameters."""
        return optimizer_of(named, plan)  # type: ignore[no-any-return]

    def microbatches(self, step: int, count: int) -> list[Any]:
        """The `count` micro-batches of a step."""
        made = [self._microbatch(step, index, step * count + index) for index in range(count)]
        if self._case.overflow is not None and self._case.overflow[0] == step:
            made[self._case.overflow[1]]["overflows"] = torch.ones(())
        return made

    def _microbatch(self, step: int, index: int, place: int) -> dict[str, torch.Tensor]:
        """Micro-batch `index` of a step; place: its number over all steps."""
        rows, seq = int(self._case.keys.get("micro_batch_size", 1)), int(self._case.keys["seq_length"])
        generator = torch.Generator().manual_seed(1000 * step + index)
        made = self._made_up(rows, seq, generator) if self._case.samples is None else self._read(place, rows)
        if self._case.masks != "full":
            lengths = torch.randint(1, seq + 1, (rows, 1), generator=generator)
            made["loss_mask"] = made["loss_mask"] * (torch.arange(seq) < lengths)
        if self._case.masks == "padded":
            made["padding_mask"] = torch.arange(seq) >= lengths
        return {name: each.contiguous() for name, each in made.items()}

    def _made_up(self, rows: int, seq: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, self.vocab_size, (rows, seq + 1), generator=generator)
        positions = torch.arange(seq).expand(rows, seq)
        return {
            "tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions,
            "loss_mask": torch.ones(rows, seq),
        }  # fmt: skip

    def _read(self, place: int, rows: int) -> dict[str, torch.Tensor]:
        """Rows of the data, which starts again at its end."""
        assert self._case.samples is not None
        parts = self._case.samples
        at = torch.arange(place * rows, (place + 1) * rows) % len(parts["tokens"])
        return {name: part[at] for name, part in parts.items()}


class WithOverflow:
    """A forward step function. The gradient of its last stage is not finite for micro-batches with `overflows`."""

    def __init__(self, inner: GptForwardStep):
        self._inner = inner
        self.weights, self.token_weights, self.routed_tokens = inner.weights, inner.token_weights, inner.routed_tokens

    def __call__(self, data_iterator: Iterator[Any], chunk: Any, **plan: Any) -> Any:
        made = dict(next(data_iterator))
        overflows = made.pop("overflows", None)
        output, loss_func = self._inner(iter([made]), chunk, **plan)
        if overflows is not None and chunk.post_process and output.requires_grad:
            output.register_hook(lambda grad: grad * float("inf"))
        return output, loss_func


class _UserSubject:
    """A user's model. Its dropout modules are switched off."""

    def __init__(self, case: Case, model: UserModel):
        self._case, self._model = case, model
        self.reports = dict(model.reports)

    def chunks(self, plan: Plan, groups: Groups) -> list[torch.nn.Module]:
        stages, rank = plan.layout.num_stages, torch.distributed.get_rank()
        return [self._built(stage, stages, plan) for stage in plan.layout.stages(rank)]

    def _built(self, stage: int, stages: int, plan: Plan) -> torch.nn.Module:
        model: torch.nn.Module = self._model.build(stage, stages)
        for module in model.modules():
            if isinstance(module, _DROPOUTS):
                module.p = 0.0
        dtype = names.DTYPES[plan.config.sharding.params_dtype or "fp32"]
        built = next((param.dtype for param in model.parameters()), dtype)
        if built != dtype:
            model.to(dtype)
            config: Any = getattr(model, "config", None)
            for name in ("params_dtype", "pipeline_dtype"):
                if getattr(config, name, None) == built:
                    setattr(config, name, dtype)
        return model if hasattr(model, "set_input_tensor") else TorchChunk(model)

    def forward_step(self, plan: Plan, groups: Groups) -> Any:
        return self._model.forward_step_func

    def loss(self, plan: Plan, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        output, loss_func = self._model.forward_step_func(iter([batch]), model)
        total, weight, _ = loss_func(output)
        return total, float(weight)

    def optimizer(self, named: list[tuple[str, torch.Tensor]], plan: Plan) -> torch.optim.Optimizer:
        if self._model.optimizer is None:
            return adamw(named, plan)
        return self._model.optimizer([each for _, each in named])  # type: ignore[no-any-return]

    def microbatches(self, step: int, count: int) -> list[Any]:
        data = self._model.data
        made = data(step) if callable(data) else data[step * count :] or data
        if len(made) < count:
            raise ConfigError(
                f"the data has {len(made)} micro-batches for a step, but the plan takes {count} over all"
                f" data-parallel ranks: give {count}, or set grad_accum_steps lower"
            )
        return list(made[:count])
