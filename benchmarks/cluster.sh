#!/usr/bin/env bash
# An emulated cluster on this machine: nodes are network namespaces joined by a bridge.  What leaves a node goes through
# its link, which is as slow as it is told to be; processes of one node talk over its loopback, which is not slowed.
#
#   cluster.sh up NODES [RATE]     make it; node i has the address 10.77.0.(i + 1)
#   cluster.sh rate RATE           change every link, both directions: 100mbit, or `none` for as fast as the machine can
#   cluster.sh exec NODE COMMAND   run a command on a node, with gloo told which interface to use
#   cluster.sh sent                bytes that every node has sent over its link so far, Ethernet headers included
#   cluster.sh down                end what runs on its nodes, and take it away
#
# CLUSTER names it ("mz" by default, at most 10 letters and digits), so that there can be several.  Needs root, ip and
# tc (Debian: iproute2).
set -euo pipefail

name="${CLUSTER:-mz}"
bridge="${name}br"

usage() {
    sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 2
}

# The nodes that exist, one a line.
nodes() { ip netns list | awk -v name="$name" '$1 ~ "^" name "n[0-9]+$" {print $1}'; }

up() {
    local count=$1 i node
    ip link add "$bridge" type bridge
    ip link set "$bridge" up
    for ((i = 0; i < count; i++)); do
        node="${name}n$i"
        ip netns add "$node"
        # Gloo would take an interface's first address, and that must be the one that is given here.
        ip netns exec "$node" sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1 || true
        ip link add "${name}v$i" type veth peer name eth0 netns "$node"
        ip link set "${name}v$i" master "$bridge" up
        ip -n "$node" link set lo up
        ip -n "$node" addr add "10.77.0.$((i + 1))/24" dev eth0
        ip -n "$node" link set eth0 up
    done
}

# A short burst: a link that has been idle is not faster than its rate for longer than a few packets.
rate() {
    local node
    for node in $(nodes); do
        if [[ "$1" == none ]]; then
            tc -n "$node" qdisc del dev eth0 root 2>/dev/null || true
        else
            tc -n "$node" qdisc replace dev eth0 root tbf rate "$1" burst 16kb latency 200ms
        fi
    done
}

# Seen from outside, what a node sends is what its end of the link receives.
sent() {
    local i count
    count=$(nodes | wc -l)
    for ((i = 0; i < count; i++)); do
        cat "/sys/class/net/${name}v$i/statistics/rx_bytes"
    done
}

# A namespace goes a while after its name, and its end of the link with it, so links go first.
down() {
    local node pids
    for node in $(nodes); do
        pids=$(ip netns pids "$node")
        # shellcheck disable=SC2086 # one word each
        [[ -z "$pids" ]] || kill -KILL $pids 2>/dev/null || true
        ip link del "${name}v${node#"${name}n"}" 2>/dev/null || true
        ip netns del "$node"
    done
    ip link del "$bridge" 2>/dev/null || true
}

case "${1:-}" in
    up)
        [[ $# -ge 2 ]] || usage
        if [[ -n "$(nodes)" ]] || ip link show "$bridge" >/dev/null 2>&1; then
            echo "error: the cluster $name is up already; cluster.sh down takes it away" >&2
            exit 2
        fi
        trap down EXIT # unless all of it succeeds
        up "$2"
        rate "${3:-none}"
        trap - EXIT
        ;;
    rate)
        [[ $# -eq 2 ]] || usage
        rate "$2"
        ;;
    exec)
        [[ $# -ge 3 ]] || usage
        node="${name}n$2"
        shift 2
        exec ip netns exec "$node" env GLOO_SOCKET_IFNAME=eth0 "$@"
        ;;
    sent) sent ;;
    down) down ;;
    *) usage ;;
esac
