"""Draws cells of the fuzz: one number draws one cell, of those that the rules of the configuration allow."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks import fuzz_cell
from benchmarks.fuzz_cell import Cell, Flags
from megaaccum.errors import ConfigError

if TYPE_CHECKING:
    from megaaccum.config import Plan

ROPE = {"position_embedding_type": "rope"}
# Far above all gradients, so that the basis of eigenvectors, in part a matter of rounding, moves the update little.
SOAP: Flags = {"optimizer": "soap", "add_bias_linear": False, "adam_eps": 1.0, "lr": 1.0, "weight_decay": 1e-3}
IN_A_V = ("zbv", "dualpipev", "v-half", "v-min")
SCHEDULES = ("1f1b", "interleaved", "gpipe", "zb-h1", "zbv", "dualpipev", "v-half", "v-min")
MORE_MODELS: tuple[Flags, ...] = (
    {"num_query_groups": 1}, {"add_qkv_bias": True}, {"squared_relu": True}, {"kv_channels": 6},
    {"softmax_type": "learnable"}, {"position_embedding_type": "none"}, {**ROPE, "rotary_percent": 0.5},
    {"window_size": "4,0", "window_attn_skip_freq": 2},
)  # fmt: skip


def draw(seed: int, index: int) -> Cell:
    """Cell `index` of `seed`: drawn until the rules of the configuration allow it."""
    chance = random.Random(f"{seed}/{index}")
    while True:
        cell = _draw(chance)
        if is_legal(cell):
            # Drawn apart, so that cells stay what they were.
            gated = random.Random(f"gates {seed}/{index}").random() < 0.3 and "mtp_num_layers" not in cell.model
            cell = dataclasses.replace(cell, gated=gated)
            cell = _with(_draw_more(random.Random(f"more {seed}/{index}"), cell), cell)
            return _with(_draw_updates(random.Random(f"updates {seed}/{index}"), cell), cell)


def _with(changes: Iterator[Flags], cell: Cell) -> Cell:
    """`cell` with each of `changes` that the rules allow."""
    for keys in changes:
        changed = {name: getattr(cell, name) | each if isinstance(each, dict) else each for name, each in keys.items()}
        candidate = dataclasses.replace(cell, **changed)
        cell = candidate if is_legal(candidate) else cell
    return cell


def is_legal(cell: Cell) -> bool:
    """Whether the configuration's rules allow the cell, at its start and at its resume."""
    try:
        plans = [fuzz_cell.plan_of(cell, layout) for layout in (cell.layout, cell.resume) if layout is not None]
        fuzz_cell.reference_plan(cell, cell.lane)
    except ConfigError:
        return False
    # Megatron computes balancing losses in FP32, and adds up what the ranks that share a micro-batch have of them. Its
    # router rounds scores to FP32, and where N comes late it rounds gradients that are N times as large.
    summed = "moe_aux_loss_coeff" in cell.model and any(plan.layout.tp * plan.layout.cp > 1 for plan in plans)
    if cell.lane == "fp64" and (summed or ("num_experts" in cell.model and not cell.told)):
        return False
    experts = int(cell.model.get("num_experts", 0))
    if cell.lane in ("bf16", "fp16") and int(cell.model.get("moe_router_topk", 2)) < experts:
        return False  # rounding changes which experts a token goes to
    shared = any(plan.layout.tp * plan.layout.cp > 1 for plan in plans)
    if shared and "moe_expert_capacity_factor" in cell.model:
        return False  # each of the ranks that share a sequence drops tokens of its own part
    ordered = any(plan.config.sharding.reproducible == "layout" for plan in plans)
    if (shared or ordered or cell.documents) and "hidden_dropout" in cell.model:
        return False  # masks belong to the ranks that share a sequence, to a place in a rank's run, and to whole rows
    if cell.model.get("optimizer") == "muon" and (cell.lane != "fp32" or cell.bad is not None):
        return False  # the iteration amplifies what rounding leaves of a small gradient
    if cell.model.get("optimizer") in ("lion", "soap") and not _is_far_from_zero(cell):
        return False
    ramps = len(set(fuzz_cell.counts(cell))) > 1
    if ramps != ("batch_warmup_steps" in cell.policies) or (ramps and "lr_decay_style" in cell.model):
        return False
    if (cell.bad is None) == ("nonfinite" in cell.policies):
        return False  # one process has to know what becomes of a bad micro-batch
    if (ramps and cell.resume is not None) or not _can_be_zeroed(cell, plans[0]):
        return False
    sequences = cell.microbatches * int(cell.model.get("micro_batch_size", 1))
    return all(plan.batch.global_batch_size == sequences and _can_be_called(plan, cell.calls) for plan in plans)


