# shellcheck shell=bash
# Sourced by ./dev: formatting and static analysis.

cpp_files() { git ls-files -- '*.cc' '*.h' '*.cu' '*.cuh'; }

cmd_fmt() {
  setup_for lint
  local files
  mapfile -t files < <(cpp_files; git ls-files -- '*.proto')
  if [ "${1:-}" = --check ]; then
    clang-format --dry-run -Werror "${files[@]}"
    "$PYTHON" -m ruff format --check .
    "$PYTHON" -m ruff check .
  else
    clang-format -i "${files[@]}"
    "$PYTHON" -m ruff check --fix .
    "$PYTHON" -m ruff format .
  fi
}

# clang-tidy on everything that the cpu preset compiles, or on what the last 20 commits touched.
cmd_tidy() {
  setup_for programs client tests lint
  build_preset cpu
  "$PYTHON" tools/dev/tidy.py --build build/cpu --jobs "$(count_jobs)" "$@"
}
