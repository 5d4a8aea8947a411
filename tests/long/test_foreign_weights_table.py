"""More checkpoints of Megatron and DeepSpeed, and more layouts, than tests/multiproc/test_foreign_weights.py tries."""

from __future__ import annotations

from tests.multiproc import test_foreign_weights as short

PP, STREAMING = "--pipeline_model_parallel_size 2 ", "--sync streaming "


def test_megatrons_checkpoints_are_read_into_any_layout(tmp_path):
    wanted = {
        "dense": ["", "--tensor_model_parallel_size 4 --zero_stage 1 ", PP + "--backend megatron "],
        "mixed": [STREAMING, PP + "--expert_model_parallel_size 2 "],
        "sparse": [PP, "--expert_model_parallel_size 4 --zero_stage 2 "],
    }
    written = short.written_by_megatron(tmp_path)
    short.check_read(tmp_path, written, [(name, layout) for name, layouts in wanted.items() for layout in layouts])


def test_megatron_reads_what_is_written_for_it(tmp_path):
    short.check_written(tmp_path, ["mixed", "sparse"])


def test_a_run_of_megatron_continues_in_any_layout(tmp_path):
    layouts = ["", PP + "--backend fsdp2 ", STREAMING, "--zero_stage 2 --tensor_model_parallel_size 2 "]
    short.check_megatron_continues(tmp_path, layouts)


def test_deepspeeds_checkpoints_are_read(tmp_path):
    short.check_deepspeed(tmp_path, [1, 2, 3], [PP, STREAMING])


def test_a_run_of_deepspeed_continues_in_any_layout(tmp_path):
    short.check_deepspeed_continues(tmp_path, [1, 2, 3], [PP, STREAMING])
