"""Real command lines, shrunk in size only, trained by launch/pretrain_gpt.py and by Megatron's own loop on CPU ranks.

    python -m benchmarks megatron_train --cases FILE [--only TEXT] [--limit N]

FILE as `megatron_cases` reads it. Of each case that is accepted, widths, depths, lengths, batches and parallel sizes
become the smallest that keep its features (at most four ranks), precisions FP32 and dropout 0; what needs a GPU's
kernels is left out. Three steps on the same small data set, from the same weights: loss, gradient norm and learning
rate of each have to be the same to 1e-5. Cases that are the same once shrunk run once.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import megatron_cases, megatron_reference
from megaaccum.config.megatron_arguments import fork_flags
from megaaccum.lab.verification.testing.ranks import RanksFailed, run_ranks
from megaaccum.pretrain.data.indexed import PairWriter, id_type

STEPS, VOCAB, TOLERANCE = 3, 128, 1e-5
LAUNCH = Path(__file__).parents[1] / "launch" / "pretrain_gpt.py"

SIZES = {
    "hidden-size": 64, "ffn-hidden-size": 128, "num-attention-heads": 4, "num-query-groups": 2, "kv-channels": 16,
    "seq-length": 32, "max-position-embeddings": 32, "moe-ffn-hidden-size": 32,
    "moe-shared-expert-intermediate-size": 32, "q-lora-rank": 16, "kv-lora-rank": 16, "qk-head-dim": 16,
    "qk-pos-emb-head-dim": 8, "v-head-dim": 16, "moe-router-num-groups": 2, "moe-router-group-topk": 1,
    "train-iters": STEPS, "lr-decay-iters": 8, "lr-warmup-iters": 1, "lr-wsd-decay-iters": 2, "eval-iters": 1,
    "num-key-value-heads": 2, "mup-base-hidden-size": 16, "checkpoint-num-layers": 1, "recompute-num-layers": 1,
}  # fmt: skip
"""Flags whose number is made this."""

VPP = "num-virtual-stages-per-pipeline-rank"
OTHERWISE = {
    "num-layers-per-virtual-pipeline-stage": VPP,
    "train-samples": "train-iters", "train-tokens": "train-iters", "lr-decay-samples": "lr-decay-iters",
    "lr-decay-tokens": "lr-decay-iters", "lr-warmup-samples": "lr-warmup-iters",
    "lr-warmup-tokens": "lr-warmup-iters", "lr-wsd-decay-samples": "lr-wsd-decay-iters",
}  # fmt: skip
"""Flags that are written with another one, which does not depend on the sizes."""

LEFT_OUT = set(
    "bf16 fp16 fp8-format fp8-recipe fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo"
    " fp8-param-gather grad-reduce-in-bf16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis"
    " moe-grouped-gemm moe-permute-fusion moe-router-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl"
    " tp-comm-overlap moe-enable-deepep use-flash-attn use-flash-attn-v2 transformer-impl mla-down-proj-fusion"
    " reuse-grad-buf-for-mxfp8-param-ag overlap-moe-expert-parallel-comm delay-wgrad-compute"
    " rampup-batch-size step-batch-size-schedule"
    " hierarchical-context-parallel-sizes cp-comm-type first-last-layers-bf16 num-layers-at-start-in-bf16"
    " num-layers-at-end-in-bf16 reset-iteration no-load-lr-state"
    " mock-data data-path train-data-path valid-data-path test-data-path per-split-data-args-path data-args-path"
    " vocab-file merge-file tokenizer-type tokenizer-model vocab-size tiktoken-pattern tokenizer-hf-use-fast"
    " fim-data fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix fim-prefix-token"
    " fim-middle-token fim-suffix-token fim-pad-token fim-eod-token"
    " save load pretrained-checkpoint finetune exit-interval exit-duration-in-mins tensorboard-dir data-cache-path"
    " wandb-project wandb-exp-name wandb-save-dir attention-dropout hidden-dropout log-interval"
    " deepspeed-config".split()
)
"""Precisions, kernels, files: replaced, or not to be had on a CPU."""

NOT_MEGATRONS = set(
    "overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step use-torch-fsdp2"
    " use-megatron-fsdp use-custom-fsdp data-parallel-sharding-strategy num-distributed-optimizer-instances"
    " fsdp-manual-registration fsdp-double-buffer init-model-with-meta-device keep-fp8-transpose-cache"
    " attention-backend deterministic-mode optimizer-cpu-offload use-nccl-ub"
    " distributed-backend rerun-mode async-save use-persistent-ckpt-worker ckpt-format cuda-graph-impl"
    " cuda-graph-scope cuda-graph-modules enable-cuda-graph external-cuda-graph te-rng-tracker use-sharp"
    " defer-embedding-wgrad-compute wgrad-deferral-limit moe-shared-expert-overlap high-priority-stream-groups"
    " fine-grained-activation-offloading offload-modules expert-tensor-parallel-size moe-flex-dispatcher-backend"
    " use-transformer-engine-op-fuser exit-signal-handler ddp-average-in-collective".split()
)
"""Flags that the reference does not get: its DDP and distributed optimizer shard and overlap in their own way."""

REFERENCE = (
    "--use-distributed-optimizer --distributed-backend gloo --num-workers 0 --rerun-mode disabled"
    " --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion"
    " --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm"
    " --use-cpu-initialization --disable-jit-fuser"
).split()

Groups = dict[str, tuple[str, list[str]]]
"""{name with dashes: (the flag as written, its values)}, the last of two equal ones."""


@dataclass(frozen=True)
class Shrunk:
    """One case as both sides are given it."""

    ours: tuple[str, ...]
    """Flags of launch/pretrain_gpt.py."""
    megatrons: tuple[str, ...]
    """The same for Megatron's parser."""
    world_size: int


