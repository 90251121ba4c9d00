#!/usr/bin/env bash
# Starts deploy/systemd/dmuond.service under a systemd that is process 1 of a namespace, in a small Debian, and trains
# against it as its own user and as another one. Prints what came of it. Needs root, debootstrap and the network.
#
#   boot_unit.sh FOLDER_OF_PROGRAMS PYTHON SCRATCH
#
# The trainers run this checkout's client; what the client needs comes from PYTHON's environment.
set -euo pipefail
bin=$(realpath "$1") python=$2 root=$(realpath "$3")/root
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
lent=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

make_root() {
  local packages
  packages=$("$here/tools/dev/runtime-packages.sh" "$bin"/dmuond "$bin"/dmuond-lane "$bin"/dmuonctl | paste -sd,)
  debootstrap --variant=minbase --include="systemd,python3,$packages" bookworm "$root" > "$root.log" 2>&1 ||
    { tail -n 20 "$root.log" >&2; return 1; }
  chroot "$root" groupadd ml
  chroot "$root" useradd --system --user-group --groups ml dmuond
  chroot "$root" useradd --groups ml trainer
  install -m 755 "$bin"/dmuond "$bin"/dmuond-lane "$bin"/dmuonctl "$root/usr/bin/"
  mkdir -p "$root/etc/dmuond" "$root/var/lib/dmuond" "$root/checkout" "$root/lent"
  chroot "$root" chown dmuond:dmuond /var/lib/dmuond
  # As the unit's own comments say for trainers of other users and for snapshots.
  sed 's/^#ReadWritePaths/ReadWritePaths/; s/^Group=dmuond/Group=ml/' "$here/deploy/systemd/dmuond.service" \
    > "$root/etc/systemd/system/dmuond.service"
  mkdir "$root/etc/systemd/system/dmuond.service.d"
  printf '[Service]\nWatchdogSec=3\n' > "$root/etc/systemd/system/dmuond.service.d/soon.conf"
  cat > "$root/etc/dmuond/config.textproto" << CONFIG
devices: "cpu:2"
snapshot_dir: "/var/lib/dmuond"
socket_group: "ml"
allowed_uids: [$(chroot "$root" id -u dmuond), $(chroot "$root" id -u trainer)]
CONFIG
  cat > "$root/etc/systemd/system/check.service" << 'UNIT'
[Unit]
DefaultDependencies=no
Wants=dmuond.service
After=dmuond.service
[Service]
Type=oneshot
ExecStart=/check.sh
ExecStopPost=/bin/systemctl exit --force
StandardOutput=file:/check.log
StandardError=inherit
TimeoutStartSec=300
UNIT
  cat > "$root/check.sh" << 'CHECK'
#!/bin/bash
export DMUOND_ADDRESS=unix:/run/dmuond/dmuond.sock PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=/checkout/client/python/src:/checkout/tests/python:/lent
train() { runuser -u "$1" -- env "DMUOND_SERVER_UID=$(id -u dmuond)" python3 /checkout/tests/python/"$2" "$DMUOND_ADDRESS" "${@:3}"; }
dmuonctl status > /dev/null || journalctl -u dmuond  # a unit that is started serves
train trainer wheel_trainer.py > /dev/null
echo "another user: $?"
train dmuond wheel_trainer.py save | grep saved
echo "its own user: ${PIPESTATUS[0]}"
grep -E '^(Seccomp|CapBnd):' "/proc/$(pidof dmuond)/status"
restarts() { systemctl show dmuond -p NRestarts --value; }
echo "restarts: $(restarts)"
kill -STOP "$(pidof dmuond)"
timeout 60 bash -c "$(declare -f restarts); until [ \$(restarts) = 1 ] && systemctl -q is-active dmuond; do sleep 0.1; done"
echo "restarts of one that does not turn: $(restarts)"
dmuonctl status > /dev/null
echo "it serves: $?"
systemctl reload dmuond && systemctl stop dmuond
systemctl show dmuond -p Result,ExecMainStatus
CHECK
  chmod 755 "$root/check.sh"
}

# In namespaces of its own, all of whose mounts end with it. cgroups are the machine's, of version 1 or 2.
boot() {
  local name
  mount --make-rprivate /
  mount --rbind "$root" "$root"
  mount -t proc proc "$root/proc"
  mount --rbind -o ro /sys "$root/sys"
  if [ "$(stat -fc %T /sys/fs/cgroup)" != cgroup2fs ]; then
    mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
    mkdir -p "$root"/sys/fs/cgroup/{systemd,unified,memory,pids}
    mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified"
    for name in memory pids; do mount -t cgroup -o $name cgroup "$root/sys/fs/cgroup/$name"; done
  fi
  for name in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$name"; done
  chmod 1777 "$root/tmp"
  for name in null zero full random urandom tty; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
  done
  ln -s /proc/self/fd "$root/dev/fd"
  mkdir "$root/dev/shm"
  mount -t tmpfs tmpfs "$root/dev/shm"
  mount --rbind -o ro "$here" "$root/checkout"
  mount --rbind -o ro "$lent" "$root/lent"
  exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" \
    /lib/systemd/systemd --system --unit=check.service --log-target=console --show-status=no
}

make_root
export -f boot
export root here lent
unshare --pid --fork --mount --uts --ipc bash -euc boot > "$root.boot.log" 2>&1 || { cat "$root.boot.log" >&2; exit 1; }
cat "$root/check.log"
