#!/bin/bash
# Init of the guest whose programs flush often. The root is read-only; vdb is for databases, vdc for files, vdd for a journal.
export PATH=/usr/lib/postgresql/15/bin:/usr/sbin:/usr/bin:/sbin:/bin
echo "guest: up"
fail() {
    echo "guest: failed: $*"
    while :; do sleep 1000; done
}
word() { sed -n "s/.*$1=\([a-z0-9]*\).*/\1/p" /proc/cmdline; }
mount -t tmpfs tmpfs /tmp && mount -t sysfs sysfs /sys || fail "mount"
mkdir -p /dev/shm && mount -t tmpfs tmpfs /dev/shm || fail "shm"
# Of a disk that writes through, Linux sends no flush.
grep -q "write back" /sys/block/vdb/queue/write_cache || fail "vdb is not flushed"
task=$(word task) appends=$(word appends) transactions=$(word transactions) seconds=$(word seconds)

# Says how often a second something was done, of which there were so many since `start`.
began() { start=${EPOCHREALTIME/./}; }
rate() {
    local us=$((${EPOCHREALTIME/./} - start))
    echo "guest: $1 $(($2 * 100000000 / us))e-2 a second"
}
off() {
    sync
    echo "guest: done"
    echo o > /proc/sysrq-trigger
    while :; do sleep 1000; done
}
postgres() { chroot --userspec=70:70 / "$@"; }
start_postgres() {
    postgres pg_ctl -D /work/pg -l /tmp/pg.log -w -t 300 \
        -o "-k /tmp -c listen_addresses= -c jit=off -c shared_buffers=16MB -c autovacuum=off" start > /tmp/said 2>&1 ||
        { cat /tmp/said /tmp/pg.log; fail "PostgreSQL does not start"; }
}
stop_postgres() { postgres pg_ctl -D /work/pg -w -t 300 stop > /tmp/said 2>&1 || { cat /tmp/said; fail "PostgreSQL"; }; }

chmod 1777 /tmp
if [ "$task" = prepare ]; then
    mkfs.ext4 -q -F -N 8192 /dev/vdb && mount -t ext4 /dev/vdb /work || fail "a file system"
    mkdir /work/pg && chown 70:70 /work/pg && chmod 700 /work/pg
    postgres initdb -D /work/pg -U postgres -A trust -N -E UTF8 --locale=C > /tmp/said 2>&1 || { cat /tmp/said; fail "initdb"; }
    start_postgres
    postgres pgbench -h /tmp -U postgres -i -q -s 1 postgres > /tmp/said 2>&1 || { cat /tmp/said; fail "pgbench -i"; }
    stop_postgres
    sqlite3 /work/test.db "CREATE TABLE t (id INTEGER PRIMARY KEY, said TEXT)" || fail "sqlite3"
    umount /work
    off
fi

if [ "$task" = transactions ]; then
    mkfs.ext4 -q -F -N 8192 /dev/vdb && mount -t ext4 /dev/vdb /work || fail "a file system"
    # Rows are long, so that few of them wait in the pipe when it is told to stop.
    printf -v said "%01000d" 0
    statements() {
        echo "CREATE TABLE t (id INTEGER PRIMARY KEY, said TEXT);"
        # A line is read whole: with a time for it, a slow guest loses what came before the time was up.
        until read -t 0 && read -r line && [ "$line" = stop ]; do
            for ((i = 0; i < 5; i++)); do echo "INSERT INTO t (said) VALUES ('$said');"; done
            echo "SELECT 'guest: 5 rows written';"
        done
    }
    statements | sqlite3 -bail -cmd "PRAGMA synchronous=FULL;" /work/test.db || fail "sqlite3"
    umount /work
    off
fi

appends() {
    mount -t ext4 -o "data=$2" /dev/vdc /files || fail "mount with data=$2"
    began
    dd if=/dev/zero of=/files/file bs=4k count="$appends" oflag=append,sync conv=notrunc 2> /tmp/said || { cat /tmp/said; fail "dd"; }
    rate "appends, journal $1, data=$2:" "$appends"
    umount /files
}
new() { mkfs.ext4 -q -F -b 4096 -N 1024 "$@" /dev/vdc || fail "mkfs.ext4 $*"; }
for mode in ordered journal; do
    new
    appends inside $mode
    mke2fs -q -F -b 4096 -O journal_dev /dev/vdd || fail "a journal"
    new -J device=/dev/vdd
    appends outside $mode
done

mount -t ext4 /dev/vdb /work || fail "mount"
began
for ((i = 0; i < transactions; i++)); do echo "INSERT INTO t (said) VALUES ('row $i of those that are written');"; done |
    sqlite3 -bail -cmd "PRAGMA synchronous=FULL;" /work/test.db > /tmp/said || { cat /tmp/said; fail "sqlite3"; }
rate SQLite: "$transactions"
[ "$(sqlite3 /work/test.db 'SELECT count(*) FROM t')" = "$transactions" ] || fail "rows are missing"
start_postgres
postgres pgbench -h /tmp -U postgres -n -M prepared -c 4 -T "$seconds" postgres > /tmp/said 2>&1 || { cat /tmp/said; fail "pgbench"; }
tps=$(sed -n 's/^tps = \([0-9.]*\).*/\1/p' /tmp/said)
[ -n "$tps" ] || { cat /tmp/said; fail "pgbench says no rate"; }
echo "guest: PostgreSQL: $tps a second"
stop_postgres
umount /work
off
