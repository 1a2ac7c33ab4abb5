# Common to the scripts here: finding and installing what they need. Sourced, never run.
# shellcheck shell=bash

export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-auto}
# Where Debian keeps mkfs.ext4 and losetup, for users who are not root.
export PATH=$PATH:/usr/sbin:/sbin

say() { printf '\n== %s\n' "$*"; }

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

# Runs a command as root: directly if we are, else by sudo.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif have sudo; then
        sudo "$@"
    else
        die "needs root to run '$*', and there is no sudo: run it by hand, then start again"
    fi
}

# Says so when fewer than `$1` GiB are free where this repository lies: a full disk fails in many places, few of which name it.
warn_of_little_space() {
    local free
    free=$(df --output=avail -BG . | tail -n 1 | tr -dc '0-9')
    [ "${free:-$1}" -ge "$1" ] || say "only $free GiB are free here: building and running this takes up to $1 GiB"
}

# Prints the Debian packages whose commands are missing, of the `command:package` pairs given.
missing_packages() {
    local pair
    for pair in "$@"; do
        have "${pair%%:*}" || printf '%s\n' "${pair#*:}"
    done | sort -u
}

# Installs what is missing of the `command:package` pairs given; touches nothing when all is there.
need_commands() {
    local missing
    mapfile -t missing < <(missing_packages "$@")
    [ ${#missing[@]} -eq 0 ] && return
    have apt-get || die "please install what Debian calls: ${missing[*]}"
    say "installing ${missing[*]}"
    as_root apt-get update -q
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
    mapfile -t missing < <(missing_packages "$@")
    [ ${#missing[@]} -eq 0 ] || die "still missing after the installation: ${missing[*]}"
}

# Makes `cargo` run with the toolchain this repository pins.
need_rust() {
    have cargo || PATH=$HOME/.cargo/bin:$PATH
    if ! have cargo; then
        say "installing rustup"
        need_commands curl:curl update-ca-certificates:ca-certificates
        curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --default-toolchain none --no-modify-path
    fi
    have cargo || die "no cargo after installing rustup; see https://rustup.rs"
    cargo --version >/dev/null 2>&1 && return
    have rustup || die "cargo does not run, and there is no rustup to mend it"
    say "installing the toolchain named in rust-toolchain.toml"
    # Without a name: the active toolchain, with its components (rustup 1.28 and later); else by name.
    rustup toolchain install ||
        rustup toolchain install "$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)" \
            --profile minimal --component rustfmt --component clippy
    cargo --version >/dev/null || die "the toolchain of rust-toolchain.toml cannot be used"
}

# Makes the cargo subcommand `$1` available from the crate of the same name.
need_cargo_tool() {
    have "$1" && return
    say "installing $1"
    cargo install --locked "$1"
}

# Makes promtool run. It is taken out of its package: installing that would start a Prometheus server.
need_promtool() {
    local tools=$PWD/target/tools
    PATH=$PATH:$tools/usr/bin
    have promtool && return
    have apt-get || die "please install promtool"
    say "fetching promtool"
    mkdir -p "$tools"
    (cd "$tools" && apt-get download -q prometheus)
    dpkg-deb -x "$tools"/prometheus_*.deb "$tools"
    rm "$tools"/prometheus_*.deb
    have promtool || die "no promtool in Debian's package prometheus"
}

# Makes Python able to make environments of its own.
need_venv() {
    python3 -c 'import ensurepip' 2>/dev/null || as_root apt-get install -q -y --no-install-recommends python3-venv
}

# Sets SCHEMATHESIS to the program, which is installed for this repository alone; fails where that cannot be had.
need_schemathesis() {
    local tools=$PWD/target/tools/schemathesis
    SCHEMATHESIS=$tools/bin/schemathesis
    [ -x "$SCHEMATHESIS" ] && return
    say "installing schemathesis"
    need_venv || return
    python3 -m venv "$tools" && "$tools/bin/pip" install -q schemathesis==4.32.5
}

# Makes an NFS server and QEMU's NFS driver available. Debian would start the server: while they are installed, nothing is started.
need_nas() {
    local policy=/usr/sbin/policy-rc.d
    have ganesha.nfsd && have rpcbind && compgen -G '/usr/lib/*/ganesha/libfsalvfs.so' >/dev/null &&
        compgen -G '/usr/lib/*/qemu/block-nfs.so' >/dev/null && return
    have apt-get || die "please install nfs-ganesha, nfs-ganesha-vfs, rpcbind and QEMU's NFS driver"
    say "installing nfs-ganesha"
    if [ -e "$policy" ]; then policy=; else printf '#!/bin/sh\nexit 101\n' | as_root install -m 755 /dev/stdin "$policy"; fi
    as_root apt-get update -q
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
        nfs-ganesha nfs-ganesha-vfs rpcbind qemu-block-extra
    [ -z "$policy" ] || as_root rm "$policy"
}

# Makes apt know the packages that test guests are made of; they are unpacked, never installed.
need_package_lists() {
    apt-cache show linux-image-cloud-amd64 >/dev/null 2>&1 && return
    have apt-get || die "test guests are made of Debian packages: run this on Debian"
    say "reading Debian's package lists"
    as_root apt-get update -q
}

# What both the tests and the demonstration run: a C compiler for the build, QEMU, and what unpacks a guest.
readonly BASE_COMMANDS=(
    git:git
    cc:build-essential
    qemu-system-x86_64:qemu-system-x86
    qemu-img:qemu-utils
    qemu-storage-daemon:qemu-system-common
    nbdinfo:libnbd-bin
    mkfs.ext4:e2fsprogs
    xz:xz-utils
)
