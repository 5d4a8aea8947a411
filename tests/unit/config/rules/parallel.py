"""Rules on ranks, stages and schedules, each broken on purpose: the text names the key and what to write."""

from __future__ import annotations

from tests.unit.config.rules.cases import OVERLAP, PP2, Case

BROKEN: list[Case] = [
    (
        "world_factors",
        6,
        dict(tensor_model_parallel_size=2) | PP2,
        ["world size 6", "tensor_model_parallel_size 2", "pipeline_model_parallel_size 2 = 4", "4 or 8"],
    ),
    ("tensor_parallel", 3, dict(tensor_model_parallel_size=3), ["num_attention_heads 8", "2 or 4", "6 or 9"]),
    ("tensor_parallel", 2, dict(tensor_model_parallel_size=2, ffn_hidden_size=63), ["ffn_hidden_size 63", "62 or 64"]),
    (
        "query_groups",
        3,
        dict(num_attention_heads=12, hidden_size=72, ffn_hidden_size=72, num_query_groups=4)
        | dict(tensor_model_parallel_size=3),
        ["num_query_groups 4", "tensor_model_parallel_size 3", "num_query_groups to 3 or 6", "2 or 4"],
    ),
    ("sequence_parallel", 1, dict(sequence_parallel=True), ["tensor_model_parallel_size", "silently", "to false"]),
    (
        "sequence_parallel",
        4,
        dict(sequence_parallel=True, tensor_model_parallel_size=4, seq_length=66),
        ["seq_length 66", "tensor_model_parallel_size 4", "64 or 68"],
    ),
    ("context_parallel", 2, dict(context_parallel_size=2, seq_length=66), ["seq_length 66", "= 4", "64 or 68"]),
    ("context_parallel", 2, dict(context_parallel_size=2, attention_backend="unfused"), ["fused attention", "to auto"]),
    ("context_parallel", 2, dict(context_parallel_size=2, reset_attention_mask=True), ["no mask", "to false"]),
    ("schedule", 1, dict(virtual_pipeline_model_parallel_size=2), ["pipeline_model_parallel_size above 1"]),
    ("schedule", 2, PP2 | dict(schedule="none"), ["schedule none", "not 2"]),
    ("schedule", 1, dict(schedule="1f1b"), ["schedule 1f1b", "leave schedule out"]),
    ("schedule", 2, PP2 | dict(schedule="interleaved"), ["virtual_pipeline_model_parallel_size"]),
    ("schedule", 2, PP2 | dict(schedule="1f1b", virtual_pipeline_model_parallel_size=2), ["is 2", "interleaved"]),
    ("group_size", 2, PP2 | dict(microbatch_group_size_per_vp_stage=2), ["interleaved", "leave it out"]),
    ("chunk_count", 2, PP2 | dict(num_layers_per_virtual_pipeline_stage=3), ["num_layers 8", "= 6", "6 or 12"]),
    (
        "chunk_count",
        2,
        PP2 | dict(num_layers_per_virtual_pipeline_stage=2, virtual_pipeline_model_parallel_size=4),
        ["makes 2 chunks", "is 4"],
    ),
    (
        "chunk_count",
        2,
        PP2 | dict(num_layers_per_virtual_pipeline_stage=2, decoder_first_pipeline_num_layers=4),
        ["decoder_first_pipeline_num_layers", "virtual_pipeline_model_parallel_size instead"],
    ),
    ("even_stages", 3, dict(pipeline_model_parallel_size=3), ["num_layers 8", "6 or 9", "to 2 or 4"]),
    ("even_stages", 2, PP2 | dict(virtual_pipeline_model_parallel_size=3), ["2 *", "3 = 6", "6 or 12"]),
    (
        "uneven_ends",
        4,
        dict(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=1),
        ["leaves 7 layers", "3 stages", "6 or 9"],
    ),
    (
        "uneven_ends",
        2,
        PP2 | dict(decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=3),
        ["leaves 2 layers for 0 stages"],
    ),
    (
        "uneven_ends",
        2,
        PP2 | dict(decoder_first_pipeline_num_layers=3, virtual_pipeline_model_parallel_size=2),
        ["decoder_first_pipeline_num_layers 3", "2 or 4"],
    ),
    (
        "uneven_ends",
        2,
        PP2 | dict(decoder_first_pipeline_num_layers=4, pipeline_model_parallel_layout="Et*4|t*4L"),
        ["pipeline_model_parallel_layout"],
    ),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="Et*4|x*4L"), ["'x'", "Et*3|(tt|)*29,m|L"]),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="Et*4|t*3L"), ["7 layers t", "is 8"]),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="Et*4|t*2|t*2L"), ["3 stages"]),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="t*4|t*4L"), ["E (the embedding)"]),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="Et*4|t*4"), ["L (head and loss)"]),
    ("explicit_layout", 2, PP2 | dict(pipeline_model_parallel_layout="Et*4|t*4mL"), ["1 layers m", "is 0"]),
    (
        "explicit_layout",
        2,
        PP2
        | dict(pipeline_model_parallel_layout="Et*4|t*3mtL", mtp_num_layers=1, position_embedding_type="rope"),
        ["every t must come before the first m"],
    ),
    (
        "explicit_layout",
        2,
        PP2 | dict(pipeline_model_parallel_layout="Et*4|t*4L", virtual_pipeline_model_parallel_size=2),
        ["makes 1 chunks", "is 2"],
    ),
    (
        "block_recompute",
        2,
        PP2 | dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=5),
        ["recompute_num_layers 5", "4 layers", "at most 4"],
    ),
    (
        "traffic",
        4,
        dict(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
        | dict(overlap_p2p_comm=True, batch_p2p_comm=True),
        ["both true", "batch_p2p_comm to false"],
    ),
    ("traffic", 2, PP2 | dict(overlap_p2p_comm=True), ["interleaved schedule", "1f1b"]),
    (
        "interleaved_on_two_ranks",
        2,
        PP2 | dict(virtual_pipeline_model_parallel_size=2, batch_p2p_comm=True),
        ["wrong gradients", "overlap_p2p_comm is true and batch_p2p_comm is false"],
    ),
    (
        "interleaved_on_two_ranks",
        2,
        PP2 | dict(virtual_pipeline_model_parallel_size=2, overlap_p2p_comm=False),
        ["wrong gradients"],
    ),
    ("schedule", 2, PP2 | dict(schedule="dualpipe"), ["'dualpipe'", "did you mean dualpipev"]),
    ("schedule", 2, PP2 | dict(schedule="none.csv"), ["none.csv", "cannot be read"]),
    ("schedule", 1, dict(schedule="zbv"), ["schedule zbv", "above 1"]),
    (
        "schedule",
        2,
        PP2 | dict(schedule="zb-h1", virtual_pipeline_model_parallel_size=2),
        ["schedule zb-h1 has 1 model chunk per rank", "is 2"],
    ),
    (
        "schedule",
        2,
        PP2 | dict(schedule="dualpipev", virtual_pipeline_model_parallel_size=4),
        ["schedule dualpipev has 2 model chunks per rank", "is 4"],
    ),
    (
        "v_shape",
        2,
        PP2
        | dict(
            schedule="zbv", mtp_num_layers=1, position_embedding_type="rope",
            pipeline_model_parallel_layout="Et*3|ttt|ttm|L",
        ),
        ["m before its last stage", "zbv", "...|mL"],
    ),
    (
        "own_executor",
        2,
        PP2 | dict(schedule="zb-h1", transformer_impl="transformer_engine", backend="ddp"),
        ["zb-h1", "transformer_impl transformer_engine", "backend to deepspeed"],
    ),
    ("expert_overlap", 1, OVERLAP | dict(expert_model_parallel_size=1), ["there is none", "num_experts 8"]),
    ("expert_overlap", 4, OVERLAP | PP2 | dict(schedule="1f1b"), ["schedule 1f1b pairs none", "dualpipev"]),
    ("expert_overlap", 2, OVERLAP | dict(bf16=False), ["16-bit", "bf16 to true"]),
    ("expert_overlap", 2, OVERLAP | dict(fp8_format="hybrid"), ["fp8_format out"]),
    ("expert_overlap", 2, OVERLAP | dict(sync="streaming"), ["sync streaming cannot gather"]),
    ("expert_overlap", 2, OVERLAP | dict(moe_token_dispatcher_type="allgather"), ["allgather", "alltoall"]),
    ("expert_overlap", 2, OVERLAP | dict(recompute_granularity="full"), ["selective without moe"]),
    (
        "expert_overlap",
        2,
        OVERLAP | dict(mtp_num_layers=1, position_embedding_type="rope", loss_norm="microbatch"),
        ["loss_norm to token"],
    ),
    ("traced", 2, PP2 | dict(schedule_trace="t.json"), ["schedule_trace t.json", "schedule 1f1b", "dualpipev"]),
    ("even_stages", 2, PP2 | dict(schedule="zbv", num_layers=10), ["num_layers 10", "= 4", "8 or 12"]),
]  # fmt: skip
