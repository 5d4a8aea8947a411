#!/bin/bash
# A GPT of 345 million parameters as one starts it with Megatron-LM: arrays of flags, and torchrun.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${SLURM_NNODES:-2}
WORLD_SIZE=$((GPUS_PER_NODE * NNODES))
TP=2
PP=2
DP=$((WORLD_SIZE / (TP * PP)))
SEQ_LENGTH=1024
RUN="gpt-345m-tp${TP}-pp${PP}"
OUT="runs/${RUN}"

LAUNCH_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --rdzv_endpoint "$MASTER_ADDR:29500"   # only the cluster knows it
)

MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length $SEQ_LENGTH
    --max-position-embeddings $SEQ_LENGTH
    --position-embedding-type rope --no-position-embedding
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --group-query-attention --num-query-groups 4
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout=0.0
    --use-mcore-models
)

TRAINING_ARGS="
    --micro-batch-size 2
    --global-batch-size $((DP * 2 * 8))
    --train-samples 3200000 --lr-decay-samples 3200000 --lr-warmup-samples 32000
    --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --bf16
    --use-flash-attn --overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer"

PARALLEL_ARGS=(--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP)
if [ "$TP" -gt 1 ]; then
    PARALLEL_ARGS+=(--sequence-parallel)
fi

DATA_ARGS=(
    # a blend, with weights
    --data-path 0.7 data/books_text_document 0.3 data/code_text_document
    --split 98,2,0
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model data/tokenizer.json
)

LOG_ARGS="--log-interval 10 --save-interval 500 --eval-interval 500 --eval-iters 10"
LOG_ARGS+=" --save $OUT/checkpoints --load $OUT/checkpoints --tensorboard-dir $OUT/tensorboard --log-throughput"
[[ -n "${WANDB_API_KEY:-}" ]] && LOG_ARGS+=" --wandb-project gpt"

mkdir -p "$OUT"
torchrun "${LAUNCH_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    $TRAINING_ARGS \
    "${PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    $LOG_ARGS \
    2>&1 | tee "$OUT/log.txt"
