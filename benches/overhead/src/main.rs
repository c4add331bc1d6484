//! The contenders, measured from outside: each is run in sections that callgrind dumps apart.
//!
//! `overhead run N` runs every contender for 2 N, N, and once more 2 N operations. Each begins with a
//! call of `overhead_section`, which is where callgrind cuts; what each section is goes to standard
//! output. The first of the three warms up. The other two differ by N operations and nothing else.
//!
//! `overhead run N W9 'W10 channel scope'` runs those of a workload, and another contender, for a profiler,
//! or W14-10000, which no check compares.
//!
//! `overhead senders LAYER THREADS N` posts N sends from that many threads while another thread polls. LAYER: `c`, `sender` or
//! `locked`.
//!
//! It fails where a contender allocates, or does not complete what it posts.

mod allocator;
mod c;
mod channel;
mod contended;
mod contenders;
mod events;
mod loops;
mod many;
mod memory;
mod prepared;
mod rails;
mod reactor;
mod rig;
mod rpc;
mod senders;
mod server;
mod server_futures;
mod server_loop;
mod verbs;

use std::process::ExitCode;

use contenders::contenders;

#[global_allocator]
static ALLOCATOR: allocator::Counting = allocator::Counting;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let result =
        match arguments[..] {
            ["run", operations, ref only @ ..] => match operations.parse() {
                Ok(operations) if operations > 0 && operations % 16 == 0 => run(operations, only),
                _ => Err(format!("{operations} is not a positive multiple of 16")),
            },
            ["senders", layer, threads, operations] => time_senders(layer, threads, operations),
            ["compiler"] => {
                println!("{}", env!("OVERHEAD_CC"));
                Ok(())
            }
            _ => Err("usage: overhead run N [WORKLOAD..] | senders LAYER THREADS N | compiler"
                .to_owned()),
        };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("overhead: {error}");
            ExitCode::FAILURE
        }
    }
}

unsafe extern "C" {
    /// Whether callgrind counts, which takes it much longer than only to run the program.
    safe fn overhead_count(on: bool);
}

/// Callgrind ends one section and begins the next at this function.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn overhead_section(section: u32) -> u32 {
    std::hint::black_box(section)
}

/// Prints the nanoseconds of a send, of this many threads that post.
fn time_senders(layer: &str, threads: &str, operations: &str) -> Result<(), String> {
    let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text}: {error}"));
    let (threads, operations) = (number(threads)?, number(operations)?);
    if !(1..=64).contains(&threads) || operations == 0 {
        return Err("there are 1 to 64 threads, and at least one send".to_owned());
    }
    let took = contended::run_layer(layer, threads, operations)?;
    println!("{:.1}", took.as_nanos() as f64 / operations as f64);
    Ok(())
}

/// Runs the contenders of these names, which may be those of workloads, or all.
fn run(operations: u64, only: &[&str]) -> Result<(), String> {
    let mut section = 0;
    for contender in contenders(!only.is_empty()) {
        let name = format!("{} {}", contender.workload, contender.layer);
        if !only.is_empty() && !only.iter().any(|only| [contender.workload, &name].contains(only)) {
            continue;
        }
        let mut body = (contender.make)();
        overhead_count(true);
        for operations in [2 * operations, operations, 2 * operations] {
            println!("{section}\t{}\t{}\t{operations}", contender.workload, contender.layer);
            overhead_section(section);
            let before = allocator::allocations();
            let sum = body(std::hint::black_box(operations));
            let allocations = allocator::allocations() - before;
            overhead_section(section);
            section += 1;
            if sum != contender.expected(operations) {
                return Err(format!("{name}: the completions add up to {sum}"));
            }
            if allocations > 0 && !contender.allocates() {
                return Err(format!(
                    "{name}: {allocations} allocations in {operations} operations"
                ));
            }
        }
        overhead_count(false);
    }
    Ok(())
}
