# shellcheck shell=bash
# Sourced by the steps of script/test and script/soak that run programs on script/libibverbs: "$run" starts a program on
# it, "$scratch" is a folder.

# Runs a server and a client, both with the same arguments, and prints a line. The server is soft0, the client soft1 (or
# "$first" and "$second"), each a device of its own process.
two() { # PROGRAM ARGUMENT..
	local server status=0
	timeout 1200 "${run:?}" "$@" -d "${first:-soft0}" >"${scratch:?}/server" 2>&1 &
	server=$!
	# The server may not listen yet. A client that cannot connect ends at once.
	for _ in {1..100}; do
		status=0
		timeout 1200 "$run" "$@" -d "${second:-soft1}" localhost >"$scratch/client" 2>&1 || status=$?
		[ $status != 0 ] && grep -qiE "couldn't connect|connection refused|unable to (connect|init)" "$scratch/client" || break
		sleep 0.1
	done
	[ $status != 0 ] || wait "$server" || status=$?
	if [ $status != 0 ]; then
		kill "$server" 2>/dev/null || true
		printf 'FAILED: %s\n' "$*" >&2
		tail -n 20 "$scratch/server" "$scratch/client" >&2
		return 1
	fi
	printf 'ran: %s\n' "$*"
}

ping_pongs() {
	local port=$((20000 + RANDOM % 10000)) kind options
	for kind in rc uc ud srq xsrq; do
		options=(-p "$port" -g 0 -n 200)
		two "ibv_${kind}_pingpong" "${options[@]}" || return
		two "ibv_${kind}_pingpong" "${options[@]}" -e || return
	done
	# On-demand memory, also fetched in advance.
	for kind in rc srq xsrq; do two "ibv_${kind}_pingpong" "${options[@]}" -o || return; done
	two ibv_rc_pingpong "${options[@]}" -o -P
}

