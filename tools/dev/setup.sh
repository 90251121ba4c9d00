# shellcheck shell=bash
# Sourced by ./dev: installs what is missing, and says what before it does.

readonly SYSTEM_LIST=tools/dev/apt-packages.txt PYTHON_LIST=tools/dev/requirements.txt

missing_packages() { # PART...
  local wanted have
  wanted=$(tools/dev/packages.sh "$SYSTEM_LIST" "$@") || return
  have=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' $wanted 2>/dev/null |
    awk '$1 == "installed" {print $2}' | sort -u || true)
  comm -23 <(printf '%s\n' "$wanted") <(printf '%s\n' "$have")
}

setup_system() { # PART...
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    say "this is not Debian or Ubuntu: install the equivalents of what $SYSTEM_LIST has for $* yourself"
    return
  fi
  local missing as_root=()
  missing=$(missing_packages "$@")
  [ -n "$missing" ] || return 0
  [ "$(id -u)" = 0 ] || as_root=(sudo)
  say "installing Debian packages:" $missing
  if [ "${#as_root[@]}" -gt 0 ] && ! command -v sudo >/dev/null; then
    die "needs root, and there is no sudo; as root, run: apt-get install --no-install-recommends" $missing
  fi
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends $missing
}

# A Python of 3.10 or newer to make .venv with.
base_python() {
  local candidate
  for candidate in python3 /usr/bin/python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.10 or newer with the venv module found; set DMUOND_PYTHON"
}

# Whether this Python has a torch that the client works with.
has_usable_torch() { # PYTHON
  "$1" - <<'PY'
import re, sys
from importlib import metadata
try:
    found = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
except metadata.PackageNotFoundError:
    found = None
sys.exit(found is None or tuple(map(int, found.groups())) < (2, 9))
PY
}

make_venv() {
  local base options=()
  base=$(base_python)
  # A torch of the machine (an NVIDIA container's, say) is used rather than downloaded again, unless it
  # is too old: Debian 12's own is 1.13, and would stand in the way of the right one.
  if has_usable_torch "$base"; then
    options=(--system-site-packages)
  fi
  say "making the Python environment .venv with $base ${options[*]}"
  "$base" -m venv "${options[@]}" .venv || { rm -rf .venv; die "$base cannot make an environment"; }
}

# "2.9.1", or nothing.
torch_version() {
  "$PYTHON" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

need_python() {
  choose_python
  [ -x "$PYTHON" ] || [ "$PYTHON" != "$PWD/.venv/bin/python" ] || make_venv
  [ -x "$PYTHON" ] || die "no Python at $PYTHON"
}

# The packages of these parts that this Python lacks, in one line.
missing_python() { # PART...
  local wanted
  wanted=$(tools/dev/packages.sh "$PYTHON_LIST" "$@")
  echo $("$PYTHON" tools/dev/python_needs.py $wanted)
}

setup_python() { # PART...
  need_python
  local missing torch limits=() quiet=()
  missing=$(missing_python "$@")
  if [ -n "$missing" ]; then
    torch=$(torch_version)
    case " $missing " in *" torch>"*)
      [ -z "$torch" ] || die "$PYTHON has torch $torch; dmuond needs 2.9 or newer. Update it, or set DMUOND_PYTHON"
      say "torch is not there yet: with its libraries it is a download of up to 3 GB" ;;
    esac
    if [ -n "$torch" ]; then
      mkdir -p build
      echo "torch==$torch" > build/torch-as-found.txt
      limits=(--constraint build/torch-as-found.txt)
    fi
    say "installing Python packages into $("$PYTHON" -c 'import sys; print(sys.prefix)'):" $missing
    [ -t 1 ] || quiet=(-q)
    if [[ " $missing " = *" torch>"* && -n "${DMUOND_TORCH_INDEX:-}" ]]; then
      "$PYTHON" -m pip install "${quiet[@]}" --index-url "$DMUOND_TORCH_INDEX" 'torch>=2.9'
    fi
    "$PYTHON" -m pip install "${quiet[@]}" "${limits[@]}" $missing
  fi
  case " $* " in *" client "*) setup_client ;; esac
}

# The package dmuond itself, in place: edits need no new install.
setup_client() {
  [ -f client/python/pyproject.toml ] || return 0
  "$PYTHON" - <<'PY' && return 0
import json, sys
from importlib import metadata
from pathlib import Path
try:
    text = metadata.distribution("dmuond").read_text("direct_url.json") or "{}"
except metadata.PackageNotFoundError:
    sys.exit(1)
sys.exit(json.loads(text).get("url") != Path("client/python").resolve().as_uri())
PY
  say "installing client/python into the environment (editable)"
  "$PYTHON" -m pip install -q --no-deps --no-build-isolation --editable client/python
}

# Both lists' packages for these parts.
setup_for() { # PART...
  local part system=() python=()
  for part; do
    ! grep -qxF "[$part]" "$SYSTEM_LIST" || system+=("$part")
    ! grep -qxF "[$part]" "$PYTHON_LIST" || python+=("$part")
  done
  setup_system "${system[@]}"
  setup_python "${python[@]}"
}

# setup_python beside a command, whose work is the processor's as this one's is the network's.
setup_python_beside() { # COMMAND...
  local installing
  set -m # a process group, for the trap; a signal from the terminal reaches the command's alone
  setup_python client > /dev/null &
  installing=$!
  set +m
  trap "kill -- -$installing 2> /dev/null" EXIT
  "$@"
  wait $installing || die "the Python packages that are missing were not installed"
  trap - EXIT
}

setup_all() { setup_for programs client tests sanitizers lint "$@"; }
