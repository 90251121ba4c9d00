# shellcheck shell=bash
# Sourced by ./dev: container images, built without Docker, a registry or a running service.

# A Debian 12 base, from packages alone. debootstrap takes its mirror from the machine; DMUOND_APT_SOURCES names a
# sources.list for the image itself, with security updates for instance.
make_base() { # NAME
  local root container
  root=$(mktemp -d) || return
  say "making the base image $1 with debootstrap"
  debootstrap --variant=minbase bookworm "$root" > "$root.log" 2>&1 ||
    { tail -n 20 "$root.log" >&2; rm -rf "$root" "$root.log"; return 1; }
  [ -z "${DMUOND_APT_SOURCES:-}" ] || cp "$DMUOND_APT_SOURCES" "$root/etc/apt/sources.list"
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/usr/share/{doc,man,locale,info}/* "$root.log"
  # What is installed later leaves out the same.
  printf 'path-exclude=/usr/share/%s/*\n' doc man locale info > "$root/etc/dpkg/dpkg.cfg.d/small"
  container=$(buildah from scratch) &&
    buildah add --quiet "$container" "$root" / > /dev/null &&
    buildah commit --quiet --rm "$container" "$1" > /dev/null
  local result=$?
  rm -rf "$root"
  return $result
}

# ./dev image [daemon|trainer]...: dmuond:latest and dmuond-trainer:latest, of the checkout as it is.
cmd_image() {
  local target name base=${BASE:-localhost/dmuond-base} arguments=()
  for name in buildah debootstrap; do
    command -v "$name" > /dev/null || die "image needs $name: apt-get install --no-install-recommends buildah debootstrap"
  done
  [ "$(id -u)" = 0 ] || die "image runs debootstrap and buildah --isolation chroot, which need root"
  [ -n "${BASE:-}" ] || buildah inspect --type image "$base" > /dev/null 2>&1 || make_base "$base" || die "no base image"
  arguments=(--build-arg "BASE=$base" --build-arg "VERSION=$(git describe --always --dirty)"
    --build-arg "REVISION=$(git rev-parse HEAD)")
  for name in TORCH_INDEX CA; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
  done
  [ $# -gt 0 ] || set -- daemon trainer
  for target in "$@"; do
    case $target in
      daemon) name=dmuond ;;
      trainer) name=dmuond-trainer ;;
      *) die "image: no target '$target'; there are daemon and trainer" ;;
    esac
    say "building $name:latest"
    buildah build --isolation chroot --layers --target "$target" --tag "$name:latest" "${arguments[@]}" . || return
  done
}
