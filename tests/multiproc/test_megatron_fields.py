"""Fields of Megatron's model configuration that are no keys of megaaccum's, in exact steps under every kind of cut."""

from tests.support.distance import check
from tests.support.parity import Case

CUT = "--grad_accum_steps 2 --pp_microbatches 4 "
PP = "--pipeline_model_parallel_size 2 "
TP = "--tensor_model_parallel_size 2 "
ROPE = "--position_embedding_type rope --use-rope-scaling --rope-scaling-factor 4.0 "
NORMS = "--apply-layernorm-1p --normalization RMSNorm --attention-output-gate "
WINDOW = "--window-size 4,0 --window-attn-skip-freq 2 --softmax-type learnable "


def test_rope_scaling_zero_centred_norms_gates_and_windows():
    check(
        [
            Case(2, PP + CUT, ROPE + NORMS, "fp64"),
            Case(2, TP + CUT, ROPE + NORMS, "fp64"),
            Case(2, PP + CUT, ROPE + NORMS),
            Case(2, PP + CUT, WINDOW),
            Case(2, PP + CUT, "--use-mup --mup-base-hidden-size 16 --untie_embeddings_and_output_weights "),
        ]
    )
