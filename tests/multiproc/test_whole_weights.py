"""Whole weights are the same under every layout, bit by bit, out of the ranks and back into them."""

from __future__ import annotations

import hashlib
import weakref

import pytest

from megaaccum.errors import CheckpointError, StepError
from megaaccum.lab.verification.testing import run_ranks, try_ranks
from tests.support.parity import SEQ, VOCAB, Case

BATCH = "--global_batch_size 8 --micro_batch_size 1 "
MODEL = "--num_layers 4 --swiglu --num_query_groups 2 --qk_layernorm --untie_embeddings_and_output_weights "
TIED = "--num_layers 4 --swiglu "
MOE = (
    "--num_layers 2 --num_experts 4 --no_add_bias_linear --swiglu --moe_router_score_function sigmoid "
    "--moe_router_enable_expert_bias --untie_embeddings_and_output_weights "
)
LAYOUTS = {
    "zero3": ("--pipeline_model_parallel_size 2", MODEL, "fp32"),
    "tp": ("--tensor_model_parallel_size 2 --sequence_parallel", MODEL, "fp32"),
    "tp-pp-bf16": ("--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2", MODEL, "bf16"),
    "streaming-bf16": ("--sync streaming --pipeline_model_parallel_size 2", MODEL, "bf16"),
    "zero1-vpp": (
        "--zero_stage 1 --pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2",
        MODEL,
        "fp32",
    ),
    "fsdp2": ("--backend fsdp2 --data_parallel_replicas 2", MODEL, "fp32"),
    "fsdp2-streaming-bf16": ("--backend fsdp2 --sync streaming", MODEL, "bf16"),
    "megatron": ("--backend megatron --tensor_model_parallel_size 2", MODEL, "fp32"),
    "ddp": ("--backend ddp", MODEL, "fp32"),
    "tied-v": ("--pipeline_model_parallel_size 2 --schedule zbv", TIED, "fp32"),
    "experts": ("--expert_model_parallel_size 2", MOE, "fp32"),
    "experts-tp": (
        "--expert_model_parallel_size 2 --tensor_model_parallel_size 2 --sequence_parallel "
        "--expert_tensor_parallel_size 1",
        MOE,
        "fp32",
    ),
}


def digests(engine, **options) -> dict[str, str]:
    """SHA-256 of each tensor, with its dtype and shape in the name."""
    import torch

    found = {}
    for name, tensor in engine.whole_weights(**options):
        content = tensor.view(-1).view(torch.uint8).numpy()
        found[f"{name} {tensor.dtype} {tuple(tensor.shape)}"] = hashlib.sha256(content).hexdigest()
    return found


def out_and_in(cells: list[Case]) -> list[tuple[dict, dict, dict]]:
    """Digests of each cell's weights as built; after others have been loaded; and on rank 1 if rank 0 asks."""
    import torch

    from tests.support.engines import engine_of

    found = []
    for case in cells:
        engine = engine_of(case)
        built = digests(engine)
        others = {name: _other(name, tensor) for name, tensor in engine.whole_weights()}
        engine.load_weights(others.items())
        loaded = digests(engine)
        alone = digests(engine, rank=0, dtype=torch.float32)
        found.append((built, loaded, alone))
    return found


def _other(name: str, tensor):
    """Other weights, which depend on the name alone."""
    import torch

    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor.dtype)


@pytest.fixture(scope="module")
def of_layouts() -> dict[str, list]:
    cases = [Case(4, BATCH + layout, model, lane) for layout, model, lane in LAYOUTS.values()]
    by_rank = run_ranks(out_and_in, 4, cases, timeout=200)
    return {name: [rank[i] for rank in by_rank] for i, name in enumerate(LAYOUTS)}


