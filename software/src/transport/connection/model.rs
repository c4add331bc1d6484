//! Every order of messages, losses, repetitions, time and calls, to a depth; and what a program may rely on in each.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::tests::{LISTENER, Two};
use super::*;

/// Depth 8, of 25,000 states, takes five seconds if optimised, and a minute or more if not.
const DEPTH: usize = if cfg!(debug_assertions) { 6 } else { 8 };

/// One side's program, by what it did and was told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Program {
    connection: Option<u32>,
    /// The program was told of a request or an answer, and has not decided.
    undecided: bool,
    accepted: bool,
    /// Ready, or told that the peer is.
    established: bool,
    /// Refused, unreachable or disconnected.
    over: bool,
    disconnected: bool,
    exited: bool,
    abandoned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Deliver(usize),
    Lose(usize),
    Repeat(usize),
    Pass,
    Accept,
    Refuse(usize),
    Ready,
    Disconnect(usize),
    Abandon(usize),
}

struct Model {
    two: Two,
    programs: [Program; 2],
}

impl Model {
    fn new() -> Self {
        let mut two = Two::new();
        let active = two.connect(10, 0x111);
        let programs =
            [Program { connection: Some(active), ..Program::default() }, Program::default()];
        Self { two, programs }
    }

    /// The possible next steps.
    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        // More of them at a time are other orders of the same.
        for i in 0..self.two.wire.len().min(3) {
            steps.extend([Step::Deliver(i), Step::Lose(i)]);
        }
        if !self.two.wire.is_empty() && self.two.wire.len() < 3 {
            steps.push(Step::Repeat(0));
        }
        if self.two.sides.iter().any(|side| side.due().is_some()) {
            steps.push(Step::Pass);
        }
        for (side, program) in self.programs.iter().enumerate() {
            if program.connection.is_none() || program.abandoned {
                continue;
            }
            if program.undecided {
                steps.extend([
                    if side == 1 { Step::Accept } else { Step::Ready },
                    Step::Refuse(side),
                ]);
            }
            if program.established || program.accepted {
                steps.push(Step::Disconnect(side));
            }
            steps.push(Step::Abandon(side));
        }
        steps
    }

    fn take(&mut self, step: Step) {
        let [active, passive] = self.programs.map(|program| program.connection);
        let number = |side: usize| [active, passive][side].unwrap();
        match step {
            Step::Deliver(i) => {
                self.two.deliver(i);
            }
            Step::Lose(i) => drop(self.two.wire.remove(i)),
            Step::Repeat(i) => {
                let copy = self.two.wire[i].clone();
                self.two.wire.push(copy);
            }
            Step::Pass => {
                self.two.pass();
            }
            Step::Accept => {
                // Accepting fails only if the peer has given up meanwhile, which an undecided program is not told.
                let accepted = self.two.accept(number(1), 20, 0x222).is_ok();
                self.programs[1].undecided = false;
                self.programs[1].accepted = accepted;
                self.programs[1].over |= !accepted;
            }
            Step::Refuse(side) => {
                let refused = self.two.call(side, |s, _| s.reject(number(side), 28, &[], 0));
                assert!(refused.is_ok() || side == 1 || self.programs[0].over, "{step:?}");
                self.programs[side].undecided = false;
                self.programs[side].over = true;
            }
            Step::Ready => {
                self.two
                    .call(0, |side, _| side.ready(number(0)))
                    .expect("it was told of the answer");
                self.programs[0].undecided = false;
                self.programs[0].established = true;
            }
            Step::Disconnect(side) => {
                let done = self.two.call(side, |s, now| s.disconnect(now, number(side)));
                let program = self.programs[side];
                assert!(done.is_ok() || program.over || program.exited, "{step:?} {program:?}");
            }
            Step::Abandon(side) => {
                self.two.call(side, |s, now| s.abandon(now, number(side)));
                self.programs[side].abandoned = true;
            }
        }
        self.hear();
    }

    /// Checks what the programs are told.
    fn hear(&mut self) {
        for (id, event) in self.two.told() {
            let side = usize::from(id != 10);
            let program = &mut self.programs[side];
            assert!(!program.abandoned || id == LISTENER, "told after it gave up: {event:?}");
            match event {
                Event::Request(arrived) => {
                    assert_eq!(id, LISTENER);
                    // A copy that comes when all is over is a request like any other; nobody answers its answer.
                    *program = Program {
                        connection: Some(arrived.connection),
                        undecided: true,
                        ..Program::default()
                    };
                }
                Event::Reply(..) => {
                    assert!(!program.undecided && !program.established && !program.over);
                    program.undecided = true;
                }
                Event::Established => {
                    assert!(program.accepted && !program.established && !program.over);
                    program.established = true;
                }
                Event::Rejected(..) | Event::Unreachable => {
                    assert!(!program.over, "told twice that it is over");
                    program.over = true;
                    program.undecided = false;
                }
                Event::Disconnected(_) => {
                    assert!(!program.over && (program.accepted || program.established));
                    program.over = true;
                    program.disconnected = true;
                }
                Event::TimewaitExit => {
                    assert!(program.disconnected && !program.exited);
                    program.exited = true;
                }
                Event::ServiceRequest(_) | Event::ServiceReply(_) => unreachable!(),
            }
        }
    }

    /// Runs on without losses, until the programs agree. Then they give up: nothing is left.
    fn finish(mut self) {
        for _ in 0..200 {
            if !self.two.wire.is_empty() {
                self.take(Step::Deliver(0));
            } else if self.programs[1].undecided && !self.programs[1].abandoned {
                self.take(Step::Accept);
            } else if self.programs[0].undecided && !self.programs[0].abandoned {
                self.take(Step::Ready);
            } else if self.two.sides.iter().any(|side| side.due().is_some()) {
                self.take(Step::Pass);
            } else {
                break;
            }
        }
        let up =
            self.programs.map(|program| program.established && !program.over && !program.abandoned);
        let told = self.programs.map(|program| program.over || program.abandoned);
        // A program that was told that its peer disconnects has not answered yet: it is over for both.
        assert!(up[0] == up[1] || told[0] || told[1], "{:?}", self.programs);
        if up[0] != up[1] {
            panic!("one side alone believes in the connection: {:?}", self.programs);
        }
        for side in 0..2 {
            if let Some(number) = self.programs[side].connection {
                self.two.call(side, |s, now| s.abandon(now, number));
                self.programs[side].abandoned = true;
            }
            self.two.deliver_all();
            self.hear();
        }
        while self.two.pass() {
            self.two.deliver_all();
        }
        self.hear();
        assert!(self.two.is_empty(), "something is left: {:?}", self.two.sides);
    }
}

