#!/bin/busybox sh
# Loads the disk's driver, waits for the disk, and hands over to the system on it.
export PATH=/bin
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*.ko; do /bin/busybox insmod $module; done
tries=0
until [ -b /dev/vda ]; do
    tries=$((tries + 1))
    [ $tries -gt 600 ] && echo "guest: failed: no disk" && /bin/busybox poweroff -f
    /bin/busybox usleep 50000
done
case "$(/bin/busybox cat /proc/cmdline)" in *rootflags=ro*) mode=ro ;; *) mode=rw ;; esac
/bin/busybox mount -t ext4 -o $mode,errors=remount-ro /dev/vda /root || {
    echo "guest: failed: no root file system"
    /bin/busybox poweroff -f
}
/bin/busybox mount --move /dev /root/dev
/bin/busybox mount --move /proc /root/proc
exec /bin/busybox switch_root /root /sbin/init
