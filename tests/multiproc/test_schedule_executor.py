"""The executor on toy chunks: order, gradients, memory, hooks, failures; Megatron's own order against the tables."""

import json

import pytest

from megaaccum.lab.verification.testing import run_ranks
from megaaccum.schedule import build, validate
from tests.support import toy

OWN = [("gpipe", 1, "loop"), ("1f1b", 1, "loop"), ("interleaved", 2, "loop"), ("zb-h1", 1, "loop"), ("zbv", 2, "v"),
       ("dualpipev", 2, "v"), ("v-half", 2, "v"), ("v-min", 2, "v")]  # fmt: skip


@pytest.mark.parametrize(("name", "pp", "m", "chunks"), [("1f1b", 4, 9, 1), ("interleaved", 2, 6, 2)])
def test_megatron_executes_the_order_of_the_table(name, pp, m, chunks):
    schedule = build(name, pp=pp, num_microbatches=m, chunks=chunks)
    for rank, (order, error) in enumerate(run_ranks(toy.traced_by_megatron, pp, name, m, chunks)):
        assert order == [tuple(action) for action in schedule.actions(rank)]
        assert error < 1e-14


def passes(schedule, rank: int) -> list:
    """The table's actions that call a chunk: forwards, and backwards when their input gradient is computed."""
    seen = [(kind.replace("I", "B"), chunk, microbatch) for kind, chunk, microbatch in schedule.actions(rank)]
    return [each for each in seen if each[0] != "W"]


@pytest.mark.parametrize(("name", "chunks", "placement"), OWN)
def test_order_gradients_and_memory_are_the_tables(name, chunks, placement):
    schedule = build(name, pp=4, num_microbatches=8, chunks=chunks)
    footprint = validate(schedule)
    last = schedule.rank_of_stage[-1]
    pairs = [sum(len(item) == 2 for item in schedule.items[rank]) for rank in range(4)]
    for rank, ran in enumerate(run_ranks(toy.executed, 4, name, 8, chunks, placement)):
        assert ran.order == passes(schedule, rank)
        assert ran.error < 1e-14
        assert ran.peak == ran.record[0] == footprint.in_flight[rank]
        assert ran.record[1] == footprint.deferred[rank]
        assert ran.live == 0
        assert len(ran.reports) == (8 if rank == last else 0)
        assert ran.fused == pairs[rank]


@pytest.mark.parametrize(("name", "chunks", "placement"), [("dualpipev", 2, "v"), ("interleaved", 2, "loop")])
def test_lanes_of_their_own_as_on_nccl(name, chunks, placement):
    for ran in run_ranks(toy.executed, 2, name, 4, chunks, placement, separate=True):
        assert ran.error < 1e-14


@pytest.mark.parametrize(("name", "chunks", "placement"), [("zbv", 2, "v"), ("gpipe", 1, "loop")])
def test_a_first_flush_over_nccl_goes_through_host_memory(name, chunks, placement):
    """With and without a backward: in both the host may have kernels to load."""
    lanes = [{"HostChannels"}, {"PipelineChannels"}] * 2
    for rank, ran in enumerate(run_ranks(toy.ways, 2, name, 4, chunks, placement)):
        sends = [True, True, *[rank == 0 or chunks == 2] * 2]  # a last stage sends nothing without a backward
        assert [carried for carried, _ in ran] == [
            each if some else set() for each, some in zip(lanes, sends, strict=True)
        ]
        assert max(error for _, error in ran) < 1e-14


@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (4, 1)])
def test_lanes_between_the_groups_of_training(pp, dp):
    """Stages are in different numbers of groups (the first and the last share an embedding), and find each other."""
    for rank, received in enumerate(run_ranks(toy.lanes_of_a_layout, pp * dp, pp, dp)):
        stage = rank // dp  # pp is the outermost dimension
        neighbours = [each for each in (stage - 1, stage + 1) if 0 <= each < pp]
        assert received == [10.0 * each + lane for each in neighbours for lane in (0, 1)]


@pytest.mark.parametrize(("name", "chunks", "placement"), [("zbv", 2, "v"), ("1f1b", 1, "loop")])
def test_outputs_that_are_views(name, chunks, placement):
    assert max(run_ranks(toy.of_views, 2, name, 4, chunks, placement)) < 1e-14


