# shellcheck shell=bash
# Sourced by the steps of script/test and script/soak that run programs on script/libibverbs: "$run" starts a program on
# it, "$scratch" is a folder.

# Runs a server and a client, both with the same arguments, and prints a line. The server is soft0, the client soft1, each
# a device of its own process.
two() { # PROGRAM ARGUMENT..
	local server status=0
	timeout 120 "${run:?}" "$@" -d soft0 >"${scratch:?}/server" 2>&1 &
	server=$!
	# The server may not listen yet. A client that cannot connect ends at once.
	for _ in {1..100}; do
		status=0
		timeout 120 "$run" "$@" -d soft1 localhost >"$scratch/client" 2>&1 || status=$?
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

perftest() {
	local port=$((20000 + RANDOM % 10000)) test connection common=(-F -s 4096)
	common+=(-p "$port")
	for connection in RC UC XRC; do
		for test in ib_send_bw ib_send_lat ib_write_bw ib_write_lat; do
			two "$test" "${common[@]}" -n 500 -c "$connection" || return
		done
	done
	for test in ib_send_bw ib_send_lat; do two "$test" "${common[@]}" -n 500 -c UD || return; done
	for test in ib_read_bw ib_read_lat ib_atomic_bw ib_atomic_lat; do
		if [[ $test == ib_atomic* ]]; then
			two "$test" -F -p "$port" -n 500 || return
		else
			two "$test" "${common[@]}" -n 500 || return
		fi
	done
	# Events, several queue pairs, all sizes, both ways.
	two ib_send_lat "${common[@]}" -n 500 -e || return
	two ib_send_bw "${common[@]}" -n 500 -q 4 || return
	two ib_write_bw -F -p "$port" -n 100 -a || return
	two ib_send_bw "${common[@]}" -n 500 -b
}
