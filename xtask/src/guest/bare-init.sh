#!/bin/busybox sh
# How guests begin whose initramfs is the whole system; what each is for follows.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc && mount -t devtmpfs dev /dev && mount -t tmpfs tmp /tmp
for module in /modules/*.ko; do insmod $module 2> /dev/null; done
echo "guest: up $(uname -r)"
fail() { echo "guest: failed: $*"; sleep 1000; }