# 35 runs of perftest, or those of some transports and options only.
perftest() { # [NAME..]
	local port=$((20000 + RANDOM % 10000)) name program options
	while read -r name program options; do
		[ $# = 0 ] || [[ " $* " == *" $name "* ]] || continue
		# shellcheck disable=SC2086 # options are words
		two "$program" -F -p "$port" $options </dev/null || return
	done <<-'END'
		RC ib_send_bw -s 4096 -n 500
		RC ib_send_lat -s 4096 -n 500
		RC ib_write_bw -s 4096 -n 500
		RC ib_write_lat -s 4096 -n 500
		RC ib_read_bw -s 4096 -n 500
		RC ib_read_lat -s 4096 -n 500
		RC ib_atomic_bw -n 500 -A FETCH_AND_ADD
		RC ib_atomic_lat -n 500 -A FETCH_AND_ADD
		RC ib_atomic_bw -n 500 -A CMP_AND_SWAP
		RC ib_atomic_lat -n 500 -A CMP_AND_SWAP
		UC ib_send_bw -s 4096 -n 500 -c UC
		UC ib_send_lat -s 4096 -n 500 -c UC
		UC ib_write_bw -s 4096 -n 500 -c UC
		UC ib_write_lat -s 4096 -n 500 -c UC
		UD ib_send_bw -s 4096 -n 500 -c UD
		UD ib_send_lat -s 4096 -n 500 -c UD
		XRC ib_send_bw -s 4096 -n 500 -c XRC
		XRC ib_send_lat -s 4096 -n 500 -c XRC
		XRC ib_write_bw -s 4096 -n 500 -c XRC
		XRC ib_write_lat -s 4096 -n 500 -c XRC
		XRC ib_read_bw -s 4096 -n 500 -c XRC
		XRC ib_read_lat -s 4096 -n 500 -c XRC
		XRC ib_atomic_bw -n 500 -c XRC
		XRC ib_atomic_lat -n 500 -c XRC
		SRQ ib_send_bw -s 4096 -n 500 --use-srq -q 2
		SRQ ib_send_lat -s 4096 -n 500 --use-srq
		events ib_send_bw -s 4096 -n 500 -e
		events ib_send_lat -s 4096 -n 500 -e
		events ib_read_lat -s 4096 -n 500 -e
		pairs ib_send_bw -s 4096 -n 500 -q 4
		sizes ib_write_bw -n 100 -a
		sizes ib_send_lat -n 100 -a
		both ib_send_bw -s 4096 -n 500 -b
		both ib_write_bw -s 4096 -n 500 -b
		lists ib_write_bw -s 64 -n 512 -l 16
	END
}

# Runs a server and a client that meet by librdmacm at 127.0.0.1, and prints a line. The client starts when a line of
# /proc/net/unix, where the name of the server's port will be, or of the server's output ends with WAIT. Both start again if
# the client is refused: a port has its name a moment before its server listens, and perftest's client asks for a second
# connection when its server may not listen for that. STAYS: the server does not end by itself. Time limits are "$slower" times
# as long.
managed() { # NAME WAIT "SERVER" "CLIENT" [STAYS]
	local server status ended folder attempt
	folder=$(mktemp -d "${scratch:?}/managed.XXXXXX")
	for attempt in {1..20}; do
		status=0
		timeout $((300 * ${slower:-1})) "${run:?}" bash -c "exec $3" </dev/null >"$folder/server" 2>&1 &
		server=$!
		for _ in {1..300}; do
			! grep -qsE "$2\$" /proc/net/unix "$folder/server" || break
			sleep 0.1
		done
		(timeout $((120 * ${slower:-1})) "$run" bash -c "exec $4"; exit $?) </dev/null >"$folder/client" 2>&1 || status=$?
		if [ $status != 0 ] || [ $# -ge 5 ]; then kill "$server" 2>/dev/null || true; fi
		ended=0
		wait "$server" 2>/dev/null || ended=$?
		if [ $# -lt 5 ] && [ $status = 0 ]; then status=$ended; fi
		case $ended in 13[2-9]) status=$ended && break ;; esac # a server that crashes is not started again
		[ $status != 0 ] && grep -qiE 'resource temporarily unavailable|connection refused|rejected' "$folder/client" || break
	done
	if [ $status != 0 ]; then
		printf 'FAILED: %s (%s, attempt %s)\n' "$1" "$status" "$attempt" >&2
		tail -n 20 "$folder/server" "$folder/client" >&2
		return 1
	fi
	printf 'ran: %s\n' "$1"
}

# Runs functions beside each other, and fails if one of them fails.
beside() { # FUNCTION..
	local lane lanes=() status=0
	for lane; do "$lane" & lanes+=($!); done
	for lane in "${lanes[@]}"; do wait "$lane" || status=1; done
	return $status
}

# The name of a port of TCP's port space, for addresses of IPv4.
port() { printf 'ibverbs-cm/0106/%s/Ipv4' "$1"; }

# rdma-core's own programs of librdmacm, and perftest by it.
managed_rpings() {
	local kind
	for kind in -v -q -V '-S 65535'; do
		managed "rping $kind" "$(port 7174)" "rping -s -C 10 $kind" "rping -c -a 127.0.0.1 -C 10 $kind" || return
	done
	managed "rping -P" "$(port 7174)" "rping -s -P" "rping -c -a 127.0.0.1 -C 10" stays &&
		managed udaddy ibverbs-cm/0111/7174/Ipv4 "udaddy -c 5" "udaddy -c 5 -s 127.0.0.1" &&
		managed mckey 'joined dgid.*' "stdbuf -oL mckey -m 239.1.2.3 -b 127.0.0.1" "mckey -m 239.1.2.3 -b 127.0.0.1 -s" &&
		managed 'mckey, IPv6' 'joined dgid.*' "stdbuf -oL mckey -m ff02::1:2" "mckey -m ff02::1:2 -s"
}
managed_connections() {
	local to="-s 127.0.0.1" kind
	for kind in '-c 10' '-m' '-c 3 -S 4096'; do
		managed "ucmatose $kind" "$(port 7471)" "ucmatose $kind" "ucmatose $kind $to" || return
	done
	managed rdma_client "$(port 7471)" rdma_server rdma_client || return
	for kind in r x; do managed "rdma_xclient -c $kind" "$(port 7471)" "rdma_xserver -c $kind" "rdma_xclient -c $kind" || return; done
	managed cmtime "$(port 7471)" "cmtime -c 20" "cmtime -c 20 $to" stays
}
managed_sockets() {
	# Python asks for a socket that exec closes, and librspreload then does not wait with it for a fork.
	local forks='import ctypes, os, socket
def stream(): return socket.socket(fileno=ctypes.CDLL(None).socket(socket.AF_INET, 1, 0))'
	local to="-s 127.0.0.1" preload="env LD_PRELOAD=${run%/run}/lib/rsocket/librspreload.so /usr/bin/python3 -c"
	managed rstream "$(port 7481)" "rstream -p 7481 -S 65536 -I 1 -C 20" "rstream -p 7481 -S 65536 -I 1 -C 20 $to" &&
		managed riostream "$(port 7482)" "riostream -p 7482 -S 4096 -I 1 -C 20" "riostream -p 7482 -S 4096 -I 1 -C 20 $to" &&
		head -c 300000 "$(command -v bash)" >"$scratch/source" &&
		managed rcopy "$(port 7427)" rcopy "rcopy $scratch/source 127.0.0.1:$scratch/copy" stays &&
		cmp "$scratch/source" "$scratch/copy" &&
		managed "Python's sockets under librspreload" "$(port 7399)" "$preload '
import socket
server = socket.create_server((\"127.0.0.1\", 7399))
stream = server.accept()[0]
while data := stream.recv(65536):
    stream.sendall(data.upper())'" "$preload '
import socket
stream = socket.create_connection((\"127.0.0.1\", 7399))
for _ in range(20):
    stream.sendall(b\"abc\" * 1000)
    got = b\"\"
    while len(got) < 3000:
        got += stream.recv(65536)
    assert got == b\"ABC\" * 1000
stream.close()'" &&
		managed "a server that forks under librspreload" 'it listens' "env RDMAV_FORK_SAFE=1 $preload '$forks
server = stream()
server.bind((\"127.0.0.1\", 7398))
server.listen()
print(\"it listens\", flush=True)
children = []
# A child for a connection, and then two that accept themselves.
for takes in True, True, False, False:
    accepted = server.accept()[0] if takes else None
    children.append(os.fork())
    if children[-1] == 0:
        accepted = accepted or server.accept()[0]
        while data := accepted.recv(65536):
            accepted.sendall(data.upper())
        accepted.close()
        os._exit(0)
    accepted and accepted.close()
assert all(os.waitpid(child, 0)[1] == 0 for child in children)'" "env RDMAV_FORK_SAFE=1 $preload '$forks
for _ in range(4):
    client = stream()
    client.connect((\"127.0.0.1\", 7398))
    for _ in range(20):
        client.sendall(b\"abc\" * 1000)
        got = b\"\"
        while len(got) < 3000:
            got += client.recv(65536)
        assert got == b\"ABC\" * 1000
    client.close()'"
}
managed_perftest() { # [PROGRAM..]
	local name options number=18600 first=''
	# A client asks for a second connection at once, and ends by SIGSEGV if it is refused: the server goes first, where it may.
	! chrt -f 1 true 2>/dev/null || first='chrt -f 1'
	while read -r name options; do
		[ $# = 0 ] || [[ " $* " == *" $name "* ]] || continue
		number=$((number + 1))
		managed "$name -R $options" "$(port $number)" "$first $name -R -F -d soft0 -p $number -n 20 $options" \
			"$name -R -F -d soft0 -p $number -n 20 $options 127.0.0.1" </dev/null || return
	done <<-'END'
		ib_send_bw
		ib_send_lat
		ib_write_bw
		ib_write_lat
		ib_read_bw
		ib_read_lat
		ib_atomic_bw
		ib_atomic_lat
		ib_send_bw -q 4
		ib_send_bw --use-srq -q 2
	END
}
managed_bandwidth() { managed_perftest ib_send_bw ib_read_bw; }
connection_managers() { beside managed_rpings managed_connections managed_sockets managed_bandwidth; }

# What programs find in /sys/class/infiniband, of two devices that no other program of the user has.
monitoring() {
	local -x IBVERBS_SOFTWARE=first$$,second$$
	local folder found name first=first$$ second=second$$ other=third$$=127.77.2.$((RANDOM % 250 + 1))
	folder=$("${run:?}" printenv IBVERBS_SOFTWARE_SYSFS) && found=$("$run" ibstat) || return
	[ "$(grep -cE "^CA '(first|second)$$'|Node GUID: 0x0200[0-9a-f]{12}$|State: Active" <<<"$found")" = 6 ] ||
		{ printf 'ibstat says:\n%s\n' "$found" >&2; return 1; }
	two ibv_rc_pingpong -p $((20000 + RANDOM % 10000)) -g 0 -n 200 || return
	for name in $first $second; do
		[ "$("$run" cat "/sys/class/infiniband/$name/device/numa_node")" = -1 ] || return
		# Each sends 4 KiB 200 times, in words of four bytes, and some bytes of headers for each packet.
		found=$(<"$folder/$name/ports/1/counters/port_xmit_data")
		((found > 204800 && found < 250000)) || { echo "$name has sent $found words" >&2; return 1; }
	done
	rm -r "${folder%/class/infiniband}"
	# One whose address is known has the GUID that the device says.
	folder=$(IBVERBS_SOFTWARE=$other "$run" printenv IBVERBS_SOFTWARE_SYSFS)
	found=$(IBVERBS_SOFTWARE=$other "$run" ibv_devinfo -v | sed -nE 's/^.*node_guid:\s+//p')
	[ "$(<"$folder/${other%=*}/node_guid")" = "$found" ] || { echo "the GUID of $other is $found" >&2; return 1; }
	rm -r "${folder%/class/infiniband}"
}

# The exporter of Prometheus finds the devices and what they have sent.
exporter() {
	local folder port=$((20000 + RANDOM % 10000)) exporter found='' _
	command -v prometheus-node-exporter >/dev/null || { echo "no exporter: apt install prometheus-node-exporter" >&2; return 1; }
	folder=$("$run" printenv IBVERBS_SOFTWARE_SYSFS) || return
	prometheus-node-exporter --path.sysfs="${folder%/class/infiniband}" --collector.disable-defaults --collector.infiniband \
		--web.listen-address=127.0.0.1:$port >"$scratch/exporter" 2>&1 &
	exporter=$!
	for _ in {1..100}; do
		found=$(curl -s "http://127.0.0.1:$port/metrics") && break
		sleep 0.1
	done
	kill $exporter
	grep -q 'scrape_collector_success{collector="infiniband"} 1' <<<"$found" &&
		grep -qE 'port_data_transmitted_bytes_total\{device="soft0",port="1"\} [1-9]' <<<"$found" ||
		{ printf 'the exporter says:\n%s\n' "$found" >&2; return 1; }
	echo "ran: prometheus-node-exporter"
}

# Those of other packages: fio, libfabric-bin, qperf and ucx-utils.
managed_others() {
	local program verb
	for program in fio fi_pingpong qperf io_demo; do
		command -v $program >/dev/null || { echo "no $program: apt install fio libfabric-bin qperf ucx-utils" >&2; return 1; }
	done
	local job="fio --name=it --ioengine=rdma --hostname=127.0.0.1 --port=7210 --bs=4k --size=1m --iodepth=4"
	for verb in write read; do
		managed "fio --verb=$verb" "$(port 7210)" "$job --verb=$verb --rw=read" "$job --verb=$verb --rw=write" || return
	done
	# It connects without retries for a receiver that is not ready, so the server needs more receives than the client has sends.
	managed "fio --verb=send" "$(port 7210)" "$job --verb=send --rw=read --iodepth=64" "$job --verb=send --rw=write" || return
	# Else libfabric writes over the first 13 bytes of munmap when it opens a domain, though another thread may be in it.
	local -x FI_MR_CACHE_MONITOR=disabled
	local ping="fi_pingpong -S 4096 -I 50 -p"
	managed "fi_pingpong -e msg" "$(port '[0-9]+')" "$ping verbs -e msg" "$ping verbs -e msg 127.0.0.1" &&
		managed "fi_pingpong -e rdm by RXM" "$(port '[0-9]+')" "$ping \"verbs;ofi_rxm\" -e rdm" "$ping \"verbs;ofi_rxm\" -e rdm 127.0.0.1" || return
	# Under memcheck it writes bytes that it has not set to a socket, and destroys a queue pair that it has not.
	[ "${slower:-1}" != 1 ] || managed "qperf -cm1" '^' qperf "qperf -cm1 -t 1 127.0.0.1 rc_bw rc_lat" stays || return
	# UCX's other way to connect to an address is TCP, which it may not use here.
	local demo="env UCX_TLS=rc_v,rdmacm UCX_NET_DEVICES=soft0:1 io_demo -q -o read,write"
	managed "io_demo by UCX's rdmacm" "$(port 1337)" "$demo" "$demo -i 200 127.0.0.1" stays
}