def _can_be_zeroed(cell: Cell, plan: Plan) -> bool:
    """Whether one process knows what a rank's own gradient is, in which `nonfinite: zero` sets elements to 0. Of a row
    of the word table, or of a router, that is a matter of which tokens the rank has."""
    if cell.policies.get("nonfinite") != "zero":
        return True
    layout, sharding = plan.layout, plan.config.sharding
    sequences_are_cut = layout.cp > 1 or (sharding.reproducible_context_blocks or 1) > 1
    tokens_are_cut = sequences_are_cut or (layout.tp > 1 and "num_experts" in cell.model)
    has_copies = layout.pp > 1 or sharding.reproducible == "layout"
    sums_overlap = sharding.backend == "fsdp2" and sharding.sync == "streaming" and layout.splits_backward
    return not tokens_are_cut and not (has_copies and "mtp_num_layers" in cell.model) and not sums_overlap


def _can_be_called(plan: Plan, calls: int) -> bool:
    """Whether a step's micro-batches can be cut into as many calls, each a whole number of flushes."""
    each, left = divmod(plan.batch.num_microbatches, calls)
    if left or (plan.batch.flush == "per_round" and each % plan.batch.microbatches_per_flush):
        return calls == 1
    return calls == 1 or plan.layout.schedule != "interleaved" or each % plan.layout.pp == 0


def _draw(chance: random.Random) -> Cell:
    world_size = chance.choice((1, 2, 2, 4, 4, 4, 4))
    lane = chance.choice(("fp64", "fp64", "fp64", "fp32", "fp32", "fp32", "bf16", "fp16"))
    microbatches = chance.choice((8, 8, 8, 16))
    nonfinite = chance.choice(("skip", "drop_microbatch", "zero", "zero")) if chance.random() < 0.25 else None
    model = _draw_model(chance, lane, experts=chance.random() < 0.5, latent=chance.random() < 0.2)
    tp = chance.choice((1, 1, 1, 2))
    layout = _draw_layout(chance, world_size, tp, lane, microbatches, model)
    resume = None
    if chance.random() < 0.3:
        resume = _draw_layout(chance, world_size, tp, lane, microbatches, model)
    short = chance.random() < 0.15
    calls = 1 if short else chance.choice((1, 1, 2, 4))
    policies: Flags = {"nonfinite": nonfinite} if nonfinite else {}
    policies |= {"short_batch": chance.choice(("pad", "pad", "drop"))} if short else {}
    ramps = not short and calls == 1 and chance.random() < 0.4
    policies |= {"batch_warmup_steps": 2} if ramps else {}
    lengths = chance.random() < 0.25
    policies |= {"variable_seq_lengths": True} if lengths else {}
    return Cell(
        world_size=world_size,
        lane=lane,
        microbatches=microbatches,
        model=model,
        layout=layout,
        resume=resume,
        policies=policies,
        masks=chance.choice(("full", "prefix", "prefix", "sparse")),
        hollow=chance.randrange(4) if chance.random() < 0.15 else None,
        bad=chance.randrange(microbatches) if nonfinite else None,
        short=chance.choice((1, 2, microbatches)) if short else 0,
        frozen=chance.choice(("", "", "", *fuzz_cell.FROZEN)),
        evaluate=not ramps and chance.random() < 0.3,
        calls=calls,
        told=calls == 1 or chance.random() < 0.5,
        lengths=lengths,
        dropped=chance.random() < 0.2,
    )


