#!/bin/bash
# Init of the test guest: does the one task named on the kernel command line, reports, and powers off.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
echo "guest: up"

off() {
    sync
    mount -o remount,ro / 2>/dev/null
    echo o > /proc/sysrq-trigger
    # Nothing may be run from the disk any more: the kernel is taking it away.
    while :; do :; done
}
fail() {
    echo "guest: failed: $*"
    off
}
task=$(sed -n 's/.*task=\([a-z]*\).*/\1/p' /proc/cmdline)
rounds=$(sed -n 's/.*rounds=\([0-9]*\).*/\1/p' /proc/cmdline)

# Every file the disk was made with has the checksum it was made with.
verify() {
    (cd /files && sha256sum --quiet -c SHA256SUMS) || fail "a file differs from its checksum"
    echo "guest: files verified"
}

# Whether a line was typed on the console.
stopped() {
    read -r -t 0.01 line && [ "$line" = stop ]
}

# Writes a new tree each round, keeps the two newest, and checks all of them from disk, not from memory.
workload() {
    mkdir -p /work
    round=0
    while [ "$round" -lt "${rounds:-4}" ] && ! stopped; do
        round=$((round + 1))
        tree=/work/$round
        mkdir "$tree" || fail "mkdir $tree"
        for file in 1 2 3 4 5 6 7 8; do
            head -c $((65536 * file + 777 * round)) /dev/urandom > "$tree/$file" || fail "write $tree/$file"
        done
        cp "$tree/8" "$tree/8.copy" && truncate -s 100000 "$tree/8.copy" || fail "truncate"
        printf 'patched' | dd of="$tree/4" bs=1 seek=70000 conv=notrunc status=none || fail "patch"
        mv "$tree/1" "$tree/1.renamed"
        (cd "$tree" && sha256sum -- * > ../$round.sums) || fail "sums"
        sync || fail "sync"
        rm -rf "/work/$((round - 2))" "/work/$((round - 2)).sums"
        echo 3 > /proc/sys/vm/drop_caches
        for sums in /work/*.sums; do
            tree=${sums%.sums}
            (cd "$tree" && sha256sum --quiet -c "$sums") || fail "$tree differs after round $round"
        done
        echo "guest: round $round verified"
    done
}

# Waits until the disk has another size, and uses its new end.
resize() {
    mkdir -p /sys && mount -t sysfs sysfs /sys || fail "no sysfs"
    before=$(cat /sys/block/vda/size)
    echo "guest: disk has $before sectors"
    for tries in $(seq 1800); do
        now=$(cat /sys/block/vda/size)
        [ "$now" != "$before" ] && break
        sleep 0.1
    done
    echo "guest: disk has $now sectors"
    [ "$now" -gt "$before" ] || fail "the disk did not grow in $tries looks"
    head -c 1048576 /dev/urandom > /end
    dd if=/end of=/dev/vda bs=512 seek=$((now - 2048)) conv=notrunc,fsync status=none || fail "write the new end"
    echo 3 > /proc/sys/vm/drop_caches
    found=$(dd if=/dev/vda bs=512 skip=$((now - 2048)) status=none | sha256sum)
    [ "$found" = "$(sha256sum < /end)" ] || fail "the new end differs"
    echo "guest: new end verified $found"
}

# The guest agent, if the machine has a port for it. It keeps its notes where nothing is frozen.
for port in /dev/vport*; do
    [ -c "$port" ] || continue
    mount -t tmpfs tmpfs /tmp || fail "tmpfs"
    qemu-ga -m virtio-serial -p "$port" -t /tmp -f /tmp/qemu-ga.pid &
    echo "guest: agent"
done

# Work beside counting: readers of files with known sums, writers, programs mapped from files that were just written, and
# files in memory that leave little for cache.
load() {
    mkdir -p /load || fail "load"
    while (cd /files && sha256sum --quiet -c SHA256SUMS) || fail "a file differs from its checksum"; do sleep 0.1; done &
    while :; do
        head -c 2000000 /dev/urandom > /load/file || fail "write a file"
        sum=$(sha256sum < /load/file)
        sync
        [ "$(sha256sum < /load/file)" = "$sum" ] || fail "a written file changed"
    done &
    while :; do
        cp /usr/bin/sha256sum /load/new && mv /load/new /load/program || fail "write a program"
        [ "$(/load/program < /load/program)" = "$(sha256sum < /usr/bin/sha256sum)" ] || fail "a program changed"
    done &
    while :; do
        head -c 100000 /dev/urandom > /tmp/fill
        while [ "$(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo)" -gt 60000 ]; do
            head -c 8000000 /dev/zero >> /tmp/fill || break
        done
        sleep 1
    done &
}

# Counts for ever. Step n finds n - 1 lines on the disk, so a disk and a memory of two instants never count on.
count() {
    mount -t tmpfs -o size=90% tmpfs /tmp && mkdir -p /work || fail "count"
    head -c 3000000 /dev/urandom > /tmp/blob && cp /tmp/blob /work/blob || fail "blob"
    cat /files/data-* > /dev/null
    [ "$task" = busy ] && load
    sum=$(sha256sum < /tmp/blob)
    step=0
    while :; do
        step=$((step + 1))
        sync
        [ $((step % 4)) = 0 ] && echo 3 > /proc/sys/vm/drop_caches
        [ "$(sha256sum < /tmp/blob)" = "$sum" ] || fail "memory changed before step $step"
        [ "$(sha256sum < /work/blob)" = "$sum" ] || fail "the disk changed before step $step"
        lines=0
        [ $step = 1 ] || lines=$(wc -l < /work/steps)
        [ "$lines" = $((step - 1)) ] || fail "$lines steps on disk before step $step"
        echo "step $step" >> /work/steps
        echo "guest: count $step"
    done
}

# Has every file in memory, and checks them there each time it is told to.
cache() {
    verify
    echo "guest: cached"
    while read -r line; do
        [ "$line" = check ] && verify && echo "guest: checked"
    done
}

case "$task" in
    boot) ;;
    verify) verify ;;
    count | busy) count ;;
    cache) cache ;;
    workload)
        workload
        verify
        ;;
    soak)
        rounds=1000000
        workload
        verify
        ;;
    resize)
        resize
        verify
        ;;
    *) fail "no task $task" ;;
esac
echo "guest: done"
off
