# Has files of three file systems on one disk in memory, clean: read from disk, and written and synced. Told to, it checks
# all of them, writes into them, and checks again; what they are to hold is in memory of its own.
systems="ext4 ext4-1k xfs"
mount -t ext4 /dev/vda1 /ext4 && mount -t ext4 /dev/vda2 /ext4-1k && mount -t xfs /dev/vda3 /xfs || fail "mount"
for dir in $systems; do
    mkdir /tmp/$dir
    for file in 1 2 3 4; do head -c $((700000 * file + 777)) /dev/urandom > /$dir/written-$file || fail "write $dir"; done
    cp /ext4/read-* /$dir 2> /dev/null
    for file in 0 1 2; do head -c 500000 /dev/urandom > /tmp/$dir/change-$file; done
    cp /tmp/$dir/change-* /$dir || fail "copy to $dir"
done
sync
echo 3 > /proc/sys/vm/drop_caches
for dir in $systems; do cat /$dir/read-* > /dev/null || fail "read $dir"; done
# Written once more: their pages have buffers, or states of blocks, of their own.
for dir in $systems; do
    for file in 1 2 3 4; do
        head -c 300000 /dev/urandom | dd of=/$dir/written-$file bs=1000 seek=100 conv=notrunc 2> /dev/null
        cat /$dir/written-$file > /dev/null
    done
    for file in 0 1 2; do cp /tmp/$dir/change-$file /$dir/change-$file; done
    (cd /$dir && sha256sum read-* written-* > /tmp/$dir.sums) || fail "sums of $dir"
done
sync
# Readers in the middle of a file: their pipes have pages of it.
for dir in $systems; do
    cat /$dir/read-0 | (while [ ! -e /tmp/go ]; do sleep 0.1; done; sha256sum > /tmp/$dir.piped; echo >> /tmp/$dir.piped) &
done
sleep 1
# What is said from here on counts.
dmesg -c > /dev/null
echo "guest: ready"

wrong=0
differs() {
    echo "guest: $1 differs"
    wrong=$((wrong + 1))
}
sums() {
    for dir in $systems; do
        (cd /$dir && sha256sum -c /tmp/$dir.sums 2> /dev/null) | grep -v ': OK$' | sed "s/^/$dir: /" > /tmp/bad
        while read -r line; do differs "$line"; done < /tmp/bad
    done
}
# A kernel that was told of pages it has, and finds that it has not, says so.
complaints() {
    dmesg | grep -E 'WARNING:|BUG:|EXT4-fs error|XFS.*(error|orrupt)' > /tmp/bad
    while read -r line; do differs "kernel: $line"; done < /tmp/bad
}
# What the readers got.
piped() {
    touch /tmp/go
    for dir in $systems; do
        while [ ! -s /tmp/$dir.piped ]; do sleep 0.1; done
        read -r got rest < /tmp/$dir.piped
        grep -q "^$got  read-0" /tmp/$dir.sums || differs "$dir/read-0 in a pipe"
    done
}
changed() {
    for dir in $systems; do
        for file in 0 1 2; do cmp -s /$dir/change-$file /tmp/$dir/change-$file || differs "$dir/change-$file $1"; done
    done
}
while read -r line; do
    [ "$line" = check ] || continue
    wrong=0
    piped
    # Parts of pages and of blocks, a page past the end, and a shorter file.
    for dir in $systems; do
        for at in 5 77 300 4711; do
            echo "a few bytes" > /tmp/bytes
            dd if=/tmp/bytes of=/$dir/change-0 bs=101 seek=$at conv=notrunc 2> /dev/null
            dd if=/tmp/bytes of=/tmp/$dir/change-0 bs=101 seek=$at conv=notrunc 2> /dev/null
        done
        echo "the end" >> /$dir/change-1 && echo "the end" >> /tmp/$dir/change-1
        truncate -s 123457 /$dir/change-2 && truncate -s 123457 /tmp/$dir/change-2
    done
    changed "in memory"
    sums
    sync
    echo 3 > /proc/sys/vm/drop_caches
    changed "on disk"
    sums
    complaints
    echo "guest: checked, $wrong wrong"
done
sleep 1000
