#!/bin/bash
# debug-mxfp8-standard: DeepSeek-V3 debug model, 8 steps on 1 node x 2 CPU ranks
# precision mxfp8 (MXFP8 on the routed experts' grouped GEMMs; EMULATED here, for numerics only)
# EP backend standard (PyTorch all-to-all)
#
#   bash train.sh                        # trains it
#   bash train.sh --training.steps=5     # TorchTitan's options at the end
#
# Reads: CELL_DIR (a run to resume), COOKBOOK_PREFLIGHT (off: no check of the nodes),
# COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns W&B on).
# Rendered by `submit.py render` from debug.yaml for local.

# Values stand in quotes, so that none is expanded.
# shellcheck disable=SC1003,SC2016
set -euo pipefail

fail() {
  echo "train.sh: $*" >&2
  exit 2
}

SCRIPT="$(realpath "$0")"

COOKBOOK_ROOT=${COOKBOOK_ROOT:-/shared/moe-cookbook}
[[ -f "${COOKBOOK_ROOT}/submit.py" ]] ||
  fail "COOKBOOK_ROOT: found '${COOKBOOK_ROOT}', which is not the cookbook's folder; export COOKBOOK_ROOT"
# Relative paths, in recipes (tokenizers, data) and in CELL_DIR, start at the cookbook's folder.
cd "${COOKBOOK_ROOT}"
CELL=debug-mxfp8-standard
# A job that is submitted again resumes in the same folder. For a run of its own, or to resume another
# one: CELL_DIR=runs/<run>/${CELL} bash train.sh
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
  '--job.description=debug-mxfp8-standard: DeepSeek-V3 debug model, 8 steps on 1 node x 2 CPU ranks'
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
# A key in the environment, or one of `wandb login`.
if [[ -n "${WANDB_API_KEY:-}" ]] || grep -qs 'api\.wandb\.ai' "${NETRC:-${HOME:-}/.netrc}"; then
  export WANDB_PROJECT="${WANDB_PROJECT:-moe-cookbook}"
  export WANDB_RUN_NAME="${WANDB_RUN_NAME:-${CELL}}"
  TRAIN_ARGS+=("--metrics.enable_wandb")
fi

if [[ -z "${COOKBOOK_ATTEMPT_DIR:-}" ]]; then
  # The supervisor checks the options, then runs this script once for each attempt: it
  # restarts what fails or hangs.
  export COOKBOOK_ROOT VENV
  exec "${VENV}/bin/python" -m cookbook.supervise "${CELL_DIR}" --script="${SCRIPT}" \
    --cell="${CELL}" --recipe=debug --precision=mxfp8 \
    --ep-backend=standard --cluster=local \
    -- "${TRAIN_ARGS[@]}" -- "$@"
fi

# One attempt. The supervisor has exported CELL_DIR, COOKBOOK_ATTEMPT_DIR, LOG_RANK and
# SHOWN_RANKS (the ranks in the log, one of them with the loss).
ATTEMPT="${COOKBOOK_ATTEMPT_DIR##*/}"
echo "cookbook: cell ${CELL}, ${ATTEMPT}, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"

# A new --rdzv-id keeps workers of the last attempt out. Checkpoints belong to the cell, everything else
# to this attempt. A log that can't be written, as on a full disk, fails no training.
torchrun --nnodes=1 --nproc-per-node=2 --role=rank \
  --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id="local_$$_${ATTEMPT}_${CELL}" \
  --log-dir="${COOKBOOK_ATTEMPT_DIR}/ranks" --redirects=3 --tee=3 --local-ranks-filter="${SHOWN_RANKS}" \
  -m torchtitan.train "${TRAIN_ARGS[@]}" --job.dump_folder="${CELL_DIR}" \
  --metrics.save_tb_folder="${ATTEMPT}/tb" --comm.save_traces_folder="${ATTEMPT}/comm_traces" \
  --profiling.save_traces_folder="${ATTEMPT}/profile_traces" \
  --profiling.save_memory_snapshot_folder="${ATTEMPT}/memory_snapshot" "$@" 2>&1 |
  { tee -a "${COOKBOOK_ATTEMPT_DIR}/train.log" || cat >/dev/null; }
