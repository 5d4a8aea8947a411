#!/bin/bash
# A GPT of 1.3 billion parameters as one starts it with Megatron-DeepSpeed: strings of flags, eval, deepspeed.
dir=$(pwd)
seq_len=2048
global_batch_size=512
micro_batch_size=4
zero_stage=3
use_pipeline="false"
activation_checkpoint="true"
bytes_per_step=$(( seq_len * global_batch_size ))
train_tokens=$(( 100000 * bytes_per_step ))

case $zero_stage in
    0|1) pp_size=4 ;;
    *)   pp_size=1 ;;
esac

megatron_options=" \
    --tensor-model-parallel-size 2 \
    --num-layers 24 \
    --hidden-size 2048 \
    --num-attention-heads 16 \
    --seq-length ${seq_len} \
    --max-position-embeddings ${seq_len} \
    --micro-batch-size ${micro_batch_size} \
    --global-batch-size ${global_batch_size} \
    --train-tokens ${train_tokens} \
    --train-samples $(( 3 * train_tokens / seq_len )) \
    --lr-decay-tokens $(( 90000 * bytes_per_step )) \
    --lr-warmup-tokens $(( 500 * bytes_per_step )) \
    --lr 2.0e-4 \
    --min-lr 2.0e-5 \
    --lr-decay-style cosine \
    --weight-decay 0.1 \
    --adam-beta2 0.95 \
    --init-method-std 0.014 \
    --bf16 \
    --num-experts 1 --moe-expert-parallel-size 1 --moe-loss-coeff 0.01 \
    --log-interval 10 --eval-interval 100 --eval-iters 10 --save-interval 1000 \
    --split 98,2,0 --data-impl mmap --data-path data/pile_text_document \
    --tokenizer-type HFTokenizer --tokenizer-model data/tokenizer.json"

if [ "${activation_checkpoint}" = "true" ]; then
megatron_options="${megatron_options} \
    --checkpoint-activations"
fi

deepspeed_options=" \
    --deepspeed \
    --deepspeed_config ds_config.json \
    --zero-stage ${zero_stage} \
    --pipeline-model-parallel-size ${pp_size}"

if [[ "${use_pipeline}" == "false" ]]; then
deepspeed_options="${deepspeed_options} \
    --no-pipeline-parallel"
fi
if [ "${activation_checkpoint}" = "true" ]; then
deepspeed_options="${deepspeed_options} \
    --deepspeed-activation-checkpointing"
fi

run_cmd="deepspeed ${dir}/pretrain_gpt.py ${megatron_options} ${deepspeed_options} &> train.log"
echo ${run_cmd}
eval ${run_cmd}
