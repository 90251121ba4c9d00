#!/usr/bin/env bash
# Installs the client into a prefix of its own, builds the example against it as a user would, and
# lets it say what it is.   usage: install_test.sh BUILD_DIR CMAKE CXX
set -euo pipefail
build=$1 cmake=$2 cxx=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$cmake" --install "$build" --component client --prefix "$work/prefix"
# Not from inside the checkout: nothing of it may be found by chance.
cp -r client/cpp/examples "$work/example"
"$cmake" -S "$work/example" -B "$work/build" -G Ninja -DCMAKE_CXX_COMPILER="$cxx" \
  -DCMAKE_PREFIX_PATH="$work/prefix"
"$cmake" --build "$work/build"
cd "$work/example"
if output=$("$work/build/dmuond-example-trainer" --address=nowhere --data=waves.csv 2>&1); then
  echo "an address that is no path was accepted" && exit 1
fi
grep -q "address 'nowhere' is not the path of a Unix socket" <<< "$output"
