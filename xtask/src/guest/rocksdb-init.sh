
# Runs three workloads on the disk's database. The kernel hands words of its command line to init as variables: `keys`, `reads`,
# `writes`.
mount -t ext4 /dev/vda /ext4 || fail "mount"
bench() {
    workload=$1
    shift
    sync && echo 3 > /proc/sys/vm/drop_caches
    /lib/ld.so --library-path /lib /bin/db_bench --flagfile=/flags --benchmarks=$workload "$@" > /tmp/said 2> /tmp/complaints ||
        { cat /tmp/said /tmp/complaints; fail "$workload"; }
    sed -n 's/^\(.* ops\/sec .*\)/guest: \1/p' /tmp/said
}
bench readrandom --db=/ext4/db --use_existing_db=1 --num=$keys --reads=$reads
# The rate is fixed, or slower reads would meet more writes.
bench readwhilewriting --db=/ext4/db --use_existing_db=1 --num=$keys --reads=$reads --benchmark_write_rate_limit=1048576
bench fillrandom --db=/ext4/new --num=$writes
echo "guest: done"
poweroff -f
