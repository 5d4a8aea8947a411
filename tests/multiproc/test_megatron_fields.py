"""Fields of Megatron's model configuration that are no keys of megaaccum's, in exact steps under every kind of cut."""

from tests.support.distance import check
from tests.support.parity import Case

CUT = "--grad_accum_steps 2 --pp_microbatches 4 "
PP = "--pipeline_model_parallel_size 2 "
TP = "--tensor_model_parallel_size 2 "
ROPE = "--position_embedding_type rope --use-rope-scaling --rope-scaling-factor 4.0 "
NORMS = "--apply-layernorm-1p --normalization RMSNorm --attention-output-gate "
WINDOW = "--window-size 4,0 --window-attn-skip-freq 2 --softmax-type learnable "

LATENT = (
    "--multi_latent_attention --position_embedding_type rope --q_lora_rank 8 --kv_lora_rank 12 --qk_head_dim 8"
    " --qk_pos_emb_head_dim 4 --v_head_dim 6 --qk_layernorm "
)


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


def test_latent_attention_on_megatrons_own_layers():
    """Under tp the norm of the queries' latent is whole on every rank, unlike a norm of heads: it is not summed."""
    check(
        [
            Case(2, PP + CUT, LATENT, "fp64"),
            Case(2, TP + CUT, LATENT, "fp64"),
            Case(2, TP + CUT + "--sequence_parallel ", LATENT, "fp64"),
            Case(2, "--context_parallel_size 2 --attention_backend flash " + CUT, LATENT, "fp64"),
            Case(2, PP + CUT, LATENT + "--mtp_num_layers 1 "),
        ]
    )
