//! A session of a server and a client, from the first message to the last.

use ibverbs::device::process_resources;
use ibverbs::{Context, settings::MaximumTransferUnit};

use crate::channel::Safe;
use crate::options::Side;
use crate::plan::Plan;
use crate::progress::Progress;
use crate::report::{Counted, Report};
use crate::rig::{Ends, Memory, Prepared, Result, peers, queue, regions};
use crate::run::{Both, Rig};
use crate::verbs::Verbs;
use crate::wire::{Address, Answer, Hello, Step, Wire, WireError};

fn open(side: &Side) -> Result<Context<'static>> {
    Ok(side.device.as_deref().map_or_else(ibverbs::open_first, ibverbs::open)?)
}

fn active_mtu(context: &Context<'_>, side: &Side) -> Result<u32> {
    let mtu = context.query_port(side.port)?.active_mtu();
    Ok(mtu.ok_or("the port tells no MTU")?.bytes())
}

/// The MTU of the path; both sides compute the same value.
fn path_mtu(plan: &Plan, ours: u32, theirs: u32) -> Result<MaximumTransferUnit> {
    let most = ours.min(theirs);
    let mtu = plan.mtu.unwrap_or(most);
    if mtu > most {
        return Err(format!("the MTU is to be {mtu}, and the ports have {most}").into());
    }
    plan.check_path(mtu)?;
    Ok(MaximumTransferUnit::from_bytes(mtu)?)
}

/// The server: waits for a client, and carries out its steps.
pub(crate) fn serve(side: &Side) -> Result<()> {
    let context = open(side)?;
    let mtu = active_mtu(&context, side)?;
    let mut wire = Wire::connect(None, side.tcp_port)?;
    wire.introduce()?;
    // The client is told about every error.
    let served = serve_client(side, &context, mtu, &mut wire);
    if let Err(error) = &served
        && !error.is::<Hopeless>()
    {
        wire.refuse(error);
    }
    served
}

/// The connection is gone, so the error cannot be sent.
#[derive(Debug)]
struct Hopeless(WireError);

impl std::fmt::Display for Hopeless {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Hopeless {}

fn serve_client(side: &Side, context: &Context<'_>, mtu: u32, wire: &mut Wire) -> Result<()> {
    wire.meet()?;
    let Hello { plan, mtu: theirs } = wire.receive()?;
    plan.check()?;
    let mtu = path_mtu(&plan, mtu, theirs)?;
    wire.send(&Answer::Yes(mtu.bytes()))?;
    with_rig(side, context, &plan, mtu, wire, |rig, wire| {
        wire.send(&Answer::Yes(()))?;
        loop {
            match wire.step().map_err(Hopeless)? {
                Step::Run { size, iterations } => {
                    if !plan.sizes.contains(&size) || !iterations.is_multiple_of(plan.list.into()) {
                        return Err("the client wants something else than it had planned".into());
                    }
                    let arrived = rig.answer(size, iterations, wire)?;
                    wire.send(&Answer::Yes(arrived))?;
                }
                Step::Finish => return Ok(()),
                Step::Done => return Err("the client is done with what it has not begun".into()),
            }
        }
    })
}

/// The client: measures, and returns the results.
pub(crate) fn measure(side: &Side, plan: &Plan) -> Result<()> {
    let context = open(side)?;
    let ours = active_mtu(&context, side)?;
    let mut wire = Wire::connect(side.host.as_deref(), side.tcp_port)?;
    wire.introduce()?;
    wire.meet()?;
    wire.send(&Hello { plan: plan.clone(), mtu: ours })?;
    let agreed: u32 = wire.answer()?;
    let mtu = MaximumTransferUnit::from_bytes(agreed)?;
    let mut report = Report {
        device: context.name(),
        port: side.port,
        mtu: agreed,
        plan,
        results: Vec::new(),
        counted: None,
    };
    with_rig(side, &context, plan, mtu, &mut wire, |rig, wire| {
        wire.answer::<()>()?;
        if !side.json {
            println!("{}\n{}", report.heading(), report.columns());
        }
        let held = process_resources()?;
        let counters = context.port_counters(side.port)?;
        let progress = Progress::new();
        let whole: f64 = plan.sizes.iter().map(|&size| plan.weight(size)).sum();
        let mut before = 0.0;
        for &size in &plan.sizes {
            let part = |of_size: f64| (before + of_size * plan.weight(size)) / whole;
            let measured = rig.measure(size, wire, &progress, &part);
            // The other side may know the cause of the error.
            let row = measured.map_err(|error| match wire.last_words() {
                Some(words) => format!("{error}; the server says: {words}").into(),
                None => error,
            })?;
            if !side.json {
                progress.println(&row);
            }
            report.results.push(row);
            before += plan.weight(size);
        }
        let counters = context.port_counters(side.port)?.since(&counters);
        report.counted = Some(Counted::new(&held, &counters));
        Ok(wire.send(&Step::Finish)?)
    })?;
    if let Some(counted) = &report.counted
        && !side.json
    {
        println!("{counted}");
    }
    if side.json {
        println!("{}", report.json()?);
    }
    if let Some(file) = &side.plot {
        crate::plot::draw(&report, file)
            .map_err(|error| format!("cannot draw to {}: {error}", file.display()))?;
    }
    Ok(())
}

/// Connects to the peer, and calls `then` with the resources.
fn with_rig<R>(
    side: &Side,
    context: &Context<'_>,
    plan: &Plan,
    mtu: MaximumTransferUnit,
    wire: &mut Wire,
    then: impl FnOnce(&mut Rig<'_>, &mut Wire) -> Result<R>,
) -> Result<R> {
    let domain = context.alloc_pd()?;
    let send_cq = queue(context, plan, plan.send_depth)?;
    let receive_cq = queue(context, plan, plan.receive_depth)?;
    let regions = regions(&domain, plan)?;
    let prepared = Prepared::new(&domain, &send_cq, &receive_cq, plan, side, mtu)?;
    let ours = Address {
        endpoints: prepared.endpoints(),
        memory: regions.iter().map(|region| region.remote()).collect(),
    };
    wire.send(&Answer::Yes(ours))?;
    let theirs: Address = wire.answer()?;
    let mut peers = peers(&domain, &theirs, plan, side)?;
    let layer = match prepared.connect(&theirs, plan.transport)? {
        Ends::Verbs(queue_pairs) => {
            let (send_cq, receive_cq, regions) = (&send_cq, &receive_cq, regions.as_slice());
            let mut verbs = Verbs { queue_pairs, peers, regions, send_cq, receive_cq, plan };
            verbs.fill_receive_queues()?;
            Both::Verbs(verbs)
        }
        Ends::Channel(channel) => {
            let memory = Memory::of(&regions[0], plan)?;
            let remote = peers.remove(0).memory(plan.operation, plan.max_size())?;
            Both::Channel(Safe { channel, memory, remote, plan })
        }
    };
    then(&mut Rig { layer, regions: &regions, plan }, wire)
}
