# Init of the guest that swaps: after bare-init.sh. It works through a data set in memory that its memory does not hold; vda is for swap.
word() { sed -n "s/.*$1=\([0-9]*\).*/\1/p" /proc/cmdline; }
mib=$(word mib) rounds=$(word rounds)
mkswap /dev/vda > /tmp/said && swapon /dev/vda || fail "swap"
mkdir /data && mount -t tmpfs -o "size=${mib}m" tmpfs /data || fail "tmpfs"
uptime() { cut -d ' ' -f 1 /proc/uptime | tr -d .; }
start=$(uptime)
# Files of 1 MiB whose pages differ, so that the kernel keeps each page.
dd if=/dev/urandom of=/tmp/piece bs=4k count=255 2> /tmp/said || fail "a piece"
i=1
while [ $i -lt "$mib" ]; do
    { echo "piece $i" && cat /tmp/piece; } > /data/$i || fail "write piece $i"
    i=$((i + 1))
done
sum=$(cat /data/* | cksum)
round=1
while [ $round -le "$rounds" ]; do
    cat /data/* > /dev/null
    round=$((round + 1))
done
[ "$(cat /data/* | cksum)" = "$sum" ] || fail "what was swapped differs"
swapped() { sed -n "s/^$1 //p" /proc/vmstat; }
echo "guest: swapping took $(($(uptime) - start))e-2 s, $(swapped pswpin) pages in, $(swapped pswpout) out"
echo "guest: done"
poweroff -f
