//! Cookbook: requests and responses.
//!
//! Each side posts a receive for the next message before it sends the message that makes the other side
//! answer. So a message always finds a receive, and no message is sent twice.

#[path = "common/two_sides.rs"]
mod two_sides;

use ibverbs::{Channel, Context, ProtectionDomain};

use two_sides::{Result, both, connect, deadline};

const REQUESTS: u64 = 100;
/// Numbers in the longest request.
const LONGEST: usize = 64;

#[allow(dead_code, reason = "a test calls run")]
fn main() -> Result {
    two_sides::main(run)
}

pub(crate) fn run(client: &Context<'_>, server: &Context<'_>) -> Result {
    let (client, server) = (client.alloc_pd()?, server.alloc_pd()?);
    let (mut to_server, mut to_client) = connect(client.create_channel(), server.create_channel())?;
    both(|| serve(&server, &mut to_client), || ask(&client, &mut to_server))
}

/// The client: sends numbers, and gets their sum.
fn ask(domain: &ProtectionDomain<'_>, channel: &mut Channel<'_>) -> Result {
    let mut request = domain.allocate::<u64>(LONGEST)?;
    let mut response = domain.allocate::<u64>(1)?;
    for number in 0..REQUESTS {
        let length = 1 + number as usize % LONGEST;
        request[..length].fill(number);
        let sum = channel.manual_scope(|scope| -> Result<u64> {
            let answer = scope.post_receive(response.slice_mut(..)?)?;
            scope.post_send(request.slice(..length)?)?.wait_until(deadline())?;
            let (answer, _) = answer.wait_until(deadline())?;
            Ok(answer[0])
        })?;
        if sum != number * length as u64 {
            return Err(format!("the sum of {length} times {number} is not {sum}").into());
        }
    }
    println!("{REQUESTS} requests were answered");
    Ok(())
}

/// The server: two buffers, so that a receive is posted for the next request while the server processes the
/// current one.
fn serve(domain: &ProtectionDomain<'_>, channel: &mut Channel<'_>) -> Result {
    let mut requests = domain.allocate::<u64>(2 * LONGEST)?;
    let mut response = domain.allocate::<u64>(1)?;
    let (first, second) = requests.slice_mut(..)?.split_at(LONGEST)?;
    channel.manual_scope(|scope| {
        let (mut spare, mut answer) = (second, response.slice_mut(..)?);
        let mut next = scope.post_receive(first)?;
        for left in (0..REQUESTS).rev() {
            let (request, completion) = next.wait_until(deadline())?;
            let length = completion.byte_len() as usize / size_of::<u64>();
            answer[0] = request[..length].iter().sum();
            // A receive without a message would still be in flight at the end of the scope, and would stop
            // the channel.
            let more = if left > 0 { Some(scope.post_receive(spare)?) } else { None };
            (answer, _) = scope.post_send(answer)?.wait_until(deadline())?;
            let Some(more) = more else { break };
            (next, spare) = (more, request);
        }
        Ok(())
    })
}
