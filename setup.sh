#!/usr/bin/env bash
#
# Makes this checkout ready to train: virtual environment, DeepEP, FlashAttention-4, tokenizers, local
# corpus.
# Run it on a login node or a laptop; `./setup.sh --help` says what it will do and how long it takes.

set -euo pipefail

usage() {
  cat <<'EOF'
usage: ./setup.sh [options]

What it does, in this order; what is there already is left alone:
  1. .venv beside this script, with the pins of requirements.txt    1 to 4 minutes, 8 GB
  2. a text corpus and a tokenizer for local runs, from Python's
     own sources, in assets/local                                   seconds
  3. the models' tokenizers from the Hugging Face hub, in assets/hf  seconds
  4. DeepEP at its pin, where a CUDA toolkit is found               2 to 15 minutes
  5. FlashAttention-4 at its pins, for Hopper and Blackwell GPUs    a minute, 0.6 GB
  6. the doctor: is this machine ready, and what to do where not    under a second

Run it again at any time: it goes on where it was interrupted, and takes about
a second where nothing is left to do. Its log is build/setup.log.

options:
  --local            only what runs on this machine alone need: steps 1, 2 and 6,
                     and step 5 where this machine has such GPUs
  --no-deepep        leave out step 4
  --no-flash-attention  leave out step 5
  --no-tokenizers    leave out step 3
  --arch LIST        build DeepEP for these GPUs, also where this machine has none:
                     10.0 for B200, 9.0 for H100 and H200, "9.0;10.0" for both
                     (default: the GPUs found here)
  --python COMMAND   the Python to use, 3.11 or later (default: $PYTHON, else one
                     that is found; tested with 3.11 to 3.14)
  --torch-index URL  take torch and torchao from this package index, for example
                     PyTorch's own for another CUDA version
  --dev              add what the tests and `make check` need
  --quiet            print only what is done, and no doctor where that is nothing
  -h, --help         print this

environment: HF_ENDPOINT and HF_TOKEN for the hub, CUDA_HOME and MAX_JOBS for DeepEP,
pip's own variables (PIP_INDEX_URL, ...) for a mirror of the package index.
Step 1 takes uv from the package index where none is on PATH, and pip where that fails;
uv's variables are UV_DEFAULT_INDEX, ...
EOF
}

readonly FETCH='
import sys
from huggingface_hub import hf_hub_download
try:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        hf_hub_download(sys.argv[1], name, local_dir=sys.argv[2])
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")'
readonly UV_VERSION=0.13.9
readonly OLDEST_PYTHON='(3, 11)'
readonly TOKENIZERS=(
  deepseek-ai/DeepSeek-V3.1-Base deepseek-ai/deepseek-moe-16b-base Qwen/Qwen3-30B-A3B
)

local_only=false
want_deepep=true
want_flash_attention=true
want_tokenizers=true
want_dev=false
quiet=false
arch=''
python="${PYTHON:-}"
torch_index=''
child=''
changed=false
failures=''

say() { echo "setup: $*"; }
warn() { echo "setup: $*" >&2; }
die() {
  warn "$*"
  exit 1
}
# A step that failed; the steps after it still run, and the end of the run says so.
failed() { failures+="setup: not done: $*"$'\n'; }
wrong_usage() {
  warn "$*; see ./setup.sh --help"
  exit 2
}

parse_options() {
  while (($# > 0)); do
    if [[ "$1" =~ ^--(arch|python|torch-index)$ && -z "${2:-}" ]]; then
      wrong_usage "$1: a value is missing"
    fi
    case "$1" in
      --local) local_only=true want_deepep=false want_tokenizers=false ;;
      --no-deepep) want_deepep=false ;;
      --no-flash-attention) want_flash_attention=false ;;
      --no-tokenizers) want_tokenizers=false ;;
      --arch) arch="$2" && shift ;;
      --python) python="$2" && shift ;;
      --torch-index) torch_index="$2" && shift ;;
      --dev) want_dev=true ;;
      --quiet) quiet=true ;;
      -h | --help) usage && exit 0 ;;
      *) wrong_usage "unknown option: $1" ;;
    esac
    shift
  done
  arch="${arch//[ ,]/;}"
  if [[ -n "${arch}" && ! "${arch}" =~ ^(9\.0|1[0-9]\.[0-9])a?(\;(9\.0|1[0-9]\.[0-9])a?)*$ ]]; then
    wrong_usage "--arch ${arch}: allowed are 9.0 (Hopper), 10.0 (Blackwell), or several joined by ';'"
  fi
}

# One at a time: two would install into the same folder. A killed run's pip keeps the lock until
# it has ended, because it inherits the descriptor.
take_lock() {
  command -v flock >/dev/null || return 0
  exec 9>build/setup.lock
  if ! flock --nonblock 9; then
    say "another setup.sh runs in this folder; waiting for it"
    flock 9
  fi
}

