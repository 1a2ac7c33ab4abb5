# Fills memory with file cache of every kind (clean, dirty, mapped, partly overwritten), tmpfs and processes; then writes
# what the kernel says of each page to the last disk, past the cache, and keeps still.
mount -t ext4 /dev/vda /ext4 && mount -t ext4 /dev/vdb /ext4-1k && mount -t xfs /dev/vdc /xfs || fail "mount"
cp /ext4/data-* /xfs && sync && echo 3 > /proc/sys/vm/drop_caches || fail "copy"
# What is dirty stays so unless it is synced.
echo 0 > /proc/sys/vm/dirty_writeback_centisecs
echo 360000 > /proc/sys/vm/dirty_expire_centisecs
for dir in ext4 ext4-1k xfs; do
    cat /$dir/data-* > /dev/null || fail "read $dir"
    head -c 2500000 /dev/urandom > /$dir/written && sync || fail "write $dir"
    cp /bin/busybox /$dir/busybox && sync || fail "copy a program to $dir"
    # Runs from there: its pages are mapped.
    /$dir/busybox sleep 1000 &
done
for dir in ext4 ext4-1k xfs; do
    head -c 1300000 /dev/urandom > /$dir/dirty
    head -c 3000 /dev/urandom | dd of=/$dir/data-0 bs=1000 seek=77 conv=notrunc 2> /dev/null
    head -c 1000 /dev/urandom | dd of=/$dir/holes bs=1000 seek=900 2> /dev/null
done
head -c 4000000 /dev/urandom > /tmp/shared
sleep 1
dd if=/proc/kpageflags of=/dev/vdd bs=64k oflag=direct 2> /dev/null || fail "kpageflags"
dd if=/proc/kpagecount of=/dev/vdd bs=64k seek=256 oflag=direct 2> /dev/null || fail "kpagecount"
echo "guest: still"
sleep 1000
