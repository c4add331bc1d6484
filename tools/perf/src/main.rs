//! Measures latency and bandwidth between two processes, as rdma-core's perftest does. Start
//! `ibverbs-perf` on one machine and `ibverbs-perf HOST` on another; `ibverbs-perf --help` lists the
//! measurements and their options.
//!
//! The client makes a [plan](plan::Plan) and the server carries out its part of it. Each size takes a few
//! [steps](wire::Step). The sides announce each step over TCP, so that neither measures before
//! the other is ready; during a step there is only the measured traffic.

#[path = "../../../examples/common/broken_pipe.rs"]
mod broken_pipe;
mod channel;
mod options;
mod plan;
mod plot;
mod progress;
mod report;
mod rig;
mod run;
mod session;
mod verbs;
mod wire;

use std::process::ExitCode;

use options::{Command, USAGE};

fn main() -> ExitCode {
    broken_pipe::end_quietly();
    let done = match options::read(lexopt::Parser::from_env()) {
        Ok(Command::Help) => {
            println!("{USAGE}");
            Ok(())
        }
        Ok(Command::Serve(side)) => session::serve(&side),
        Ok(Command::Measure(side, plan)) => session::measure(&side, &plan),
        Err(error) => Err(format!("{error}\nibverbs-perf --help says what there is").into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ibverbs-perf: {error}");
            ExitCode::FAILURE
        }
    }
}
