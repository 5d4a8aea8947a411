"""Rules on the optimizer's schedule: the assertions of Megatron's OptimizerParamScheduler and its assumptions."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.rules.subject import Subject


def rates(subject: Subject) -> Iterator[str]:
    """The rate rises from lr_warmup_init to lr and falls to min_lr; that of embedding and head falls from its own."""
    optimizer = subject.optimizer
    if optimizer.lr <= 0:
        return
    low = "min_lr" if optimizer.decoupled_min_lr is None else "decoupled_min_lr"
    for name, peak in (("min_lr", "lr"), ("lr_warmup_init", "lr"), (low, "decoupled_lr")):
        value, most = getattr(optimizer, name), getattr(optimizer, peak)
        if most is not None and value > most:
            yield f"{name} {value:g} is more than {peak} {most:g}: set {name} to at most {most:g}."
    if optimizer.lr_mult and optimizer.lr_warmup_init:  # Megatron's warm-up begins at one rate for all groups
        yield f"lr_warmup_init {optimizer.lr_warmup_init:g} knows no lr_mult: set it to 0, or leave lr_mult out."


def scaling(subject: Subject) -> Iterator[str]:
    """Scaled learning rates are given for one reference batch."""
    optimizer, references = subject.optimizer, subject.given("lr_reference_batch_size", "lr_reference_tokens")
    if optimizer.lr_scaling != "none" and len(references) != 1:
        found = " and ".join(references) or "none"
        yield (
            f"lr_scaling {optimizer.lr_scaling} needs one reference batch, but {found} is given: set"
            " lr_reference_batch_size (sequences) or lr_reference_tokens."
        )


def spans(subject: Subject) -> Iterator[str]:
    """Warm-up, decay and anneal have one length each (lr_spans.too_long compares them)."""
    for kind, what in (("warmup", "warm-up"), ("decay", "decay"), ("wsd_decay", "anneal")):
        names = [f"lr_{kind}_{unit}" for unit in ("iters", "samples", "fraction")]
        lengths = {name: getattr(subject.optimizer, name, None) for name in names}
        given = [
            f"{name} {length}" for name, length in lengths.items() if length or (name in names[2:] and length == 0)
        ]
        if len(given) > 1:
            yield f"{' and '.join(given)} both give the length of the {what}: leave one of them out."


def stable_then_decay(subject: Subject) -> Iterator[str]:
    """WSD needs the length of its anneal."""
    optimizer = subject.optimizer
    if optimizer.lr_decay_style == "WSD" and not (optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples):
        yield "lr_decay_style WSD needs lr_wsd_decay_iters, the steps of its final anneal: set it."


def weight_decay(subject: Subject) -> Iterator[str]:
    """A weight decay that moves has two ends; one that does not has one value."""
    optimizer, names = subject.optimizer, subject.given("start_weight_decay", "end_weight_decay")
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if optimizer.weight_decay_incr_style == "constant":
        for name in names:
            if (value := getattr(optimizer, name)) != optimizer.weight_decay:
                yield (
                    f"{name} {value} contradicts weight_decay {optimizer.weight_decay} with weight_decay_incr_style"
                    f" constant: leave {name} out, or set weight_decay_incr_style to linear or cosine."
                )
    elif len(names) < 2:
        yield (
            f"weight_decay_incr_style {optimizer.weight_decay_incr_style} needs start_weight_decay and"
            " end_weight_decay: set both."
        )
    elif start is not None and end is not None and end < start:
        yield f"end_weight_decay {end} is less than start_weight_decay {start}, but it can only grow: swap them."


def fp32_states(subject: Subject) -> Iterator[str]:
    """Updates of matrices stand where gradients were, in FP32, and so do the states of all optimizers but AdamW."""
    optimizer, sharding = subject.optimizer.optimizer, subject.sharding
    for name in ("grad_accum_dtype", "optimizer_dtype") if optimizer != "adam" else ():
        if (given := getattr(sharding, name)) != "fp32":
            yield f"{name} {given}: optimizer {optimizer} keeps its states and updates in FP32: set it to fp32."


def matrices(subject: Subject) -> Iterator[str]:
    """Matrices scale their updates by their own shape, and are whole where heads are."""
    optimizer, tp = subject.optimizer, subject.parallel.tensor_model_parallel_size
    if optimizer.optimizer not in ("muon", "soap"):
        return
    if subject.megatron.get("use_mup"):
        yield (
            f"optimizer {optimizer.optimizer}: use_mup gives matrices rates by their width, as their own updates do:"
            " leave one out."
        )
    if optimizer.optimizer == "soap" and subject.sharding.offload_optimizer != "none":
        yield (
            f"offload_optimizer {subject.sharding.offload_optimizer}: SOAP's state stays on the devices of its owners:"
            " set it to none."
        )
    moves = optimizer.weight_decay_incr_style != "constant"
    if optimizer.muon_scalar_weight_decay and (moves or not optimizer.weight_decay):
        yield (
            f"muon_scalar_weight_decay {optimizer.muon_scalar_weight_decay:g} is a share of weight_decay, which"
            f" {'moves: set weight_decay_incr_style to constant' if moves else 'is 0: set weight_decay above 0'}."
        )
    groups = subject.model.num_query_groups
    if optimizer.muon_split_qkv and groups is not None and groups % max(tp, 1):
        yield (
            f"optimizer {optimizer.optimizer}: tensor_model_parallel_size {tp} cuts through num_query_groups {groups},"
            " so that ranks have parts of keys and values: set it to a divisor, or muon_split_qkv to false."
        )
