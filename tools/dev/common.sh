# shellcheck shell=bash
# Sourced by ./dev: messages, the chosen Python, the number of jobs.

if [ -t 2 ]; then BOLD=$'\033[1m' PLAIN=$'\033[0m'; else BOLD='' PLAIN=''; fi
say() { echo "$BOLD==> $*$PLAIN" >&2; }
die() { echo "$BOLD./dev: $*$PLAIN" >&2; exit 1; }

# The environment that everything in Python runs in: DMUOND_PYTHON, an active virtual or conda
# environment, or .venv of this checkout.
choose_python() {
  if [ -n "${DMUOND_PYTHON:-}" ]; then
    PYTHON=$(command -v "$DMUOND_PYTHON") || die "DMUOND_PYTHON=$DMUOND_PYTHON is not a program"
  elif [ -n "${VIRTUAL_ENV:-}" ]; then
    PYTHON=$VIRTUAL_ENV/bin/python
  elif [ -n "${CONDA_PREFIX:-}" ]; then
    PYTHON=$CONDA_PREFIX/bin/python
  else
    PYTHON=$PWD/.venv/bin/python
  fi
}

# One job per core, but no more than one per 2 GiB of memory: files that include gRPC need 1 to 1.5.
count_jobs() {
  local cores gib
  cores=$(nproc)
  gib=$(awk '/MemTotal/ {print int($2 / 2097152)}' /proc/meminfo)
  [ "$gib" -ge 1 ] || gib=1
  echo "${DMUOND_JOBS:-$((cores < gib ? cores : gib))}"
}

# The CUDA compiler, if there is one.
find_nvcc() {
  command -v nvcc || { [ -x /usr/local/cuda/bin/nvcc ] && echo /usr/local/cuda/bin/nvcc; }
}