on_exit() {
  if [[ -n "${child}" ]]; then
    kill -TERM -- "-${child}" 2>/dev/null || kill -TERM "${child}" 2>/dev/null || true
    wait "${child}" 2>/dev/null || true
  fi
  rm -rf build/tmp
}

on_signal() {
  warn "interrupted; run ./setup.sh again, it goes on from here"
  exit 130
}

# Runs a command with its output in the log; on failure its last lines are shown. In a process
# group of its own and waited for, so that an interrupt ends all of it at once.
logged() {
  local status=0 before
  printf '\n$ %s\n' "$*" >>build/setup.log
  before="$(wc -l <build/setup.log)"
  set -m
  "$@" >>build/setup.log 2>&1 </dev/null &
  child=$!
  set +m
  wait "${child}" || status=$?
  child=''
  if ((status != 0)); then
    warn "this failed with status ${status} (its log is build/setup.log):"
    tail -n "+$((before + 1))" build/setup.log | tail -n 20 | sed 's/^/  | /' >&2
  fi
  return "${status}"
}

runs_python() { "$1" -c "import sys; sys.exit(sys.version_info < ${OLDEST_PYTHON})" &>/dev/null; }

find_python() {
  local candidate candidates=(python3.12 python3.13 python3.14 python3.11 python3)
  if [[ -n "${python}" ]]; then
    candidates=("${python}")
  fi
  for candidate in "${candidates[@]}"; do
    if runs_python "${candidate}"; then
      python="${candidate}"
      break
    fi
  done
  runs_python "${python}" \
    || die "${python:-no Python found}: this is not a Python 3.11 or later; name one with --python"
  "${python}" -c 'import ensurepip, venv' &>/dev/null \
    || die "${python} cannot make virtual environments; install its venv package" \
      "(Debian and Ubuntu: apt-get install python3-venv)"
}

# What a finished environment was made from; it is compared in full.
environment_stamp() {
  cat requirements.txt
  if "${want_dev}"; then
    cat requirements-dev.txt
  fi
  echo "# index: ${torch_index}"
}

has_current_environment() {
  [[ -f .venv/.cookbook/installed ]] || return 1
  if [[ -f .venv/.cookbook/dev ]]; then
    want_dev=true # an environment for developers stays one
  fi
  if [[ -z "${torch_index}" && -f .venv/.cookbook/torch-index ]]; then
    torch_index="$(<.venv/.cookbook/torch-index)"
  fi
  environment_stamp | cmp -s - .venv/.cookbook/installed && is_environment \
    && { [[ -z "${python}" ]] || same_version "${python}" .venv/bin/python; }
}

same_version() {
  local print='import sys; print(sys.version_info[:2])'
  [[ "$("$1" -c "${print}" 2>/dev/null)" == "$("$2" -c "${print}" 2>/dev/null)" ]]
}

# Where pyvenv.cfg is lost, or bin/python starts another one, packages would go elsewhere.
is_environment() {
  runs_python .venv/bin/python \
    && .venv/bin/python -c 'import os, sys; sys.exit(not os.path.samefile(sys.prefix, ".venv"))'
}

is_usable_environment() {
  [[ ! -e .venv/.cookbook/unfinished ]] && is_environment \
    && .venv/bin/python -m pip --version &>/dev/null && same_version "${python}" .venv/bin/python
}

# An environment whose install was cut short can hold half a package that pip takes for complete, so
# one of ours is made anew; an environment that somebody else made is only added to.
make_environment() {
  local began=${SECONDS}
  if has_current_environment; then
    return 0
  fi
  changed=true
  find_python
  if [[ -e .venv ]] && ! is_usable_environment; then
    if [[ ! -d .venv/.cookbook ]]; then
      die ".venv is there but not a working Python 3.11 environment, and not made by setup.sh;" \
        "move it away"
    fi
    say "making .venv anew: it is unfinished or has another Python"
    mv .venv ".venv.old.$$"
    rm -rf .venv.old.*
  fi
  mkdir -p .venv/.cookbook
  rm -f .venv/.cookbook/installed
  touch .venv/.cookbook/unfinished
  say "installing the pins into .venv ($("${python}" -V)); 1 to 4 minutes, log in build/setup.log"
  if [[ ! -x .venv/bin/python ]]; then
    logged "${python}" -m venv .venv || exit 1
  fi
  install_requirements || exit 1
  if "${want_dev}"; then
    touch .venv/.cookbook/dev
  fi
  echo "${torch_index}" >.venv/.cookbook/torch-index
  environment_stamp >.venv/.cookbook/installed
  rm -f .venv/.cookbook/unfinished
  say "installed in $((SECONDS - began)) s"
}

