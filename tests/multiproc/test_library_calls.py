"""Calls of library users beside steps: a reference model, reports on every rank, stages of a Hugging Face
model, data that end too early."""

from __future__ import annotations

import pytest

from megaaccum.errors import ConfigError, FlushError
from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc import test_engine_inputs as inputs

BATCH = dict(micro_batch_size=1, seq_length=6, global_batch_size=8)
LLAMA = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, tie_word_embeddings=False, max_position_embeddings=16, head_dim=8,
)  # fmt: skip
KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
LAYOUTS = {
    "1f1b": (dict(pp=2), dict(zero_stage=3)),
    "interleaved": (dict(pp=2, vpp=2), dict(backend="ddp")),
    "zbv": (dict(pp=2, schedule="zbv"), dict(backend="fsdp2")),
    "none": (dict(), dict(zero_stage=3, sync="streaming")),
}


def hf_model(kind: str = "llama", **more):
    """A small model with weights that every process draws alike, in float64 where a backend takes it."""
    import torch
    import transformers

    sliding = dict(sliding_window=3, layer_types=None) if kind == "mistral" else {}
    if kind in ("qwen2", "qwen3"):
        sliding = dict(
            use_sliding_window=True, sliding_window=3, max_window_layers=1,
            layer_types=["full_attention", "sliding_attention"] * 2,
        )  # fmt: skip
    config = getattr(transformers, f"{KINDS[kind]}Config")(**(LLAMA | sliding | more))
    torch.manual_seed(7)
    return getattr(transformers, f"{KINDS[kind]}ForCausalLM")(config).eval()


def samples() -> list[dict]:
    """The global batch, a sequence each, the second half padded on the right."""
    import torch

    torch.manual_seed(3)
    tokens = torch.randint(0, 32, (8, 1, 6))
    masks = [torch.ones(1, 6, dtype=torch.long) for _ in range(8)]
    for mask in masks[4:]:
        mask[:, 4:] = 0
    return [{"input_ids": each, "attention_mask": mask} for each, mask in zip(tokens, masks, strict=True)]


def loss_of(batch):
    import torch

    def loss_func(logits):
        labels = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="sum")
        hits = ((logits[:, :-1].argmax(-1) == labels) & (labels != -100)).sum()
        return losses, (labels != -100).sum(), {"hits": hits, "last": logits[0, -1].detach().double()}

    return loss_func


def forward_step(data_iterator, chunk):
    batch = next(data_iterator)
    return chunk(**batch), loss_of(batch)


def hf_engine(kind: str, layout: dict, sharding: dict, dtype: str, **more):
    import torch

    from megaaccum import Plan, hf_stages, initialize

    unclipped = dict(clip_grad=0.0)
    plan = Plan.of(layout=layout, batch=BATCH, sharding=sharding, hidden_size=16, world_size=4, optimizer=unclipped)
    rank = torch.distributed.get_rank()
    chunks = hf_stages(hf_model(kind).to(getattr(torch, dtype)).train(), plan, rank)
    optimizer = more.pop("optimizer", lambda params: torch.optim.SGD(params, lr=1.0))
    engine = initialize(plan, chunks, forward_step_func=forward_step, optimizer=optimizer, **more)
    mine = [samples()[plan.batch.sample_index(m, engine.groups.dp.rank(), in_runs=False)]
            for m in range(plan.batch.num_microbatches)]  # fmt: skip
    return engine, mine


def hf_gradients(kind: str, names: list[str], dtype: str) -> list[dict]:
    """(by layout) the gradients of a step that reach the optimizer, whole, by name, and its loss and hits."""
    import torch

    from tests.support.parity import Rig

    found = []
    for name in names:
        engine, mine = hf_engine(kind, *LAYOUTS[name], dtype)
        rig = Rig(None, engine.plan, engine.groups, engine.chunks, engine.backend, engine.train_steps)
        seen: dict[str, torch.Tensor] = {}
        engine.backend.step = lambda rig=rig, seen=seen: seen.update(rig.assemble())
        result = engine.train_step(mine)
        assert "last" not in result.reports, "a report of one number per token is none of the step"
        assert {tuple(each.shape) for each in result.per_microbatch.get("last", ())} <= {(32,)}
        found.append({"gradient": seen, "loss": result.loss, "hits": result.reports["hits"]})
    return found