@pytest.mark.parametrize(("experts", "after"), [(None, []), (2, ["calc"])])
def test_an_output_leaves_as_soon_as_the_models_step_returns(experts, after):
    """Megatron's work after it scales the losses of experts, and is left out where a stage has neither these nor the
    loss."""
    first, last = run_ranks(toy.departures, 2, "gpipe", 4, experts)
    assert first == ["send", *after] * 4  # forwards alone: the first stage sends no gradients
    assert last == ["calc"] * 4 + ["send"] * 4


@pytest.mark.parametrize("with_grad_sync", [False, True])
def test_the_five_hooks(with_grad_sync):
    m = 8
    for events in run_ranks(toy.hooks_of, 2, "dualpipev", m, 2, "v", with_grad_sync):
        assert [e[1:] for e in events if e[0] == "gather"] == [(0, 2), (1, 2)]
        finalized = events.index(("finalize", m if ("finalize", m) in events else 0))
        assert finalized == len(events) - 2
        assert events[-1] == ("inside at the end", False)
        for chunk in (0, 1):
            for which in ("weight", "bias"):
                inside = [e[3] for e in events if e[:3] == ("grad", chunk, which)]
                assert inside == [True] * (m - 1) + [with_grad_sync]
        reduced = [e[1:] for e in events if e[0] == "reduce"]
        assert reduced == ([(1, False), (0, False)] if with_grad_sync else [])
        for at, event in enumerate(events):
            if event[0] == "reduce":
                assert not any(e[:2] == ("grad", event[1]) for e in events[at:])


def test_tokens_are_counted_where_the_loss_is():
    by_rank = run_ranks(toy.hooks_of, 2, "zbv", 4, 2, "v", False)
    assert [next(e[1] for e in events if e[0] == "finalize") for events in by_rank] == [4, 0]


ROUNDED = (
    "ConfigError: stage 1 returns [3, 2, 4] of torch.bfloat16, but stages send [sequence, micro-batch, hidden] ="
    " [3, 2, 4] of torch.float64: return that, or give the chunks' config another pipeline_dtype"
)


@pytest.mark.parametrize(("rounds", "said"), [(False, "ValueError: bad sample"), (True, ROUNDED)])
@pytest.mark.parametrize(("name", "chunks", "placement"), [("dualpipev", 2, "v"), ("zb-h1", 1, "loop")])
def test_a_rank_that_raises_ends_all(name, chunks, placement, rounds, said):
    """The one that failed names its action; the others name theirs, what they waited for, and who failed first. A stage
    that sends another dtype than is received fails so: its receiver would take the bytes for numbers."""
    texts = run_ranks(toy.failing, 3, name, 6, chunks, placement, 2.0, rounds, init=False, timeout=60)
    failed = "pipeline rank 1 (global rank 1) failed in 0F3 (forward, chunk 0, micro-batch 3) of schedule " + name
    assert texts[1] == f"{failed}: {said}"
    for rank in (0, 2):
        assert texts[rank].startswith(f"pipeline rank {rank} (global rank {rank}), in ")
        assert "from pipeline rank 1, and it did not come; before that, " + texts[1] in texts[rank]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shapes", "so every stage has to know the lengths: give seq_lengths, one per micro-batch"),
        ("adjust", "adjust_tensor_shapes_fn"),
        ("chunks", "schedule zbv has 2 model chunks per rank, but the model is 1"),
        ("iterators", "1 data iterators for 2 model chunks"),
    ],
)
def test_what_cannot_be_run_is_refused(what, said):
    for text in run_ranks(toy.refused, 2, what):
        assert said in text


def test_a_trace_has_the_run_beside_the_plan(tmp_path):
    run_ranks(toy.traced, 2, str(tmp_path / "trace.json"), 4)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    schedule = build("dualpipev", pp=2, num_microbatches=4)
    for group in (0, 1):
        for rank in range(2):
            passes = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (group, rank)]
            assert [e["name"] for e in passes] == [str(action) for action in schedule.actions(rank)]
            assert all(e["dur"] >= 0 for e in passes)
            assert passes == sorted(passes, key=lambda e: e["ts"])
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "planned: dualpipev", "measured: dualpipev",
    }  # fmt: skip