# uv takes a sixth of pip's time. Where there is none it comes from the package index, into a folder of
# its own, and keeps nothing in the user's home. It does not read pip's configuration, so pip follows
# where uv fails.
install_requirements() {
  local uv=uv
  if ! command -v uv >/dev/null; then
    uv=build/uv/bin/uv
    if [[ ! -x "${uv}" ]]; then
      logged "${python}" -m venv build/uv || true
      build/uv/bin/python -m pip --disable-pip-version-check install "uv==${UV_VERSION}" \
        >>build/setup.log 2>&1 || true
    fi
    export UV_NO_CACHE=1 UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$(pip_index)}"
  fi
  if command -v "${uv}" >/dev/null; then
    install_pins "${uv}" pip install --python .venv/bin/python && return
    warn "uv could not install the pins; pip tries now"
  fi
  install_pins .venv/bin/python -m pip --disable-pip-version-check install --progress-bar off
}

# The package index that pip is told to use, by its variable or its configuration.
pip_index() {
  echo "${PIP_INDEX_URL:-$(.venv/bin/python -m pip config get global.index-url 2>/dev/null \
    || echo https://pypi.org/simple)}"
}

# Arguments: the installer's command.
install_pins() {
  local files=(-r requirements.txt)
  if [[ -n "${torch_index}" ]]; then
    grep -E '^(torch|torchao)==' requirements.txt >build/tmp/torch.txt
    logged "$@" --index-url "${torch_index}" -r build/tmp/torch.txt || return
  fi
  if "${want_dev}"; then
    files+=(-r requirements-dev.txt)
  fi
  logged "$@" "${files[@]}"
}

make_corpus() {
  .venv/bin/python -c 'import sys; from cookbook.install.corpus import *; sys.exit(not is_made(LOCAL_ASSETS))' \
    && return
  changed=true
  say "making the local corpus and tokenizer in assets/local"
  logged .venv/bin/python -m cookbook.install.corpus || failed "the local corpus"
}

# Only the two files that TorchTitan reads; a folder appears when both are there.
fetch_tokenizer() {
  local repository="$1" folder="assets/hf/${1##*/}" part="assets/hf/.${1##*/}.part"
  if [[ -s "${folder}/tokenizer.json" && -s "${folder}/tokenizer_config.json" ]]; then
    return 0
  fi
  changed=true
  say "downloading the tokenizer of ${repository}"
  if logged .venv/bin/python -c "${FETCH}" "${repository}" "${part}"; then
    mkdir -p "${folder}"
    mv -f "${part}/tokenizer_config.json" "${part}/tokenizer.json" "${folder}/"
    rm -rf "${part}"
  else
    failed "the tokenizer of ${repository}; set HF_ENDPOINT to a mirror that is reachable, or" \
      "copy tokenizer.json and tokenizer_config.json into ${folder}"
  fi
}

# Runs a module that says with --plan what it would do: status 0 nothing, 3 not needed or not possible
# here, 4 something. Fails where the module does.
# Arguments: what it does (a verb), how long, the module and its words.
planned() {
  local verb="$1" time="$2" status=0 plan
  shift 2
  plan="$(.venv/bin/python -m "$@" --plan)" || status=$?
  case "${status}" in
    0) ;;
    3) "${quiet}" || "${local_only}" || say "${plan}" ;;
    4)
      changed=true
      say "${verb} ${plan}; ${time}"
      logged .venv/bin/python -m "$@"
      ;;
    *) return 1 ;;
  esac
}

main() {
  local repository status=0 here_only=()
  parse_options "$@"
  if "${local_only}"; then
    here_only=(--local)
  fi
  cd "$(dirname "${BASH_SOURCE[0]}")"
  if [[ ! -f requirements.txt || ! -d cookbook ]]; then
    die "run setup.sh from its checkout: $(pwd) holds no cookbook"
  fi
  # A loaded module or a user's pip configuration must not lead installs elsewhere.
  unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX
  export PYTHONNOUSERSITE=1
  mkdir -p build
  take_lock
  trap on_exit EXIT
  trap on_signal INT TERM HUP
  # /tmp is memory on some clusters, too small for unpacked wheels.
  rm -rf build/tmp
  mkdir -p build/tmp
  TMPDIR="$(pwd)/build/tmp"
  export TMPDIR
  echo "== $(date -u +%FT%TZ) setup.sh $*" >>build/setup.log

  make_environment
  make_corpus
  if "${want_tokenizers}"; then
    for repository in "${TOKENIZERS[@]}"; do
      fetch_tokenizer "${repository}"
    done
  fi
  if "${want_deepep}"; then
    planned building "2 to 15 minutes" cookbook.install.deepep --arch "${arch}" || failed "DeepEP"
  fi
  if "${want_flash_attention}"; then
    planned installing "about a minute" cookbook.install.attention "${here_only[@]}" \
      || failed "FlashAttention-4"
  fi

  if "${quiet}" && ! "${changed}"; then
    return 0
  fi
  echo
  .venv/bin/python -m cookbook.cli.main doctor "${here_only[@]}" || status=1
  if [[ -n "${failures}" ]]; then
    echo >&2
    echo -n "${failures}" >&2
    status=1
  fi
  return "${status}"
}

main "$@"
