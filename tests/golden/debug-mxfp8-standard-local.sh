#!/bin/bash
# debug-mxfp8-standard: DeepSeek-V3 debug model: a few steps anywhere, with or without GPUs
# precision mxfp8 (MXFP8 on the routed experts' grouped GEMMs; EMULATED here, for numerics only)
# EP backend standard (PyTorch all-to-all)
#
#   bash train.sh                        # trains it
#   bash train.sh --training.steps=5     # TorchTitan's options at the end
#
# Reads: CELL_DIR (a run to resume), COOKBOOK_PREFLIGHT (off: no look at the nodes),
# COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns W&B on).
# Rendered by `submit.py render` from debug.yaml for local.

# Values stand in quotes, so that none is expanded.
# shellcheck disable=SC1003,SC2016
set -euo pipefail

fail() {
  echo "train.sh: $*" >&2
  exit 2
}

NUM_NODES=1

COOKBOOK_ROOT="${COOKBOOK_ROOT:-}"
if [[ -z "${COOKBOOK_ROOT}" ]]; then
  COOKBOOK_ROOT=/shared/moe-cookbook
fi
[[ -f "${COOKBOOK_ROOT}/submit.py" ]] ||
  fail "COOKBOOK_ROOT: found '${COOKBOOK_ROOT}', which is not the cookbook's folder; export COOKBOOK_ROOT"
# Relative paths, in recipes (tokenizers, data) and in CELL_DIR, start at the cookbook's folder.
cd "${COOKBOOK_ROOT}"
CELL=debug-mxfp8-standard
# The folder stays the same, so a job that is submitted again goes on with the same run. For a run of
# its own, or to go on with another one: CELL_DIR=runs/<run>/${CELL} bash train.sh
CELL_DIR="$(realpath -m "${CELL_DIR:-${COOKBOOK_RUNS:-runs}/debug-local/${CELL}}")"

VENV="${VENV:-${COOKBOOK_ROOT}/.venv}"
[[ -x "${VENV}/bin/python" ]] || fail "VENV: no Python at ${VENV}; run: bash ${COOKBOOK_ROOT}/setup.sh"
export PATH="${VENV}/bin:${PATH}"
# For `--experimental.custom_import=cookbook.titan.tt_0_2_2`.
export PYTHONPATH="${COOKBOOK_ROOT}${PYTHONPATH:+:${PYTHONPATH}}"
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1
# Lines of the log begin with the global rank; torchrun fills it in.
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank${rank}]:'

TRAIN_ARGS=(
  --job.custom_config_module=cookbook.titan.tt_0_2_2.job_config
  --experimental.custom_import=cookbook.titan.tt_0_2_2
  '--job.description=debug-mxfp8-standard: DeepSeek-V3 debug model: a few steps anywhere, with or without GPUs'
  --cookbook.precision=mxfp8
  --cookbook.grouped_gemms=mxfp8
  --cookbook.linear_layers=bf16
  --cookbook.ep_backend=standard
  --cookbook.dispatch=standard
  --cookbook.emulated
  --model.name=deepseek_v3
  --model.flavor=debugmodel
  --model.hf_assets_path=assets/local/tokenizer
  --parallelism.data_parallel_shard_degree=-1
  --parallelism.expert_parallel_degree=2
  --parallelism.expert_tensor_parallel_degree=1
  --training.seq_len=256
  --training.local_batch_size=2
  --training.dataset=c4_test
  --training.dataset_path=assets/local/corpus
  --training.steps=8
  --training.max_norm=1.0
  --optimizer.name=AdamW
  --optimizer.lr=0.0008
  --optimizer.eps=1e-08
  --lr_scheduler.warmup_steps=2
  --lr_scheduler.decay_ratio=0.8
  --lr_scheduler.decay_type=linear
  --lr_scheduler.min_lr_factor=0.0
  --activation_checkpoint.mode=none
  --compile.no_enable
  --debug.seed=42
  --metrics.log_freq=1
  --metrics.enable_tensorboard
  --metrics.disable_color_printing
  --parallelism.expert_parallel_comm_backend=standard
  --model.converters=quantize.grouped_mm.mx
  --quantize.grouped_mm.mx.recipe_name=mxfp8
  --quantize.grouped_mm.mx.fqns=experts
  --quantize.grouped_mm.mx.emulate
)
if [[ -n "${WANDB_API_KEY:-}" ]]; then
  export WANDB_PROJECT="${WANDB_PROJECT:-moe-cookbook}"
  export WANDB_RUN_NAME="${WANDB_RUN_NAME:-${CELL}}"
  TRAIN_ARGS+=("--metrics.enable_wandb")