@pytest.fixture(scope="module")
def of_one_rank() -> dict[tuple[str, str], tuple[dict, dict, dict]]:
    models = list(dict.fromkeys((model, lane) for _, model, lane in LAYOUTS.values()))
    (found,) = run_ranks(out_and_in, 1, [Case(1, BATCH, model, lane) for model, lane in models], timeout=120)
    return dict(zip(models, found, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_those_of_one_rank(name, of_layouts, of_one_rank):
    _, model, lane = LAYOUTS[name]
    built, loaded, alone = of_one_rank[model, lane]
    assert len(built) > 10 and built != loaded
    for rank, (here, then, only) in enumerate(of_layouts[name]):
        assert here == built, f"rank {rank}"
        assert then == loaded, f"rank {rank}"
        assert only == (alone if rank == 0 else {}), f"rank {rank}"


def biases_of_a_cast_model(folder: str) -> list[bool]:
    """Whether expert biases of a model in BF16, as Megatron's Float16Module casts it, take FP32 values of whole weights
    and of a checkpoint."""
    import torch

    from megaaccum.distributed import groups
    from megaaccum.engine import initialize
    from megaaccum.pretrain.model import gpt
    from tests.support.engines import engine_of

    case = Case(1, BATCH, MOE, "bf16")
    first = engine_of(case)
    given = {name: torch.full_like(tensor, 1.001) for name, tensor in first.whole_weights()}
    first.load_weights(given)
    first.save(folder)

    def cast():
        groups.destroy()
        plan = case.plan()
        built = groups.build(plan.layout, timeout_minutes=1)
        chunks = [chunk.bfloat16() for chunk in gpt.build_chunks(plan, built, vocab_size=VOCAB)]
        return initialize(plan, chunks, groups=built)

    equal = []
    for read in (lambda made: made.load_weights(given), lambda made: made.load(folder)):
        made = cast()
        read(made)
        equal += [torch.equal(bias, given[name]) for name, bias in made.whole_weights() if name.endswith("expert_bias")]
    return equal


def test_expert_biases_stay_in_fp32(tmp_path):
    assert run_ranks(biases_of_a_cast_model, 1, str(tmp_path)) == [[True] * 4]


def refused(kind: str) -> tuple[str, str]:
    """The error of wrong weights, and that of the step after it."""
    from tests.support.engines import engine_of

    engine = engine_of(Case(2, BATCH + "--pipeline_model_parallel_size 2", MODEL))
    weights = dict(engine.whole_weights())
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    given = list(weights.items())
    if kind == "missing":
        given = [each for each in given if each[0] != name]
    elif kind == "unknown":
        given.append(("decoder.layers.4.mlp.linear_fc2.weight", weights[name]))
    elif kind == "twice":
        given.append((name, weights[name]))
    else:
        given = [(each, tensor.t() if each == name else tensor) for each, tensor in given]
    texts = []
    for call in (lambda: engine.load_weights(given), lambda: engine.train_step([])):
        try:
            call()
        except (CheckpointError, StepError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts[0], texts[1]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing", "lack decoder.layers.3.mlp.linear_fc2.weight"),
        ("unknown", "no parameter decoder.layers.4.mlp.linear_fc2.weight"),
        ("twice", "no parameter decoder.layers.3.mlp.linear_fc2.weight (it is there twice"),
        ("transposed", "decoder.layers.3.mlp.linear_fc2.weight is 64 x 32, but 32 x 64 in the model"),
    ],
)
def test_wrong_weights_are_named_on_every_rank(kind, text):
    for error, after in run_ranks(refused, 2, kind, timeout=60):
        assert error.startswith("CheckpointError") and text in error
        assert after.startswith("StepError: the engine failed before (CheckpointError")


def of_a_hybrid_model(folder: str) -> tuple[list[str], list[bool]]:
    """Errors of a model with state-space layers over tensor-parallel ranks when its weights are asked for whole, given
    whole, and loaded over another number of these ranks; whether each weight is as it was saved after a load of all."""
    import torch

    from megaaccum.config import Plan
    from megaaccum.distributed import groups
    from megaaccum.engine import initialize
    from tests.multiproc.test_engine_inputs import said
    from tests.support import hybrid

    def engine(tp: int):
        plan = Plan.of(
            layout=dict(tp=tp), batch=dict(micro_batch_size=1, seq_length=hybrid.SEQ, pp_microbatches=tp),
            optimizer=dict(lr=1e-2), sharding=dict(backend="deepspeed"), hidden_size=hybrid.WIDTH, world_size=2,
        )  # fmt: skip
        groups.destroy()
        built = groups.build(plan.layout, timeout_minutes=1)
        chunk = hybrid.stage(0, 1)
        return initialize(plan, [chunk], groups=built, forward_step_func=hybrid.forward_step), chunk

    cut, chunk = engine(2)
    cut.save(folder)
    texts = [said(lambda: dict(cut.whole_weights())), said(lambda: cut.load_weights({}))]
    texts.append(said(lambda: engine(1)[0].load(folder)))
    again, other = engine(2)
    saved = {name: param.clone() for name, param in chunk.named_parameters()}
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    assert again.load(folder)
    return texts, [torch.equal(param, saved[name]) for name, param in other.named_parameters()]


def test_parameters_of_state_space_layers_stay_in_the_parts_that_tensor_parallelism_made(tmp_path):
    """A rank's part of them is a part of several matrices, which no cut describes."""
    for (whole, given, moved), equal in run_ranks(of_a_hybrid_model, 2, str(tmp_path), timeout=60):
        assert "decoder.layers.0.mixer.in_proj.weight" in whole and "only without tensor parallelism" in whole
        assert "decoder.layers.0.mixer.conv1d_weight" in whole
        assert given == whole
        assert "decoder.layers.0.mixer.in_proj.weight of a state-space layer is cut otherwise" in moved
        assert all(equal)


def of_a_wider_model() -> str:
    """Load the weights of one engine into another, as they come; a matrix of the first stage has other sizes."""
    import torch

    from tests.multiproc.test_engine_inputs import chunk_of, engine, said

    def sized(width: int, rank: int):
        chunk = chunk_of(rank)
        if rank == 0:
            chunk.more = torch.nn.Linear(8, width)
        return chunk

    narrow, wide = (engine(lambda rank, width=width: sized(width, rank)) for width in (4, 6))
    return said(lambda: wide.load_weights(narrow.whole_weights()))


def test_weights_of_another_engine_that_do_not_fit_one_stage_end_on_every_rank():
    for error in run_ranks(of_a_wider_model, 2, timeout=30):
        assert error == "CheckpointError: rank 0: stages.0.more.weight is 4 x 8, but 6 x 8 in the model"


def train_transformers(folder: str, sharding: dict) -> tuple[str, float]:
    """Train a transformers model, write it by the line that the error says; the error, and this rank's loss."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from megaaccum import Plan, initialize
    from megaaccum.distributed import groups

    groups.destroy()
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=VOCAB, n_positions=SEQ, n_embd=32, n_layer=2, n_head=4, bos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    plan = Plan.of(batch=dict(micro_batch_size=1, seq_length=SEQ, grad_accum_steps=2), sharding=sharding)

    def forward_step(data_iterator, chunk):
        tokens = next(data_iterator)

        def loss_func(logits):
            losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="sum")
            return losses, tokens[:, 1:].numel(), {}

        return chunk(tokens).logits, loss_func

    optimizer = lambda params: torch.optim.AdamW(params, lr=0.05)  # noqa: E731
    engine = initialize(plan, model, forward_step_func=forward_step, optimizer=optimizer)
    microbatches = [torch.arange(SEQ)[None] * 7 % VOCAB for _ in range(2)]
    for _ in range(3):
        engine.train_step(microbatches)
    said = ""
    try:
        model.save_pretrained(folder)
    except CheckpointError as error:
        said = str(error)
    exec("\n".join(line.strip("\n")[4:] for line in said.splitlines()[1:]), {**globals(), **locals()})
    loss, _ = engine.evaluate(microbatches)
    torch.distributed.barrier()
    return said, loss


@pytest.mark.parametrize("sharding", [dict(zero_stage=3), dict(backend="fsdp2"), dict(backend="ddp")])
def test_save_pretrained_writes_by_the_line_that_its_error_says(sharding, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "trained"
    ranks = run_ranks(train_transformers, 2, str(folder), sharding, timeout=100)
    for said, _ in ranks:
        assert "the engine has spread the weights over ranks" in said
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(SEQ)[None] * 7 % VOCAB
    with torch.no_grad():
        loss = float(model(tokens, labels=tokens).loss)
    assert loss < 3.5, "three steps have taken it down from 4.1"
    assert loss == pytest.approx(ranks[0][1], rel=1e-6)


def test_a_rank_that_fails_alone_is_seen_on_the_other():
    outcomes = try_ranks(missing_on_rank1, 2, timeout=60)
    assert [("rank 1: the weights lack" in str(each.result)) for each in outcomes] == [True, True]


def missing_on_rank1() -> str:
    import torch

    from tests.support.engines import engine_of

    engine = engine_of(Case(2, BATCH, MODEL))
    weights = dict(engine.whole_weights())
    if torch.distributed.get_rank() == 1:
        del weights["decoder.final_layernorm.weight"]
    try:
        engine.load_weights(weights.items())
    except CheckpointError as error:
        return str(error)
    return ""


def asked_apart() -> list[str]:
    """The errors of streams that ranks ask for otherwise, and of one to a rank that is not there; then a stream's."""
    import torch

    from tests.multiproc.test_engine_inputs import said
    from tests.support.engines import engine_of

    engine, me = engine_of(Case(2, BATCH, MODEL)), torch.distributed.get_rank()
    kinds = dict(rank=me), dict(rank=2), dict(rank=-1), dict(dtype=(torch.float32, torch.bfloat16)[me]), dict(rank=1)
    return [said(lambda keys=keys: dict(engine.whole_weights(**keys))) for keys in kinds]


def test_ranks_that_ask_for_different_streams_all_end():
    for own, missing, negative, dtypes, rank_1 in run_ranks(asked_apart, 2, timeout=40):
        assert own.startswith("RankDisagreement: ranks disagree about the options of whole_weights (rank 0: rank 0, ")
        assert missing == "ConfigError: whole_weights: rank 2 is none of the 2 ranks"
        assert negative == "ConfigError: whole_weights: rank -1 is none of the 2 ranks"
        assert "rank 0: rank None, dtype torch.float32; rank 1: rank None, dtype torch.bfloat16" in dtypes
        assert rank_1 == ""


def loaded_from_a_dict() -> bool:
    import torch

    from tests.support.engines import engine_of

    engine = engine_of(Case(1, BATCH, TIED))
    given = {name: _other(name, tensor) for name, tensor in engine.whole_weights()}
    engine.load_weights(given)
    return all(torch.equal(tensor, given[name]) for name, tensor in engine.whole_weights())


def test_a_dict_of_weights_is_loaded():
    assert run_ranks(loaded_from_a_dict, 1, timeout=40) == [True]


def peak_of_streaming() -> tuple[int, int, int]:
    """Bytes of the whole model, of its largest parameter, and the most that a stream held at a time."""
    import torch

    from tests.support.engines import engine_of

    engine = engine_of(Case(2, BATCH, MODEL))
    sizes, held, most = [], 0, 0
    make = torch.empty

    def counted(*args, **kwargs):
        nonlocal held, most
        tensor = make(*args, **kwargs)
        held += tensor.nbytes
        most = max(most, held)

        def gone(size=tensor.nbytes):
            nonlocal held
            held -= size

        weakref.finalize(tensor, gone)
        return tensor

    torch.empty = counted
    try:
        for _, tensor in engine.whole_weights():
            sizes.append(tensor.nbytes)
            del tensor
    finally:
        torch.empty = make
    return sum(sizes), max(sizes), most


def test_a_stream_holds_two_parameters_at_most():
    for total, largest, most in run_ranks(peak_of_streaming, 2, timeout=60):
        assert total > 10 * largest
        assert 0 < most <= 2 * largest
