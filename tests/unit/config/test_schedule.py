"""The configuration's `schedule`: from a name or a file to chunks, placement, and errors before anything starts."""

import pytest

from megaaccum.config.resolve import with_schedules
from megaaccum.errors import ConfigError
from megaaccum.schedule import build, write_csv
from megaaccum.schedule.registry import set_shared_table
from tests.support.check import run
from tests.support.configs import make, plan

PP2 = dict(pipeline_model_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "vpp", "placement"),
    [
        ("gpipe", 1, "loop"),
        ("zb-h1", 1, "loop"),
        ("zbv", 2, "v"),
        ("v-half", 2, "v"),
        ("v-min", 2, "v"),
        ("1f1b", 1, "loop"),
    ],
)
def test_a_schedule_sets_chunks_and_placement(name, vpp, placement):
    layout = plan(2, schedule=name, **PP2).layout
    assert (layout.schedule, layout.vpp, layout.placement) == (name, vpp, placement)


def test_a_table_in_a_file(tmp_path):
    path = str(tmp_path / "mine.csv")
    write_csv(build("zbv", pp=2, num_microbatches=6), path)
    layout = plan(2, schedule=path, pp_microbatches=6, **PP2).layout
    assert (layout.vpp, layout.placement) == (2, "v")
    with pytest.raises(ConfigError, match="a schedule of pp 2 and 6 micro-batches, not of pp 2 and 8"):
        plan(2, schedule=path, pp_microbatches=8, **PP2)


def test_ranks_that_read_another_table_do_not_agree(tmp_path):
    """A host's own copy of the file, with the same name and another order."""
    path, digests = str(tmp_path / "mine.csv"), set()
    for name in ("zb-h1", "1f1b"):
        write_csv(build(name, pp=2, num_microbatches=6), path)
        digests.add(plan(2, schedule=path, pp_microbatches=6, **PP2).digest())
    assert len(digests) == 2


def test_a_table_that_ranks_shared_holds_whatever_the_file_says(tmp_path):
    path, text = str(tmp_path / "mine.csv"), tmp_path / "shared.csv"
    own, shared = (build(name, pp=2, num_microbatches=6) for name in ("zb-h1", "gpipe"))
    write_csv(own, path)
    write_csv(shared, text)
    for given, expected in ((text.read_text(), shared), (None, own)):
        set_shared_table(path, given)
        assert build(path, pp=2, num_microbatches=6).items == expected.items


@pytest.mark.parametrize(
    ("keys", "vpp"),
    [
        ({}, 2),
        (dict(virtual_pipeline_model_parallel_size=4), 4),
        (dict(num_layers_per_virtual_pipeline_stage=1), None),
        (dict(pipeline_model_parallel_layout="Et|tt|tt|tttL"), None),
    ],
)
def test_auto_tries_interleaved_with_the_chunks_that_are_given(keys, vpp):
    tried = {each.parallel.schedule: each.parallel for each in with_schedules(make(schedule="auto", **PP2, **keys))}
    assert tried["interleaved"].virtual_pipeline_model_parallel_size == vpp


def test_a_table_without_a_weight_gradient(tmp_path):
    path = tmp_path / "mine.csv"
    write_csv(build("zb-h1", pp=2, num_microbatches=4), path)
    path.write_text(path.read_text().replace(",1W2", ""))
    with pytest.raises(ConfigError, match=r"rank 1: 0W2 \(weight gradient, chunk 0, micro-batch 2\) is missing"):
        plan(2, schedule=str(path), pp_microbatches=4, **PP2)


def test_stages_that_are_placed_in_another_way(tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n")
    with pytest.raises(ConfigError, match=r"2 \* pp - 1 - r"):
        plan(2, schedule=str(tmp_path / "mine.csv"), **PP2)


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "zbv", "dualpipev"])
def test_a_flush_has_two_microbatches_per_rank(name):
    with pytest.raises(ConfigError, match="needs at least 2 \\* 4 = 8 micro-batches in a flush"):
        plan(4, schedule=name, pp_microbatches=7, pipeline_model_parallel_size=4)


def test_check_tells_what_the_schedule_costs(tmp_path):
    text = run(
        None,
        (
            "--num_layers 8 --hidden_size 64 --num_attention_heads 4 --seq_length 16 --train_iters 2 --lr 1e-3 "
            "--pipeline_model_parallel_size 4 --pp_microbatches 8 --schedule dualpipev --vocab_size 64"
        ).split(),
        world_size=4,
        hostfile=None,
        with_json=False,
    )
    assert "DualPipeV: pp 4, 2 model chunks per rank" in text
    assert "bubble = 5.9% of a flush" in text
    assert "activations of 9 chunk passes" in text
    assert "rank r holds r and 7 - r" in text