fi

JOB=("${VENV}/bin/python" -m cookbook.supervise)

# A misspelt option, a layout that does not divide or a tokenizer that is not there ends the job here, in
# a second, and not on every rank. The run is noted as well, for `submit.py status` and `report`. The
# answer: the number of this attempt, and the ranks whose lines the log shows, the one with the loss
# among them.
ANSWER="$(
  "${JOB[@]}" begin "${CELL_DIR}" --cell="${CELL}" --recipe=debug \
    --precision=mxfp8 --ep-backend=standard --cluster=local \
    --nodes="${NUM_NODES}" -- "${TRAIN_ARGS[@]}" -- "$@"
)"
read -r ATTEMPT LOG_RANK SHOWN_RANKS <<<"${ANSWER}"
# TorchTitan warns where the rank that knows the loss is not among these.
export LOG_RANK
export COOKBOOK_ATTEMPT_DIR="${CELL_DIR}/attempt-${ATTEMPT}"
mkdir -p "${COOKBOOK_ATTEMPT_DIR}"

# Port 0: any free port of this machine.
RDZV_ENDPOINT="localhost:0"

ATTEMPT_ARGS=(
  # Checkpoints belong to the cell, everything else to this attempt.
  "--job.dump_folder=${CELL_DIR}"
  "--metrics.save_tb_folder=attempt-${ATTEMPT}/tb"
  "--comm.save_traces_folder=attempt-${ATTEMPT}/comm_traces"
  "--profiling.save_traces_folder=attempt-${ATTEMPT}/profile_traces"
  "--profiling.save_memory_snapshot_folder=attempt-${ATTEMPT}/memory_snapshot"
)
TORCHRUN=(
  torchrun
  --nnodes="${NUM_NODES}"
  --nproc-per-node=2
  --rdzv-backend=c10d
  --rdzv-endpoint="${RDZV_ENDPOINT}"
  # New for each attempt: a worker that is left over from the last one must not join this one.
  --rdzv-id="local_$$_${ATTEMPT}_${CELL}"
  --role=rank
  # Every rank's log is kept.
  --log-dir="${COOKBOOK_ATTEMPT_DIR}/ranks"
  --redirects=3
  --tee=3
  --local-ranks-filter="${SHOWN_RANKS}"
)

echo "cookbook: cell ${CELL}, attempt ${ATTEMPT}, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
echo "cookbook: ${NUM_NODES} nodes x 2 ranks, rendezvous ${RDZV_ENDPOINT}"
echo "cookbook: writing to ${COOKBOOK_ATTEMPT_DIR}"

if [[ -z "${COOKBOOK_SUPERVISED:-}" ]]; then
  # Told to stop, bash would end with the status of whatever came before, which is mostly 0.
  TOLD=""
  trap 'TOLD=SIGTERM; exit 143' TERM
  trap 'TOLD=SIGINT; exit 130' INT
  trap '"${JOB[@]}" end "${CELL_DIR}" --exit-status=$? --signal="${TOLD}"' EXIT
fi
# A log that can't be written, as on a full disk, fails no training.
"${TORCHRUN[@]}" -m torchtitan.train "${TRAIN_ARGS[@]}" "${ATTEMPT_ARGS[@]}" "$@" 2>&1 |
  { tee -a "${COOKBOOK_ATTEMPT_DIR}/train.log" || cat >/dev/null; }