def grouped(flags: list[str]) -> Groups:
    groups: Groups = {}
    for word in flags:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            name = flag.removeprefix("--").replace("_", "-")
            groups.pop(name, None)
            groups[name] = (flag, [value] if equals else [])
        elif groups:
            groups[next(reversed(groups))][1].append(word)
    return groups


def number(groups: Groups, *names: str) -> int:
    """The value of the first of these flags that is there, else 1."""
    return next((int(groups[name][1][0]) for name in names if name in groups), 1)


def shrunk(flags: list[str], translated: list[str]) -> Shrunk:
    """flags: as written; translated: those in Megatron's own names."""
    given = grouped(translated)
    tp = min(2, number(given, "tensor-model-parallel-size"))
    pp = min(2, number(given, "pipeline-model-parallel-size"))
    cp = min(2, number(given, "context-parallel-size"), 4 // (tp * pp))
    world = tp * pp * cp * (2 if tp * pp * cp <= 2 else 1)
    sizes = _sizes(given, tp=tp, pp=pp, cp=cp, dp=world // (tp * pp * cp))
    ours, theirs = _resized(grouped(flags), sizes), _resized(given, sizes)
    absent = NOT_MEGATRONS | {name.replace("_", "-") for names in fork_flags().values() for name in names}
    theirs = {name: group for name, group in theirs.items() if name not in absent}
    if "expert-model-parallel-size" in theirs:  # experts are whole here, as a note says
        theirs |= grouped(["--expert-tensor-parallel-size", "1"])
    return Shrunk(_words(ours), (*_words(theirs), *REFERENCE), world)


def _sizes(given: Groups, *, tp: int, pp: int, cp: int, dp: int) -> dict[str, list[str]]:
    """The values of the flags that are another one's consequence."""
    interleaved = pp > 1 and (
        given.keys() & {"num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"}
        or "(" in "".join(given.get("pipeline-model-parallel-layout", ("", []))[1])
    )
    vpp = 2 if interleaved else 1
    counted = given.keys() & {"account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"}
    _, (dispatcher,) = given.get("moe-token-dispatcher-type", ("", ["allgather"]))
    layers, size = 2 * pp * vpp - len(counted), min(2, number(given, "micro-batch-size"))
    values: dict[str, object] = SIZES | {
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
        "context-parallel-size": cp,
        "ds-sequence-parallel-size": cp,
        "expert-model-parallel-size": min(2, number(given, "expert-model-parallel-size")),
        "num-virtual-stages-per-pipeline-rank": vpp,
        "num-layers": layers,
        "micro-batch-size": size,
        "global-batch-size": 4 * size * dp,
        "moe-router-topk": min(2, number(given, "moe-router-topk")),
        "moe-layer-freq": f"([0]*1+[1]*{layers - 1})",
        "pipeline-model-parallel-layout": _layout(pp * vpp, mtp="mtp-num-layers" in given),
        "decoder-first-pipeline-num-layers": 1,
        "decoder-last-pipeline-num-layers": 1,
        "recompute-modules": "core_attn",
        "moe-token-dispatcher-type": dispatcher.replace("flex", "alltoall"),
        "num-experts": min(4, number(given, "num-experts")),
        "microbatch-group-size-per-virtual-pipeline-stage": pp,
        "split": "949,50,1",
    }
    return {name: [str(value)] for name, value in values.items()}


def _layout(stages: int, *, mtp: bool) -> str:
    parts = ["tt"] * stages
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "m" * mtp + "L"
    return "|".join(parts)


def _resized(groups: Groups, sizes: dict[str, list[str]]) -> Groups:
    """Flags with the small sizes; batch and data are always there."""
    made: Groups = {}
    for written, (flag, values) in groups.items():
        name = OTHERWISE.get(written, written)
        if name in LEFT_OUT or name.removeprefix("no-") in LEFT_OUT or (name == VPP and sizes[name] == ["1"]):
            continue
        is_number = name == "moe-layer-freq" and "[" not in values[0]
        made[name] = (flag if name == written else f"--{name}", values if is_number else sizes.get(name, values))
    for name in ("train-iters", "micro-batch-size", "global-batch-size"):
        made[name] = (f"--{name}", sizes[name])
    always = f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --attention-dropout 0 --hidden-dropout 0"
    return made | grouped(always.split())


def _words(groups: Groups) -> tuple[str, ...]:
    return tuple(word for flag, values in groups.values() for word in (flag, *values))


# --- both sides ------------------------------------------------------------------------------------------------------


def write_data(prefix: Path) -> None:
    """2000 documents of 8 to 80 tokens; the end of a document is the vocabulary's last entry."""
    random = np.random.default_rng(0)
    with PairWriter(prefix, id_type(VOCAB)) as writer:
        for _ in range(2000):  # a split of 949,50,1 leaves two for the test
            ids = np.append(random.integers(0, VOCAB - 1, random.integers(8, 80)), VOCAB - 1)
            writer.add(ids, [len(ids)])


def train_here(argv: list[str]) -> None:
    """launch/pretrain_gpt.py on a rank that has been started."""
    sys.argv = [str(LAUNCH), *argv]
    try:
        runpy.run_path(str(LAUNCH), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"pretrain_gpt.py ended with {end.code}") from None


def steps_of(case: Shrunk, folder: Path) -> tuple[list[dict], list[dict]]:
    """(megaaccum's steps, Megatron's). Raises RanksFailed."""
    prefix = folder / "data"
    write_data(prefix)
    data = ["--data-path", str(prefix), "--data-cache-path", str(folder / "cache")]
    own = ["--save", str(folder / "save"), "--output_dir", str(folder / "out"), "--log-interval", "1"]
    run_ranks(train_here, case.world_size, [*case.ours, *data, *own], init=False, timeout=90)
    lines = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    ranks = run_ranks(megatron_reference.train, case.world_size, [*case.megatrons, *data], STEPS, timeout=90)
    return [line for line in lines if "grad_norm" in line], ranks[-1]


def differences(ours: list[dict], theirs: list[dict]) -> dict[str, float]:
    """The largest relative difference of each number; nan where one is not a number."""
    assert len(ours) == len(theirs) == STEPS

    def largest(name: str) -> float:
        a, b = (np.array([step[name] for step in steps]) for steps in (ours, theirs))
        return float((np.abs(a - b) / np.maximum(np.abs(b), 1e-12)).max())

    return {name: largest(name) for name in ("loss", "grad_norm", "lr")}


def _why(error: AssertionError) -> str:
    """The lines that say what was wrong, of all ranks."""
    outcomes = error.outcomes if isinstance(error, RanksFailed) else []
    texts = [f"{outcome.error and outcome.error.text}\n{outcome.output}" for outcome in outcomes if outcome.failed]
    lines = dict.fromkeys(line for text in texts for line in text.splitlines() if "rror:" in line)
    return "\n    ".join([str(error).splitlines()[0], *lines])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", required=True)
    parser.add_argument("--only", default="", help="cases whose file holds this text")
    parser.add_argument("--limit", type=int, default=0, help="as many different ones")
    args = parser.parse_args(argv)
    seen: dict[Shrunk, list[str]] = {}
    for case in json.loads(Path(args.cases).read_text(encoding="utf-8")):
        if args.only in case["file"] and not megatron_cases.check(case)[0]:
            flags = megatron_cases.words_of(case["flags"])
            seen.setdefault(shrunk(flags, case["translated"]), []).append(case["file"])
    equal = total = 0
    for case, files in list(seen.items())[: args.limit or None]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = differences(*steps_of(case, Path(folder)))
            except (RanksFailed, AssertionError) as error:
                print(f"failed     {len(files):2} {files[0]}: {_why(error)}", flush=True)
                total += len(files)
                continue
        good = all(value <= TOLERANCE for value in found.values())
        total, equal = total + len(files), equal + good * len(files)
        numbers = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
        print(f"{'equal' if good else 'DIFFERENT':10} {len(files):2} {files[0]}: {numbers}", flush=True)
    print(f"{equal} of {total} cases equal to {TOLERANCE:g}")
    return 0 if equal == total else 1


if __name__ == "__main__":
    sys.exit(main())