/// The steps that led to a failure.
struct Shown<'a>(&'a [Step]);

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("after {:?}", self.0);
        }
    }
}

/// The most that was explored from each state, which its hash stands for.
type Seen = HashMap<u64, usize>;

fn explore(path: &mut Vec<Step>, depth: usize, seen: &mut Seen) {
    let replay = || {
        let mut model = Model::new();
        path.iter().for_each(|step| model.take(*step));
        model
    };
    let model = replay();
    let mut hasher = DefaultHasher::new();
    let Two { sides, wire, now, .. } = &model.two;
    format!("{sides:?} {wire:?} {now} {:?}", model.programs).hash(&mut hasher);
    let most = seen.entry(hasher.finish()).or_insert(0);
    if *most > depth {
        return;
    }
    let is_new = *most == 0;
    *most = depth + 1;
    let steps = model.steps();
    if is_new {
        let _shown = Shown(path);
        model.finish();
    }
    for step in steps.into_iter().filter(|_| depth > 0) {
        path.push(step);
        explore(path, depth - 1, seen);
        path.pop();
    }
}

#[test]
fn in_every_order_the_programs_agree_and_nothing_is_left() {
    let mut seen = Seen::new();
    explore(&mut Vec::new(), DEPTH, &mut seen);
    assert!(seen.len() > 2_500, "{} states", seen.len());
}