def reference(kind: str):
    """(gradient by name, loss, hits) of one process in float64 on the full global batch."""
    import torch

    model = hf_model(kind).double().train()
    total, hits, weight = 0.0, 0, 0
    for batch in samples():
        loss, tokens, reports = loss_of(batch)(model(**batch).logits)
        total, hits, weight = total + loss, hits + int(reports["hits"]), weight + int(tokens)
    (total / weight).backward()
    return {name: param.grad for name, param in model.named_parameters()}, float(total / weight), hits, torch


@pytest.mark.parametrize("kind", KINDS)
def test_stages_of_a_hugging_face_model_have_the_gradient_of_one_process(kind):
    true, loss, hits, torch = reference(kind)
    lanes = [(["1f1b", "none"], "float32", 2e-6), (["interleaved", "zbv"], "float64", 1e-12)]
    for names, dtype, limit in lanes if kind == "llama" else lanes[1:]:
        for by_layout in zip(*run_ranks(hf_gradients, 4, kind, names, dtype, timeout=90), strict=True):
            gradient = {name: each for rank in by_layout for name, each in rank["gradient"].items()}
            assert gradient.keys() == true.keys()
            for name, each in gradient.items():
                assert torch.dist(each, true[name]) <= limit * max(float(true[name].norm()), 1e-3), name
            for rank in by_layout:
                assert rank["loss"] == pytest.approx(loss, rel=limit) and rank["hits"] == hits, "a count is added up"


class FakePlan:
    def __init__(self, stages: int):
        self.layout = type("Layout", (), {"num_stages": stages, "stages": lambda self, rank: (rank,)})()


