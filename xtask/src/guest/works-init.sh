#!/bin/bash
# Init of the guests whose memory is measured: does the work named on the kernel command line until it has filled its
# memory as such work does, says that it is ready, and goes on for ever, a line for each piece; pieces are of about one size.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
echo "guest: up"
fail() {
    echo "guest: failed: $*"
    while :; do sleep 1000; done
}
mount -t tmpfs tmpfs /tmp || fail "tmpfs"
task=$(sed -n 's/.*task=\([a-z]*\).*/\1/p' /proc/cmdline)
piece=0
did() {
    piece=$((piece + 1))
    echo "guest: did $piece"
}

# A file server, and who reads from it: every file once, then one after another.
files() {
    busybox ip address add 127.0.0.1/8 dev lo && busybox ip link set lo up || fail "loopback"
    busybox httpd -p 127.0.0.1:80 -h /usr || fail "httpd"
    mapfile -t served <<< "$(cd /usr && find lib src share -type f -size +63k)"
    [ ${#served[@]} -gt 100 ] || fail "${#served[@]} files to serve"
    for file in "${served[@]}"; do
        busybox wget -q -O - "http://127.0.0.1/$file" > /dev/null || fail "wget $file"
    done
    echo "guest: ready"
    mapfile -t served <<< "$(cd /usr && find lib src share -type f -size +63k -size -129k)"
    while :; do
        for file in "${served[@]}"; do
            sum=$(busybox wget -q -O - "http://127.0.0.1/$file" | sha256sum)
            [ "$sum" = "$(sha256sum < "/usr/$file")" ] || fail "/usr/$file differs"
            did
        done
    done
}

# A database with an index, and transactions on it.
database() {
    sqlite3 /work/shop.db > /dev/null <<'SQL' || fail "sqlite3"
PRAGMA journal_mode = WAL;
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, item TEXT, cents INTEGER);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 400000)
    INSERT INTO orders SELECT i, abs(random()) % 50000, 'item ' || hex(randomblob(12)), abs(random()) % 100000 FROM n;
CREATE INDEX by_customer ON orders (customer);
SQL
    # What a server's other programs have read.
    find /usr/lib /usr/share -type f -exec cat {} + > /dev/null
    echo "guest: ready"
    while :; do
        sqlite3 /work/shop.db > /dev/null <<'SQL' || fail "a transaction"
BEGIN;
UPDATE orders SET cents = cents + 1 WHERE id IN (SELECT abs(random()) % 400000 FROM orders LIMIT 200);
SELECT sum(cents) FROM orders WHERE customer = abs(random()) % 50000;
COMMIT;
SQL
        did
    done
}

# A full-text index of C headers, and questions to it.
search() {
    {
        echo "CREATE VIRTUAL TABLE docs USING fts5(name, body); BEGIN;"
        find /usr/src -name '*.h' | head -n 4000 | while read -r file; do
            echo "INSERT INTO docs VALUES ('$file', CAST(readfile('$file') AS TEXT));"
        done
        echo "COMMIT;"
    } | sqlite3 /work/search.db || fail "the index"
    find /usr/lib /usr/src -type f -exec cat {} + > /dev/null
    echo "guest: ready"
    while :; do
        for word in mutex page inode packet clock interrupt buffer queue; do
            found=$(sqlite3 /work/search.db "SELECT count(*) FROM docs WHERE docs MATCH '$word AND struct';")
            [ "$found" -gt 0 ] || fail "nothing about $word"
            did
        done
    done
}

# Python's library is compiled to bytecode, as packages do when they are installed.
build() {
    cp -r /usr/lib/python3.11 /work/python || fail "copy"
    cat /usr/lib/gcc/*/*/* /usr/lib/x86_64-linux-gnu/* > /dev/null 2>&1
    compile() { python3.11 -I -S -m compileall -q -f "$1" > /dev/null || fail "compile $1"; }
    for part in asyncio email http json xml; do
        compile "/work/python/$part"
    done
    echo "guest: ready"
    while :; do
        find /work/python -maxdepth 1 -name '*.py' -size +15k -size -33k > /tmp/modules
        while read -r module; do
            compile "$module"
            did
        done < /tmp/modules
    done
}

# An archive, of which copies are made until an eighth of memory is left; then its files are read.
archive() {
    meminfo() { sed -n "s/^$1: *\\([0-9]*\\) kB/\\1/p" /proc/meminfo; }
    mapfile -t archived <<< "$(find /usr/lib /usr/share -type f -size +63k -size -513k)"
    [ ${#archived[@]} -gt 100 ] || fail "${#archived[@]} files to archive"
    copy=0
    while [ "$(meminfo MemFree)" -gt $(($(meminfo MemTotal) / 8)) ]; do
        copy=$((copy + 1))
        mkdir "/work/$copy" && cp -t "/work/$copy" --backup=numbered "${archived[@]}" || fail "copy $copy"
        sync
    done
    echo "guest: ready"
    while :; do
        for file in "${archived[@]}"; do
            sha256sum "$file" > /dev/null || fail "$file"
            did
        done
    done
}

case "$task" in
    files | database | search | build | archive) "$task" ;;
    *) fail "no work $task" ;;
esac
