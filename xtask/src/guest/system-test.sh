#!/bin/bash
# Uses vmstrata as its units run it under systemd: started by its socket, in its sandbox, restarted, killed and upgraded.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
uri='nbd+unix:///web?socket=/run/vmstrata-guests/nbd.sock'

off() {
    sync
    echo o > /proc/sysrq-trigger
    while :; do sleep 1; done
}
fail() {
    systemctl status --no-pager --full vmstrata.service vmstrata-control.socket
    journalctl --boot --no-pager --output cat --lines 60
    echo "guest: failed: $*"
    off
}
of_service() {
    systemctl show --property "$1" --value vmstrata.service
}
until_active() {
    for tries in $(seq 300); do
        [ "$(of_service ActiveState)" = active ] && return
        sleep 0.2
    done
    fail "not active after $tries looks: $1"
}
# Whether the disk reads as this file.
reads_as() {
    [ "$(nbdcopy -- "$uri" - | sha256sum)" = "$(sha256sum < "$1")" ] || fail "the disk is not as $1: $2"
}
# How the server's process is confined, by the kernel's own word.
confined() {
    pid=$(of_service MainPID)
    grep -q "^$1:[[:space:]]*$2\$" "/proc/$pid/status" || fail "$(grep "^$1:" "/proc/$pid/status") is not $2"
}

echo "guest: up"
# As whoever installs it does.
chown -R vmstrata: /srv/vms && chmod 700 /srv/vms || fail "chown"
[ "$(of_service ActiveState)" = inactive ] || fail "the service runs before anyone has asked"
systemctl is-active --quiet vmstrata-control.socket || fail "nothing listens"
vmstrata status || fail "the first command is not answered"
until_active "the first command"
reads_as /srv/before.raw "at first"
echo "guest: the socket started the server"

nbdcopy -- /srv/after.raw "$uri" || fail "write"
reads_as /srv/after.raw "after a write"
vmstrata snapshot create /srv/vms/web.qcow2 --name s1 || fail "snapshot"
vmstrata resize /srv/vms/web.qcow2 +1M || fail "resize"
vmstrata resize /srv/vms/web.qcow2 8M --shrink || fail "shrink"
confined Seccomp 2
confined CapEff 0000000000000000
confined NoNewPrivs 1
# Whether a disk is refused for this reason.
refused() {
    cp -p /srv/vms/other.qcow2 "$1" || fail "copy to $1"
    said=$(vmstrata disk add "path=$1$2" 2>&1) && fail "$1$2 was opened"
    [[ "$said" = *"$3"* ]] || fail "$1$2: $said"
}
cp -p /srv/vms/web.s1.qcow2 /srv/vms/other.qcow2 || fail "copy"
vmstrata disk add path=/srv/vms/other.qcow2,name=other && vmstrata disk remove other || fail "a disk where images are"
refused /etc/vmstrata/other.qcow2 "" "Read-only file system"
refused /home/other.qcow2 ",read-only" "ermission denied"
echo "guest: the sandbox lets it serve and no more"

# What a QEMU can do that was taken over: use the sockets of its group, and no more.
as_nobody() {
    chroot --userspec=nobody:nogroup "$1" / "${@:2}" > /dev/null 2>&1
}
as_nobody --groups=vmstrata-guests nbdinfo "$uri" || fail "the group cannot connect"
as_nobody --groups= nbdinfo "$uri" && fail "others can connect"
as_nobody --groups=vmstrata-guests vmstrata status && fail "the group has the control socket"
as_nobody --groups=vmstrata-guests cat /srv/vms/web.qcow2 && fail "the group can read the image"
[ "$(stat -c %U "/proc/$(of_service MainPID)")" = vmstrata ] || fail "the server runs as another user"
echo "guest: the group gets to its sockets and no further"

# The pruning unit, in a sandbox of its own: of two snapshots one goes.
vmstrata snapshot create /srv/vms/web.qcow2 --name s2 || fail "snapshot"
mkdir -p /etc/systemd/system/vmstrata-prune@.service.d
printf '[Service]\nEnvironment=VMSTRATA_KEEP=last=1\n' > /etc/systemd/system/vmstrata-prune@.service.d/keep.conf
systemctl daemon-reload
prune="vmstrata-prune@$(systemd-escape --path /srv/vms/web.qcow2).service"
systemctl start "$prune" || { journalctl --unit "$prune" --no-pager; fail "prune"; }
names=$(vmstrata snapshot list /srv/vms/web.qcow2 --json | grep -o '"name": "s[0-9]"')
[ "$names" = '"name": "s2"' ] || fail "after pruning: $names"
reads_as /srv/after.raw "after pruning"
echo "guest: the pruning unit deletes what no rule keeps"

# The next version, under clients that ask all the time: none of them is turned away.
while [ ! -e /tmp/upgraded ]; do
    vmstrata status > /dev/null || touch /tmp/turned-away
done &
asking=$!
before=$(of_service MainPID)
cp /usr/bin/vmstrata /usr/bin/vmstrata.new && mv /usr/bin/vmstrata.new /usr/bin/vmstrata || fail "install"
systemctl restart vmstrata.service || fail "restart"
touch /tmp/upgraded
wait "$asking"
[ ! -e /tmp/turned-away ] || fail "a command was turned away while the server was restarted"
[ "$(of_service MainPID)" != "$before" ] || fail "the same process"
reads_as /srv/after.raw "after an upgrade"
echo "guest: the upgrade kept it serving"

nbdcopy -- /srv/before.raw "$uri" || fail "write"
before=$(of_service MainPID)
kill -9 "$before"
for tries in $(seq 300); do
    now=$(of_service MainPID)
    [ "$now" != 0 ] && [ "$now" != "$before" ] && break
    sleep 0.2
done
until_active "killed"
[ "$(of_service NRestarts)" -ge 1 ] || fail "it was not restarted"
# Nobody has flushed that: it is in the journal that outlived the process.
reads_as /srv/before.raw "after a kill"
systemctl stop vmstrata.service || fail "stop"
vmstrata status > /dev/null || fail "not started again"
until_active "stopped"
reads_as /srv/before.raw "after a stop"
echo "guest: it comes back"
echo "guest: done"
off