@pytest.mark.parametrize(
    ("change", "stages", "words"),
    [
        (dict(tie_word_embeddings=True), 2, "tie_word_embeddings"),
        (dict(), 8, "4 layers on 8 stages"),
        (dict(model_type="gemma"), 2, "model_type gemma, only llama"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(change, stages, words):
    from megaaccum import hf_stages

    model = hf_model(**{name: each for name, each in change.items() if name != "model_type"})
    model.config.model_type = change.get("model_type", "llama")
    with pytest.raises(ConfigError, match=words):
        hf_stages(model, FakePlan(stages), rank=0)


def broadcast_reports() -> list:
    """(last stage here, reports as they come, reports with broadcast, loss) under each layout."""
    from megaaccum.distributed import groups

    found = []
    for name in ("1f1b", "zbv", "none"):
        groups.destroy()
        engine, mine = hf_engine("llama", *LAYOUTS[name], "float32")
        alone, everywhere = engine.forward(mine), engine.forward(mine, broadcast=True)
        holds = engine.plan.layout.num_stages - 1 in [engine.groups.stage(n) for n in range(len(engine.chunks))]
        found.append((holds, alone, everywhere, engine.groups.pp.rank() if engine.plan.layout.pp > 1 else 0,
                      engine.groups.dp.rank()))  # fmt: skip
    return found


def test_reports_of_a_forward_reach_every_stage():
    import torch

    for ranks in zip(*run_ranks(broadcast_reports, 4, timeout=90), strict=True):
        of_last = {dp: alone for holds, alone, _, _, dp in ranks if holds}
        for holds, alone, everywhere, _, dp in ranks:
            assert bool(alone) == holds and len(everywhere) == len(of_last[dp]) > 0
            for mine, last in zip(everywhere, of_last[dp], strict=True):
                assert all(torch.equal(mine[name], last[name]) for name in ("hits", "last"))


def reference_model(folder: str) -> dict:
    """An actor of pp 2 takes a step and saves; a reference of another layout that trains nothing loads its weights."""
    import torch

    from megaaccum import initialize

    actor, mine = hf_engine("llama", *LAYOUTS["1f1b"], "float32")
    before, _ = actor.evaluate(mine)
    actor.train_step(mine)
    actor.save(folder)
    after, _ = actor.evaluate(mine)
    found: dict = {"before": before, "after": after, "said": []}
    for sharding in (dict(backend="fsdp2"), dict(backend="fsdp2", sync="streaming"), dict(backend="ddp")):
        from megaaccum import Plan, hf_stages

        plan = Plan.of(batch=BATCH, sharding=sharding, hidden_size=16, world_size=4)
        frozen = hf_model("llama").requires_grad_(False)
        engine = initialize(plan, hf_stages(frozen, plan, 0), forward_step_func=forward_step)
        data = [samples()[plan.batch.sample_index(m, engine.groups.dp.rank(), in_runs=False)]
                for m in range(plan.batch.num_microbatches)]  # fmt: skip
        losses = [engine.evaluate(data)[0]]
        assert engine.load(folder)
        losses.append(engine.evaluate(data)[0])
        for call in (engine.train_step, engine.forward_backward):
            try:
                call(data)
            except ConfigError as error:
                found["said"].append(str(error))
        found.setdefault("losses", []).append([*losses, engine.evaluate(data)[0]])
        held = sum(each.numel() for kind in ("optimizer", "gradients_whole") for each in engine.backend.tensors()[kind])
        found.setdefault("held", []).append(held)
    try:
        plan = Plan.of(batch=BATCH, sharding=dict(zero_stage=3), hidden_size=16, world_size=4)
        initialize(plan, hf_stages(hf_model("llama").requires_grad_(False), plan, 0), forward_step_func=forward_step)
    except ConfigError as error:
        found["refused"] = str(error)
    assert torch.distributed.is_initialized()
    return found


def test_a_reference_model_has_no_optimizer_and_loads_an_actors_weights(tmp_path):
    for found in run_ranks(reference_model, 4, str(tmp_path), timeout=120):
        assert found["before"] != pytest.approx(found["after"], rel=1e-3)
        for first, loaded, again in found["losses"]:
            assert first == pytest.approx(found["before"], rel=1e-6)
            assert loaded == again == pytest.approx(found["after"], rel=1e-6)
        assert found["held"] == [0, 0, 0]
        assert len(found["said"]) == 6 and all("no trained parameter" in text for text in found["said"])
        assert "set backend to fsdp2" in found["refused"]


def data_that_ends() -> list[str]:
    """The errors of an iterator with too few micro-batches, and of a forward step that takes two of a list."""
    import torch

    from megaaccum import Plan, initialize

    def twice(data_iterator, chunk):
        next(data_iterator)
        return inputs.forward_step(data_iterator, chunk)

    texts = []
    for function, data in ((inputs.forward_step, iter(inputs.batches()[:3])), (twice, inputs.batches())):
        batch = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4)
        plan = Plan.of(batch=batch, sharding=dict(backend="ddp"), world_size=1)
        engine = initialize(plan, torch.nn.Linear(8, 8), forward_step_func=function, optimizer=torch.optim.AdamW)
        with pytest.raises(FlushError) as raised:
            engine.forward_backward(data, num_microbatches=4)
        texts.append(str(raised.value))
    return texts


def test_data_that_end_before_the_last_microbatch():
    text = "the data of chunk 0, or an iterator of your code, ended before micro-batch {} of the 4 of this flush"
    (texts,) = run_ranks(data_that_ends, 1)
    assert [given.startswith(text.format(number)) for given, number in zip(texts, (4, 3), strict=True)] == [True, True]
