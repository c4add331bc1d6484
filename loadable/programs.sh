# shellcheck shell=bash
# Sourced by the steps of script/test and script/soak that run programs on script/libibverbs: "$run" starts a program on
# it, "$scratch" is a folder.

# Runs a server and a client, both with the same arguments, and prints a line. The server is soft0, the client soft1, each
# a device of its own process.
two() { # PROGRAM ARGUMENT..
	local server status=0
	timeout 1200 "${run:?}" "$@" -d soft0 >"${scratch:?}/server" 2>&1 &
	server=$!
	# The server may not listen yet. A client that cannot connect ends at once.
	for _ in {1..100}; do
		status=0
		timeout 1200 "$run" "$@" -d soft1 localhost >"$scratch/client" 2>&1 || status=$?
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

# Runs a server and a client that meet by librdmacm at 127.0.0.1, and prints a line. The client starts once the server
# listens: then the name of its port is there.
managed() { # NAME "SERVER" "CLIENT"
	local server status=0 before
	before=$(grep -c ibverbs-cm /proc/net/unix || true)
	timeout 300 "${run:?}" bash -c "exec $2" </dev/null >"${scratch:?}/server" 2>&1 &
	server=$!
	for _ in {1..300}; do
		[ "$(grep -c ibverbs-cm /proc/net/unix || true)" = "$before" ] || break
		sleep 0.1
	done
	timeout 300 "$run" bash -c "exec $3" </dev/null >"$scratch/client" 2>&1 || status=$?
	[ $status != 0 ] || wait "$server" || status=$?
	if [ $status != 0 ]; then
		kill "$server" 2>/dev/null || true
		printf 'FAILED: %s (%s)\n' "$1" "$status" >&2
		tail -n 20 "$scratch/server" "$scratch/client" >&2
		return 1
	fi
	printf 'ran: %s\n' "$1"
}

# rdma-core's own programs of librdmacm.
connection_managers() {
	local to=127.0.0.1
	managed rping "rping -s -C 20 -v" "rping -c -a $to -C 20 -v" &&
		managed "rping of 64 KiB" "rping -s -C 20 -S 65535" "rping -c -a $to -C 20 -S 65535" &&
		managed ucmatose "ucmatose -c 20" "ucmatose -c 20 -s $to" &&
		managed "ucmatose with migration" "ucmatose -m" "ucmatose -m -s $to" &&
		managed udaddy "udaddy -c 5" "udaddy -c 5 -s $to" &&
		managed rdma_client rdma_server rdma_client &&
		managed rstream "rstream -S 65536 -I 20" "rstream -S 65536 -I 20 -s $to"
}