def _draw_model(chance: random.Random, lane: str, *, experts: bool, latent: bool) -> Flags:
    def maybe(probability: float, **keys: Any) -> Flags:
        return keys if chance.random() < probability else {}

    model: Flags = {"num_layers": chance.choice((4, 4, 4, 8))}
    model |= maybe(0.4, swiglu=True) | maybe(0.4, normalization="RMSNorm")
    model |= maybe(0.2, qk_layernorm=True) | maybe(0.5, untie_embeddings_and_output_weights=True)
    model |= maybe(0.5, **ROPE) | maybe(0.4, add_bias_linear=False)
    model |= maybe(0.3, micro_batch_size=2) | maybe(0.3, loss_norm="microbatch") | maybe(0.5, clip_grad=0.5)
    model |= maybe(0.15, mtp_num_layers=chance.choice((1, 2)), mtp_loss_scaling_factor=0.5, **ROPE)
    if latent:
        model |= {"multi_latent_attention": True, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
        model |= {"v_head_dim": chance.choice((6, 8))} | maybe(0.5, q_lora_rank=8)
    else:
        model |= maybe(0.4, num_query_groups=2)
    if experts:
        model |= {"num_experts": 4, "add_bias_linear": False, "moe_router_dtype": "fp64", "moe_ffn_hidden_size": 64}
        model |= {"moe_router_load_balancing_type": chance.choice(("aux_loss", "seq_aux_loss", "none"))}
        if model["moe_router_load_balancing_type"] != "none":
            model |= {"moe_aux_loss_coeff": 0.1}
        model |= maybe(0.5, moe_z_loss_coeff=0.01) | maybe(0.3, moe_shared_expert_intermediate_size=32)
        model |= maybe(0.3, moe_router_topk=1, moe_router_pre_softmax=True) | maybe(0.3, moe_layer_freq=2)
        model |= {"moe_router_topk": 4} if lane in ("bf16", "fp16") else {}
        model |= maybe(0.2, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
        model |= maybe(0.2, moe_token_dispatcher_type="allgather")
        if lane in ("fp64", "fp32"):  # in 16 bits rounding would change which tokens are dropped
            model |= _draw_capacity(chance, lane)
    return model


def _draw_more(chance: random.Random, cell: Cell) -> Iterator[Flags]:
    """Single changes of a cell. Some are not legal."""

    def maybe(probability: float) -> bool:
        return chance.random() < probability

    pp, schedule = cell.layout.get("pipeline_model_parallel_size", 1), cell.layout.get("schedule")
    if schedule == "interleaved" and maybe(0.3):
        yield {"layout": {"virtual_pipeline_model_parallel_size": 4}}
    if schedule == "interleaved" and maybe(0.3):
        yield {"layout": {"microbatch_group_size_per_vp_stage": chance.choice((2, 4))}}
    if pp > 1 and schedule not in IN_A_V and maybe(0.3):
        chunks = 2 if schedule == "interleaved" else 1
        yield {"layout": {"pipeline_model_parallel_layout": _draw_stages(chance, chunks, pp, cell.model)}}
    if maybe(0.4):
        blocks = {"reproducible_tensor_blocks": 2, "reproducible_context_blocks": chance.choice((1, 2, 4))}
        whole = {"sequence_parallel": False} if "sequence_parallel" in cell.layout else {}
        yield {"layout": {"reproducible": "layout"} | blocks | whole}
    if maybe(0.25):
        yield {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.2}}
    if maybe(0.25):
        yield {"documents": True, "policies": {"reset_attention_mask": True}}
    if maybe(0.15):
        yield {"model": {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}}
    if maybe(0.5):
        yield {"model": chance.choice(MORE_MODELS)}
    if "moe_aux_loss_coeff" in cell.model and maybe(0.3):
        several = ["aux_loss", "seq_aux_loss"]
        yield {"model": {"moe_router_load_balancing_type": several, "moe_aux_loss_coeff": [0.1, 0.05]}}
    if "num_experts" in cell.model and maybe(0.3):
        yield {"model": {"moe_router_num_groups": 2, "moe_router_group_topk": 1}}


def _draw_updates(chance: random.Random, cell: Cell) -> Iterator[Flags]:
    """Single changes of how a gradient becomes an update. Some are not legal."""
    of_some: Flags = {"lr_mult": ["decoder.layers.1.*=0.5", "*.linear_fc1.*=2"], "wd_mult": ["decoder.layers.3.*=3"]}
    moving = {"lr_decay_style": chance.choice(("linear", "cosine")), "lr_decay_iters": 5, "min_lr": 1e-4}
    scale = {"loss_scale": None, "initial_loss_scale": fuzz_cell.LOSS_SCALE}
    scale |= {"loss_scale_window": chance.choice((1, 2)), "hysteresis": chance.choice((1, 2))}
    # Four blocks pad the vocabulary to 4 * 32 rows, and the reference, without, to as many.
    four: Flags = {"reproducible": "layout", "reproducible_tensor_blocks": 4, "make_vocab_size_divisible_by": 32}
    whole: Flags = {"ffn_hidden_size": 128, "make_vocab_size_divisible_by": 128}
    draws: tuple[tuple[float, Flags], ...] = (
        (0.2, {"model": of_some}),
        (0.15, {"model": {"decoupled_lr": 3e-3, "decoupled_min_lr": 1e-4}}),
        (0.25, {"model": moving | {"lr_warmup_iters": chance.choice((0, 1, 2))}}),
        (0.6 * (cell.lane == "fp16"), {"policies": scale}),
        (0.3 * (cell.lane == "bf16"), {"layout": {"grad_reduce_dtype": "bf16"}}),
        (0.3 * (cell.lane == "bf16"), {"layout": {"grad_accum_dtype": "bf16"}}),
        (0.3 * (cell.resume is None), {"layout": four, "model": whole}),
        (0.2, {"model": {"optimizer": "lion", "add_bias_linear": False, "lr": 1e-3}}),
        (0.2, {"model": SOAP}),
    )
    yield from (changes for probability, changes in draws if chance.random() < probability)


def _is_far_from_zero(cell: Cell) -> bool:
    """Whether no gradient is zero but for rounding, which Lion and SOAP would make as large as others: that of a bias
    of keys is, which moves no softmax."""
    no_bias = not cell.model.get("add_bias_linear", True) and not cell.model.get("add_qkv_bias")
    norms = not cell.model.get("qk_layernorm") or cell.model.get("normalization") == "RMSNorm"
    # SOAP's basis of eigenvectors amplifies rounding.
    lanes = ("fp64", "fp32") if cell.model["optimizer"] == "lion" else ("fp64",)
    return cell.lane in lanes and cell.bad is None and no_bias and norms


def _draw_layout(chance: random.Random, world_size: int, tp: int, lane: str, microbatches: int, model: Flags) -> Flags:
    """Draw keys of a layout. Some are not legal; then the cell is drawn again."""
    experts = "num_experts" in model
    pp = chance.choice([size for size in (1, 2, 2, 4) if size <= world_size])
    layout: Flags = {}
    if tp > 1:
        layout |= {"tensor_model_parallel_size": tp, "sequence_parallel": experts or chance.random() < 0.6}
    cp = chance.choice((1, 1, 2)) if world_size // (tp * pp) > 1 else 1
    layout |= {"context_parallel_size": cp} if cp > 1 else {}
    if cp == 1 and lane in ("fp64", "fp32") and chance.random() < 0.2:
        layout |= {"attention_backend": "fused"}
    if lane == "bf16" and chance.random() < 0.3:
        layout |= {"cross_entropy_loss_fusion": True}
    layout |= _draw_pipeline(chance, pp, model) if pp > 1 else {}
    per_rank = microbatches // max(world_size // (tp * cp * pp), 1)
    rounds = chance.choice((1, 1, 2, 4))
    layout |= {"grad_accum_steps": rounds, "pp_microbatches": max(per_rank // rounds, 1)}
    if rounds > 1 and chance.random() < 0.4:
        layout |= {"flush": "per_round"}
    layout |= _draw_recompute(chance, experts=experts)
    if "moe_shared_expert_intermediate_size" in model and chance.random() < 0.3:
        layout |= {"moe_shared_expert_overlap": True}
    if experts and world_size > pp and chance.random() < 0.6:
        spread = chance.choice([size for size in (1, 2, 2, 4) if size * pp <= world_size])
        layout |= {"expert_model_parallel_size": spread, "expert_tensor_parallel_size": chance.choice((1, 1, tp))}
        if lane == "bf16" and chance.random() < 0.3:
            layout |= {"overlap_moe_expert_parallel_comm": True}
    return layout | _draw_sharding(chance, lane, experts=experts)


def _draw_pipeline(chance: random.Random, pp: int, model: Flags) -> Flags:
    keys: Flags = {"pipeline_model_parallel_size": pp, "schedule": chance.choice(SCHEDULES)}
    if keys["schedule"] == "interleaved":
        keys |= {"virtual_pipeline_model_parallel_size": 2}
    elif keys["schedule"] in ("1f1b", "gpipe", "zb-h1") and chance.random() < 0.2:
        keys |= {"decoder_first_pipeline_num_layers": 1}
    elif keys["schedule"] in IN_A_V:
        if chance.random() < 0.3:
            keys |= {"pipeline_model_parallel_layout": _draw_stages(chance, 2, pp, model, in_a_v=True)}
        if chance.random() < 0.4:
            keys |= {"speculative_step": True}
    return keys


def _draw_stages(chance: random.Random, chunks: int, pp: int, model: Flags, *, in_a_v: bool = False) -> str:
    """Stages of unequal numbers of layers, in Megatron's notation."""
    layers, predicting = int(model["num_layers"]), int(model.get("mtp_num_layers", 0))
    stages = chunks * pp
    of_rank = [(rank, -1 - rank) if in_a_v else range(rank, stages, pp) for rank in range(pp)]
    # A rank trains something; where stages are in a row, the first and the last rank do without a layer, too.
    needy = of_rank if in_a_v else of_rank[1:-1]
    counts = [0] * stages
    while not any(counts) or any(sum(counts[stage] for stage in mine) == 0 for mine in needy):
        ends = [0, *sorted(chance.randint(0, layers) for _ in range(stages - 1)), layers]
        counts = [end - start for start, end in itertools.pairwise(ends)]
    texts = ["t" * count for count in counts]
    at = -2 if not in_a_v and not counts[-1] and chance.random() < 0.5 else -1
    texts[at] += "m" * predicting
    return "E" + "|".join(texts) + "L"


def _draw_sharding(chance: random.Random, lane: str, *, experts: bool) -> Flags:
    by_lane = {"fp64": ("ddp", "fsdp2"), "fp16": ("deepspeed", "fsdp2", "ddp")}
    backends = by_lane.get(lane, ("deepspeed", "deepspeed", "fsdp2", "megatron", "ddp"))
    keys: Flags = {"backend": chance.choice(backends)}
    if chance.random() < 0.2:
        keys |= chance.choice(({"deterministic": True}, {"reproducible": "layout"}))
    if keys["backend"] == "fsdp2":
        keys |= {"sync": chance.choice(("resident", "streaming"))}
        keys |= {"data_parallel_replicas": 2} if chance.random() < 0.3 else {}
    if keys["backend"] == "deepspeed":
        keys |= {"zero_stage": chance.choice((1, 2, 3, 3, 3)), "reduce_bucket_size": chance.choice((5000, 20000))}
        if keys["zero_stage"] == 3:
            keys |= {"sync": chance.choice(("resident", "streaming"))}
            if keys["sync"] == "streaming" and chance.random() < 0.4:
                keys |= {"max_live_parameters": 20000}
            elif experts:
                keys |= _draw_cold_experts(chance)
        keys |= {"offload_optimizer": "cpu"} if chance.random() < 0.15 else {}
    return keys


def _draw_capacity(chance: random.Random, lane: str) -> Flags:
    """Draw a limit of experts' tokens. In FP32 rounding would change which have the lowest probabilities."""
    if chance.random() < 0.7:
        return {}
    filled: Flags = {"moe_pad_expert_input_to_capacity": True} if chance.random() < 0.4 else {}
    policy = chance.choice(("probs", "position"))
    policy = policy if lane == "fp64" else "position"
    return {"moe_expert_capacity_factor": chance.choice((0.75, 1.25)), "moe_token_drop_policy": policy, **filled}


def _draw_cold_experts(chance: random.Random) -> Flags:
    cold: Flags = {"cold_expert_offload": True, "cold_expert_steps": 1, "cold_expert_tokens": 20}
    return cold if chance.random() < 0.3 else {}


def _draw_recompute(chance: random.Random, *, experts: bool) -> Flags:
    kind = chance.choice((None, None, None, "uniform", "block", "selective"))
    if kind is None:
        return {}
    if kind == "selective":
        modules = ["core_attn", "mlp", *(["moe"] if experts else [])]
        return {"recompute_granularity": "selective", "recompute_modules": chance.sample(modules, 2)}
    return {"recompute_granularity": "full", "recompute_method": kind, "recompute_num_layers": chance.choice((1, 2))}
