#!/usr/bin/env bash
# Installs both wheels with pip into a Debian 12 that has Python and pip and no other package, and trains there: on the
# CPU, and on a GPU of the fake driver. Needs root, debootstrap and the network.
#
#   bare_root.sh FOLDER_OF_WHEELS BUILD PYTHON SCRATCH
#
# torch and what else the wheels need come from PYTHON's environment, whose Python must be of the root's version.
set -euo pipefail
wheels=$(realpath "$1") build=$(realpath "$2") python=$3 root=$(realpath "$4")/root
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
lent=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

debootstrap --variant=minbase --include=python3-pip,python3-venv bookworm "$root" > "$root.log" 2>&1 ||
  { tail -n 20 "$root.log" >&2; exit 1; }

cat > "$root/train.sh" << 'TRAIN'
set -eu
python3 -m venv /venv
site=$(/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo /lent > "$site/lent.pth"
/venv/bin/pip uninstall -q -y setuptools  # older than torch wants, and before the lent one
/venv/bin/pip install -q --no-index /wheels/*.whl 'torch>=2.9'
export PATH=/venv/bin
dmuonctl run -- python /here/client/python/examples/train.py
echo "lane_binary: '/build/bin/dmuond-lane-fake'" > /fake.textproto
export LD_LIBRARY_PATH=/build/fake_cuda:$site/dmuond_engine/lib FAKE_CUDA_DEVICES=1 FAKE_CUDA_NO_CONTEXT=dmuond
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/here/tests/python
exec dmuonctl run --devices=cuda:1 --config=/fake.textproto -- python -c '
import dmuond, gpus, wheel_trainer
gpus.train(0, 1, wheel_trainer.JOB, {})
print("on a GPU:", dmuond.__file__)'
TRAIN

# In namespaces of its own, all of whose mounts and processes end with it.
enter() {
  mount --make-rprivate /
  mount -t proc proc "$root/proc"
  mkdir -p "$root/dev/shm"
  mount -t tmpfs tmpfs "$root/dev/shm"
  for name in wheels build lent here; do
    mkdir "$root/$name"
    mount --bind -o ro "${!name}" "$root/$name"
  done
  exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" sh /train.sh
}
export -f enter
export root wheels build lent here
unshare --pid --fork --kill-child --mount --ipc bash -euc enter
